"""Who is compared: name → how its run is made. The only file of the suite that knows how algorithms are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

import dpfedexp
from dpfedexp.algorithms import Algorithm, cdp_fedexp, dp_fedadam, dp_fedavg
from dpfedexp.core.local_optimizer import LocalOptimizer, Sgd
from dpfedexp.core.step_size import Step
from dpfedexp.engine.advice import silence
from dpfedexp.engine.stopping import OnAdvice
from dpfedexp.engine.train import train
from dpfedexp.errors import InputError
from dpfedexp.trainers.execution import Execution
from reproduction.suite.problem import Loaded, Problem

DELTA = 1e-5
SERVER_RATES = (0.5, 1.0, 2.0, 4.0, 8.0)
ADAM_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Contender:
    """One column of the table.

    Attributes:
        label: its heading.
        algorithm: from ε and the server's rate to the algorithm; None for `fit`, which chooses everything itself.
        server_rates: those of which the best counts; none where nothing is tuned on the server.
        automatic: whether the local rate sets itself.
        color: a name of the palette, or nothing.
    """

    label: str
    algorithm: Callable[[float, float | None], Algorithm] | None
    server_rates: tuple[float, ...] = ()
    automatic: bool = False
    color: str = ""

    def local(self, problem: Problem, lr: float | None) -> LocalOptimizer:
        if not self.automatic:
            return problem.local(lr if lr is not None else problem.center)
        return Sgd(lr="auto", steps=problem.steps)

    @property
    def why_missing(self) -> str:
        """Why it can't be run with this version; empty where it can."""
        try:
            if self.algorithm is None:
                return "" if hasattr(dpfedexp, "fit") else "this version has no dpfedexp.fit"
            self.algorithm(8.0, self.server_rates[0] if self.server_rates else None)
            if self.automatic:
                Sgd(lr="auto", steps=1)
        except (InputError, TypeError) as error:
            return str(error)
        return ""


def _fedexp(step: Step, epsilon: float) -> Algorithm:
    return cdp_fedexp(clip="adaptive", target_epsilon=epsilon, delta=DELTA, step=step)


def _fedavg(epsilon: float, rate: float | None) -> Algorithm:
    return dp_fedavg(clip="adaptive", target_epsilon=epsilon, delta=DELTA, server_rate=rate or 1.0)


def _fedadam(epsilon: float, rate: float | None) -> Algorithm:
    return dp_fedadam(clip="adaptive", target_epsilon=epsilon, delta=DELTA, server_rate=rate or 0.03)


CONTENDERS: dict[str, Contender] = {
    "fit": Contender("fit", None, color="fit"),
    "safe": Contender("safe FedEXP", lambda epsilon, rate: _fedexp("safe", epsilon), color="fedexp"),
    "fedavg": Contender("FedAvg", _fedavg, color="fedavg"),
    "plain": Contender("plain FedEXP", lambda epsilon, rate: _fedexp("paper", epsilon), color="plain"),
    "fedavg-tuned": Contender("FedAvg, tuned", _fedavg, SERVER_RATES, color="tuned"),
    "fedadam-tuned": Contender("FedAdam, tuned", _fedadam, ADAM_RATES, color="fedadam"),
    "auto": Contender("automatic rate", lambda epsilon, rate: _fedexp("safe", epsilon), automatic=True),
}


def trained(
    contender: Contender,
    problem: Problem,
    loaded: Loaded,
    *,
    epsilon: float,
    lr: float | None,
    server_rate: float | None,
    seed: int,
    execution: Execution,
) -> tuple[nn.Module, list[dict[str, Any]], Any]:
    """The trained model, the history of its rounds, and the privacy statement."""
    common: dict[str, Any] = {
        "execution": replace(execution, seed=seed, progress=False),
        "loss": loaded.loss,
        "on_round": OnAdvice(silence),
    }
    if contender.algorithm is None:
        package: Any = dpfedexp
        run = package.fit(loaded.model, loaded.clients, epsilon=epsilon, delta=DELTA, **common)
    else:
        run = train(
            loaded.model,
            loaded.clients,
            contender.algorithm(epsilon, server_rate),
            local=contender.local(problem, lr),
            rounds=problem.rounds,
            **common,
        )
    return run.model, run.history, run.privacy
