"""The paper, reproduced: its tables and figures, each from one function."""

PART_NAMES = ("table1", "synthetic", "mnist", "step-size", "step-history", "grid", "beyond")
"""What `dpfedexp paper` takes, in the order of a whole reproduction: `parts.PARTS` by name, for whoever may not import torch."""
