"""Seconds and bytes of a round, beside other systems; `results/` holds what was measured."""
