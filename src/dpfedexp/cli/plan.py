"""`dpfedexp plan`: how much signal to expect for a number of clients and a model size."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from dpfedexp.cli.options import CENTRAL, JsonOption, MechanismOption, print_json
from dpfedexp.cli.train import public_sizes
from dpfedexp.errors import InputError, require

if TYPE_CHECKING:
    from dpfedexp.engine.plan import Plan


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(help="A run's TOML file: its clients, model, mechanism, δ, rounds and ε.", show_default=False),
    ] = None,
    clients: Annotated[int | None, typer.Option("--clients", "-M", help="The public number of clients.")] = None,
    parameters: Annotated[int | None, typer.Option("--parameters", "-d", help="Parameters of the model.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="δ; by default the smaller of 1e-5 and 0.1/M.")] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", "-e", help="ε of a row; may be repeated; by default 1 2 4 8 16.")
    ] = None,
    rounds: Annotated[
        list[int] | None,
        typer.Option("--rounds", "-T", help="Rounds of a row; may be repeated; by default 20 50 100 200."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--sampling-rate", "-q", help="Fraction of the clients in a round; may be repeated."),
    ] = None,
    mechanism: MechanismOption = CENTRAL,
    as_json: JsonOption = False,
) -> None:
    """Show how much signal to expect at each ε and number of rounds, from public numbers alone."""
    from dpfedexp.engine.plan import EPSILONS, ROUNDS, default_delta, plans, sampling_rates
    from dpfedexp.report.compare import plan_section
    from dpfedexp.report.document import wide

    chosen: Plan | None = None
    if file is not None:
        others = (clients, parameters, delta)
        require(all(one is None for one in others), "a file is given with --clients, --parameters or --delta.")
        chosen = _of_file(file)
        population, dimension, at = chosen.population, chosen.dimension, chosen.algorithm.delta
        kind = chosen.algorithm.mechanism
    else:
        for name, value in (("--clients", clients), ("--parameters", parameters)):
            require(value is None or value >= 1, f"{name} is {value}; it must be 1 or more.")
        if clients is None or parameters is None:
            raise InputError("pass --clients and --parameters, or a run's TOML file.")
        population, dimension, kind = clients, parameters, mechanism
        at = default_delta(population) if delta is None else delta
        require(0 < at < 1, f"--delta is {at}; it must be between 0 and 1.")
    epsilons, counts = epsilon or EPSILONS, rounds or ROUNDS
    own = [chosen.sampling.rate] if chosen is not None and chosen.sampling.kind != "full" else []
    rates = rate or [*sampling_rates(population), *own]
    grid = plans(population, dimension, delta=at, mechanism=kind, epsilons=epsilons, rounds=counts, rates=rates)
    size = len(epsilons) * len(counts) * len(rates)
    if min(rates) < 1 and not as_json:  # calibrating a sampled round takes a second or two
        grid = iter(track(grid, "calibrating", size, console=Console(stderr=True), transient=True))
    rows = list(grid)
    # Without a file: the row with the largest cohort, then ε nearest to 8, then rounds nearest to 50.
    advised = chosen or min(rows, key=lambda one: (-one.cohort, abs(one.epsilon - 8), abs(one.rounds - 50)))
    section = plan_section(rows, advised)
    if as_json:
        print_json(section.data)
    else:
        section.show(wide())


def _of_file(path: Path) -> "Plan":
    from dpfedexp.config import load
    from dpfedexp.config.problem import build
    from dpfedexp.engine.plan import Plan

    settings = load(path)
    algorithm, participation = settings.build_algorithm(), settings.build_participation()
    require(algorithm.private, f"the algorithm of {str(path)!r} is {algorithm.name!r}, which is not private.")
    if settings.resolved is not None:
        population, dimension = settings.resolved.clients, settings.resolved.parameters
    else:
        population, dimension = public_sizes(settings, build(settings))
    return Plan.of(algorithm, participation, population, dimension, settings.run.rounds, settings.run.secure)
