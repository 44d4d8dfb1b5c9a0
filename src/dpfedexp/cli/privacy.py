"""`dpfedexp privacy`: what rounds cost, what a target needs, what a run promised and whether that is true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfedexp.cli import privacy_runs
from dpfedexp.cli.options import (
    CENTRAL,
    AdjacencyName,
    AdjacencyOption,
    ClientsOption,
    DeltaOption,
    DimensionOption,
    Epsilon0Option,
    Epsilon1Option,
    Epsilon2Option,
    GammaName,
    GammaOption,
    JsonOption,
    MechanismOption,
    NoiseOption,
    Per,
    PerOption,
    RateOption,
    RoundsOption,
    SamplingKind,
    SamplingOption,
    TargetOption,
)
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms.registry import MECHANISMS

if TYPE_CHECKING:
    from dpfedexp.accounting import Event

app = typer.Typer(no_args_is_help=True, help="Privacy: epsilon, noise, rounds, and what a run promised.")
app.command()(privacy_runs.explain)
app.command()(privacy_runs.verify)


@app.command()
def epsilon(
    mechanism: MechanismOption = CENTRAL,
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
    from dpfedexp.cli.privacy_cost import Plan, show_cost

    require(clients is None or clients >= 1, f"clients is {clients}; it must be 1 or more.")
    plan = Plan(mechanism, sampling_rate, sampling, adjacency, (epsilon0, epsilon1, epsilon2), gamma, dimension)
    event = plan.event(noise_multiplier)
    extra: dict[str, Any] = {"noise_multiplier": noise_multiplier}
    if event.nominal is not None:
        extra = {"nominal_epsilon_round": event.nominal}
    about = {"mechanism": mechanism.value, **extra, "sampling_rate": sampling_rate, "clients": clients}
    show_cost(event, rounds, delta, about, as_json)


@app.command()
def noise(
    target: TargetOption,
    mechanism: MechanismOption = CENTRAL,
    rounds: RoundsOption = 1,
    delta: DeltaOption = 1e-5,
    sampling_rate: RateOption = 1.0,
    sampling: SamplingOption = SamplingKind.poisson,
    adjacency: AdjacencyOption = AdjacencyName.replace_one,
    per: PerOption = Per.total,
    epsilon0: Epsilon0Option = 2.0,
    epsilon1: Epsilon1Option = 2.0,
    epsilon2: Epsilon2Option = 2.0,
    gamma: GammaOption = GammaName.exact,
    dimension: DimensionOption = None,
    as_json: JsonOption = False,
) -> None:
    """How much noise does a target ε need? For PrivUnit: which ε₀, ε₁, ε₂, in the proportions given."""
    from dpfedexp.accounting import calibrate_noise, calibrate_privunit
    from dpfedexp.cli.privacy_cost import Plan, show_cost

    plan = Plan(mechanism, sampling_rate, sampling, adjacency, (epsilon0, epsilon1, epsilon2), gamma, dimension)
    over = rounds if per == Per.total else 1
    about: dict[str, Any] = {"mechanism": mechanism.value, "target_epsilon": target, "per": per.value}
    event: Event
    if MECHANISMS[mechanism.value].tunes == "epsilons":
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
    show_cost(event, rounds, delta, about, as_json)


@app.command()
def rounds(
    target: TargetOption,
    mechanism: MechanismOption = CENTRAL,
    noise_multiplier: NoiseOption = None,
    delta: DeltaOption = 1e-5,
    sampling_rate: RateOption = 1.0,
    sampling: SamplingOption = SamplingKind.poisson,
    adjacency: AdjacencyOption = AdjacencyName.replace_one,
    epsilon0: Epsilon0Option = 2.0,
    epsilon1: Epsilon1Option = 2.0,
    epsilon2: Epsilon2Option = 2.0,
    gamma: GammaOption = GammaName.exact,
    dimension: DimensionOption = None,
    as_json: JsonOption = False,
) -> None:
    """How many rounds does a target ε pay for?"""
    from dpfedexp.accounting import affordable_rounds, guarantee
    from dpfedexp.cli.privacy_cost import Plan, show_cost

    plan = Plan(mechanism, sampling_rate, sampling, adjacency, (epsilon0, epsilon1, epsilon2), gamma, dimension)
    event = plan.event(noise_multiplier)
    affordable = affordable_rounds(event, target, delta)
    if affordable == 0:
        one = guarantee(event, 1, delta)
        raise InputError(
            f"epsilon is {target:g}, which pays for no round: a single one costs {one.epsilon_round:.4f}. "
            "Raise epsilon or the noise."
        )
    about = {"mechanism": mechanism.value, "noise_multiplier": noise_multiplier, "target_epsilon": target}
    show_cost(event, affordable, delta, about, as_json)


@app.command()
def plot(
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write: .png, .svg or .pdf.")] = Path(
        "privacy.png"
    ),
    mechanism: MechanismOption = CENTRAL,
    noise_multiplier: Annotated[
        list[float] | None, typer.Option("--noise-multiplier", "-z", help="Repeat for several.")
    ] = None,
    rounds: RoundsOption = 50,
    delta: DeltaOption = 1e-5,
    sampling_rate: RateOption = 1.0,
    sampling: SamplingOption = SamplingKind.poisson,
    adjacency: AdjacencyOption = AdjacencyName.replace_one,
    as_json: JsonOption = False,
    dimension: DimensionOption = None,
) -> None:
    """Draw ε over rounds for several noise multipliers, and the noise that a target ε needs."""
    from dpfedexp.cli.privacy_cost import Plan, show_cost
    from dpfedexp.report.epsilon_curves import plot_privacy

    require(
        MECHANISMS[mechanism.value].tunes == "noise_multiplier",
        f"mechanism is {mechanism.value!r}, which has no noise multiplier to draw; it must be central-gaussian or local-gaussian.",
    )
    plan = Plan(mechanism, sampling_rate, sampling, adjacency, (2.0, 2.0, 2.0), dimension=dimension)
    noises = noise_multiplier or ([2.0, 5.0, 10.0, 20.0] if mechanism == CENTRAL else [0.7, 2.0, 5.0, 10.0])
    title = f"{mechanism.value}, {adjacency.value}" + (f", q = {sampling_rate:g}" if sampling_rate < 1.0 else "")
    make: Callable[[float], Event] = plan.event
    plot_privacy(make, out, noises=noises, rounds=rounds, delta=delta, title=title)
    about = {"mechanism": mechanism.value, "noise_multiplier": noises[0], "file": str(out)}
    if as_json:
        show_cost(make(noises[0]), rounds, delta, about, as_json)
    else:
        typer.echo(f"Written: {out}")
