"""`train`: a simulated run from start to end; how its model is measured and its rounds are shown."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from dpfedexp.accounting import Budget, GaussianEvent, Ledger, PrivacyStatement, compose
from dpfedexp.accounting.wording import Source
from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.algorithm import Aggregation, aggregated
from dpfedexp.algorithms.participation import Participation
from dpfedexp.algorithms.round import State
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.core.losses import Loss, check_labels, check_loss
from dpfedexp.engine.advice import Commentary
from dpfedexp.engine.checkpoint import Checkpoint
from dpfedexp.engine.open_run import OpenRun, RunDescription, facts_of, find
from dpfedexp.engine.outlets import METRICS, recorded
from dpfedexp.engine.plan import Advice, Plan
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.ranks import Team, world
from dpfedexp.engine.rounds import Simulation, describe, probed
from dpfedexp.engine.run import Run, RunFolder
from dpfedexp.engine.stopping import Interrupted, OnRound, Stop, callbacks_of, heard, tell
from dpfedexp.errors import AdviceWarning, BudgetExceeded, InputError, checked, is_count, is_number, require
from dpfedexp.evaluation import Evaluate, Metric, check_metrics, on_test_set
from dpfedexp.inputs import each, shape_of
from dpfedexp.mechanisms import Secure
from dpfedexp.trainers.checks import applied, first_line
from dpfedexp.trainers.execution import MOVED, Execution, execution_on
from dpfedexp.trainers.select import trainer_again
from dpfedexp.trainers.task import Clients

ELSEWHERE = {
    "lr": "local=Sgd(lr=0.1, steps=10)",
    "steps": "local=Sgd(lr=0.1, steps=10)",
    "epochs": "local=Sgd(lr=0.1, epochs=1)",
    "batch_size": "local=Sgd(lr=0.1, epochs=1, batch_size=32)",
    "epsilon": "algorithm=cdp_fedexp(clip=…, target_epsilon=8.0), or budget=8.0 to stop there",
    "target_epsilon": "algorithm=cdp_fedexp(clip=…, target_epsilon=8.0)",
    "clip": "algorithm=cdp_fedexp(clip=0.3, …)",
    "federation": "clients",
    "folder": "out",
    "callbacks": "on_round=[…], functions of one record",
}
"""What people give to `train` itself, and where it belongs."""
DIAGNOSTICS = "the values whose names start with nonprivate_, which this run recorded for study"


@checked(instead=MOVED | ELSEWHERE)
def train(
    model: nn.Module,
    clients: Clients,
    algorithm: Algorithm,
    *,
    local: LocalOptimiser,
    rounds: int,
    seed: int = 0,
    device: str | torch.device | None = None,
    execution: Execution | None = None,
    participation: Participation | None = None,
    population: int | None = None,
    noise_cohort: int | None = None,
    loss: str | Loss | None = None,
    test: tuple[Any, Any] | None = None,
    evaluate: Evaluate | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int = 1,
    budget: float | None = None,
    ledger: Ledger | Path | str | None = None,
    out: Path | str | RunFolder | None = None,
    checkpoint: Path | str | None = None,
    resume: bool = False,
    aggregation: Aggregation = "plain",
    secure: Secure = False,
    diagnostics: bool = False,
    progress: bool = True,
    on_round: OnRound | Sequence[OnRound] | None = None,
    on_advice: Callable[[Advice], None] | None = None,
) -> Run:
    """Train a model over clients with a differentially private algorithm, simulated on this machine.

    Every round is charged to the ledger, on disk where it has a file, before its result exists. Noise comes from `seed` unless the
    run is secure: a simulation studies an algorithm; it protects nobody's real data.

    Args:
        model: any nn.Module; it is copied, and its parameters are the starting point.
        clients: a `Federation`.
        algorithm: what is run, such as `cdp_fedexp(clip=0.3, target_epsilon=8.0)`.
        local: what a client does, such as `Sgd(lr=0.1, steps=10)`.
        rounds: how many rounds.
        seed: what every draw of a simulation follows from.
        device: a torch device such as "cuda"; the same as `execution=Execution(device=…)`.
        execution: how the run is computed: chunk size, trainer, precision, memory (`Execution`).
        participation: `Full()` (default), `Poisson(rate)` or `FixedSize(count)`.
        population: the public number of clients. Under add-remove adjacency how many there are is private, so it must be declared:
            sums are divided by it, and the federation may hold more or fewer. Under replace-one it is the federation's own.
        noise_cohort: noise as for a round of so many clients of a larger deployment, while `participation` simulates fewer. The
            promise is the deployment's, whose `population` may be given, and not one to the simulated clients.
        loss: a name such as "mse", a loss of torch, or a function (outputs, targets) → one loss per example; the usual one for the
            targets by default (docs/losses.md).
        test: (inputs, targets) of the server's own, evaluated every `evaluate_every` rounds.
        evaluate: instead of `test`, a function (model) → dict of numbers.
        metrics: further numbers on `test`, name → function (outputs, targets) of the whole test set (docs/losses.md).
        evaluate_every: after how many rounds the model is measured; it always is after the last.
        budget: stop before the round that would take ε (at the algorithm's δ) above this.
        ledger: a file to charge every round to before it is released; `ledger.jsonl` beside the checkpoint, or in memory. Runs that
            name the same ledger, or are given the same `Ledger`, add up, and `budget` is for all of them together.
        out: a new folder that gets what `dpfedexp train` writes: model, metrics, ledger, privacy statement, the call, and a
            checkpoint after every round. `dpfedexp report`, `dpfedexp privacy verify` and `Run.load` read it.
        checkpoint: a folder that gets only the ledger and a checkpoint after every round. With it or with `out`, what must be
            remembered of the clients goes to a private folder: $DPFEDEXP_PRIVATE, or ~/.local/state/dpfedexp.
        resume: go on from the checkpoint in `out` or `checkpoint`. The run ends like one that was never interrupted, bit for bit
            on the same device.
        aggregation: "plain" for one server that is trusted with the updates; "two-party" for a server and a helper of which neither
            can read one, each with all of the noise; "two-party-one-sided" for the helper's noise alone (docs/two-party.md).
        secure: True: noise on a grid, from the operating system; "strict": exact discrete Gaussian noise (docs/security.md).
        diagnostics: also record values that are not private (their names start with `nonprivate_`), for studying the algorithm.
        progress: show a progress bar.
        on_round: called with every round's record once the round is complete; or a list of such functions. One that raises or
            returns `Stop`, or raises `StopIteration`, ends the run: what was made is returned, and the statement says so. See
            `EarlyStopping` and `dpfedexp.sinks`.
        on_advice: called with what there is to say about the run, before it and while it goes on (docs/advice.md); by default what
            is a warning becomes an `AdviceWarning`. `Run.advice` holds all of it.

    Returns:
        The trained model, the history, the privacy statement and the ledger (`Run`). A KeyboardInterrupt loses nothing either: it
        comes as `Interrupted`, a KeyboardInterrupt whose `run` holds the rounds that were complete.

    Example:
        >>> import torch
        >>> from dpfedexp import Federation, Sgd, cdp_fedexp, train
        >>> clients = Federation.from_clients([(torch.randn(5, 3), torch.randn(5)) for _ in range(20)])
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
        >>> algorithm = cdp_fedexp(clip=0.3, noise_multiplier=1.0)
        >>> run = train(model, clients, algorithm, local=Sgd(lr=0.1, steps=2), rounds=3, progress=False)
        >>> len(run.history)
        3
    """
    if isinstance(algorithm, Algorithm):
        algorithm = aggregated(algorithm, aggregation)
    execution = execution_on(device, execution)
    callbacks = callbacks_of(on_round)
    require(
        on_advice is None or callable(on_advice), f"on_advice is {on_advice!r}; it must be a function of one advice."
    )
    require(
        evaluate is None or callable(evaluate),
        f"evaluate is {evaluate!r}; it must be a function from a model to numbers.",
    )
    require(is_count(evaluate_every), f"evaluate_every is {evaluate_every!r}; it must be a positive whole number.")
    require(
        budget is None or (is_number(budget) and budget > 0), f"budget is {budget!r}; it must be a positive epsilon."
    )
    require(
        world() == 1 or not local.automatic,
        "local lr is 'auto' in a run on several ranks; choose the rate on one, and give it as a number.",
    )
    team = Team.current()
    follows = team is not None and team.rank > 0
    with nullcontext() if team is None else team.at_work():
        run_folder = None if follows else _run_folder(out, checkpoint, resume)
        folder = None if checkpoint is None or follows else Path(checkpoint)
        folder = folder if run_folder is None else run_folder.path
        last = None if follows else find(folder, resume)
        simulation, note = prepare(
            model,
            clients,
            algorithm,
            local=local,
            rounds=rounds,
            seed=seed,
            execution=_as_before(execution, last),
            participation=participation,
            population=population,
            noise_cohort=noise_cohort,
            loss=loss,
            diagnostics=diagnostics,
            secure=secure,
        )
        if team is not None and follows:
            return _followed(team, simulation, model)
        if note:
            warnings.warn(note, stacklevel=3)
        measure = evaluation_of(test, evaluate, clients, simulation, model, metrics)
        description = RunDescription.of(
            simulation, int(rounds), evaluate_every=evaluate_every, secure=secure, precision=execution.precision
        )
        with (
            OpenRun.open(description, ledger, folder, last, resume=resume) as open_run,
            round_progress(simulation, rounds, enabled=progress) as show_progress,
        ):
            simulation = replace(simulation, team=team, run=open_run.name)
            plan = Plan.of(
                simulation.algorithm,
                simulation.participation,
                simulation.population,
                simulation.task.layout.dimension,
                int(rounds),
                mechanism=simulation.mechanism,
            )
            commentary = Commentary(plan, description.start.w, on_advice or _warn)
            commentary.begin(open_run.history)
            how: dict[str, Any] = {"seed": seed, "secure": secure, "budget": budget}
            how |= {} if aggregation == "plain" else {"aggregation": aggregation}
            facts = facts_of(simulation, open_run, clients, run_folder, how)
            if run_folder is not None:
                run_folder.begin(facts)
            tell(callbacks, "begun", facts)

            def completed(record: dict[str, Any]) -> Stop | None:
                if run_folder is not None:
                    run_folder.record(record)
                stop = heard(callbacks, record)
                show_progress(record)
                commentary.after(record, open_run.state.w)
                return stop

            def made(end: End) -> Run:
                return Run(
                    _with_parameters(model, simulation, open_run.state.reported.cpu()),
                    open_run.history,
                    _statement(simulation, open_run, end),
                    open_run.ledger,
                    simulation.trainer.name,
                    end.reason,
                    tuple(commentary.advice),
                    facts,
                )

            limit = None if budget is None else Budget(budget, algorithm.delta)
            try:
                stop = tell(callbacks, "resumed", open_run.history)
                end = (
                    End(stop.reason, stop.source)
                    if stop is not None
                    else _rounds(simulation, open_run, measure, evaluate_every, limit, completed)
                )
            except KeyboardInterrupt:
                if run_folder is not None:
                    run_folder.close()
                where = "" if folder is None else f", and resume=True goes on in {str(folder)!r}"
                raise Interrupted(
                    f"interrupted after {open_run.state.round} of {description.rounds} rounds; this exception's `run` holds "
                    f"them{where}.",
                    made(End("somebody interrupted it.", "hand")),
                ) from None
            except Exception as error:
                if run_folder is not None:
                    run_folder.close()
                    error.add_note(f"The rounds so far are in {str(run_folder.path)!r}; resume=True goes on from them.")
                raise
            commentary.end(open_run.state.w)
        run = made(end)
        if team is not None:
            team.dismiss((open_run.state.reported.cpu(), run.history, run.privacy, run.stopped))
        if run_folder is not None:
            run_folder.finish(run)
        tell(callbacks, "finished", run)
        return run


class End(NamedTuple):
    """How the rounds ended: with the last of them, or for a reason, which somebody may have decided by looking at something."""

    reason: str | None = None
    decided: Source | Literal["hand", ""] = ""


def _run_folder(out: Path | str | RunFolder | None, checkpoint: Path | str | None, resume: bool) -> RunFolder | None:
    if out is None or isinstance(out, RunFolder):
        return out
    require(isinstance(out, str | Path), f"out is {out!r}; it must be the path of a new folder.")
    require(
        checkpoint is None or Path(checkpoint).resolve() == Path(out).resolve(),
        f"out is {str(out)!r} and checkpoint is {str(checkpoint)!r}; out holds the checkpoint too, so leave checkpoint out.",
    )
    return RunFolder(out, resume=resume)


def _warn(advice: Advice) -> None:
    """A note is in `Run.advice` for whoever looks; a warning is for everybody."""
    if advice.level == "warning":
        warnings.warn(advice.sentence, AdviceWarning, stacklevel=6)


def _as_before(execution: Execution, last: Checkpoint | None) -> Execution:
    """The chunk size and the trainer of the interrupted run: both were chosen where it began, and both decide how it rounds."""
    if last is None:
        return execution
    before = last.progress
    trainer = execution.trainer
    if trainer == "auto" and before.trainer is not None:
        trainer = trainer_again(before.trainer, execution.place.type)
    return replace(execution, chunk_size=execution.chunk_size or before.chunk_size, trainer=trainer)


def _rounds(
    simulation: Simulation,
    open_run: OpenRun,
    measure: Measuring | None,
    evaluate_every: int,
    budget: Budget | None,
    completed: Callable[[dict[str, Any]], Stop | None],
) -> End:
    """All the rounds that are left."""
    rounds, delta = open_run.description.rounds, simulation.algorithm.delta
    try:
        open_run.before_rounds(probed(simulation, open_run.state, open_run.ledger, budget))
    except BudgetExceeded as reason:
        open_run.stop()
        return End(str(reason))
    for number in range(open_run.state.round + 1, rounds + 1):
        # A copy of the run that another one has overtaken ends here, before its clients train.
        open_run.ledger.check_newest()
        try:
            state, result = simulation.step(open_run.state, open_run.ledger, budget)
        except BudgetExceeded as reason:
            open_run.stop()
            return End(str(reason))
        metrics = {}
        if measure is not None and (number % evaluate_every == 0 or number == rounds):
            metrics = measure(state)
        record = describe(result, epsilon_so_far(open_run.ledger, delta, last=number == rounds), metrics)
        record = recorded(METRICS, record, secure=open_run.description.secure)
        open_run.complete(state, record, last=number == rounds)
        stop = completed(record)
        # After the last round there is nothing left to stop.
        if stop is not None and number < rounds:
            open_run.stop()
            return End(stop.reason, stop.source)
    return End()


def _statement(simulation: Simulation, open_run: OpenRun, end: End) -> PrivacyStatement:
    algorithm, charges = simulation.algorithm, open_run.ledger.charges()
    # An interrupt may come between the charge and the release.
    charged = {entry.round for entry in open_run.ledger.entries if entry.run == open_run.name and entry.round > 0}
    missing = open_run.description.rounds - max(open_run.state.round, len(charged))
    return PrivacyStatement.from_charges(
        charges,
        algorithm.delta,
        algorithm=algorithm.name,
        clients=simulation.population,
        simulated=simulation.system is None,
        # The rounds that are missing, on top of everything in the ledger: other runs may share it.
        planned=[*charges, (simulation.event, missing)] if end.reason else None,
        not_covered=[DIAGNOSTICS] if simulation.diagnostics and algorithm.private else [],
        # A client that remembers its own report carries its noise into the next one, so the sums' noises are not independent.
        reporting=0 if algorithm.scaffold == "report" else None,
        stopping=end.decided,
        **simulation.stands_for,
    )


def _followed(team: Team, simulation: Simulation, model: nn.Module) -> Run:
    """What a rank other than 0 returns: the same run, without its ledger."""
    w, history, statement, stopped = team.follow(simulation)
    return Run(
        _with_parameters(model, simulation, w), history, statement, Ledger.in_memory(), simulation.trainer.name, stopped
    )


def _with_parameters(model: nn.Module, simulation: Simulation, w: torch.Tensor) -> nn.Module:
    trained = copy.deepcopy(model)
    simulation.task.layout.write(trained, w)
    return trained


def evaluation_of(
    test: tuple[Any, Any] | None,
    evaluate: Evaluate | None,
    clients: Clients,
    simulation: Simulation,
    model: nn.Module,
    metrics: Mapping[str, Metric] | None = None,
) -> Measuring | None:
    """What measures the model: `evaluate` where it is given, or the test set, which is tried on it before the first round."""
    counted = f" of {len(test)}" if isinstance(test, (tuple, list)) else ""
    require(
        test is None or counted == " of 2",
        f"test is a {type(test).__name__}{counted}; it must be a pair (inputs, targets).",
    )
    check_metrics(metrics)
    require(
        metrics is None or (test is not None and evaluate is None),
        "metrics are measured on test: give test=(inputs, targets) with them, and no evaluate.",
    )
    if evaluate is not None:
        return Measuring(model, simulation, evaluate, asks=False)
    if test is None:
        return None
    cast = getattr(clients, "prepare", None)
    if cast is None:
        raise InputError(
            f"test is given, but a {type(clients).__name__} has no method prepare that casts a test set as the clients' data are; "
            "give evaluate, a function (model) → dict, instead."
        )
    task = simulation.task
    inputs, targets = cast(test[0], test[1], task.device)
    measure = on_test_set(inputs, targets, task.loss, metrics=metrics)
    shapes = f"inputs of shape {shape_of(inputs)} and targets of shape {tuple(targets.shape)}"
    with torch.no_grad():
        try:
            rows = torch.tensor([0, min(1, len(targets) - 1)], device=targets.device)
            outputs = applied(copy.deepcopy(task.model).eval(), each(lambda value: value[rows], inputs))
            check_loss(task.loss, outputs, targets[rows])
            check_labels("its targets", task.loss, outputs, targets)
        except Exception as error:
            raise InputError(
                f"test has {shapes}, which do not fit the model and its loss: {first_line(error)}"
            ) from None
    return Measuring(model, simulation, measure, asks=True)


class Measuring:
    """Metrics of released parameters, in a copy of the model that no client trains.

    Every measurement has a copy of its own, because modules may remember and a caller's function may do what it likes. Where
    `evaluate` only `asks`, as a test set does, frozen parameters are not copied, and nothing is where all modules are torch's own,
    which remember nothing in eval mode.
    """

    def __init__(self, model: nn.Module, simulation: Simulation, evaluate: Evaluate, *, asks: bool) -> None:
        self.task, self.evaluate, self.asks = simulation.task, evaluate, asks
        self.copy = copy.deepcopy(model).to(self.task.device).eval()
        held = dict(self.task.model.named_parameters())
        for name, own in self.copy.named_parameters():
            if not own.requires_grad:
                # What is frozen lies on the device once.
                own.data = held[name].data
        self.forgets = asks and all(map(_is_torchs_own, self.copy.modules()))

    def __call__(self, state: State) -> dict[str, float]:
        frozen = [parameter for parameter in self.copy.parameters() if self.asks and not parameter.requires_grad]
        held = {id(parameter): parameter for parameter in frozen}
        model = self.copy if self.forgets else copy.deepcopy(self.copy, held)
        self.task.layout.write(model, state.reported.to(self.task.device))
        found = self.evaluate(model)
        if not isinstance(found, Mapping):
            raise InputError(
                f"evaluate returned a {type(found).__name__}; it must return a dict of numbers by name, {{'loss': 0.3}}."
            )
        return {name: _number(name, value) for name, value in found.items()}


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether a module's forward is torch's, with nobody's function before or after it."""
    hooked = any(getattr(module, kind) for kind in ("_forward_hooks", "_forward_pre_hooks"))
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module) and not hooked


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"evaluate returned a {type(value).__name__} for {name!r}; it must be one number.") from None


