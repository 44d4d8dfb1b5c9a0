"""Hostile input for every parser. Each target is a module: `python -m tests.fuzz.ledger --minutes 10`."""
