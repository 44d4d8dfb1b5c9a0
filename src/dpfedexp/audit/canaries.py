"""The training audit: one whole run with many canaries (Steinke, Nasr, Jagielski 2023).

Every canary is a client that takes part or not, by a coin of its own. After the run the attacker guesses the coins from the trained
model alone, and may abstain where it is unsure. Under (ε, δ)-DP with add-remove adjacency the number of right guesses is hardly
larger than that of independent coins with bias e^ε/(1 + e^ε); how much larger it was proves a lower bound on the ε of the run.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import binom

from dpfedexp.algorithms import Algorithm, dp_fedavg
from dpfedexp.audit.result import Result
from dpfedexp.data import Federation
from dpfedexp.local import Sgd
from dpfedexp.models import linear_regression
from dpfedexp.simulation.train import train

DELTA = 1e-9
"""Of the run's claim. The bound can't be surer than about 5δ for a thousand canaries, so a usual δ would leave nothing to prove."""

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the canaries that the attacker guesses; every one costs its part of the confidence."""


def audit_training(
    seed: int,
    confidence: float,
    *,
    algorithm: Algorithm | None = None,
    canaries: int = 1000,
    others: int = 100,
    rounds: int = 8,
) -> Result:
    """Trains the synthetic linear model with canaries whose updates point in directions of their own."""
    algorithm = algorithm or dp_fedavg(clip=0.3, noise_multiplier=1.0, adjacency="add-remove", delta=DELTA)
    chance = np.random.default_rng(seed)
    coins = chance.random(canaries) < 0.5
    directions = torch.eye(canaries)
    nobody = (torch.zeros(0, canaries), torch.zeros(0))
    # A target far out of reach keeps a canary's residual, and with it its clipped update, the same in every round.
    marked = [(directions[i : i + 1], torch.tensor([1e4])) for i in range(canaries)]
    clients = [marked[i] if coins[i] else nobody for i in range(canaries)]
    x = torch.from_numpy(chance.normal(size=(others, canaries)) / math.sqrt(canaries)).float()
    clients += [(x[i : i + 1], x[i : i + 1].sum(1)) for i in range(others)]
    run = train(
        linear_regression(canaries),
        Federation.from_clients(clients),
        algorithm,
        local=Sgd(lr=0.1, steps=2),
        rounds=rounds,
        seed=seed,
        device="cpu",
        progress=False,
        population=len(clients),
    )
    scores = next(run.model.parameters()).detach().double().numpy().ravel()
    lower, guessed, right = best_guess(scores, coins, run.privacy.delta, 1.0 - confidence)
    return Result(
        "training",
        f"{algorithm.name}, {rounds} rounds, {canaries} canaries",
        f"ε at δ = {run.privacy.delta:g}",
        lower,
        run.privacy.epsilon_total,
        confidence,
        f"{right} of {guessed} guesses right",
    )


def best_guess(scores: np.ndarray, coins: np.ndarray, delta: float, failure: float) -> tuple[float, int, int]:
    """The attacker says 'took part' of the highest scores and 'did not' of the lowest: (lower bound, guesses, right ones)."""
    order = np.argsort(scores)
    best = (0.0, 0, 0)
    for share in SHARES:
        half = int(len(scores) * share / 2)
        right = int(coins[order[len(scores) - half :]].sum() + (~coins[order[:half]]).sum())
        best = max(
            best, (epsilon_of_guesses(len(scores), 2 * half, right, delta, failure / len(SHARES)), 2 * half, right)
        )
    return best


def epsilon_of_guesses(canaries: int, guesses: int, right: int, delta: float, failure: float) -> float:
    """The largest ε that so many right guesses refute."""
    if guesses == 0 or p_value(canaries, guesses, right, 0.0, delta) > failure:
        return 0.0
    # Never above the root: a bound must not be rounded up.
    root = brentq(lambda e: p_value(canaries, guesses, right, e, delta) - failure, 0.0, 60.0, xtol=1e-9)
    return max(0.0, float(root) - 1e-8)


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """P(at least so many right) under (ε, δ)-DP: Theorem 5.2 of the paper."""
    q = 1.0 / (1.0 + math.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, q))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
    alpha = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, beta + 2.0 * canaries * delta * alpha)
