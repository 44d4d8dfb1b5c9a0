"""`fit`: training with automatic settings, chosen from public numbers or by the clients' votes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dpfedexp.accounting import Ledger
from dpfedexp.accounting.events import Adjacency
from dpfedexp.algorithms import Algorithm, cdp_fedexp
from dpfedexp.algorithms.round import Full, Participation, public_population
from dpfedexp.core.local_optimizer import LocalOptimizer, Sgd
from dpfedexp.core.losses import Loss
from dpfedexp.engine.outlets import LEDGER
from dpfedexp.engine.plan import Advice, default_delta
from dpfedexp.engine.prepare import check_kinds
from dpfedexp.engine.ranks import rank
from dpfedexp.engine.run import Run, rewrite_statement
from dpfedexp.engine.stopping import OnRound
from dpfedexp.engine.tournament import Candidate, candidates_of
from dpfedexp.engine.train import train
from dpfedexp.errors import checked, is_count, is_number, require
from dpfedexp.evaluation import Evaluate, Metric
from dpfedexp.mechanisms import Secure
from dpfedexp.trainers.execution import Execution
from dpfedexp.trainers.task import Clients

DEFAULT_ROUNDS, LOW_NOISE_ROUNDS = 50, 100
"""Rounds: usually, and where noise hardly matters."""
LOCAL_STEPS = 10
"""Full-batch steps of a client in a round, on at most `MOST_EXAMPLES` of its rows."""
MOST_EXAMPLES = 512


@checked
def fit(
    model: nn.Module,
    clients: Clients,
    *,
    epsilon: float = 8.0,
    delta: float | None = None,
    rounds: int | None = None,
    local: LocalOptimizer | None = None,
    adjacency: Adjacency = "replace-one",
    participation: Participation | None = None,
    population: int | None = None,
    loss: str | Loss | None = None,
    test: tuple[Any, Any] | None = None,
    evaluate: Evaluate | Literal["clients"] | None = None,
    held_out: float = 0.0,
    metrics: Mapping[str, Metric] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    execution: Execution | None = None,
    secure: Secure = False,
    candidates: Sequence[Candidate | nn.Module | LocalOptimizer | Algorithm] | None = None,
    budget: float | None = None,
    ledger: Ledger | Path | str | None = None,
    out: Path | str | None = None,
    checkpoint: Path | str | None = None,
    resume: bool = False,
    progress: bool = True,
    on_round: OnRound | Sequence[OnRound] | None = None,
    on_advice: Callable[[Advice], None] | None = None,
) -> Run:
    """Train privately with automatic settings: CDP-FedEXP with the safe step, an adaptive clip and an automatic local rate.

    The statement (`Run.privacy`) lists what was chosen. Arguments that are passed are used as they are.

    Args:
        model: any nn.Module; it is copied, and its parameters are the starting point.
        clients: a `Federation`.
        epsilon: what the whole run may cost each client, the votes that choose the rate and the clip included.
        delta: δ of the promise; by default a tenth of 1/M, and at most 10⁻⁵.
        rounds: how many rounds; by default `rounds_for`.
        local: what a client does; by default ten full-batch steps at an automatic rate.
        adjacency: "replace-one" hides what a client holds, "add-remove" that it takes part at all.
        budget: stop before ε of everything on the ledger would be above this.
        ledger: a file or a `Ledger` that several runs on the same clients charge; the statement is of all of them together.
        out: a new folder that gets what `dpfedexp fit` writes: model, metrics, ledger, privacy statement and checkpoint.

    All other arguments are those of `train`.

    Returns:
        The trained model, the history, the privacy statement and the ledger.

    Example:
        >>> import torch
        >>> from dpfedexp import Federation, fit
        >>> clients = Federation.from_clients([(torch.randn(5, 3), torch.randn(5)) for _ in range(200)])
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
        >>> run = fit(model, clients, epsilon=8, rounds=3, progress=False)
        >>> round(run.privacy.epsilon_total, 2)
        8.0
    """
    require(is_number(epsilon) and 0 < epsilon < float("inf"), f"epsilon is {epsilon!r}; it must be a positive number.")
    require(rounds is None or is_count(rounds), f"rounds is {rounds!r}; it must be a positive whole number.")
    work = local or Sgd(lr="auto", steps=LOCAL_STEPS, max_examples=MOST_EXAMPLES)
    check_kinds(model, clients, work, participation, secure)
    everyone = participation or Full()
    declared = public_population(adjacency, everyone, len(clients), population)
    dimension = sum(p.numel() for p in model.parameters() if p.requires_grad)
    delta_given = default_delta(declared) if delta is None else delta
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=float(epsilon), delta=delta_given, adjacency=adjacency)
    number = rounds_for(algorithm, dimension, declared, everyone) if rounds is None else rounds
    run = train(
        model,
        clients,
        algorithm,
        local=work,
        rounds=number,
        seed=seed,
        device=device,
        execution=execution,
        participation=participation,
        population=population,
        loss=loss,
        test=test,
        evaluate=evaluate,
        held_out=held_out,
        metrics=metrics,
        secure=secure,
        candidates=candidates,
        budget=budget,
        ledger=ledger,
        out=out,
        checkpoint=checkpoint,
        resume=resume,
        progress=progress,
        on_round=on_round,
        on_advice=on_advice,
    )
    facts = describe_choices(
        run, algorithm, work, number, given={"delta": delta, "rounds": rounds, "local": local}, candidates=candidates
    )
    privacy = replace(run.privacy, choices=facts)
    if out is not None and rank() == 0:
        # The one date that all files of a secure run have.
        rewrite_statement(
            Path(out), privacy, (Path(out) / LEDGER).stat().st_mtime if (Path(out) / LEDGER).exists() else None
        )
    return replace(run, privacy=privacy)


def fit_settings(epsilon: float, clients: int) -> dict[str, dict[str, Any]]:
    """The settings that `fit` chooses, as the sections `algorithm` and `local` of a configuration."""
    algorithm = {"name": "cdp_fedexp", "clip": "adaptive", "target_epsilon": epsilon, "delta": default_delta(clients)}
    return {"algorithm": algorithm, "local": {"lr": "auto", "steps": LOCAL_STEPS, "max_examples": MOST_EXAMPLES}}


@checked
def rounds_for(algorithm: Algorithm, dimension: int, population: int, participation: Participation) -> int:
    """How many rounds, from the norm n = z√d/M of the noise that 50 rounds would have, in units of the clip.

    What clients can say against the noise in all rounds together hardly depends on their number (`engine.plan`); what does is how
    much of it is in one round, and how long it takes. Where n < 0.1 a round costs next to nothing, and 100 of them let the model
    settle; else it is 50.

    Args:
        algorithm: what is run.
        dimension: parameters of the model.
        population: the public number of clients.
        participation: who takes part in a round.
    """
    cohort = participation.expected(population)
    mechanism = algorithm.bind(dimension, cohort, participation.sampling(population), DEFAULT_ROUNDS)
    return LOW_NOISE_ROUNDS if (mechanism.noise_share(dimension, cohort) or 0.0) < 0.1 else DEFAULT_ROUNDS


def describe_choices(
    run: Run, algorithm: Algorithm, local: LocalOptimizer, rounds: int, *, given: dict[str, Any], candidates: Any = None
) -> tuple[str, ...]:
    """Describe the automatic choices; all of them are public or released."""
    first, last = (run.history[0], run.history[-1]) if run.history else ({}, {})
    facts = ["the algorithm cdp_fedexp with the safe step"]
    if "candidate" in last:
        labels = [one.label for one in candidates_of(candidates)]
        facts.append(f"of {len(labels)} candidates, by the clients' votes: {labels[int(last['candidate'])]}")
    if given["delta"] is None:
        facts.append(f"δ = {algorithm.delta:g}, a tenth of 1/M and at most 10⁻⁵")
    if given["rounds"] is None:
        facts.append(f"{rounds} rounds, by the noise of one")
    if given["local"] is None:
        facts.append(f"{LOCAL_STEPS} full-batch local steps on at most {MOST_EXAMPLES} rows of a client")
    if local.automatic and "local_rate" in first:
        facts.append(
            f"the local rate, {first['local_rate']:.3g} by votes at first and {last['local_rate']:.3g} at the end"
        )
    if "clip" in first:
        facts.append(f"the clip, {first['clip']:.3g} at first and {last['clip']:.3g} at the end")
    return tuple(facts)
