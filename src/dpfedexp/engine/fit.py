"""`fit`: training with automatic settings, chosen from public numbers or by the clients' votes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import Algorithm, cdp_fedexp
from dpfedexp.algorithms.round import Full, Participation, public_population
from dpfedexp.core.local_optimizer import LocalOptimizer, Sgd
from dpfedexp.core.losses import Loss
from dpfedexp.engine.outlets import LEDGER
from dpfedexp.engine.plan import default_delta
from dpfedexp.engine.prepare import check_kinds
from dpfedexp.engine.ranks import rank
from dpfedexp.engine.run import Run, call_text, rewrite_statement
from dpfedexp.engine.stopping import OnRound
from dpfedexp.engine.tournament import Candidate, candidates_of
from dpfedexp.engine.train import LOCAL_NAMES, TRAIN_HINTS, run_folder_of, train
from dpfedexp.errors import checked, is_count, is_number, require
from dpfedexp.evaluation import Evaluations
from dpfedexp.mechanisms import Secure
from dpfedexp.trainers.execution import EXECUTION_HINTS, Execution
from dpfedexp.trainers.task import Clients

FIT_ROUNDS = 50
"""The default. At one ε, the signal over noise of all rounds together hardly depends on their number."""
FIT_LOCAL = Sgd(lr="auto", steps=10, batch_size=64, max_examples=512)
"""Its bounds on a client's work are public: ten steps on at most 64 rows each. More steps or rows were no better on the suite."""


_CHOSEN = "nothing: fit chooses it; to choose it yourself use train(model, clients, algorithm, local=Sgd(…), rounds=…)"
FIT_HINTS = {
    **dict.fromkeys((*LOCAL_NAMES, "epochs", "local_epochs", "batch_size", "clip", "algorithm"), _CHOSEN),
    "noise_multiplier": _CHOSEN,
    **dict.fromkeys(("target_epsilon", "eps"), "epsilon=8.0"),
    "local": "train(…, local=Sgd(lr='auto', steps=5)), which takes it",
    "adjacency": "train(…, algorithm=cdp_fedexp(…, adjacency='add-remove')), which takes it",
}
"""Hints for arguments that only `train` takes."""


@checked(hints=EXECUTION_HINTS | TRAIN_HINTS | FIT_HINTS)
def fit(
    model: nn.Module,
    clients: Clients,
    *,
    epsilon: float = 8.0,
    delta: float | None = None,
    rounds: int = FIT_ROUNDS,
    execution: Execution | str | torch.device | None = None,
    participation: Participation | None = None,
    loss: str | Loss | None = None,
    evaluate: Evaluations = None,
    ledger: Ledger | Path | str | None = None,
    budget: float | None = None,
    out: Path | str | None = None,
    secure: Secure = False,
    candidates: Sequence[Candidate | nn.Module | LocalOptimizer | Algorithm] | None = None,
    on_round: OnRound | Sequence[OnRound] | None = None,
) -> Run:
    """Train privately with automatic settings: CDP-FedEXP with the safe step, an adaptive clip and an automatic local rate.

    The statement (`Run.privacy`) lists what was chosen. Arguments that are passed are used as they are.

    Args:
        model: any nn.Module; it is copied, and its parameters are the starting point.
        clients: a `Federation`.
        epsilon: ε of the whole run for each client, including the votes that choose the rate and the clip.
        delta: δ of the guarantee; by default a tenth of 1/M, and at most 10⁻⁵.
        rounds: the number of rounds.
        ledger: a file or a `Ledger` that several runs on the same clients charge; the statement then covers all of them.
        budget: the ε that all runs of the ledger together must not exceed; training stops before the round that
            would, by the `delta` of this run.
        out: the folder of the run, new or empty, for the files of `dpfedexp fit`: model, metrics, ledger, privacy statement
            and checkpoint. The same call resumes an interrupted run.

    All other arguments are those of `train`, which also takes other local steps and add-remove adjacency: `fit` is
    `train` with `cdp_fedexp(clip="adaptive", target_epsilon=…)` and
    `local=Sgd(lr="auto", steps=10, batch_size=64, max_examples=512)`.

    Returns:
        The trained model, the history, the privacy statement and the ledger.

    Example:
        >>> import torch
        >>> from dpfedexp import Federation, fit
        >>> clients = Federation.from_clients([(torch.randn(5, 3), torch.randn(5)) for _ in range(200)])
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
        >>> run = fit(model, clients, epsilon=8, rounds=3)
        >>> round(run.privacy.epsilon_total, 2)
        8.0
    """
    require(is_number(epsilon) and 0 < epsilon < float("inf"), f"epsilon is {epsilon!r}; it must be a positive number.")
    require(is_count(rounds), f"rounds is {rounds!r}; it must be a positive whole number.")
    check_kinds(model, clients, FIT_LOCAL, participation, secure)
    declared = public_population("replace-one", participation or Full(), len(clients))
    delta_given = default_delta(declared) if delta is None else delta
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=float(epsilon), delta=delta_given)
    given: dict[str, Any] = {
        "epsilon": float(epsilon),
        "delta": delta,
        "rounds": None if rounds == FIT_ROUNDS else rounds,
    }
    given |= {"execution": execution, "participation": participation, "budget": budget, "secure": secure or None}
    named = {name: value for name, value in given.items() if value is not None}
    call = call_text("fit", named, type(model).__name__, type(clients).__name__)
    folder = run_folder_of(out, call) if rank() == 0 else None
    run = train(
        model,
        clients,
        algorithm,
        local=FIT_LOCAL,
        rounds=rounds,
        execution=execution,
        participation=participation,
        loss=loss,
        evaluate=evaluate,
        ledger=ledger,
        budget=budget,
        out=folder,
        secure=secure,
        candidates=candidates,
        on_round=on_round,
    )
    facts = describe_choices(run, algorithm, delta_given=delta is not None, candidates=candidates)
    run = with_choices(run, facts, Path(out) if out is not None and rank() == 0 else None)
    return replace(run, facts=run.facts and replace(run.facts, command=call))


