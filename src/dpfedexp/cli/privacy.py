"""`dpfedexp privacy`: what rounds cost, what a target needs, what a run promised and whether that is true."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dpfedexp.accounting import (
    Event,
    GaussianEvent,
    PrivUnitEvent,
    Query,
    Sampling,
    affordable_rounds,
    calibrate_noise,
    calibrate_privunit,
    guarantee,
)
from dpfedexp.accounting.events.charges import privunit as exact_event
from dpfedexp.accounting.statements.views import models_only, other_adjacency
from dpfedexp.accounting.statements.wording import figure
from dpfedexp.cli import privacy_runs
from dpfedexp.cli.json_output import JsonOption, print_json
from dpfedexp.errors import InputError, require

app = typer.Typer(no_args_is_help=True, help="Privacy: epsilon, noise, rounds, and what a run promised.")
app.command()(privacy_runs.explain)
app.command()(privacy_runs.verify)
app.command()(privacy_runs.table1)


class Mechanism(StrEnum):
    central_gaussian = "central-gaussian"
    local_gaussian = "local-gaussian"
    privunit = "privunit"


class AdjacencyName(StrEnum):
    replace_one = "replace-one"
    add_remove = "add-remove"


class GammaName(StrEnum):
    exact = "exact"
    paper = "paper"


class SamplingKind(StrEnum):
    poisson = "poisson"
    fixed = "fixed"


class Per(StrEnum):
    total = "total"
    round = "round"


MechanismOption = Annotated[Mechanism, typer.Option("--mechanism", help="Who adds the noise, and how.")]
NoiseOption = Annotated[
    float | None,
    typer.Option("--noise-multiplier", "-z", help="Noise std on the sum over the clip C (local: on each update)."),
]
RoundsOption = Annotated[int, typer.Option("--rounds", "-T", help="How many rounds are released.")]
DeltaOption = Annotated[float, typer.Option("--delta", help="δ of the total.")]
RateOption = Annotated[
    float, typer.Option("--sampling-rate", "-q", help="Expected fraction of the clients in a round.")
]
SamplingOption = Annotated[
    SamplingKind, typer.Option("--sampling", help="How a cohort is drawn when the rate is below 1.")
]
AdjacencyOption = Annotated[AdjacencyName, typer.Option("--adjacency", help="What changes between neighbours.")]
Epsilon0Option = Annotated[float, typer.Option("--epsilon0", help="PrivUnit: ε₀.")]
Epsilon1Option = Annotated[float, typer.Option("--epsilon1", help="PrivUnit: ε₁.")]
Epsilon2Option = Annotated[float, typer.Option("--epsilon2", help="PrivUnit: ε₂, for the norm.")]
GammaOption = Annotated[
    GammaName, typer.Option("--gamma", help="PrivUnit: the rule that chooses the cap; the paper's needs --dimension.")
]
DimensionOption = Annotated[int | None, typer.Option("--dimension", "-d", help="PrivUnit: parameters of the model.")]
ClientsOption = Annotated[
    int | None,
    typer.Option(
        "--clients", "-M", help="Clients that report in every round; local: adds readers of the models alone."
    ),
]
TargetOption = Annotated[float, typer.Option("--epsilon", "--target-epsilon", "-e", help="The ε that may be spent.")]
PerOption = Annotated[Per, typer.Option("--per", help="Whether the target is for all the rounds or for one.")]


@dataclasses.dataclass(frozen=True)
class _Plan:
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
        both = 2.0 if self.adjacency == "replace-one" else 1.0
        sampling = Sampling() if self.rate == 1.0 else Sampling(self.sampling.value, self.rate)
        if self.mechanism == Mechanism.local_gaussian:
            self._require_replace_one()
            update = Query("update", 1.0, 2.0, z, diameter=2.0)
            return GaussianEvent("local", "replace-one", (update,), sampling, attained=True, beside_sum="nothing")
        update = Query("update", 1.0, both, z, diameter=2.0)
        return GaussianEvent("central", self.adjacency.value, (update,), sampling, attained=True)

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


@app.command()
def epsilon(
    mechanism: MechanismOption = Mechanism.central_gaussian,
    noise_multiplier: NoiseOption = None,
    rounds: RoundsOption = 1,
    delta: DeltaOption = 1e-5,
    sampling_rate: RateOption = 1.0,
    sampling: SamplingOption = SamplingKind.poisson,
    adjacency: AdjacencyOption = AdjacencyName.replace_one,
    epsilon0: Epsilon0Option = 2.0,
    epsilon1: Epsilon1Option = 2.0,
    epsilon2: Epsilon2Option = 2.0,
    gamma: GammaOption = GammaName.exact,
    dimension: DimensionOption = None,
    clients: ClientsOption = None,
    as_json: JsonOption = False,
) -> None:
    """What do these rounds cost, each and together, under both adjacencies and (local) for both kinds of reader?"""
    require(clients is None or clients >= 1, f"clients is {clients}; it must be 1 or more.")
    plan = _Plan(mechanism, sampling_rate, sampling, adjacency, (epsilon0, epsilon1, epsilon2), gamma, dimension)
    event = plan.one_round(noise_multiplier)
    extra: dict[str, Any] = {"noise_multiplier": noise_multiplier}
    if isinstance(event, PrivUnitEvent):
        extra = {"nominal_epsilon_round": event.nominal}
    about = {"mechanism": mechanism.value, **extra, "sampling_rate": sampling_rate, "clients": clients}
    _show_cost(event, rounds, delta, about, as_json)


@app.command()
def noise(
    target: TargetOption,
    mechanism: MechanismOption = Mechanism.central_gaussian,
    rounds: RoundsOption = 1,
    delta: DeltaOption = 1e-5,
    sampling_rate: RateOption = 1.0,
    sampling: SamplingOption = SamplingKind.poisson,
    adjacency: AdjacencyOption = AdjacencyName.replace_one,
    per: PerOption = Per.total,
    epsilon0: Epsilon0Option = 2.0,
    epsilon1: Epsilon1Option = 2.0,
    epsilon2: Epsilon2Option = 2.0,
    as_json: JsonOption = False,
) -> None:
    """How much noise does a target ε need? For PrivUnit: which ε₀, ε₁, ε₂, in the proportions given."""
    plan = _Plan(mechanism, sampling_rate, sampling, adjacency, (epsilon0, epsilon1, epsilon2))
    over = rounds if per == Per.total else 1
    about: dict[str, Any] = {"mechanism": mechanism.value, "target_epsilon": target, "per": per.value}
    event: Event
    if mechanism == Mechanism.privunit:
        at = delta if per == Per.total else 0.0
        one = calibrate_privunit(plan.report, target_epsilon=target, delta=at, rounds=over)
        scale = one / sum(plan.epsilons)
        event = plan.report(one)
        about |= {"noise_multiplier": None}
        about |= {f"epsilon{i}": scale * value for i, value in enumerate(plan.epsilons)}
    else:
        z = calibrate_noise(plan.event, target_epsilon=target, delta=delta, rounds=over)
        event = plan.event(z)
        about |= {"noise_multiplier": z, "sampling_rate": sampling_rate}
    _show_cost(event, rounds, delta, about, as_json)


@app.command()
def rounds(
    target: TargetOption,
    mechanism: MechanismOption = Mechanism.central_gaussian,
    noise_multiplier: NoiseOption = None,
    delta: DeltaOption = 1e-5,
    sampling_rate: RateOption = 1.0,
    sampling: SamplingOption = SamplingKind.poisson,
    adjacency: AdjacencyOption = AdjacencyName.replace_one,
    epsilon0: Epsilon0Option = 2.0,
    epsilon1: Epsilon1Option = 2.0,
    epsilon2: Epsilon2Option = 2.0,
    as_json: JsonOption = False,
) -> None:
    """How many rounds does a target ε pay for?"""
    plan = _Plan(mechanism, sampling_rate, sampling, adjacency, (epsilon0, epsilon1, epsilon2))
    event = plan.one_round(noise_multiplier)
    affordable = affordable_rounds(event, target, delta)
    if affordable == 0:
        one = guarantee(event, 1, delta)
        raise InputError(
            f"epsilon is {target:g}, which pays for no round: a single one costs {one.epsilon_round:.4f}. "
            "Raise epsilon or the noise."
        )
    about = {"mechanism": mechanism.value, "noise_multiplier": noise_multiplier, "target_epsilon": target}
    _show_cost(event, affordable, delta, about, as_json)


@app.command()
def plot(
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write: .png, .svg or .pdf.")] = Path(
        "privacy.png"
    ),
    mechanism: MechanismOption = Mechanism.central_gaussian,
    noise_multiplier: Annotated[
        list[float] | None, typer.Option("--noise-multiplier", "-z", help="Repeat for several.")
    ] = None,
    rounds: RoundsOption = 50,
    delta: DeltaOption = 1e-5,
    sampling_rate: RateOption = 1.0,
    sampling: SamplingOption = SamplingKind.poisson,
    adjacency: AdjacencyOption = AdjacencyName.replace_one,
    as_json: JsonOption = False,
) -> None:
    """Draw ε over rounds for several noise multipliers, and the noise that a target ε needs."""
    from dpfedexp.report.epsilon_curves import plot_privacy

    require(
        mechanism != Mechanism.privunit,
        "mechanism is 'privunit', which has no noise multiplier to draw; it must be central-gaussian or local-gaussian.",
    )
    plan = _Plan(mechanism, sampling_rate, sampling, adjacency, (2.0, 2.0, 2.0))
    noises = noise_multiplier or (
        [2.0, 5.0, 10.0, 20.0] if mechanism == Mechanism.central_gaussian else [0.7, 2.0, 5.0, 10.0]
    )
    title = f"{mechanism.value}, {adjacency.value}" + (f", q = {sampling_rate:g}" if sampling_rate < 1.0 else "")
    make: Callable[[float], Event] = plan.event
    plot_privacy(make, out, noises=noises, rounds=rounds, delta=delta, title=title)
    about = {"mechanism": mechanism.value, "noise_multiplier": noises[0], "file": str(out)}
    if as_json:
        _show_cost(make(noises[0]), rounds, delta, about, as_json)
    else:
        typer.echo(f"Written: {out}")


def _show_cost(event: Event, rounds: int, delta: float, about: dict[str, Any], as_json: bool) -> None:
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
