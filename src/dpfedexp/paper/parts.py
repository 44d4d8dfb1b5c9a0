"""The parts of the paper by name: which cells each needs, and the section it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfedexp.paper import beyond, grid, mnist, step_history, step_size, synthetic, table1_section
from dpfedexp.paper.cells import Cell, Place
from dpfedexp.paper.scale import Scale
from dpfedexp.paper.store import Results, Store
from dpfedexp.report.document import Section


@dataclass(frozen=True)
class Part:
    cells: Callable[[Scale], list[Cell]]
    section: Callable[[Scale, Results], Section]


PARTS = {
    "table1": Part(table1_section.cells, table1_section.section),
    "synthetic": Part(synthetic.cells, synthetic.section),
    "mnist": Part(mnist.cells, mnist.section),
    "step-size": Part(step_size.cells, step_size.section),
    "step-history": Part(step_history.cells, step_history.section),
    "grid": Part(grid.cells, grid.section),
    "beyond": Part(beyond.cells, beyond.section),
}


QUICK_SEEDS = 2


def run(names: Sequence[str], scale: Scale, place: Place, out: Path) -> list[Section]:
    """The sections of the named parts; all their cells run first, under one estimate of the time left."""
    store = Store(out / "cells", place)
    store.run([cell for name in names for cell in PARTS[name].cells(scale)], "running cells")
    results = Results(store)
    return [PARTS[name].section(scale, results) for name in names]
