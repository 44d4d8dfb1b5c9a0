"""Hostile input for every parser, and random programs for secure runs."""
