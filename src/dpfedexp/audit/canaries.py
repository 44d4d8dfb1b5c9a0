"""The training audit: one whole run with many canaries, whose coins the attacker guesses from the trained model alone.

Every canary is a client that takes part or not, by a fair coin of its own; the attacker may abstain where it is unsure. How many
guesses were right proves a lower bound on the ε of the run, by two tests. The first (Steinke, Nasr and Jagielski 2023, Theorem 5.2)
holds for every (ε, δ)-DP run. The second (Mahloujifar, Melis and Chaudhuri 2025, their numerical procedure for c' guesses) takes
the whole trade-off curve, here that of μ-GDP, and proves more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from dpfedexp.accounting import gdp
from dpfedexp.algorithms import Algorithm, dp_fedavg
from dpfedexp.audit.bounds import Floats, Power, Result
from dpfedexp.audit.runs import mu_of, run_canaries
from dpfedexp.core.local import Sgd
from dpfedexp.errors import checked

DELTA = 1e-9
"""Of the run's claim. The (ε, δ) test can't be surer than about 5δ for 1,000 canaries: a usual δ would leave nothing to prove."""

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the canaries that the attacker guesses; every one costs its part of the confidence."""

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
    directions, nobody = torch.eye(canaries), (torch.zeros(0, canaries), torch.zeros(0))
    # A target far out of reach keeps a canary's residual, and with it its clipped update, the same in every round.
    clients = [(directions[i : i + 1], torch.tensor([1e4])) if coin else nobody for i, coin in enumerate(coins)]
    x = np.random.default_rng([seed, 1]).normal(size=(others, canaries)) / math.sqrt(canaries)
    clients += [(row, row.sum(1)) for row in torch.from_numpy(x).float().split(1)]
    run, _ = run_canaries(algorithm, clients, rounds, seed, local=Sgd(lr=0.1, steps=2))
    scores = next(run.model.parameters()).detach().double().numpy().ravel()
    delta, failure = run.privacy.delta, 1.0 - confidence
    mu = mu_of(run.ledger.guarantee(delta), algorithm.name)
    # What the same attacker sees of a mechanism that spends exactly what is claimed.
    reference = np.random.default_rng(seed + 1).normal(mu * coins, 1.0)

    tests: dict[str, Test] = {
        "(ε, δ) test": lambda m, guesses, right, failing: epsilon_of_guesses(m, guesses, right, failing, delta),
        "f-DP test": lambda *guessed: gdp.epsilon(mu_of_guesses(*guessed), delta),
    }
    found = []
    for name, test in tests.items():
        lower, guessed, right = best_guess(scores, coins, test, failure)
        likely = best_guess(scores, coins, test, 0.05)[0]
        power = Power(best_guess(reference, coins, test, failure)[0], 0.0)
        what = f"{algorithm.name}, {rounds} rounds, {canaries} canaries, {name}"
        detail = f"{right} of {guessed} guesses right; {likely:.2f} at 95%"
        unit, claim = f"ε at δ = {delta:g}", run.privacy.epsilon_total
        found.append(Result("training", what, unit, lower, claim, confidence, detail, power=power, one_sided=True))
    return found


def best_guess(scores: Floats, coins: np.ndarray, test: Test, failure: float) -> tuple[float, int, int]:
    """The attacker says 'took part' of the highest scores and 'did not' of the lowest: (lower bound, guesses, right ones)."""
    order = np.argsort(scores)
    best = (0.0, 0, 0)
    for share in SHARES:
        half = int(len(scores) * share / 2)
        right = int(coins[order[len(scores) - half :]].sum() + (~coins[order[:half]]).sum())
        best = max(best, (test(len(scores), 2 * half, right, failure / len(SHARES)), 2 * half, right))
    return best


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """P(at least so many right) under (ε, δ)-DP: Theorem 5.2 of Steinke, Nasr and Jagielski."""
    q = 1.0 / (1.0 + math.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, q))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
    alpha = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, beta + 2.0 * canaries * delta * alpha)


def epsilon_of_guesses(canaries: int, guesses: int, right: int, failure: float, delta: float) -> float:
    """The largest ε that so many right guesses refute."""
    if guesses == 0 or p_value(canaries, guesses, right, 0.0, delta) > failure:
        return 0.0
    # Never above the root: a bound must not be rounded up.
    root = brentq(lambda e: p_value(canaries, guesses, right, e, delta) - failure, 0.0, 60.0, xtol=1e-9)
    return max(0.0, float(root) - 1e-8)


def refutes_gdp(canaries: int, guesses: int, right: int, mu: float, failure: float) -> bool:
    """Whether μ-GDP gives so many right guesses, or more, a probability below `failure`.

    Suppose that probability is τ. Among outcomes with at least i right guesses let r_i be the mass of right guesses of a canary and
    h_i that of wrong ones, averaged over canaries. At i = c they are at least τc/m and τ(c' − c)/m. Flipping a canary's own coin
    turns right into wrong, so h_i ≥ f̄⁻¹(r_{i+1}) with the curve's blow-up f̄(x) = Φ(Φ⁻¹(x) + μ); and outcomes with exactly i right
    have i/(c' − i) right guesses for a wrong one. Followed down to i = 0 this must not exceed the whole mass c'/m.
    """
    if not 0 < right <= guesses:
        return False
    r, h = failure * right / canaries, failure * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        wrong = max(h, float(ndtr(ndtri(r) - mu)))
        r, h = r + i / (guesses - i) * (wrong - h), wrong
        if r + h > guesses / canaries:
            return True
    return False


def mu_of_guesses(canaries: int, guesses: int, right: int, failure: float) -> float:
    """The largest μ that so many right guesses refute, never rounded up."""
    if not refutes_gdp(canaries, guesses, right, 0.0, failure):
        return 0.0
    low, high = 0.0, 50.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refutes_gdp(canaries, guesses, right, middle, failure) else (low, middle)
    return low
