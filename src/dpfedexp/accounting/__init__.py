"""Composition, calibration and the ledger. Knows mechanisms only by their events."""
