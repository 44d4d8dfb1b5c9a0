"""The training audit: one whole run with many canaries, whose coins the attacker guesses from the trained model alone.

Every canary is a client that takes part or not, by a coin of its own; the attacker may abstain where it is unsure. How many guesses
were right proves a lower bound on the ε of the run, by the two tests of `one_run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from dpfedexp.accounting import gdp
from dpfedexp.algorithms import Algorithm, dp_fedavg
from dpfedexp.audit.bounds import Floats
from dpfedexp.audit.power import Power
from dpfedexp.audit.result import Result
from dpfedexp.audit.runs.observed import mu_of
from dpfedexp.audit.runs.one_run import epsilon_of_guesses, mu_of_guesses
from dpfedexp.core.local import Sgd
from dpfedexp.data import Federation
from dpfedexp.engine.advice import silence
from dpfedexp.engine.run import Run
from dpfedexp.engine.train import train
from dpfedexp.errors import checked
from dpfedexp.models import linear_regression

DELTA = 1e-9
"""Of the run's claim. The (ε, δ) test can't be surer than about 5δ for 1,000 canaries: a usual δ would leave nothing to prove."""

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the canaries that the attacker guesses; every one costs its part of the confidence."""

Coins = np.ndarray
Test = Callable[[int, int, int, float], float]
"""(canaries, guesses, right ones, failure) → what they refute."""


@checked
def audit_training(
    seed: int,
    confidence: float,
    *,
    algorithm: Algorithm | None = None,
    canaries: int = 1000,
    others: int = 100,
    rounds: int = 8,
) -> list[Result]:
    """Trains the synthetic linear model with canaries whose updates point in directions of their own.

    Both tests are one-sided: they reach a small part of what was spent, by their nature, and their power says how much.
    """
    algorithm = algorithm or dp_fedavg(clip=0.3, noise_multiplier=1.0, adjacency="add-remove", delta=DELTA)
    coins = np.random.default_rng(seed).random(canaries) < 0.5
    run = _run(algorithm, coins, others, rounds, seed)
    scores = next(run.model.parameters()).detach().double().numpy().ravel()
    delta, failure = run.privacy.delta, 1.0 - confidence
    mu = mu_of(run.ledger.guarantee(delta), algorithm.name)
    # What the same attacker sees of a mechanism that spends exactly what is claimed.
    reference = np.random.default_rng(seed + 1).normal(mu * coins, 1.0)

    def steinke(m: int, guesses: int, right: int, failing: float) -> float:
        return epsilon_of_guesses(m, guesses, right, delta, failing)

    def mahloujifar(m: int, guesses: int, right: int, failing: float) -> float:
        return gdp.epsilon(mu_of_guesses(m, guesses, right, failing), delta)

    tests: dict[str, Test] = {"(ε, δ) test": steinke, "f-DP test": mahloujifar}
    found = []
    for name, test in tests.items():
        lower, guessed, right = best_guess(scores, coins, test, failure)
        likely = best_guess(scores, coins, test, 0.05)[0]
        found.append(
            Result(
                "training",
                f"{algorithm.name}, {rounds} rounds, {canaries} canaries, {name}",
                f"ε at δ = {delta:g}",
                lower,
                run.privacy.epsilon_total,
                confidence,
                f"{right} of {guessed} guesses right; {likely:.2f} at 95%",
                power=Power(best_guess(reference, coins, test, failure)[0], 0.0),
                one_sided=True,
            )
        )
    return found


def _run(algorithm: Algorithm, coins: Coins, others: int, rounds: int, seed: int) -> Run:
    canaries = len(coins)
    directions = torch.eye(canaries)
    nobody = (torch.zeros(0, canaries), torch.zeros(0))
    # A target far out of reach keeps a canary's residual, and with it its clipped update, the same in every round.
    clients = [(directions[i : i + 1], torch.tensor([1e4])) if coin else nobody for i, coin in enumerate(coins)]
    chance = np.random.default_rng([seed, 1])
    x = torch.from_numpy(chance.normal(size=(others, canaries)) / math.sqrt(canaries)).float()
    clients += [(x[i : i + 1], x[i : i + 1].sum(1)) for i in range(others)]
    return train(
        linear_regression(canaries),
        Federation.from_clients(clients),
        algorithm,
        local=Sgd(lr=0.1, steps=2),
        rounds=rounds,
        seed=seed,
        device="cpu",
        progress=False,
        on_advice=silence,
        population=len(clients) if algorithm.adjacency == "add-remove" else None,
    )


def best_guess(scores: Floats, coins: Coins, test: Test, failure: float) -> tuple[float, int, int]:
    """The attacker says 'took part' of the highest scores and 'did not' of the lowest: (lower bound, guesses, right ones)."""
    order = np.argsort(scores)
    best = (0.0, 0, 0)
    for share in SHARES:
        half = int(len(scores) * share / 2)
        right = int(coins[order[len(scores) - half :]].sum() + (~coins[order[:half]]).sum())
        best = max(best, (test(len(scores), 2 * half, right, failure / len(SHARES)), 2 * half, right))
    return best
