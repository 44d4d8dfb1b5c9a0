"""`dpfedexp privacy`: what rounds cost, what a target needs, what a run promised and whether that is true."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from dpfedexp.cli.options import (
    CENTRAL,
    AdjacencyName,
    GammaName,
    JsonOption,
    MechanismOption,
    Per,
    SamplingKind,
    print_json,
)
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms.registry import MECHANISMS

if TYPE_CHECKING:
    from dpfedexp.accounting import Event

app = typer.Typer(no_args_is_help=True, help="Privacy: epsilon, noise, rounds, and what a run promised.")

NoiseOption = Annotated[
    float | None,
    typer.Option("--noise-multiplier", "-z", help="Noise std on the sum over the clip C (local: on each update)."),
]
RoundsOption = Annotated[int, typer.Option("--rounds", "-T", help="How many rounds are released.")]
DeltaOption = Annotated[float, typer.Option("--delta", help="δ of the total.")]
TargetOption = Annotated[float, typer.Option("--epsilon", "--target-epsilon", "-e", help="The ε that may be spent.")]
RunArgument = Annotated[Path, typer.Argument(help="The folder of a run.")]
INCOMPLETE = 4
"""The exit code where a claim can't be checked, because something is missing."""
PICTURES = (".png", ".svg", ".pdf")
_VERDICTS = {
    "holds": "[bold green]The claim holds.[/]",
    "false": "[bold red]THE CLAIM DOES NOT HOLD. Do not rely on it.[/]",
    "incomplete": "[bold yellow]The claim can't be checked: what is missing stands above. Do not rely on it until it is there.[/]",
}


@dataclasses.dataclass(frozen=True)
class Round:
    """The options that describe one round, whatever its noise multiplier."""

    mechanism: MechanismOption = CENTRAL
    sampling_rate: Annotated[
        float, typer.Option("--sampling-rate", "-q", help="Expected fraction of the clients in a round.")
    ] = 1.0
    sampling: Annotated[
        SamplingKind, typer.Option("--sampling", help="How a cohort is drawn when the rate is below 1.")
    ] = SamplingKind.poisson
    adjacency: Annotated[AdjacencyName, typer.Option("--adjacency", help="What changes between neighbours.")] = (
        AdjacencyName.replace_one
    )
    dimension: Annotated[
        int | None,
        typer.Option("--dimension", "-d", help="Parameters of the model, where a round's cost depends on them."),
    ] = None
    epsilon0: Annotated[float, typer.Option("--epsilon0", help="PrivUnit: ε₀.")] = 2.0
    epsilon1: Annotated[float, typer.Option("--epsilon1", help="PrivUnit: ε₁.")] = 2.0
    epsilon2: Annotated[float, typer.Option("--epsilon2", help="PrivUnit: ε₂, for the norm.")] = 2.0
    gamma: Annotated[
        GammaName,
        typer.Option("--gamma", help="PrivUnit: the rule that chooses the cap; the paper's needs --dimension."),
    ] = GammaName.exact

    def event(self, z: float | None) -> Event:
        """One round with noise multiplier z."""
        from dpfedexp.accounting import Sampling
        from dpfedexp.accounting.charges import RoundSettings
        from dpfedexp.mechanisms.registry import round_event

        rate, epsilons = self.sampling_rate, (self.epsilon0, self.epsilon1, self.epsilon2)
        require(0.0 < rate <= 1.0, f"sampling-rate is {rate}; it must be above 0 and at most 1.")
        sampling = Sampling() if rate == 1.0 else Sampling(self.sampling.value, rate)
        settings = RoundSettings(z, self.adjacency.value, sampling, epsilons, self.gamma.value, self.dimension)
        return round_event(self.mechanism.value, settings)

    def scaled(self, total: float) -> Round:
        """PrivUnit's round with its three ε scaled to sum to `total`."""
        scale = total / (self.epsilon0 + self.epsilon1 + self.epsilon2)
        return dataclasses.replace(
            self, epsilon0=scale * self.epsilon0, epsilon1=scale * self.epsilon1, epsilon2=scale * self.epsilon2
        )


