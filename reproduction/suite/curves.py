"""The recorded numbers against ε, for programs: what the explorer draws."""

from __future__ import annotations

from typing import Any

from dpfedexp.files import finite
from reproduction.suite import table
from reproduction.suite.contenders import CONTENDERS, DELTA
from reproduction.suite.plan import HEADLINE, RIVALS, Size
from reproduction.suite.problem import Problem
from reproduction.suite.table import Lookup


def curves(rates: dict[Problem, float], size: Size, lookup: Lookup) -> dict[str, Any]:
    """Problem → contender → ε, mean, standard error, seeds and the server rate that was best; a mean of None diverged.

    Args:
        rates: the problems that are shown, and the local rate of each.
        size: how much was run.
        lookup: the recorded runs.
    """
    return {
        "delta": DELTA,
        "adjacency": "replace-one",
        "problems": [
            {
                "name": problem.name,
                "kind": problem.kind,
                "natural": problem.natural,
                "summary": problem.summary,
                "higher_is_better": problem.higher_is_better,
                "contenders": [
                    {
                        "label": CONTENDERS[name].label,
                        "colour": CONTENDERS[name].colour,
                        "server_rates": len(CONTENDERS[name].server_rates),
                        "points": points,
                    }
                    for name in (*HEADLINE, *RIVALS)
                    if (points := _points(problem, name, lr, size, lookup))
                ],
            }
            for problem, lr in rates.items()
        ],
    }


def _points(problem: Problem, name: str, lr: float, size: Size, lookup: Lookup) -> list[dict[str, Any]]:
    points = []
    for epsilon in sorted({*size.epsilons, *(size.headline_epsilons if name in HEADLINE else ())}):
        cell = table.cell(problem, name, epsilon, lr, size, lookup)
        if cell is not None:
            mean, error = (finite(number) for number in (cell.mean, cell.error))
            seeds = len(cell.values)
            points.append(
                {"epsilon": epsilon, "mean": mean, "error": error, "seeds": seeds, "server_rate": cell.server_rate}
            )
    return points
