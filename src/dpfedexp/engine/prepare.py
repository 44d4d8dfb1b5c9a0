"""Build the engine of a simulated run, and check its arguments before the first round."""

import copy
import math
import secrets
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.algorithm import resolve_algorithm
from dpfedexp.algorithms.probe import Extras, bind, evaluation_count
from dpfedexp.algorithms.round import Full, LargerCohort, Participation, larger_cohort, public_population, server_device
from dpfedexp.core.client_metrics import EVALUATION, ClientMetrics
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.core.local_rate import PRIOR_RATE
from dpfedexp.core.losses import Loss, half_squared_error, resolve
from dpfedexp.core.modules import Layout, each
from dpfedexp.core.noise import Streams, SystemStreams
from dpfedexp.data.federation import Federation
from dpfedexp.engine.engine import ClientEvaluation, Engine
from dpfedexp.engine.simulated import Simulation
from dpfedexp.errors import InputError, checked, first_line, is_count, require
from dpfedexp.mechanisms import Secure, mechanism_class
from dpfedexp.trainers import isolation
from dpfedexp.trainers.chunk_size import automatic_chunk, parse_memory
from dpfedexp.trainers.client_losses import MOST_ROWS, ClientScores
from dpfedexp.trainers.draws import with_explicit_masks, without_flat_weights
from dpfedexp.trainers.execution import EXECUTION_HINTS, Execution, as_execution
from dpfedexp.trainers.per_client import check_isolated_optimizer, check_optimizer
from dpfedexp.trainers.recording import Synthetic, SyntheticClients, Unrecordable, refusal
from dpfedexp.trainers.select import select
from dpfedexp.trainers.steps import Parallel
from dpfedexp.trainers.task import Clients, Task, Trainer, applied, check_task, one_row


@checked(hints=EXECUTION_HINTS)
def prepare(
    model: nn.Module,
    clients: Clients,
    algorithm: Algorithm,
    *,
    local: LocalOptimizer,
    rounds: int,
    execution: Execution | str | torch.device | None = None,
    participation: Participation | None = None,
    loss: str | Loss | None = None,
    diagnostics: bool = False,
    secure: Secure = False,
    isolated: bool | None = None,
    evaluate_every: int = 0,
    held_out: float = 0.0,
    extras: Extras = Extras(),
) -> tuple[Engine, str | None]:
    """Build the engine of a run over simulated clients; the other arguments are those of `train`.

    Args:
        isolated: whether clients are isolated bit for bit (`trainers.isolation`); by default only in a secure run.
        evaluate_every: rounds between evaluations by the clients; 0 for none.
        held_out: the share of a client's rows that are used for evaluation only.
        extras: the votes of a tournament, beside updates.

    Returns:
        The engine, and a note for the user about the trainer or the loss, or None.
    """
    check_kinds(model, clients, local, participation, secure)
    require(
        isinstance(algorithm, Algorithm),
        f"algorithm is a {type(algorithm).__name__}; it must be an algorithm such as cdp_fedexp(…).",
    )
    require(is_count(rounds), f"rounds is {rounds!r}; it must be a positive whole number.")
    require(len(clients) > 0, "the federation has no clients; pass at least one.")
    require(
        not (secure and diagnostics),
        "diagnostics is True in a secure run: its values have no noise and must not leave the run; use one of the two.",
    )
    check_optimizer(local)
    isolated = bool(secure) if isolated is None else isolated
    if isolated:
        check_isolated_optimizer(local)
    unbounded = isolated and not local.shape_is_public
    if unbounded:
        # A client's number of rows is private, and it must not decide about shapes.
        local = copy.copy(local)
        object.__setattr__(local, "max_examples", MOST_ROWS)
    execution = as_execution(execution)
    everyone: Participation = participation or Full()
    # Without privacy there is no adjacency, so the number of clients is public.
    adjacency = algorithm.adjacency if algorithm.private else "replace-one"
    if isinstance(everyone, LargerCohort):
        check_noise_cohort(everyone.noise_cohort, algorithm, local, secure)
        require(
            not evaluate_every,
            f"noise_cohort is {everyone.noise_cohort} with evaluate='clients': the simulated clients are not those of the "
            "deployment; leave one of them out.",
        )
        everyone, declared = larger_cohort(everyone, len(clients))
    else:
        declared = public_population(adjacency, everyone, len(clients))
    sampling, cohort = everyone.sampling(declared), everyone.expected(declared)
    trained_per_round = everyone.stand_ins if isinstance(everyone, LargerCohort) else cohort
    measured_on = clients
    if held_out:
        if not isinstance(clients, Federation):
            raise InputError(
                f"held_out is {held_out}, but a {type(clients).__name__} can't be split; pass a Federation."
            )
        clients, measured_on = clients.hold_out(held_out)
    task, synthetic = _task(model, clients, local, loss, execution, declared, isolated=isolated)
    tau_eta_l = None
    if algorithm.scaffold:
        # SCAFFOLD divides by τη_l, which must be defined for the optimizer, public and the same for all clients.
        require(
            local.steps is not None or local.batch_size is None,
            "dp_scaffold needs the same number of local steps on every client: give steps instead of epochs.",
        )
        steps = int(local.step_count(torch.ones(1, dtype=torch.int64)))
        tau_eta_l = local.tau_eta_l(steps)
    # Streams are keyed by client numbers, which shift when a client leaves, so a secure run needs a secret seed.
    streams = Streams(secrets.randbits(62) if isolated else execution.seed)
    # An automatic rate is passed with every call; any value will do here.
    # Sizes, and with them shapes and times, are private: a secure run chooses trainer and chunks on synthetic clients.
    trained = replace(task, local=local.at(PRIOR_RATE), has_client_rates=True) if local.automatic else task
    trial = replace(trained, clients=synthetic, copies=[]) if isolated else None
    try:
        trainer, chunk, unit, note = _trainer(
            trained, trial, streams, execution, trained_per_round, rounds, fixed=sampling.kind != "poisson"
        )
    except Unrecordable as reason:
        raise refusal("what a client computes", reason) from None
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not isolated:
            raise
        # The error comes from synthetic rows, so its text reveals nothing about the clients.
        raise InputError(
            f"the model can't be trained on a batch of synthetic rows: {first_line(error)} {isolation.WHY}"
        ) from error
    if loss is None and task.loss is half_squared_error and one_row(clients)[1].shape[2:].numel() > 1:
        several = (
            "a target is several real numbers, so the loss is 'mse'; for 0/1 labels pass loss='bce', else loss='mse'."
        )
        note = several if note is None else f"{note} {several}"
    if unbounded and note is None:
        note = f"a secure run trains on at most {MOST_ROWS} rows of a client in a round; local.max_examples sets this bound."
    dimension = task.layout.dimension
    extras = replace(extras, evaluations=evaluation_count(rounds, evaluate_every) if evaluate_every else 0)
    mechanism, probe, others = bind(algorithm, local, dimension, declared, everyone, int(rounds), secure, extras=extras)
    scores, evaluation = None, None
    if EVALUATION in others:
        scores = scores_of(task, measured_on, trainer, streams, unit)
        evaluation = ClientEvaluation(others[EVALUATION], scores.metrics, evaluate_every, held_out)
    algorithm = resolve_algorithm(algorithm, local, mechanism, dimension, cohort)
    system = SystemStreams() if secure else None
    simulation = Simulation(
        task,
        trainer,
        everyone,
        streams,
        chunk,
        scaffold=algorithm.scaffold,
        diagnostics=diagnostics,
        system=system,
        unit=unit,
        scores=scores,
        sampling=sampling,
    )
    engine = Engine(
        algorithm,
        mechanism,
        everyone,
        declared,
        simulation,
        start=task.layout.read(task.model).to(server_device(dimension, task.device)),
        noise=simulation.noise,
        seed=streams.seed if system is None else None,
        tau_eta_l=tau_eta_l,
        probe=probe,
        evaluation=evaluation,
        diagnostics=diagnostics,
    )
    return engine, note


