"""Table 1 as a section: what is printed, and what the printed settings cost."""

from __future__ import annotations

from dataclasses import asdict

from dpfedexp.paper.cells import Cell
from dpfedexp.paper.scale import Scale
from dpfedexp.paper.store import Results
from dpfedexp.paper.table1 import Row, table1
from dpfedexp.report.document import Claim, Section, Table


def cells(scale: Scale) -> list[Cell]:
    return []


def section(scale: Scale, results: Results) -> Section:
    rows = table1()
    return Section(
        name="table1",
        title="What the paper's runs cost (Table 1)",
        text=["M = 1000, 50 rounds, δ = 1e-5, replace-one adjacency, exact composition."],
        tables=[_table(rows)],
        claims=[_claim(row) for row in rows if row.printed is not None],
        notes=NOTES,
        command="dpfedexp paper table1",
        data={"rows": [asdict(row) for row in rows]},
    )


def reading(row: Row) -> float:
    """The figure that the printed one turns out to be: one round in the local settings, 49 in the central one."""
    return row.epsilon_round if row.setting.startswith("LDP") else row.epsilon_49


def _table(rows: list[Row]) -> Table:
    shown = []
    for row in rows:
        printed = ["–", "–"] if row.printed is None else [f"{row.printed:.3f}", f"{reading(row) - row.printed:+.4f}"]
        total = f"{row.epsilon_total:.3f}" + (f" (pure {row.pure_total:.0f})" if row.pure_total else "")
        figures = [f"{row.epsilon_round:.3f}", f"{row.epsilon_49:.3f}", total]
        shown.append([row.setting, row.algorithm, *printed, *figures, row.note])
    columns = ["setting", "algorithm", "paper", "difference", "ε per round", "ε of 49 rounds", "ε total", "reading"]
    note = "Difference: our figure in the reading of the last column, minus the printed one, which is rounded up in its last digit."
    return Table("Table 1", columns, shown, note)


def _claim(row: Row) -> Claim:
    ours = reading(row)
    assert row.printed is not None
    return Claim(
        f"{row.setting}, {row.algorithm}: {row.note}",
        f"{ours:.4f} against {row.printed:.3f}",
        abs(ours - row.printed) < 1.5e-3,
    )


NOTES = (
    "The printed central figures are those of 49 rounds; over the 50 rounds that are run, ε is the one under “ε total”.",
    "The printed local figures are those of a single round; over all rounds they compose to the total beside them.",
    "PrivUnit's printed 6 is nominal, the sum of its three parameters. The exact γ spends it in full; the paper's own γ, with "
    "which its runs are repeated here, is only sufficient and spends 5.586 of it.",
    "The free rule gives the same step size at DP-FedAvg's own ε, for every d, M and number of rounds.",
)