def takes_options(command: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """The command with the fields of `Round`, but for some, in place of its parameter `one`."""
    hints, fields = (get_type_hints(made, include_extras=True) for made in (command, Round))
    defaults = {field.name: field.default for field in dataclasses.fields(Round) if field.name not in without}

    @functools.wraps(command)
    def call(**given: Any) -> None:
        command(one=Round(**{name: given.pop(name) for name in defaults}), **given)

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "one"]
    parameters = [
        *(p.replace(kind=kind, annotation=hints[p.name]) for p in own),
        *(inspect.Parameter(name, kind, default=given, annotation=fields[name]) for name, given in defaults.items()),
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


@app.command()
@takes_options
def epsilon(
    one: Round,
    noise_multiplier: NoiseOption = None,
    rounds: RoundsOption = 1,
    delta: DeltaOption = 1e-5,
    clients: Annotated[
        int | None,
        typer.Option(
            "--clients", "-M", help="Clients that report in every round; local: adds readers of the models alone."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What do these rounds cost, each and together, under both adjacencies and (local) for both kinds of reader?"""
    require(clients is None or clients >= 1, f"clients is {clients}; it must be 1 or more.")
    event = one.event(noise_multiplier)
    extra: dict[str, Any] = {"noise_multiplier": noise_multiplier}
    if event.nominal is not None:
        extra = {"nominal_epsilon_round": event.nominal}
    about = {"mechanism": one.mechanism.value, **extra, "sampling_rate": one.sampling_rate, "clients": clients}
    _show_cost(event, rounds, delta, about, as_json)


@app.command()
@takes_options
def noise(
    one: Round,
    target: TargetOption,
    rounds: RoundsOption = 1,
    delta: DeltaOption = 1e-5,
    per: Annotated[Per, typer.Option("--per", help="Whether the target is for all the rounds or for one.")] = Per.total,
    as_json: JsonOption = False,
) -> None:
    """How much noise does a target ε need? For PrivUnit: which ε₀, ε₁, ε₂, in the proportions given."""
    from dpfedexp.accounting import calibrate_noise, calibrate_privunit

    over = rounds if per == Per.total else 1
    about: dict[str, Any] = {"mechanism": one.mechanism.value, "target_epsilon": target, "per": per.value}
    if MECHANISMS[one.mechanism.value].tunes == "epsilons":
        at = delta if per == Per.total else 0.0
        total = calibrate_privunit(
            lambda total: one.scaled(total).event(None), target_epsilon=target, delta=at, rounds=over
        )
        needed = one.scaled(total)
        event = needed.event(None)
        about |= {"noise_multiplier": None}
        about |= {f"epsilon{i}": getattr(needed, f"epsilon{i}") for i in range(3)}
    else:
        z = calibrate_noise(one.event, target_epsilon=target, delta=delta, rounds=over)
        event = one.event(z)
        about |= {"noise_multiplier": z, "sampling_rate": one.sampling_rate}
    _show_cost(event, rounds, delta, about, as_json)


@app.command()
@takes_options
def rounds(
    one: Round,
    target: TargetOption,
    noise_multiplier: NoiseOption = None,
    delta: DeltaOption = 1e-5,
    as_json: JsonOption = False,
) -> None:
    """How many rounds does a target ε pay for?"""
    from dpfedexp.accounting import affordable_rounds, guarantee

    event = one.event(noise_multiplier)
    affordable = affordable_rounds(event, target, delta)
    if affordable == 0:
        raise InputError(
            f"epsilon is {target:g}, which pays for no round: a single one costs "
            f"{guarantee(event, 1, delta).epsilon_round:.4f}. Raise epsilon or the noise."
        )
    about = {"mechanism": one.mechanism.value, "noise_multiplier": noise_multiplier, "target_epsilon": target}
    _show_cost(event, affordable, delta, about, as_json)


@app.command()
@functools.partial(takes_options, without=("epsilon0", "epsilon1", "epsilon2", "gamma"))
def plot(
    one: Round,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write: .png, .svg or .pdf.")] = Path(
        "privacy.png"
    ),
    noise_multiplier: Annotated[
        list[float] | None, typer.Option("--noise-multiplier", "-z", help="Repeat for several.")
    ] = None,
    rounds: RoundsOption = 50,
    delta: DeltaOption = 1e-5,
    as_json: JsonOption = False,
) -> None:
    """Draw ε over rounds for several noise multipliers, and the noise that a target ε needs."""
    import numpy as np

    from dpfedexp.accounting.calibrate import calibrate_noise
    from dpfedexp.accounting.compose import epsilon_curve
    from dpfedexp.engine.plot import Panel, Series, figure, save_figure

    name = one.mechanism.value
    require(
        MECHANISMS[name].tunes == "noise_multiplier",
        f"mechanism is {name!r}, which has no noise multiplier to draw; it must be central-gaussian or local-gaussian.",
    )
    require(out.suffix in PICTURES, f"the picture is {out.name!r}; its name must end in {', '.join(PICTURES)}.")
    noises = noise_multiplier or ([2.0, 5.0, 10.0, 20.0] if one.mechanism == CENTRAL else [0.7, 2.0, 5.0, 10.0])
    at = sorted({int(t) for t in np.geomspace(1, rounds, 24).round()})
    curves = [Series(f"z = {z:g}", at, epsilon_curve(one.event(z), at, delta)) for z in sorted(noises)]
    targets = np.geomspace(0.5, 32.0, 9).tolist()
    needed = [calibrate_noise(one.event, target_epsilon=e, delta=delta, rounds=rounds) for e in targets]
    total, need = f"total ε at δ = {delta:g}", f"noise needed for {rounds} rounds"
    panels = [
        Panel("ε over rounds", "rounds", total, curves, log_x=True, log_y=True),
        Panel(need, total, "noise multiplier z", [Series(need, targets, needed)], log_x=True, log_y=True),
    ]
    rate = one.sampling_rate
    title = f"{name}, {one.adjacency.value}" + (f", q = {rate:g}" if rate < 1.0 else "")
    try:
        save_figure(figure(panels, title), out)
    except OSError as error:
        raise InputError(f"the picture {str(out)!r} can't be written: {error.strerror}.") from None
    if as_json:
        about = {"mechanism": name, "noise_multiplier": noises[0], "file": str(out)}
        _show_cost(one.event(noises[0]), rounds, delta, about, as_json)
    else:
        typer.echo(f"Written: {out}")


@app.command()
def explain(run: RunArgument, as_json: JsonOption = False) -> None:
    """What did a run promise, in plain language? Computed from its ledger."""
    from dpfedexp.accounting.wording import wrap
    from dpfedexp.engine.verify import read_claim, recompute

    statement = recompute(run, read_claim(run))
    typer.echo(statement.to_json() if as_json else wrap(statement.text, min(Console().width, 120)))


@app.command()
def verify(run: RunArgument, as_json: JsonOption = False) -> None:
    """Is a run's claim true? Recomputes it from ledger and configuration; exit code 1: it is not, 4: something is missing."""
    from dpfedexp.engine.verify import outcome, read_claim, recompute, verify_run

    events, unplanned = _planned_events(run)
    planned = events[0] if events else None
    checks = verify_run(run, planned, events[1:])
    result = outcome(checks)
    if as_json:
        # Without a whole ledger there is nothing to recompute, and the checks say so.
        found = json.loads(recompute(run, read_claim(run)).to_json()) if checks[0].passed else {}
        keys = ("epsilon_total", "epsilon_round", "delta", "adjacency", "accountant", "rounds", "exact")
        print_json(
            {
                "verified": result == "holds",
                "outcome": result,
                **{key: found.get(key) for key in keys},
                "checks": [dataclasses.asdict(check) for check in checks],
                "configuration_checked": planned is not None,
            }
        )
    else:
        table = Table("check", "result", "detail", title=f"Verification of {run}")
        for check in checks:
            failed = "[yellow]missing[/]" if check.incomplete else "[bold red]FAILED[/]"
            table.add_row(check.name, "[green]ok[/]" if check.passed else failed, check.detail)
        if planned is None:
            table.add_row("configuration", "[yellow]not checked[/]", unplanned)
        console = Console()
        console.print(table)
        console.print(_VERDICTS[result])
    if result != "holds":
        raise typer.Exit(1 if result == "false" else INCOMPLETE)


def _planned_events(run: Path) -> tuple[list[Event], str]:
    """The event of one round by the run's own configuration and those before the first; without any, why they are not known."""
    from dpfedexp.config import load
    from dpfedexp.engine.outlets import CONFIG

    path = run / CONFIG
    if not path.exists():
        return [], f"the run has no {CONFIG}"
    events = load(path).planned_events()
    return events, "" if events else f"{CONFIG} does not say how large the model and the federation were"


def _show_cost(event: Event, rounds: int, delta: float, about: dict[str, Any], as_json: bool) -> None:
    """What `rounds` rounds of `event` cost; with the clients known, for readers of a local run's models too."""
    from dpfedexp.accounting import guarantee
    from dpfedexp.accounting.statement import models_only, other_adjacency
    from dpfedexp.accounting.wording import figure

    cost = guarantee(event, rounds, delta)
    charges = [(event, rounds)]
    other, no_other = other_adjacency(charges, delta)
    clients = about.get("clients")
    readers, no_readers = (None, "") if clients is None else models_only(charges, delta, clients, clients)
    if as_json:
        views = {
            "other_adjacency": None if other is None else dataclasses.asdict(other),
            "no_other_adjacency": no_other,
            "models_only": None if readers is None else dataclasses.asdict(readers),
            "no_models_only": no_readers,
        }
        print_json({**about, **dataclasses.asdict(cost), **views})
        return

    def kind(exact: bool) -> str:
        return "exact" if exact else "upper bound"

    table = Table(show_header=False, title="Privacy")
    table.add_column(style="bold")
    table.add_column()
    for name, value in about.items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
    table.add_row("rounds", str(cost.rounds))
    table.add_row("ε of one round", f"{figure(cost.epsilon_round)} at δ = {cost.delta_round:g}")
    table.add_row("ε in total", f"[bold]{figure(cost.epsilon_total)}[/] at δ = {cost.delta:g} ({kind(cost.exact)})")
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
            spent, total = figure(view.epsilon_round), figure(view.epsilon_total)
            table.add_row(f"ε {name}", f"{spent} a round, [bold]{total}[/] in total ({kind(view.exact)})")
        elif reason:
            table.add_row(f"ε {name}", f"none: {reason}")
    Console().print(table)