def _task(
    model: nn.Module,
    clients: Clients,
    local: LocalOptimizer,
    loss: str | Loss | None,
    execution: Execution,
    declared: int,
    *,
    isolated: bool,
) -> tuple[Task, SyntheticClients]:
    """Build the task of every client and try it once. Also return synthetic clients, for decisions that must not use real data."""
    place = execution.place
    module = without_flat_weights(with_explicit_masks(_in_training(model))).to(place)
    _, targets = one_row(clients)
    task = Task(module, Layout.of(module), resolve(loss, targets), local, clients, place, execution.precision)
    synthetic = isolation.synthetic_clients(task, declared)
    if isolated:
        task = replace(task, synthetic=Synthetic(synthetic.tokens))
        # An error about a client's rows is private too, so a secure run checks synthetic rows.
        isolation.check_on(synthetic, task)
        isolation.check_rows(task)
    else:
        check_task(task, labels=True)
    return replace(task, state_check=isolation.make_state_check(task, synthetic, isolated=isolated)), synthetic


def scores_of(task: Task, measured_on: Clients, trainer: Trainer, streams: Streams, unit: int | None) -> ClientScores:
    """Build the metrics of clients from the shapes of the model's outputs, and try them once; a secure run uses synthetic rows."""
    rows = measured_on if task.synthetic is None else isolation.synthetic_clients(task, 3)
    require(
        bool((rows.sizes > 0).any()),
        "no client has enough rows to hold some out: it takes 1/held_out rows, and at least two; or leave held_out out.",
    )
    trial = replace(task, clients=rows, copies=[])
    try:
        x, y = one_row(trial.clients)
        with torch.no_grad():
            two = each(lambda value: value[0].expand(2, *value.shape[2:]).to(task.device), x)
            outputs = applied(copy.deepcopy(task.model).eval(), two)
        metrics = ClientMetrics.of(task.loss, outputs, y[0].expand(2, *y.shape[2:]))
        holder = torch.nonzero(trial.clients.sizes > 0).flatten()[:1]
        w = task.layout.read(task.model).float().to(task.device)
        ClientScores(trial, trainer, streams, metrics, trial.clients, unit=unit).of_clients(w, holder, 0)
    except Unrecordable as reason:
        raise refusal("what a client measures", reason) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"evaluate is 'clients', and the model can't be measured on a client's rows: {first_line(error)}"
        ) from error
    return ClientScores(task, trainer, streams, metrics, measured_on, unit=unit)


