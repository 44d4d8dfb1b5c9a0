"""What a run must remember and nobody else may see."""
