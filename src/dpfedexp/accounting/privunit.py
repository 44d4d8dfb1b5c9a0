"""Exact composition of reports by the distribution of their privacy loss: PrivUnit × ScalarDP, and any ε-DP release.

The worst pair of clients for one report has opposite directions (whose caps are disjoint, because a cap holds at most half of the
sphere) and different levels. The privacy loss is then the sum of two independent three-point variables,

    direction  +L with probability p,              −L with probability p·e^{−L},    0 otherwise,
    level      +ε₂ with probability e^ε₂/(e^ε₂+k), −ε₂ with probability 1/(e^ε₂+k), 0 otherwise,

with L = `event.direction_epsilon`, so the losses of T reports lie on two lattices of 2T + 1 points. The lattices are convolved
without discretization, every term is positive, and δ(ε) = Σ P(loss)·(1 − e^{ε−loss})₊ is exact up to rounding. The outputs of any
other pair of clients are a mixture of this pair's and of indistinguishable outputs, so this pair dominates.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np

from dpfedexp.accounting import gdp
from dpfedexp.accounting.events import PrivUnitEvent, ReportEvent, ThreePoint

EXACT = "exact PrivUnit composition"
RENYI = "RDP of the exact PrivUnit pair"
RENYI_BOUND = "RDP of randomized response"
PURE = "pure ε sum"

_MAX_EXACT_REPORTS = 20_000
_MAX_ATOMS = 2_000_000
_MAX_ATOMS_WITH_GAUSSIAN = 2**18
_ORDERS = 1.0 + np.logspace(-4, 5, 600)


def pure_epsilon(charges: Iterable[tuple[ReportEvent, int]]) -> float:
    """Sum the exact ε of all reports; the sum holds at δ = 0."""
    return math.fsum(event.strength * count for event, count in charges)


def epsilon(charges: Sequence[tuple[ReportEvent, int]], delta: float) -> tuple[float, str]:
    """Return the smallest proven ε at δ of all reports together, and the name of the accountant that proved it."""
    pure = pure_epsilon(charges)
    if delta <= 0.0 or pure == 0.0 or math.isinf(pure):
        return pure, PURE
    parts = _parts(charges)
    if _tractable(parts):
        return min((pure, PURE), (_invert(_Losses(parts).delta, pure, delta), _composition(charges)))
    only = all(isinstance(event, PrivUnitEvent) for event, _ in charges)
    return min((pure, PURE), (_renyi_epsilon(parts, delta), RENYI if only else RENYI_BOUND))


def epsilon_with_gaussian(charges: Sequence[tuple[ReportEvent, int]], mu: float, delta: float) -> tuple[float, str]:
    """Return the smallest proven ε at δ of the reports and a μ-GDP release together, and the name of the accountant.

    Given the loss ℓ of the reports, the rest of the loss is the Gaussian's, so δ(ε) = Σ P(ℓ)·δ_μ(ε − ℓ). If the reports have too
    many possible losses to list, the two ε are added.
    """
    pure = pure_epsilon(charges)
    added = gdp.epsilon(mu, delta) + pure
    if delta <= 0.0 or not math.isfinite(added) or mu == 0.0:
        return added, PURE
    parts = _parts(charges)
    if math.prod(2 * count + 1 for count in parts.values()) > _MAX_ATOMS_WITH_GAUSSIAN:
        halves = gdp.epsilon(mu, delta / 2) + epsilon(charges, delta / 2)[0]
        return min((added, PURE), (halves, _composition(charges)))
    losses, weights = _atoms((part.step, _law(part, count)) for part, count in parts.items())
    losses, weights = losses[weights > 0.0], weights[weights > 0.0]
    tight = _invert(lambda epsilon: float(weights @ gdp.deltas(epsilon - losses, mu)), added, delta)
    return min((added, PURE), (tight, _composition(charges)))


def _composition(charges: Sequence[tuple[ReportEvent, int]]) -> str:
    """Return the name of the composition; it is exact only if every event is (no overlapping caps, rounding or sampling)."""
    names = sorted({event.composition for event, _ in charges})
    exact = all(event.exact for event, _ in charges)
    return ("exact " if exact else "") + " and ".join(names)


def _parts(charges: Iterable[tuple[ReportEvent, int]]) -> dict[ThreePoint, int]:
    parts: Counter[ThreePoint] = Counter()
    for event, count in charges:
        for part in event.losses():
            parts[part] += count
    return parts


def _tractable(parts: dict[ThreePoint, int]) -> bool:
    """Return whether the lattices are short enough to convolve, and whether all but the longest fit in one outer product."""
    sizes: Counter[float] = Counter()
    for part, count in parts.items():
        sizes[part.step] += count
    *others, longest = sorted(sizes.values())
    return longest <= _MAX_EXACT_REPORTS and math.prod(2 * n + 1 for n in others) <= _MAX_ATOMS


class _Losses:
    """The composed privacy loss as explicit atoms plus one lattice, so that δ(ε) takes one pass over the atoms."""

    def __init__(self, parts: dict[ThreePoint, int]) -> None:
        lattices: dict[float, np.ndarray] = {}
        for part, count in parts.items():
            pmf = _law(part, count)
            lattices[part.step] = np.convolve(lattices[part.step], pmf) if part.step in lattices else pmf
        *others, (self.step, pmf) = sorted(lattices.items(), key=lambda item: item[1].size)
        self.atoms, self.weights = _atoms(others)
        self.reach = pmf.size // 2
        # One more slot of 0 at the end, for ε above every lattice point.
        self.above = np.append(np.cumsum(pmf[::-1])[::-1], 0.0)
        discount = math.exp(-self.step)
        sums = list(accumulate(pmf[::-1].tolist(), lambda total, mass: mass + discount * total))
        self.discounted = np.append(sums[::-1], 0.0)

    def delta(self, epsilon: float) -> float:
        first = np.floor((epsilon - self.atoms) / self.step) + 1.0
        j = np.clip(first, -self.reach, self.reach + 1).astype(np.int64)
        discount = np.exp(np.minimum(0.0, epsilon - self.atoms - j * self.step))
        slot = j + self.reach
        return float(np.sum(self.weights * np.maximum(0.0, self.above[slot] - discount * self.discounted[slot])))


def _atoms(lattices: Iterable[tuple[float, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return every sum of one loss per lattice, and its probability; a lattice is a step and the distribution around 0."""
    atoms, weights = np.zeros(1), np.ones(1)
    for step, pmf in lattices:
        losses = (np.arange(pmf.size) - pmf.size // 2) * step
        atoms, weights = np.add.outer(atoms, losses).ravel(), np.multiply.outer(weights, pmf).ravel()
    return atoms, weights


def _law(part: ThreePoint, count: int) -> np.ndarray:
    """Return the distribution of the sum of `count` losses, by squaring; rounding errors of an FFT would exceed small tails."""
    pmf, result = np.array([part.down, part.stay, part.up]), np.ones(1)
    while count:
        if count & 1:
            result = np.convolve(result, pmf)
        count >>= 1
        if count:
            pmf = np.convolve(pmf, pmf)
    return result


def _invert(delta_at: Callable[[float], float], most: float, delta: float) -> float:
    low, high = 0.0, most
    if delta_at(0.0) <= delta:
        return 0.0
    while high - low > 1e-12 * max(1.0, high):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def _renyi_epsilon(parts: dict[ThreePoint, int], delta: float) -> float:
    """Compute ε by Rényi DP of the worst pair; every order gives a valid bound, so the minimum over a grid of orders does."""
    total = np.zeros_like(_ORDERS)
    for part, count in parts.items():
        up, shift = math.log(part.up), (_ORDERS - 1.0) * part.step
        stay = math.log(part.stay) if part.stay > 0.0 else -math.inf
        total += count * np.logaddexp(np.logaddexp(up + shift, up - part.step - shift), stay) / (_ORDERS - 1.0)
    candidates = total + np.log1p(-1.0 / _ORDERS) - np.log(delta * _ORDERS) / (_ORDERS - 1.0)
    return max(0.0, float(candidates.min()))
