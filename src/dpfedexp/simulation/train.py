"""`train`: a simulated run from start to end."""

from __future__ import annotations

import copy
import secrets
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfedexp.accounting import Budget, Ledger, PrivacyStatement
from dpfedexp.algorithms import Algorithm
from dpfedexp.errors import BudgetExceeded, InputError, is_count, is_number, require
from dpfedexp.evaluation import Evaluate, on_test_set
from dpfedexp.layout import Layout
from dpfedexp.local import LocalOptimiser
from dpfedexp.losses import Loss, resolve
from dpfedexp.mechanisms.secure import Secure
from dpfedexp.noise.chacha import SystemStreams
from dpfedexp.noise.streams import Streams
from dpfedexp.participation import Full, Participation, public_population
from dpfedexp.runs.outlets import recorded
from dpfedexp.runs.resume import Keeping, find
from dpfedexp.runs.settings import settings_of
from dpfedexp.simulation.progress import RoundProgress
from dpfedexp.simulation.ranks import Team
from dpfedexp.simulation.rounds import Simulation, State, check_scaffold, describe
from dpfedexp.trainers.chunk_size import automatic_chunk, parse_memory
from dpfedexp.trainers.isolation import check_on, check_rows_apart, check_training, made_up, watched, widths
from dpfedexp.trainers.precision import Precision, check_precision
from dpfedexp.trainers.select import kept as kept_trainer
from dpfedexp.trainers.select import select
from dpfedexp.trainers.task import Clients, Task, check_task
from dpfedexp.trainers.tiled import Parallel

DIAGNOSTICS = "the values whose names start with nonprivate_, which this run recorded for study"


@dataclass(frozen=True)
class Run:
    """What a run leaves.

    model    the trained module: the average of the last two iterates for FedEXP variants, the last one otherwise
    history  one record per round: test metrics, eta_g, clip, epsilon_total so far, and seconds unless the run is secure
    privacy  the statement of what was promised to whom; print it
    stopped  why the run ended before its last round, None if it did not
    """

    model: nn.Module
    history: list[dict[str, Any]] = field(repr=False)
    privacy: PrivacyStatement = field(repr=False)
    ledger: Ledger = field(repr=False)
    trainer: str = "vectorised"
    stopped: str | None = None

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        shown = {k: round(v, 4) for k, v in last.items() if isinstance(v, float)}
        ended = "" if self.stopped is None else f", stopped: {self.stopped}"
        return f"Run({len(self.history)} rounds, {shown}{ended})"


