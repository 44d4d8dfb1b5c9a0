"""`train`: a complete run over simulated clients, and the evaluation of its model on the server."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.probe import Extras, evaluation_interval
from dpfedexp.algorithms.round import Participation, State
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.core.losses import Loss, check_labels, check_loss, read
from dpfedexp.core.modules import Layout, each, leaves, shape_of
from dpfedexp.engine.checkpoint import Checkpoint, digest, load
from dpfedexp.engine.engine import Engine
from dpfedexp.engine.open_run import OpenRun, described, facts_of
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.ranks import RankCohort
from dpfedexp.engine.run import Run, RunFacts, RunFolder
from dpfedexp.engine.runner import run_to_end
from dpfedexp.engine.simulated import Simulation
from dpfedexp.engine.stopping import OnRound, callbacks_of
from dpfedexp.engine.tournament import Candidate, candidates_of, compared
from dpfedexp.errors import InputError, checked, first_line, is_count, is_number, require, warn
from dpfedexp.evaluation import Evaluate, Evaluation, Evaluations, majority_share, on_test_set
from dpfedexp.mechanisms import Secure
from dpfedexp.trainers.execution import EXECUTION_HINTS, Execution, as_execution
from dpfedexp.trainers.select import trainer_again
from dpfedexp.trainers.task import Clients, Task, applied, one_row

LOCAL_NAMES = ("lr", "learning_rate", "steps", "local_steps", "optimizer")
TRAIN_HINTS = {
    **dict.fromkeys(LOCAL_NAMES, "local=Sgd(lr=0.1, steps=10)"),
    **dict.fromkeys(("epochs", "local_epochs"), "local=Sgd(lr=0.1, epochs=1)"),
    **dict.fromkeys(("test", "test_data", "test_set", "validation_data", "eval_set"), "evaluate=(inputs, targets)"),
    **dict.fromkeys(("sampling_rate", "client_fraction"), "participation=Poisson(0.1)"),
    **dict.fromkeys(("data", "federation"), "clients, a Federation such as Federation.from_pandas(…)"),
    "random_state": "execution=Execution(seed=1)",
    "verbose": "on_round=print to see every round, or execution=Execution(progress=False) to hide the progress bar",
    "noise_multiplier": "algorithm=cdp_fedexp(clip=…, noise_multiplier=1.0)",
    "batch_size": "local=Sgd(lr=0.1, epochs=1, batch_size=32)",
    **dict.fromkeys(("n_rounds", "num_rounds"), "rounds"),
    "epsilon": "algorithm=cdp_fedexp(clip=…, target_epsilon=8.0), or budget=8.0 to stop there",
    "target_epsilon": "algorithm=cdp_fedexp(clip=…, target_epsilon=8.0)",
    "clip": "algorithm=cdp_fedexp(clip=0.3, …)",
    "folder": "out",
    "callbacks": "on_round=[…], functions of one record",
    "on_advice": "on_round=OnAdvice(…)",
    "checkpoint": "out, the folder of the run",
    "resume": "the same out: the run in it goes on",
    "metrics": "evaluate=Evaluation((inputs, targets), metrics={…})",
    "evaluate_every": "evaluate=Evaluation((inputs, targets), every=10)",
    "held_out": "evaluate=Evaluation('clients', held_out=0.2)",
    "population": "participation=Full(population=1000)",
    "noise_cohort": "participation=LargerCohort(Full(), noise_cohort=1000)",
    "aggregation": "algorithm=with_aggregation(cdp_fedexp(…), 'two-party') of dpfedexp.algorithms",
}
"""Hints for arguments that `train` takes as part of another object."""


@checked(hints=EXECUTION_HINTS | TRAIN_HINTS)
def train(
    model: nn.Module,
    clients: Clients,
    algorithm: Algorithm,
    *,
    local: LocalOptimizer,
    rounds: int,
    execution: Execution | str | torch.device | None = None,
    participation: Participation | None = None,
    loss: str | Loss | None = None,
    evaluate: Evaluations = None,
    budget: float | None = None,
    ledger: Ledger | Path | str | None = None,
    out: Path | str | RunFolder | None = None,
    secure: Secure = False,
    candidates: Sequence[Candidate | nn.Module | LocalOptimizer | Algorithm] | None = None,
    diagnostics: bool = False,
    on_round: OnRound | Sequence[OnRound] | None = None,
) -> Run:
    """Train a model over clients with a differentially private algorithm, simulated on this machine.

    Every round is charged to the ledger (on disk, if it has a file) before its result exists. Noise comes from a seed unless the
    run is secure: a simulation is for studying an algorithm and does not protect real data.

    Args:
        model: any nn.Module; it is copied, and its parameters are the starting point.
        clients: a `Federation`.
        algorithm: the algorithm, such as `cdp_fedexp(clip=0.3, target_epsilon=8.0)`.
        local: the local optimizer of every client, such as `Sgd(lr=0.1, steps=10)`.
        rounds: the number of rounds.
        execution: how the run is computed: a torch device such as "cuda", or an `Execution` with seed, precision and more.
        participation: who takes part in a round: `Full()` (default), `Poisson(rate)` or `FixedSize(count)`. It may declare the
            public number of clients, which add-remove adjacency needs. `LargerCohort` uses the noise of a larger deployment.
        loss: a name such as "mse", a loss of torch, or a function (outputs, targets) → one loss per example; by default the
            usual loss for the targets (docs/losses.md).
        evaluate: (inputs, targets) of a test set, measured after every round; or a function (model) → dict of numbers; or
            "clients": the clients measure the model on their own rows, and noise is added within the same ε. An `Evaluation` of
            one of these sets how often, which metrics, and which share of the clients' rows; a list holds one evaluation on the
            server's data and one by the clients.
        budget: stop before the round that would raise ε (at the algorithm's δ) above this value.
        ledger: a file or a `Ledger` to charge every round to before its release; by default `ledger.jsonl` in `out`, or in memory.
            The charges of runs with the same ledger add up, and `budget` is for all of them together.
        out: the folder of the run, new or empty, for the files of `dpfedexp train`: model, metrics, ledger, privacy statement,
            the call, and a checkpoint after every round. `dpfedexp report`, `dpfedexp privacy verify` and `Run.load` read it.
            The same call with the same folder resumes an interrupted run. The result is that of an uninterrupted run, bit for
            bit on the same device, and nothing is charged twice. Private state of the clients goes to a private folder:
            $DPFEDEXP_PRIVATE, or ~/.local/state/dpfedexp.
        secure: True: noise on a grid, from the operating system; "strict": exact discrete Gaussian noise (docs/security.md).
        candidates: settings to choose from during training: networks, local optimizers, algorithms, or `Candidate`s that combine
            them. Each trains on its own group of clients, and after a few rounds the clients vote for the model with the lowest
            loss. One candidate is left after a fifth of the rounds (docs/tuning.md).
        diagnostics: also record values that are not private (their names start with `nonprivate_`), for studying the algorithm.
        on_round: a callback, or a list of callbacks, called with every completed round's record. A callback that raises or
            returns `Stop` ends the run: the run so far is returned, and the statement says so. A callback with a method
            `on_advice` gets advice about the run; without one, warnings become an `AdviceWarning`. See `EarlyStopping`,
            `OnAdvice` and `dpfedexp.sinks`.

    Returns:
        The trained model, the history, the privacy statement and the ledger (`Run`). Ctrl-C loses no completed round: it raises
        `Interrupted`, a KeyboardInterrupt whose `run` holds the completed rounds.

    Example:
        >>> import torch
        >>> from dpfedexp import Federation, Sgd, cdp_fedexp, train
        >>> clients = Federation.from_clients([(torch.randn(5, 3), torch.randn(5)) for _ in range(20)])
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
        >>> algorithm = cdp_fedexp(clip=0.3, noise_multiplier=1.0)
        >>> run = train(model, clients, algorithm, local=Sgd(lr=0.1, steps=2), rounds=3)
        >>> len(run.history)
        3
    """
    execution = as_execution(execution)
    callbacks = callbacks_of(on_round)
    require(is_count(rounds), f"rounds is {rounds!r}; it must be a positive whole number.")
    server, by_clients = Evaluation.split(evaluate)
    every = 1 if server is None else server.every or 1
    require(
        budget is None or (is_number(budget) and budget > 0), f"budget is {budget!r}; it must be a positive epsilon."
    )
    team = RankCohort.current()
    follows = team is not None and team.rank > 0
    with nullcontext() if team is None else team.at_work():
        run_folder = None if follows else run_folder_of(out)
        last = None if run_folder is None else load(run_folder.path)

        def prepared(one: Candidate, extras: Extras) -> tuple[Engine, str | None]:
            return prepare(
                cast(nn.Module, one.model or model),
                clients,
                one.algorithm or algorithm,
                local=one.local or local,
                rounds=rounds,
                execution=_as_before(execution, last),
                participation=participation,
                loss=loss,
                diagnostics=diagnostics,
                secure=secure,
                evaluate_every=0 if by_clients is None else evaluation_interval(rounds, by_clients.every),
                held_out=0.0 if by_clients is None else float(by_clients.held_out),
                extras=extras,
            )

        named = candidates_of(candidates)
        engine, note = compared(named, local, rounds, prepared) if named else prepared(Candidate(), Extras())
        simulation = cast(Simulation, engine.cohort)
        simulations = simulation.candidates or (simulation,)
        models = [cast(nn.Module, one.model or model) for one in named or [Candidate()]]
        trainer = simulation.trainer.name

        def filled(candidate: int, w: torch.Tensor) -> nn.Module:
            trained = copy.deepcopy(models[candidate])
            simulations[candidate].task.layout.write(trained, w)
            return trained

        if team is not None:
            team.simulation = simulation
            engine = replace(engine, cohort=team)
        if team is not None and follows:
            candidate, w, history, statement, stopped = team.follow(engine)
            return Run(filled(candidate, w), history, statement, Ledger.in_memory(), trainer, stopped)
        if note:
            warn(note)
        tasks = [one.task for one in simulations]
        measures = [make_evaluator(server, clients, *own) for own in zip(tasks, models, strict=True) if server]
        description = described(
            engine,
            simulation,
            int(rounds),
            evaluate_every=every,
            secure=secure,
            precision=execution.precision,
            frozen=[frozen_tag(one, own.task.layout) for one, own in zip(models, simulations, strict=True)],
        )
        seeded = Execution(seed=execution.seed) if execution.seed else None
        options: dict[str, Any] = {"local": local, "execution": seeded, "secure": secure, "budget": budget}

        def facts(open_run: OpenRun) -> RunFacts:
            if last is not None:
                folder, done = str(open_run.folder), open_run.state.round
                complete = f"the folder {folder!r} holds this run, which is complete: no round is made, and rows are not compared."
                warn(complete if done >= rounds else f"resuming at round {done + 1} of {rounds} from {folder!r}.")
            names = {"model": type(simulation.task.model).__name__, "data": type(clients).__name__}
            found = facts_of(engine, open_run, run_folder, **names, options=options, trainer=trainer)
            return replace(found, baselines=measures[0].baselines) if measures else found

        def model_of(state: State) -> nn.Module:
            return filled(state.candidate, state.reported.cpu())

        run = run_to_end(
            engine,
            description,
            facts,
            model_of,
            files=run_folder,
            last=last,
            ledger=ledger,
            measure=(lambda state: measures[state.candidate](state)) if measures else None,
            evaluate_every=every,
            budget=budget,
            callbacks=callbacks,
            progress=execution.progress,
            trainer=trainer,
        )
        if team is not None:
            candidate = int(run.history[-1].get("candidate", 0)) if run.history else 0
            w = simulations[candidate].task.layout.read(run.model).cpu()
            team.dismiss((candidate, w, run.history, run.privacy, run.stopped))
        return run


def run_folder_of(out: Path | str | RunFolder | None, call: str = "") -> RunFolder | None:
    """The folder `out`, whose run is resumed; None without one. `call` is the call of the user, if not one of `train`."""
    if out is None or isinstance(out, RunFolder):
        return out
    require(isinstance(out, str | Path), f"out is {out!r}; it must be the path of a folder.")
    return RunFolder(out, resume=True, call=call)


def _as_before(execution: Execution, last: Checkpoint | None) -> Execution:
    """The execution with the chunk size and trainer of the interrupted run, because both affect rounding."""
    if last is None:
        return execution
    before = last.progress
    trainer = execution.trainer
    if trainer == "auto" and before.trainer is not None:
        trainer = trainer_again(before.trainer, execution.place.type)
    return replace(execution, chunk_size=execution.chunk_size or before.chunk_size, trainer=trainer)


def frozen_tag(model: nn.Module, layout: Layout) -> str | None:
    """The hash of the frozen parameters and buffers, which no checkpoint holds; None where the model has none."""
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = {name: value.detach().cpu().contiguous() for name, value in every.items() if name not in layout.names}
    return digest(held) if held else None


class Evaluator:
    """Evaluate released parameters, in a copy of the model that clients do not train.

    Every evaluation uses a new copy, so that a module's state or a change by a caller's function does not affect the next one.
    With `shares_frozen` all copies share the frozen parameters; it is for an `evaluate` that only calls the model.
    """

    def __init__(self, model: nn.Module, task: Task, evaluate: Evaluate, *, shares_frozen: bool) -> None:
        self.task, self.evaluate = task, evaluate
        self.baselines: dict[str, float] = {}
        self.copy = copy.deepcopy(model).to(task.device).eval()
        held = dict(task.model.named_parameters())
        frozen = {name: own for name, own in self.copy.named_parameters() if not own.requires_grad}
        for name, own in frozen.items():
            # Frozen parameters share memory with the clients' model.
            own.data = held[name].data
        self.shared = {id(own): own for own in frozen.values() if shares_frozen}

    def __call__(self, state: State) -> dict[str, float]:
        model = copy.deepcopy(self.copy, dict(self.shared))
        self.task.layout.write(model, state.reported.to(self.task.device))
        found = self.evaluate(model)
        require(
            isinstance(found, Mapping),
            f"evaluate returned a {type(found).__name__}; it must return a dict of numbers by name, {{'loss': 0.3}}.",
        )
        numbers = {}
        for name, value in found.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                wrong = f"evaluate returned a {type(value).__name__} for {name!r}; it must be one number."
                raise InputError(wrong) from None
        return numbers


def make_evaluator(evaluation: Evaluation, clients: Clients, task: Task, model: nn.Module) -> Evaluator:
    """Build the evaluator for a test set or a function. Two rows of a test set are tried now, and all its labels are checked."""
    if callable(evaluation.on):
        return Evaluator(model, task, evaluation.on, shares_frozen=False)
    test = evaluation.on
    require(
        hasattr(clients, "prepare"),
        f"evaluate is a test set, but a {type(clients).__name__} has no method prepare that casts it as the clients' data are; "
        "give a function (model) → dict instead.",
    )
    inputs, targets = cast(Any, clients).prepare(test[0], test[1], task.device)
    measure = on_test_set(inputs, targets, task.loss, metrics=evaluation.metrics)
    shapes = f"inputs of shape {shape_of(inputs)} and targets of shape {tuple(targets.shape)}"
    with torch.no_grad():
        try:
            rows = torch.tensor([0, min(1, len(targets) - 1)], device=targets.device)
            outputs = applied(copy.deepcopy(task.model).eval(), each(lambda value: value[rows], inputs))
            check_labels("its targets", task.loss, outputs, targets)
            check_loss(task.loss, outputs, targets[rows])
        except Exception as error:
            ours, theirs = leaves(inputs)[0].shape[1:], leaves(one_row(clients)[0])[0].shape[2:]
            why = first_line(error) if ours == theirs else f"the clients' rows have shape {tuple(theirs)}."
            raise InputError(f"evaluate has {shapes}, which do not fit the model and its loss: {why}") from None
    evaluator = Evaluator(model, task, measure, shares_frozen=True)
    share = majority_share(task.loss, read(task.loss, outputs), targets)
    evaluator.baselines = {} if share is None else {"test_accuracy": share}
    return evaluator
