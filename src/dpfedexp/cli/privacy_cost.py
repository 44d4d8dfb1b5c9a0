"""From the flags of `dpfedexp privacy` to an event, and from an event to what its rounds cost, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from dpfedexp.accounting import Event, GaussianEvent, PrivUnitEvent, Sampling, guarantee
from dpfedexp.accounting.gaussian_events import central_gaussian_event, local_gaussian_event
from dpfedexp.accounting.privunit import exact_event
from dpfedexp.accounting.statements.views import models_only, other_adjacency
from dpfedexp.accounting.statements.wording import figure
from dpfedexp.cli.json_output import print_json
from dpfedexp.cli.privacy_options import AdjacencyName, GammaName, Mechanism, SamplingKind
from dpfedexp.errors import require


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

    def event(self, z: float) -> GaussianEvent:
        require(z > 0.0 and math.isfinite(z), f"noise-multiplier is {z}; it must be a finite number above 0.")
        require(0.0 < self.rate <= 1.0, f"sampling-rate is {self.rate}; it must be above 0 and at most 1.")
        sampling = Sampling() if self.rate == 1.0 else Sampling(self.sampling.value, self.rate)
        if self.mechanism == Mechanism.local_gaussian:
            self._require_replace_one()
            return local_gaussian_event(z, sampling)
        return central_gaussian_event(z, self.adjacency.value, sampling)

    def report(self, total: float | None = None) -> PrivUnitEvent:
        """PrivUnit's event; with `total`, its three ε scaled to sum to that."""
        self._require_replace_one()
        require(0.0 < self.rate <= 1.0, f"sampling-rate is {self.rate}; it must be above 0 and at most 1.")
        scale = 1.0 if total is None else total / sum(self.epsilons)
        epsilon0, epsilon1, epsilon2 = (scale * epsilon for epsilon in self.epsilons)
        sampling = Sampling() if self.rate == 1.0 else Sampling(self.sampling.value, self.rate)
        if self.gamma == GammaName.exact:
            return dataclasses.replace(exact_event(epsilon0, epsilon1, epsilon2), sampling=sampling)
        require(
            self.dimension is not None and self.dimension >= 2,
            f"dimension is {self.dimension} with the paper's gamma, whose cap depends on it; give --dimension, at least 2.",
        )
        assert self.dimension is not None
        from dpfedexp.mechanisms import PrivUnit  # torch is slow to import, and only this asks for it

        event = PrivUnit(1.0, self.dimension, epsilon0, epsilon1, epsilon2, gamma="paper").event(sampling)
        assert isinstance(event, PrivUnitEvent)
        return event

    def one_round(self, z: float | None) -> Event:
        if self.mechanism == Mechanism.privunit:
            return self.report()
        require(
            z is not None,
            f"noise-multiplier is missing; {self.mechanism.value} needs one, such as --noise-multiplier 5.",
        )
        assert z is not None
        return self.event(z)

    def _require_replace_one(self) -> None:
        require(
            self.adjacency == "replace-one",
            f"adjacency is {self.adjacency.value!r} with {self.mechanism.value}; it must be 'replace-one', because a client that "
            "reports by itself cannot be hidden by leaving it out.",
        )


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