def _trainer(
    task: Task, trial: Task | None, streams: Streams, execution: Execution, cohort: float, rounds: int, *, fixed: bool
) -> tuple[Trainer, int, int | None, str | None]:
    """Choose the trainer, clients per chunk, clients per batch shape in an isolated run, and a note for the user."""
    limit, isolated = parse_memory(execution.memory), trial is not None
    if trial is not None:
        isolation.check_recordings(trial, streams)
    chunk = execution.chunk_size or automatic_chunk(trial or task, limit, isolated=isolated)
    if isolated:
        chunk, _ = isolation.widths(cohort, chunk, None, fixed=fixed)
    trainer, note = select(
        task, streams, execution.trainer, chunk=chunk, updates=rounds * cohort, budget=limit, trial=trial
    )
    if isinstance(trainer, Parallel) and execution.chunk_size is None:
        chunk = automatic_chunk(trial or task, limit, trainer.in_flight, isolated=isolated)
    unit = None
    if not isolated and execution.chunk_size is None and task.device.type != "cpu":
        # Equal chunks, because every size needs its own CUDA graph.
        chunk = math.ceil(cohort / math.ceil(cohort / chunk)) if fixed else chunk
    if trial is not None:
        chunk, unit = isolation.widths(cohort, chunk, trainer.unit, fixed=fixed)
    return trainer, int(chunk), unit, note


def check_kinds(model: Any, clients: Any, local: Any, participation: Any, secure: Any) -> None:
    """Raise `InputError` for arguments of the wrong type. A misspelled "strict" must not silently give weaker noise."""
    if isinstance(local, torch.optim.Optimizer):
        kind, lr = type(local).__name__, local.defaults.get("lr", 0.1)
        ours = "AdamW" if "Adam" in kind else "Sgd"
        raise InputError(
            f"local is torch's {kind}, which holds one model's parameters; every client needs an optimizer of its own: give "
            f"local={ours}(lr={lr:g}, steps=10) of dpfedexp, with momentum or weight_decay where you want them."
        )
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(f"model is the class {model.__name__}; pass an instance, {model.__name__}(…).")
    if isinstance(model, nn.Module):
        _check_plain(model)
    require(
        isinstance(secure, bool) or secure == "strict", f"secure is {secure!r}; it must be True, False or 'strict'."
    )
    source = "from_pandas" if hasattr(clients, "columns") else "from_clients"
    draws = participation is None or hasattr(participation, "cohort")
    for name, value, right, remedy in (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("clients", clients, hasattr(clients, "gather"), f"a Federation, such as Federation.{source}(…)"),
        ("local", local, isinstance(local, LocalOptimizer), "what a client does, such as Sgd(lr=0.1, steps=10)"),
        ("participation", participation, draws, "Full(), Poisson(rate) or FixedSize(count)"),
    ):
        require(right, f"{name} is a {type(value).__name__}; it must be {remedy}.")


def _check_plain(model: nn.Module) -> None:
    within = dict.fromkeys(("DataParallel", "DistributedDataParallel"), "model.module")
    within["OptimizedModule"] = "model._orig_mod"
    name = type(model).__name__
    require(
        name not in within,
        f"model is a {name} around another module; pass {within.get(name)}: dpfedexp parallelizes and compiles it.",
    )
    require(
        not isinstance(model, torch.jit.ScriptModule),
        f"model is a {name}, which torch.jit made; give the nn.Module that it was made of.",
    )
    require(
        not any(p.is_meta for p in model.parameters()),
        "the model's parameters are on the device 'meta' and have no numbers; build it on the CPU, or load its parameters first.",
    )


def check_noise_cohort(noise_cohort: int, algorithm: Algorithm, local: LocalOptimizer, secure: Secure = False) -> None:
    kind, given = mechanism_class(algorithm.mechanism), f"noise_cohort is {noise_cohort!r}"
    central = kind.is_private and not kind.is_local
    unprotected = "noise for a larger cohort does not protect the clients that are there"
    rate = "with a local rate that the clients' votes choose"
    require(
        central,
        f"{given} with mechanism {algorithm.mechanism!r}, in which no server adds noise to a sum; leave it out.",
    )
    require(not secure, f"{given} in a secure run: {unprotected}; leave one of them out.")
    require(
        not algorithm.scaffold,
        f"{given} with DP-SCAFFOLD, whose clients remember how often they took part; leave it out.",
    )
    require(not local.automatic, f"{given} {rate}; give the rate as a number.")


def _in_training(model: nn.Module) -> nn.Module:
    """A copy in training mode. Parts in eval mode stay so. If the whole model is in eval mode, only layers with running statistics
    stay in eval mode, as a pretrained network needs."""
    module = copy.deepcopy(model)
    if not module.training:
        module.train()
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None:
                part.eval()
    return module
