"""A federation with client-level differential privacy."""