def fit_settings(epsilon: float, clients: int) -> dict[str, dict[str, Any]]:
    """The settings that `fit` chooses, as the sections `algorithm` and `local` of a configuration."""
    algorithm = {"name": "cdp_fedexp", "clip": "adaptive", "target_epsilon": epsilon, "delta": default_delta(clients)}
    local = {name: getattr(FIT_LOCAL, name) for name in ("lr", "steps", "batch_size", "max_examples")}
    return {"algorithm": algorithm, "local": local}


def with_choices(run: Run, choices: tuple[str, ...], folder: Path | None) -> Run:
    """The run with its automatic choices in its statement, and in that of its folder."""
    privacy = replace(run.privacy, choices=choices)
    if folder is not None:
        # All files of a secure run keep one common date.
        ledger = folder / LEDGER
        rewrite_statement(folder, privacy, ledger.stat().st_mtime if ledger.exists() else None)
    return replace(run, privacy=privacy)


def describe_choices(run: Run, algorithm: Algorithm, *, delta_given: bool, candidates: Any = None) -> tuple[str, ...]:
    """Sentences on the automatic choices of `fit`; all of them are public or released."""
    first, last = (run.history[0], run.history[-1]) if run.history else ({}, {})
    facts = ["the algorithm cdp_fedexp with the safe step"]
    if "candidate" in last:
        labels = [one.label for one in candidates_of(candidates)]
        facts.append(f"of {len(labels)} candidates, by the clients' votes: {labels[int(last['candidate'])]}")
    if not delta_given:
        facts.append(f"δ = {algorithm.delta:g}, a tenth of 1/M and at most 10⁻⁵")
    work = FIT_LOCAL
    facts.append(
        f"{work.steps} local steps on {work.batch_size} rows each, of at most {work.max_examples} rows of a client"
    )
    if "local_rate" in first:
        facts.append(
            f"the local rate, {first['local_rate']:.3g} by votes at first and {last['local_rate']:.3g} at the end"
        )
    if run.history and all(record["eta_g"] == 1.0 for record in run.history):
        facts.append("the server's step size, 1 in every round, as in DP-FedAvg")
    if "clip" in first:
        facts.append(f"the clip, {first['clip']:.3g} at first and {last['clip']:.3g} at the end")
    return tuple(facts)
