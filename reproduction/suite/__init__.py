"""Real federations, and made-up ones with a dial: what they are, and how algorithms compare on them."""