def train(
    model: nn.Module,
    federation: Clients,
    algorithm: Algorithm,
    *,
    local: LocalOptimiser,
    rounds: int,
    seed: int = 0,
    device: str | torch.device | None = None,
    chunk_size: int | None = None,
    participation: Participation | None = None,
    population: int | None = None,
    loss: str | Loss | None = None,
    test: tuple[Any, Any] | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    budget: float | None = None,
    ledger: Ledger | Path | str | None = None,
    checkpoint: Path | str | None = None,
    resume: bool = False,
    secure: Secure = False,
    trainer: str = "auto",
    precision: Precision = "fp32",
    memory: str | int | None = None,
    diagnostics: bool = False,
    progress: bool = True,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train `model` over the clients of `federation` with a differentially private algorithm, simulated on this machine.

    model          any nn.Module; it is copied, and its parameters are the starting point
    local          what a client does: `Sgd(lr=0.1, steps=10)`
    participation  `Full()` (default), `Poisson(rate)` or `FixedSize(count)`
    population     the public number of clients. Under add-remove adjacency how many there are is private, so it must be declared:
                   sums are divided by it, and the federation may hold more or fewer. Under replace-one it is the federation's own
    loss           a name, or a function (outputs, targets) → one loss per example; the usual one for the targets by default
    test           (inputs, targets) of the server's own, evaluated every `evaluate_every` rounds; or `evaluate(model) → dict`
    budget         stop before the round that would take ε (at the algorithm's δ) above this
    ledger         a file to charge every round to before it is released; `ledger.jsonl` beside the checkpoint, or in memory. Runs
                   that name the same ledger, or are given the same `Ledger`, add up, and `budget` is for all of them together
    checkpoint     a folder that gets a checkpoint after every round; with `resume` the run goes on from the one that is there, and
                   ends like a run that was never interrupted, bit for bit on the same device. What it must remember of the clients
                   goes to a private folder: $DPFEDEXP_PRIVATE, or ~/.local/state/dpfedexp
    secure         True: noise on a grid, from the operating system; "strict": exact discrete Gaussian noise (docs/security.md)
    chunk_size     clients per tensor program; automatic by default, and without effect on the result beyond rounding
    memory         bytes that the clients of a chunk may take, such as "4GB"; automatic by default
    trainer        "auto" takes the fastest of "fast" (networks of known layers), "vectorised" (any that vmap can trace) and "loop"
    precision      of local training: "fp32", or on a GPU "tf32" or "bf16" (docs/scale.md says what they change)
    diagnostics    also record values that are not private (their names start with `nonprivate_`), for studying the algorithm

    Noise comes from `seed` unless the run is secure: a simulation studies an algorithm; it protects nobody's real data.

    >>> import torch
    >>> from dpfedexp import Federation, Sgd, cdp_fedexp, train
    >>> clients = Federation.from_clients([(torch.randn(5, 3), torch.randn(5)) for _ in range(20)])
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    >>> algorithm = cdp_fedexp(clip=0.3, noise_multiplier=1.0)
    >>> run = train(model, clients, algorithm, local=Sgd(lr=0.1, steps=2), rounds=3, progress=False)
    >>> len(run.history)
    3
    """
    team = Team.current()
    with nullcontext() if team is None else team.at_work():
        if team is not None and team.rank > 0:
            checkpoint, ledger, resume, on_round, progress = None, None, False, None, False
        folder = None if checkpoint is None else Path(checkpoint)
        found = find(folder, resume)
        if found is not None:
            # Both were chosen on the machine that the run began on, and both decide how it rounds.
            chunk_size = chunk_size or found.progress.chunk_size
            if trainer == "auto" and found.progress.trainer is not None:
                trainer = kept_trainer(found.progress.trainer, _device(device))
        simulation, note = prepare(
            model,
            federation,
            algorithm,
            local=local,
            rounds=rounds,
            seed=seed,
            device=device,
            chunk_size=chunk_size,
            participation=participation,
            population=population,
            loss=loss,
            trainer=trainer,
            precision=precision,
            memory=memory,
            diagnostics=diagnostics,
            secure=secure,
        )
        if team is not None and team.rank > 0:
            return _followed(team, simulation, model)
        simulation = replace(simulation, team=team)
        if note:
            warnings.warn(note, stacklevel=2)
        require(is_count(evaluate_every), f"evaluate_every is {evaluate_every!r}; it must be a positive whole number.")
        require(
            budget is None or (is_number(budget) and budget > 0),
            f"budget is {budget!r}; it must be a positive epsilon.",
        )
        require(
            test is None or (isinstance(test, (tuple, list)) and len(test) == 2),
            f"test is a {type(test).__name__}; it must be a pair (inputs, targets).",
        )
        if evaluate is None and test is not None:
            inputs, targets = federation.prepare(test[0], test[1], simulation.task.device)  # type: ignore[attr-defined]
            evaluate = on_test_set(inputs, targets, simulation.task.loss)
        limit = None if budget is None else Budget(budget, algorithm.delta)
        settings = settings_of(
            simulation, rounds=rounds, evaluate_every=evaluate_every, secure=secure, precision=precision
        )
        stopped = None
        with (
            Keeping.open(simulation, settings, ledger, folder, found, resume=resume) as kept,
            RoundProgress(algorithm.name, rounds, enabled=progress, times=not secure) as bar,
        ):
            simulation, book = kept.simulation, kept.book
            for number in range(kept.state.round + 1, rounds + 1):
                try:
                    state, shown = simulation.step(kept.state, book, limit)
                except BudgetExceeded as reason:
                    stopped = str(reason)
                    kept.stop()
                    break
                metrics = {}
                if evaluate is not None and (number % evaluate_every == 0 or number == rounds):
                    metrics = _evaluate(model, simulation, state, evaluate)
                record = describe(shown, book.guarantee(algorithm.delta).epsilon, metrics)
                record = recorded("metrics.jsonl", record, secure=bool(secure))
                kept.keep(state, record, last=number == rounds)
                if on_round is not None:
                    on_round(record)
                bar.update(record)
        result = copy.deepcopy(model)
        simulation.task.layout.write(result, kept.state.reported.cpu())
        statement = PrivacyStatement.from_charges(
            book.charges(),
            algorithm.delta,
            algorithm=algorithm.name,
            clients=simulation.population,
            simulated=simulation.system is None,
            # The rounds that are missing, on top of everything in the ledger: other runs may share it.
            planned=[*book.charges(), (simulation.event, rounds - kept.state.round)] if stopped else None,
            not_covered=[DIAGNOSTICS] if diagnostics and algorithm.private else [],
            # A client that remembers its own report carries its noise into the next one, so the sums' noises are not independent.
            reporting=0 if algorithm.scaffold == "report" else None,
        )
        if team is not None:
            team.dismiss((kept.state.reported.cpu(), kept.history, statement, stopped))
        return Run(result, kept.history, statement, book, simulation.trainer.name, stopped)


def _followed(team: Team, simulation: Simulation, model: nn.Module) -> Run:
    """What a rank other than 0 returns: the same run, without its ledger."""
    w, history, statement, stopped = team.follow(simulation)
    result = copy.deepcopy(model)
    simulation.task.layout.write(result, w)
    return Run(result, history, statement, Ledger.in_memory(), simulation.trainer.name, stopped)


def prepare(
    model: nn.Module,
    federation: Clients,
    algorithm: Algorithm,
    *,
    local: LocalOptimiser,
    rounds: int,
    seed: int = 0,
    device: str | torch.device | None = None,
    chunk_size: int | None = None,
    participation: Participation | None = None,
    population: int | None = None,
    loss: str | Loss | None = None,
    trainer: str = "auto",
    precision: Precision = "fp32",
    memory: str | int | None = None,
    diagnostics: bool = False,
    secure: Secure = False,
    isolated: bool | None = None,
) -> tuple[Simulation, str | None]:
    """The bound simulation, and a note for the user if it is slower than they might expect.

    `isolated` keeps clients apart bit for bit (`isolation`); a secure run does.
    """
    _check_kinds(model, federation, algorithm, local, participation, secure)
    isolated = bool(secure) if isolated is None else isolated
    require(is_count(rounds), f"rounds is {rounds!r}; it must be a positive whole number.")
    require(
        chunk_size is None or is_count(chunk_size),
        f"chunk_size is {chunk_size!r}; it must be a positive whole number.",
    )
    require(len(federation) > 0, "the federation has no clients; it needs at least one.")
    require(
        not (secure and diagnostics),
        "diagnostics is True in a secure run: they are computed without noise, so they must not leave it; use one of the two.",
    )
    check_precision(precision)
    where = _device(device)
    module = _in_training(model).to(where)
    layout = Layout.of(module)
    everyone = participation or Full()
    # An algorithm that promises nothing has no neighbours to hide from: everybody is counted.
    adjacency = algorithm.adjacency if algorithm.private else "replace-one"
    declared = public_population(adjacency, everyone, len(federation), population)
    sampling = everyone.sampling(declared)
    holders = torch.nonzero(federation.sizes > 0).flatten()
    require(len(holders) > 0, "every client is empty; at least one must hold data.")
    _, targets = federation.gather(holders[:1], torch.zeros((1, 1), dtype=torch.int64))
    task = Task(module, layout, resolve(loss, targets), local, federation, where, precision)
    check_scaffold(algorithm, task)
    if isolated:
        check_rows_apart(federation)
    nobody = made_up(task, declared)
    # What is wrong with a client's own rows is private too: not even the sentence that refuses them may leave a secure run.
    if isolated:
        check_on(nobody, task)
    else:
        check_task(task)
    task = replace(task, watch=watched(task, nobody, isolated=isolated))
    # Numbers that key a stream move up when a client leaves: in a secure run nobody may know what they key.
    streams = Streams(secrets.randbits(62) if isolated else seed)
    limit = parse_memory(memory)
    cohort = everyone.expected(declared)
    # Sizes, and with them shapes and times, are private: a secure run decides everything on clients that are nobody.
    trial = replace(task, clients=nobody, copies=[]) if isolated else None
    if trial is not None:
        check_training(trial, streams)
    chunk = chunk_size or automatic_chunk(trial or task, limit, isolated=isolated)
    unit = None
    if trial is not None:
        chunk, _ = widths(cohort, chunk, None, fixed=sampling.kind != "poisson")
    chosen, note = select(task, streams, trainer, chunk=chunk, updates=rounds * cohort, budget=limit, trial=trial)
    if isinstance(chosen, Parallel) and chunk_size is None:
        chunk = automatic_chunk(trial or task, limit, chosen.in_flight, isolated=isolated)
    if trial is not None:
        chunk, unit = widths(cohort, chunk, chosen.unit, fixed=sampling.kind != "poisson")
    mechanism = algorithm.bind(layout.dimension, declared, cohort, sampling, rounds, secure)
    system = SystemStreams() if secure else None
    bound = Simulation(
        task, chosen, algorithm, mechanism, everyone, streams, chunk, diagnostics, system, unit, declared=declared
    )
    return bound, note


def _check_kinds(model: Any, federation: Any, algorithm: Any, local: Any, participation: Any, secure: Any) -> None:
    """Every part is of its kind. Above all, a misspelt "strict" must not become weaker noise than was asked for."""
    require(
        isinstance(secure, bool) or secure == "strict",
        f"secure is {secure!r}; it must be True, False or 'strict'.",
    )
    for name, value, right, remedy in (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("federation", federation, hasattr(federation, "gather"), "a Federation, such as Federation.from_clients(…)"),
        ("algorithm", algorithm, isinstance(algorithm, Algorithm), "an algorithm such as cdp_fedexp(…)"),
        ("local", local, isinstance(local, LocalOptimiser), "what a client does, such as Sgd(lr=0.1, steps=10)"),
        (
            "participation",
            participation,
            participation is None or hasattr(participation, "cohort"),
            "Full(), Poisson(rate) or FixedSize(count)",
        ),
    ):
        require(right, f"{name} is a {type(value).__name__}; it must be {remedy}.")


def _in_training(model: nn.Module) -> nn.Module:
    """A copy in the mode that it trains in. Parts may be frozen in eval mode; a model that is in eval mode as a whole is not."""
    module = copy.deepcopy(model)
    return module if module.training else module.train()


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError:
        raise InputError(f"device is {device!r}; it must be a torch device such as 'cpu' or 'cuda'.") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device is {str(device)!r}, but torch sees no CUDA device here; use 'cpu'.")
    return where


def _evaluate(model: nn.Module, simulation: Simulation, state: State, evaluate: Evaluate) -> dict[str, float]:
    """Metrics of the released parameters in a fresh copy of the model, which no client has trained."""
    fresh = copy.deepcopy(model).to(simulation.task.device)
    simulation.task.layout.write(fresh, state.reported)
    return {name: float(value) for name, value in evaluate(fresh.eval()).items()}
