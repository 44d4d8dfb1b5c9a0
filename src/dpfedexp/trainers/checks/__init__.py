"""What must hold of a model, an optimiser and a trainer before a round is paid for."""
