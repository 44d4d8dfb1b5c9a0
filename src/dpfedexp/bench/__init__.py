"""How long a round takes and how much memory it needs: ours, the plain loop, the accountant, PrivUnit."""