LARGER = "of the larger deployment"
"""Whose ε it is where few clients stand for many."""


@contextmanager
def round_progress(simulation: Simulation, rounds: int, *, enabled: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields what shows a record in a bar over the rounds; silent when disabled or when there is no terminal.

    In a secure run it shows no durations, which depend on what the clients hold.
    """
    # A run that shows nothing needs no package of the command line.
    if not enabled or not (sys.stdout.isatty() or "ipykernel" in sys.modules):
        yield lambda record: None
        return
    from rich import progress

    times = recorded("terminal", {"elapsed": None}, secure=simulation.system is not None)
    whose = "" if simulation.larger is None else LARGER
    with progress.Progress(
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        *([progress.TimeElapsedColumn(), progress.TimeRemainingColumn()] if times else []),
        progress.TextColumn("{task.fields[shown]}"),
        transient=True,
    ) as bar:
        row = bar.add_task(simulation.algorithm.name, total=rounds, shown="")
        yield lambda record: bar.update(row, completed=record["round"], shown=show(record, whose))


def show(record: dict[str, Any], whose: str = "") -> str:
    """The public values of a round in one line; `whose` ε it is, where it is not that of the run's own clients."""
    metrics = [
        f"{key.removeprefix('test_')} {value:.4g}"
        for key, value in recorded("terminal", record, secure=True).items()
        if isinstance(value, float) and key not in ("eta_g", "clip", "update_norm", "vote_within_clip", "epsilon_total")
    ]
    epsilon = record["epsilon_total"]
    privacy = "not private" if math.isinf(epsilon) else f"ε {whose}{' ' if whose else ''}{epsilon:.3f}"
    return "  ".join([*metrics, f"η_g {record['eta_g']:.2f}", privacy])


EXACT = 8
"""Up to so many sampled rounds the record of each has its own ε."""
GROWTH = 1.25
"""From one number of rounds for which ε is computed to the next, in longer runs."""


def epsilon_so_far(ledger: Ledger, delta: float, *, last: bool) -> float:
    """ε of everything that was charged, or where that takes long an upper bound: ε of up to a quarter more rounds.

    The cost of rounds that sample by Poisson takes a tenth of a second or more to compute, for every number of rounds anew. After
    the first few it is therefore computed for some numbers of rounds only, and a record gets that of the next one: more rounds cost
    more. Which numbers these are depends on nothing, so that a run which goes on records what it would have. The `last` record, and
    every statement, is of what was charged.
    """
    charges = ledger.charges()
    sampled = [
        (n, event) for event, n in charges if isinstance(event, GaussianEvent) and event.sampling.kind == "poisson"
    ]
    _, event = max(sampled, key=lambda pair: pair[0], default=(0, None))
    if event is None or last or event.setting == "local":
        return compose(charges, delta).epsilon
    return compose([(one, next_known(n) if one == event else n) for one, n in charges], delta).epsilon


def next_known(rounds: int) -> int:
    """The smallest number of rounds, not below this one, for which ε is computed."""
    known = EXACT
    while known < rounds:
        known = max(known + 1, int(known * GROWTH))
    return known if rounds > EXACT else rounds
