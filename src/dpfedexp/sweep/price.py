"""What a sweep costs the clients, if all of its runs used the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfedexp.accounting import Event, Ledger, NonPrivateEvent, compose
from dpfedexp.accounting.selection import selection_epsilon
from dpfedexp.errors import InputError
from dpfedexp.runs.file_names import LEDGER

Charges = list[tuple[Event, int]]


@dataclass(frozen=True)
class Price:
    """ε of a sweep.

    Attributes:
        runs: how many runs were charged.
        delta: δ of all figures.
        one: the dearest run alone.
        together: all runs.
        settings: one run of every combination of settings: what somebody who tries them once pays.
        selected: the best of a secret, geometric number of runs with as many on average as there are combinations; None, with
            `why`, where no such figure is at hand.
        why: the reason.
    """

    runs: int
    delta: float
    one: float
    together: float
    settings: float
    selected: float | None
    why: str = ""

    @property
    def sentences(self) -> list[str]:
        """For the page and the terminal."""
        most = f"ε = {self.together:.3f}" if self.together < float("inf") else "without any promise"
        found = [
            f"One run costs ε = {self.one:.3f} at δ = {self.delta:g}. On the same clients the {self.runs} runs cost {most} "
            f"together, and one run of every setting ε = {self.settings:.3f}: whoever picks the best of them has paid for all.",
        ]
        if self.selected is not None:
            found.append(
                f"Private selection (--select and --repeats) shows only the best of a secret number of runs, as many on "
                f"average, and costs ε = {self.selected:.3f} in all."
            )
        elif self.why:
            found.append(f"Private selection has no figure here: {self.why}")
        return found


def charges(folder: Path) -> Charges:
    """What a run's ledger holds."""
    return Ledger.open(folder / LEDGER, read_only=True).charges()


def price(runs: Sequence[tuple[str, Charges]], delta: float) -> Price:
    """The price of finished runs, from their ledgers.

    Args:
        runs: the setting of every run, and its charges.
        delta: δ.
    """
    private = [(label, one) for label, one in runs if not any(isinstance(event, NonPrivateEvent) for event, _ in one)]
    if len(private) < len(runs) or not runs:
        raise InputError("some runs of the sweep promise no privacy, so that together they promise none.")
    costs = [compose(one, delta) for _, one in private]
    dearest = max(costs, key=lambda cost: cost.epsilon)
    first = dict(reversed(private))
    selected, why = None, ""
    if dearest.mu is None:
        why = "it needs rounds of Gaussian noise in which everybody takes part."
    elif len(first) < 2:
        why = "there is nothing to select from."
    else:
        selected = selection_epsilon(max(cost.mu or 0.0 for cost in costs), delta, float(len(first)))
    return Price(
        len(runs),
        delta,
        dearest.epsilon,
        compose([charge for _, one in private for charge in one], delta).epsilon,
        compose([charge for one in first.values() for charge in one], delta).epsilon,
        selected,
        why,
    )
