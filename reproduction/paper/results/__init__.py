"""The runs behind the tables and figures: planned by a section, run once, recorded in its `runs.jsonl`."""
