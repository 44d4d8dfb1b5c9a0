"""Subsampled Gaussian rounds, through dp-accounting's privacy loss distributions (pessimistic) and Rényi DP.

Several sound upper bounds exist for a sampled round; the smallest one is returned with its name.

- Poisson sampling, add/remove: the dominating pair is (1−q)N(0,1) + qN(r,1) against N(0,1), r = `event.radius`, so the noise
  multiplier of dp-accounting is 1/r.
- Poisson sampling, replace-one: (1−q)N(0,1) + qN(r,1) against (1−q)N(0,1) + qN(−r,1). dp-accounting's REPLACE_ONE takes the
  distance from the center to one side as its sensitivity, so the noise multiplier is 1/r here too, not 1/(2r).
- Fixed-size sampling, replace-one: RDP for sampling without replacement, whose sensitivity is the distance between the two sides,
  so the noise multiplier is 1/`event.mu`.
- Fixed-size sampling, add/remove: an added client takes the place of another one, so the shift is that of a replacement, at most
  2r, without amplification.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np

from dpfedexp.accounting import gdp
from dpfedexp.accounting.events import Adjacency, GaussianEvent

PLD = "PLD (dp-accounting, pessimistic)"
RDP = "RDP (dp-accounting)"
UNAMPLIFIED = "Gaussian (GDP), no amplification claimed"

_ORDERS = (*range(2, 64), 80, 96, 128, 192, 256)
_GRID_PER_SD = 512
_MAX_ROUND_GRID = 2**15
_MAX_TOTAL_GRID = 2**19
_FINEST = 2.0**-20  # probabilities are second differences of δ over the step; a finer grid has only rounding errors
_FOURIER_ERROR = 1e-16  # per round: smaller tail probabilities of the Fourier convolution are rounding errors


@dataclass(frozen=True)
class GaussianRound:
    """The numbers of a Gaussian round that the accountants use; equal for rounds that differ only in the clip."""

    adjacency: Adjacency
    kind: str
    rate: float
    radius: float
    mu: float

    @classmethod
    def of(cls, event: GaussianEvent) -> Self:
        kind = event.sampling.kind if event.sampling.rate < 1.0 else "full"
        pushed_out = kind == "fixed" and event.adjacency == "add-remove"
        mu = max(event.mu, event.under("replace-one").mu) if pushed_out else event.mu
        return cls(event.adjacency, kind, event.sampling.rate, _round_up(event.radius), _round_up(mu))


def epsilon(charges: Sequence[tuple[GaussianEvent, int]], delta: float) -> tuple[float, str]:
    """Compute the smallest proven ε at δ of central Gaussian rounds with any sampling, and name the accountant that proved it."""
    counts: Counter[GaussianRound] = Counter()
    for event, n in charges:
        counts[GaussianRound.of(event)] += n
    return _epsilon(tuple(sorted(counts.items(), key=repr)), float(delta))


@lru_cache(maxsize=65536)
def _epsilon(counts: tuple[tuple[GaussianRound, int], ...], delta: float) -> tuple[float, str]:
    mu = gdp.compose(item.mu * math.sqrt(n) for item, n in counts)
    candidates = [(gdp.epsilon(mu, delta), UNAMPLIFIED)]
    if delta > 0.0 and math.isfinite(mu):
        poisson = any(item.kind == "poisson" for item, _ in counts)
        without_replacement = any(item.kind == "fixed" and item.adjacency == "replace-one" for item, _ in counts)
        by_pld = pld_epsilon(counts, delta) if poisson else math.inf
        candidates.append((by_pld, PLD))
        if without_replacement or math.isinf(by_pld) or _grid(counts)[1]:
            candidates.append((rdp_epsilon(counts, delta), RDP))
    return min(candidates)


def pld_epsilon(counts: Sequence[tuple[GaussianRound, int]], delta: float) -> float:
    """Compute ε by privacy loss distributions, with amplification by Poisson sampling; infinite if no distribution can be built."""
    step, _ = _grid(counts)
    if not math.isfinite(step) or delta < _FOURIER_ERROR * sum(n for _, n in counts):
        return math.inf
    try:
        total: Any = None
        for item, n in counts:
            part = _repeat(_one_round(item, step), n)
            total = part if total is None else total.compose(part, tail_mass_truncation=1e-15)
        value = float(total.get_epsilon_for_delta(delta))
    except (ValueError, OverflowError, ZeroDivisionError, FloatingPointError, MemoryError):
        # dp-accounting refuses some extreme but valid settings; the caller then uses another bound, under its own name.
        return math.inf
    return value if value >= 0.0 else math.inf


def _repeat(part: Any, n: int) -> Any:
    """Compose `part` n times; in two stages for large n, because dp-accounting raises an integer to the n-th power."""
    if n <= 1024:
        return part.self_compose(n)
    total = part.self_compose(1024)
    if n >= 2048:
        total = total.self_compose(n // 1024)
    return total.compose(part.self_compose(n % 1024), tail_mass_truncation=1e-15) if n % 1024 else total


def rdp_epsilon(counts: Sequence[tuple[GaussianRound, int]], delta: float) -> float:
    """Compute ε by Rényi DP, with amplification for Poisson sampling (add-remove) and fixed-size sampling (replace-one)."""
    from dp_accounting.rdp import rdp_privacy_accountant

    total = np.sum([n * _rdp_one_round(item) for item, n in counts], axis=0)
    usable = np.isfinite(total) & (total >= 0.0)
    if not usable.any():
        return math.inf
    value, _ = rdp_privacy_accountant.compute_epsilon(np.array(_ORDERS)[usable], total[usable], delta)
    return float(value)


@lru_cache(maxsize=1024)
def _rdp_one_round(item: GaussianRound) -> np.ndarray:
    import dp_accounting
    from dp_accounting.rdp import rdp_privacy_accountant

    if item.kind == "poisson" and item.adjacency == "add-remove":
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        inner = dp_accounting.GaussianDpEvent(1.0 / item.radius)
        event: Any = dp_accounting.PoissonSampledDpEvent(item.rate, inner)
    elif item.kind == "fixed" and item.adjacency == "replace-one":
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        population = 10**9
        sample = min(population, math.ceil(item.rate * population))
        inner = dp_accounting.GaussianDpEvent(1.0 / item.mu)
        event = dp_accounting.SampledWithoutReplacementDpEvent(population, sample, inner)
    else:
        return np.array(_ORDERS) * item.mu**2 / 2.0
    accountant = rdp_privacy_accountant.RdpAccountant(_ORDERS, relation)
    try:
        with np.errstate(all="ignore"):
            accountant.compose(event)
            return np.array(accountant._rdp, dtype=float)
    except (ValueError, OverflowError, ZeroDivisionError, FloatingPointError):
        return np.array(_ORDERS) * item.mu**2 / 2.0


@lru_cache(maxsize=32)
def _one_round(item: GaussianRound, step: float) -> Any:
    import dp_accounting
    from dp_accounting.pld import privacy_loss_distribution

    gaussian = partial(privacy_loss_distribution.from_gaussian_mechanism, value_discretization_interval=step)
    if item.kind != "poisson":
        return gaussian(1.0 / item.mu)
    relations = dp_accounting.NeighboringRelation
    relation = relations.REPLACE_ONE if item.adjacency == "replace-one" else relations.ADD_OR_REMOVE_ONE
    return gaussian(1.0 / item.radius, sampling_prob=item.rate, neighboring_relation=relation)


def _grid(counts: Sequence[tuple[GaussianRound, int]]) -> tuple[float, bool]:
    """Return a grid step for the privacy loss that is fine for one round and affordable for all, and whether it is too coarse."""
    # Pessimistic rounding adds at most step²/4 of variance to a round, so a few hundred points per standard deviation give
    # many correct digits. The step is a power of two, so that different numbers of rounds can reuse one cached distribution.
    moments = [_loss_spread(item) for item, _ in counts]
    finest = min(sd for sd, _ in moments)
    total = math.sqrt(sum(n * sd * sd for (sd, _), (_, n) in zip(moments, counts, strict=True)))
    reach = max(reach for _, reach in moments)
    step = max(_FINEST, finest / _GRID_PER_SD, reach / _MAX_ROUND_GRID, (16.0 * total + reach) / _MAX_TOTAL_GRID)
    if not math.isfinite(step) or step <= 0.0:
        return math.inf, True
    step = 2.0 ** math.floor(math.log2(step))
    return step, step > finest / 8.0


@lru_cache(maxsize=1024)
def _loss_spread(item: GaussianRound) -> tuple[float, float]:
    """Return the standard deviation and the range of the privacy loss of one round, within 10 standard deviations of the noise."""
    if item.kind != "poisson":
        return item.mu, item.mu * (item.mu + 20.0)
    q, r = item.rate, item.radius
    x = np.linspace(-10.0, 10.0, 2001)
    x = np.concatenate([x, x + r])
    weight = np.exp(-0.5 * np.linspace(-10.0, 10.0, 2001) ** 2)
    weight = np.concatenate([(1.0 - q) * weight, q * weight]) / weight.sum()

    def gain(side: float) -> np.ndarray:
        return np.logaddexp(math.log1p(-q), math.log(q) + side * r * x - r * r / 2.0)

    loss = gain(1.0) - (gain(-1.0) if item.adjacency == "replace-one" else 0.0)
    mean = float(np.sum(weight * loss))
    return math.sqrt(max(0.0, float(np.sum(weight * (loss - mean) ** 2)))), float(loss.max() - loss.min())


def _round_up(value: float) -> float:
    """Round up to 12 digits, so that equal ratios computed from different clips become equal and the bound stays valid."""
    if value == 0.0 or not math.isfinite(value):
        return value
    rounded = float(f"{value:.11e}")
    return rounded if rounded >= value else float(f"{value * (1.0 + 1e-11):.11e}")
