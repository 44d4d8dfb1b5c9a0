"""The paper, reproduced: a file for each table and figure that it prints, and `beyond/` for what goes further.

`results/` holds how their runs are planned, run and recorded. The names are here, where reading them imports nothing.
"""

SECTIONS = ("table1", "synthetic", "mnist", "step-size", "step-history", "grid", "beyond")
"""The sections of the report, in its order."""

PRINTED_AS: dict[str, tuple[str, ...]] = {
    "figure1": ("synthetic", "mnist"),
    "figure2": ("step-size",),
    "figure3": ("step-history",),
    "table2": ("grid",),
    "table3": ("mnist",),
    "all": SECTIONS,
}
"""What the paper calls the same things."""
