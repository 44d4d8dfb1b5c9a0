"""`dpfedexp privacy`: accounting, calibration, privacy statements and their verification."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from dpfedexp.cli.options import CENTRAL, JsonOption, MechanismOption, print_json
from dpfedexp.errors import require

if TYPE_CHECKING:
    from dpfedexp.accounting import Event

app = typer.Typer(no_args_is_help=True, help="Privacy: epsilon, noise, and what a run promised.")

NoiseOption = Annotated[
    float | None,
    typer.Option("--noise-multiplier", "-z", help="Noise std on the sum over the clip C (local: on each update)."),
]
RoundsOption = Annotated[int, typer.Option("--rounds", "-T", help="How many rounds are released.")]
DeltaOption = Annotated[float, typer.Option("--delta", help="δ of the total.")]
TargetOption = Annotated[float, typer.Option("--epsilon", "--target-epsilon", "-e", help="The ε that may be spent.")]
RunArgument = Annotated[Path, typer.Argument(help="The folder of a run.")]
_VERDICTS = {
    "holds": "[bold green]The claim holds.[/]",
    "limited": "[bold green]The claim holds for this ledger.[/] See above for what can't be checked on this machine.",
    "false": "[bold red]THE CLAIM DOES NOT HOLD. Do not rely on it.[/]",
    "incomplete": "[bold yellow]The claim can't be checked: see above for what is missing. Do not rely on it.[/]",
}


@dataclasses.dataclass(frozen=True)
class RoundOptions:
    """The options of one round, without its noise multiplier."""

    mechanism: MechanismOption = CENTRAL
    sampling_rate: Annotated[
        float, typer.Option("--sampling-rate", "-q", help="Expected fraction of the clients in a round.")
    ] = 1.0
    sampling: Annotated[
        Literal["poisson", "fixed"], typer.Option(help="How a cohort is drawn when the rate is below 1.")
    ] = "poisson"
    adjacency: Annotated[Literal["replace-one", "add-remove"], typer.Option(help="What changes between neighbors.")] = (
        "replace-one"
    )
    dimension: Annotated[
        int | None,
        typer.Option("--dimension", "-d", help="Parameters of the model, where a round's cost depends on them."),
    ] = None
    epsilon0: Annotated[float, typer.Option("--epsilon0", help="PrivUnit: ε₀.")] = 2.0
    epsilon1: Annotated[float, typer.Option("--epsilon1", help="PrivUnit: ε₁.")] = 2.0
    epsilon2: Annotated[float, typer.Option("--epsilon2", help="PrivUnit: ε₂, for the norm.")] = 2.0
    gamma: Annotated[
        Literal["exact", "paper"],
        typer.Option(help="PrivUnit: the rule for the cap's threshold γ; the paper's rule needs --dimension."),
    ] = "exact"

    def event(self, z: float | None) -> "Event":
        """Return the event of one round with noise multiplier z."""
        from dpfedexp.accounting import Sampling
        from dpfedexp.accounting.events import RoundSettings
        from dpfedexp.mechanisms.registry import round_event

        rate, epsilons = self.sampling_rate, (self.epsilon0, self.epsilon1, self.epsilon2)
        require(0.0 < rate <= 1.0, f"sampling-rate is {rate}; it must be above 0 and at most 1.")
        sampling = Sampling() if rate == 1.0 else Sampling(self.sampling, rate)
        settings = RoundSettings(z, self.adjacency, sampling, epsilons, self.gamma, self.dimension)
        return round_event(self.mechanism, settings)

    def scaled(self, total: float) -> Self:
        """Return the options with PrivUnit's three ε scaled to sum to `total`."""
        epsilons = {name: getattr(self, name) for name in ("epsilon0", "epsilon1", "epsilon2")}
        scale = total / sum(epsilons.values())
        return dataclasses.replace(self, **{name: scale * value for name, value in epsilons.items()})


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of `RoundOptions` as options instead of its parameter `one`."""
    hints, fields = (get_type_hints(made, include_extras=True) for made in (command, RoundOptions))
    defaults = {field.name: field.default for field in dataclasses.fields(RoundOptions)}

    @functools.wraps(command)
    def call(**given: Any) -> None:
        command(one=RoundOptions(**{name: given.pop(name) for name in defaults}), **given)

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
    one: RoundOptions,
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
    """Compute ε of a number of rounds, under both adjacencies and (local) for both kinds of reader."""
    require(clients is None or clients >= 1, f"clients is {clients}; it must be 1 or more.")
    event = one.event(noise_multiplier)
    name, value = (
        ("noise_multiplier", noise_multiplier) if event.nominal is None else ("nominal_epsilon_round", event.nominal)
    )
    about = {"mechanism": one.mechanism, name: value, "sampling_rate": one.sampling_rate, "clients": clients}
    _show_cost(event, rounds, delta, about, as_json)


@app.command()
@takes_options
def noise(
    one: RoundOptions,
    target: TargetOption,
    rounds: RoundsOption = 1,
    delta: DeltaOption = 1e-5,
    as_json: JsonOption = False,
) -> None:
    """Compute the noise for a target ε. For PrivUnit: the largest ε₀, ε₁, ε₂ in the proportions of the given ones."""
    from dpfedexp.accounting import calibrate_noise, calibrate_privunit

    about: dict[str, Any] = {"mechanism": one.mechanism, "target_epsilon": target}
    goal: dict[str, Any] = {"target_epsilon": target, "delta": delta, "rounds": rounds}
    z = None
    if one.mechanism == "privunit":
        one = one.scaled(calibrate_privunit(lambda total: one.scaled(total).event(None), **goal))
        about |= {f"epsilon{i}": getattr(one, f"epsilon{i}") for i in range(3)}
    else:
        z = calibrate_noise(one.event, **goal)
        about |= {"noise_multiplier": z, "sampling_rate": one.sampling_rate}
    _show_cost(one.event(z), rounds, delta, about, as_json)


@app.command()
def explain(run: RunArgument, as_json: JsonOption = False) -> None:
    """Explain the guarantee of a run in plain language, computed from its ledger."""
    from dpfedexp.accounting.statement import wrap
    from dpfedexp.engine.verify import recompute

    statement = recompute(run)
    typer.echo(statement.to_json() if as_json else wrap(statement.text, min(Console().width, 120)))


@app.command()
def verify(run: RunArgument, as_json: JsonOption = False) -> None:
    """Verify the claim of a run from its ledger and configuration. Exit code 1: it is false; 4: something is missing."""
    from dpfedexp.config import load
    from dpfedexp.engine.outlets import CONFIG
    from dpfedexp.engine.verify import outcome, recompute, verify_run

    events = load(run / CONFIG).planned_events() if (run / CONFIG).exists() else []
    planned = events[0] if events else None
    checks = verify_run(run, planned, events[1:])
    result = outcome(checks)
    limited = any(check.passed and check.incomplete for check in checks)
    if as_json:
        # Without a complete ledger nothing can be recomputed; the checks report it.
        found = json.loads(recompute(run).to_json()) if checks[0].passed else {}
        keys = ("epsilon_total", "epsilon_round", "delta", "adjacency", "accountant", "rounds", "exact")
        print_json(
            {
                "verified": result == "holds",
                "outcome": result,
                "limited": limited,
                **{key: found.get(key) for key in keys},
                "checks": [dataclasses.asdict(check) for check in checks],
                "configuration_checked": planned is not None,
            }
        )
    else:
        table = Table("check", "result", "detail", title=f"Verification of {run}")
        for check in checks:
            failed = "[yellow]missing[/]" if check.incomplete else "[bold red]FAILED[/]"
            passed = "[yellow]not checked[/]" if check.incomplete else "[green]ok[/]"
            table.add_row(check.name, passed if check.passed else failed, check.detail)
        if planned is None:
            reason = f"optional: only a run from the command line writes a {CONFIG} to compare with"
            table.add_row("configuration", "[dim]not checked[/]", reason)
        console = Console()
        console.print(table)
        console.print(_VERDICTS["limited" if result == "holds" and limited else result])
    raise typer.Exit({"holds": 0, "false": 1, "incomplete": 4}[result])


def _show_cost(event: "Event", rounds: int, delta: float, about: dict[str, Any], as_json: bool) -> None:
    from dpfedexp.accounting import PrivacyStatement
    from dpfedexp.accounting.statement import figure

    require(rounds >= 1, f"rounds is {rounds}; it must be 1 or more.")
    cost = PrivacyStatement.from_charges(
        [(event, rounds)], delta, algorithm=str(about["mechanism"]), clients=about.get("clients") or 0
    )
    if as_json:
        keys = (
            *("epsilon_round", "epsilon_total", "delta", "delta_round", "pure_epsilon_total", "adjacency", "setting"),
            *("accountant", "exact", "other_adjacency", "no_other_adjacency", "models_only", "no_models_only"),
        )
        found = dataclasses.asdict(cost)
        print_json({**about, "rounds": rounds, **{key: found[key] for key in keys}})
        return

    kind = {True: "exact", False: "upper bound"}
    table = Table(show_header=False, title="Privacy")
    table.add_column(style="bold")
    table.add_column()
    for name, value in {**about, "rounds": rounds}.items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
    table.add_row("ε of one round", f"{figure(cost.epsilon_round)} at δ = {cost.delta_round:g}")
    table.add_row("ε in total", f"[bold]{figure(cost.epsilon_total)}[/] at δ = {delta:g} ({kind[cost.exact]})")
    if cost.pure_epsilon_total is not None:
        table.add_row("ε in total, pure", f"{figure(cost.pure_epsilon_total)} at δ = 0")
    for name in ("adjacency", "setting", "accountant"):
        table.add_row(name, getattr(cost, name))
    other = cost.other_adjacency
    for view, reason, name in (
        (other, cost.no_other_adjacency, "under add-remove" if other is None else f"under {other.adjacency}"),
        (cost.models_only, cost.no_models_only, "for readers of the models"),
    ):
        if view is not None:
            spent, total = figure(view.epsilon_round), figure(view.epsilon_total)
            table.add_row(f"ε {name}", f"{spent} a round, [bold]{total}[/] in total ({kind[view.exact]})")
        elif reason:
            table.add_row(f"ε {name}", f"none: {reason}")
    Console().print(table)
