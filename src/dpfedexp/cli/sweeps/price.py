"""What a sweep costs the clients, if all of its runs used the same ones: composed from every ledger below its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfedexp.accounting import Event, Ledger, NonPrivateEvent, compose
from dpfedexp.accounting.pld import selection_epsilon
from dpfedexp.engine.outlets import CHECKPOINT, LEDGER, LEDGER_HEAD, METRICS, MODEL, STATEMENT
from dpfedexp.errors import InputError, LedgerError

Charges = list[tuple[Event, int]]
TRACES = (LEDGER_HEAD, CHECKPOINT, METRICS, MODEL, STATEMENT)
"""Files of which one at least is there where a run released something."""


@dataclass(frozen=True)
class Price:
    """ε of a sweep.

    Attributes:
        runs: how many runs were charged.
        delta: δ of all figures.
        one: the dearest run alone.
        together: all runs.
        settings: one run of every combination of settings, the dearest of each: what trying them once costs.
        selected: the best of a secret, geometric number of runs with as many on average as there are combinations; None, with
            `why`, where no such figure is at hand.
        why: the reason.
        adjacency: what change of the data the figures are about.
        noise_cohort: clients of a round of the larger deployment that the promise is for; None where it is for the runs' own.
    """

    runs: int
    delta: float
    one: float
    together: float
    settings: float
    selected: float | None
    why: str = ""
    adjacency: str = "replace-one"
    noise_cohort: int | None = None

    @property
    def sentences(self) -> list[str]:
        """For the page and the terminal."""
        found = [
            f"One run costs ε = {self.one:.3f} at δ = {self.delta:g} under {self.adjacency} adjacency. On the same clients the "
            f"{self.runs} runs cost ε = {self.together:.3f} together, those that failed or were stopped included, and one run "
            f"of every setting ε = {self.settings:.3f}: picking the best of them has cost all of it.",
        ]
        if self.noise_cohort is not None:
            found.append(
                f"The promise is that of a larger deployment with {self.noise_cohort} clients in a round, and none to the clients "
                "whose data these runs used."
            )
        if self.selected is not None:
            found.append(
                f"Private selection (--select and --repeats) shows only the best of a secret number of runs, as many on "
                f"average, and costs ε = {self.selected:.3f} in all."
            )
        elif self.why:
            found.append(f"Private selection has no figure here: {self.why}")
        return found


def ledgers_below(folder: Path) -> dict[Path, Ledger]:
    """The ledger of every run below a folder, whatever became of the run, by the run's folder.

    Raises:
        InputError: a ledger is missing or damaged where a run released something, so that what was spent is not known.
    """
    runs = {path.parent for name in (LEDGER, *TRACES) for path in folder.rglob(name)}
    try:
        return {run: Ledger.open(run / LEDGER, read_only=True) for run in sorted(runs)}
    except LedgerError as error:
        raise InputError(f"what the sweep spent is not known: {error} Put it back, or name a new folder.") from None


def price_below(folder: Path, labels: Mapping[Path, str], delta: float) -> Price:
    """The price of all runs below a folder.

    Args:
        folder: of the sweep.
        labels: the settings of the runs of this grid, by their folders; any other run has its path for a setting.
        delta: δ.
    """
    ledgers = {run: ledger for run, ledger in ledgers_below(folder).items() if len(ledger)}
    contexts = {_context(ledger.header) for ledger in ledgers.values()}
    if len(contexts) > 1:
        raise InputError(
            "some runs below the folder promise something to other clients than the others (a noise_cohort, or a private "
            "selection), so that no figure covers all of them; make a sweep of each in a folder of its own."
        )
    runs = [(labels.get(run, str(run.relative_to(folder))), ledger.charges()) for run, ledger in ledgers.items()]
    ((cohort, selected),) = contexts or {(None, None)}
    if selected is not None:
        raise InputError(
            "the runs below the folder are the best of private selections, whose costs are in their statements."
        )
    return price(runs, delta, cohort)


def _context(header: Mapping[str, Any]) -> tuple[Any, Any]:
    return header.get("noise_cohort"), header.get("selection_runs")


def price(runs: Sequence[tuple[str, Charges]], delta: float, noise_cohort: int | None = None) -> Price:
    """The price of runs, from their charges.

    Args:
        runs: the setting of every run, and its charges.
        delta: δ.
        noise_cohort: of all of them.
    """
    if not runs:
        raise InputError("no run of the sweep was charged anything.")
    if any(isinstance(event, NonPrivateEvent) for _, one in runs for event, _ in one):
        raise InputError("some runs of the sweep promise no privacy, so that together they promise none.")
    together = compose([charge for _, one in runs for charge in one], delta)
    costs = [compose(one, delta) for _, one in runs]
    dearest = max(costs, key=lambda cost: cost.epsilon)
    settings: dict[str, Charges] = {}
    for (label, charges), _ in sorted(zip(runs, costs, strict=True), key=lambda pair: pair[1].epsilon):
        settings[label] = charges
    selected, why = None, ""
    if together.mu is None:
        why = "it needs rounds of Gaussian noise in which all clients take part."
    elif len(settings) < 2:
        why = "there is nothing to select from."
    else:
        selected = selection_epsilon(max(cost.mu or 0.0 for cost in costs), delta, float(len(settings)))
    return Price(
        len(runs),
        delta,
        dearest.epsilon,
        together.epsilon,
        compose([charge for one in settings.values() for charge in one], delta).epsilon,
        selected,
        why,
        together.adjacency,
        noise_cohort,
    )
