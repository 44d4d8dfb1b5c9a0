"""From the flags of `dpfedexp privacy` to an event, and from an event to what its rounds cost, as a table or as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from dpfedexp.accounting import Event, Sampling, guarantee
from dpfedexp.accounting.charges import RoundSettings
from dpfedexp.accounting.statement import models_only, other_adjacency
from dpfedexp.accounting.wording import figure
from dpfedexp.cli.options import AdjacencyName, GammaName, Mechanism, SamplingKind, print_json
from dpfedexp.errors import require
from dpfedexp.mechanisms.registry import round_event


@dataclasses.dataclass(frozen=True)
class Plan:
    """The flags that describe one round."""

    mechanism: Mechanism
    rate: float
    sampling: SamplingKind
    adjacency: AdjacencyName
    epsilons: tuple[float, float, float]
    gamma: GammaName = GammaName.exact
    dimension: int | None = None

    def event(self, z: float | None) -> Event:
        """One round with noise multiplier z."""
        return self._event(z, self.epsilons)

    def report(self, total: float) -> Event:
        """One round with the three ε scaled to sum to `total`."""
        scale = total / sum(self.epsilons)
        epsilon0, epsilon1, epsilon2 = (scale * epsilon for epsilon in self.epsilons)
        return self._event(None, (epsilon0, epsilon1, epsilon2))

    def _event(self, z: float | None, epsilons: tuple[float, float, float]) -> Event:
        require(0.0 < self.rate <= 1.0, f"sampling-rate is {self.rate}; it must be above 0 and at most 1.")
        sampling = Sampling() if self.rate == 1.0 else Sampling(self.sampling.value, self.rate)
        settings = RoundSettings(z, self.adjacency.value, sampling, epsilons, self.gamma.value, self.dimension)
        return round_event(self.mechanism.value, settings)


def show_cost(event: Event, rounds: int, delta: float, about: dict[str, Any], as_json: bool) -> None:
    """What `rounds` rounds of `event` cost; with the clients known, for readers of a local run's models too."""
    cost = guarantee(event, rounds, delta)
    charges = [(event, rounds)]
    other, no_other = other_adjacency(charges, delta)
    clients = about.get("clients")
    readers, no_readers = (None, "") if clients is None else models_only(charges, delta, clients, clients)
    views = {
        "other_adjacency": None if other is None else dataclasses.asdict(other),
        "no_other_adjacency": no_other,
        "models_only": None if readers is None else dataclasses.asdict(readers),
        "no_models_only": no_readers,
    }
    if as_json:
        print_json({**about, **dataclasses.asdict(cost), **views})
        return
    table = Table(show_header=False, title="Privacy")
    table.add_column(style="bold")
    table.add_column()
    for name, value in about.items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
    table.add_row("rounds", str(cost.rounds))
    table.add_row("ε of one round", f"{figure(cost.epsilon_round)} at δ = {cost.delta_round:g}")
    table.add_row("ε in total", f"[bold]{figure(cost.epsilon_total)}[/] at δ = {cost.delta:g} ({_kind(cost.exact)})")
    if cost.pure_epsilon_total is not None:
        table.add_row("ε in total, pure", f"{figure(cost.pure_epsilon_total)} at δ = 0")
    table.add_row("adjacency", cost.adjacency)
    table.add_row("setting", cost.setting)
    table.add_row("accountant", cost.accountant)
    for view, reason, name in (
        (other, no_other, "under add-remove" if other is None else f"under {other.adjacency}"),
        (readers, no_readers, "for readers of the models"),
    ):
        if view is not None:
            one, total = figure(view.epsilon_round), figure(view.epsilon_total)
            table.add_row(f"ε {name}", f"{one} a round, [bold]{total}[/] in total ({_kind(view.exact)})")
        elif reason:
            table.add_row(f"ε {name}", f"none: {reason}")
    Console().print(table)


def _kind(exact: bool) -> str:
    return "exact" if exact else "upper bound"
