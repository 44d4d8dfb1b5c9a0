"""PrivUnit × ScalarDP (Bhowmick et al. 2018): a client's direction and norm, each randomised on its own.

Formal guarantee: the structured report (Ĵ, V) is ε-locally differentially private with ε = log(p(1−q)/(q(1−p))) + ε₂, where q is
the mass of the cap {⟨v,u⟩ ≥ γ} and p the probability of drawing from it; c, r̂ and ŝ are post-processing. The paper's box draws from
the cap "with probability γ", which must read p: taken literally, E[z] points away from u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import betaincc, betainccinv, betaincinv, betaln
from torch import Tensor

from dpfedexp.accounting.events import Event, PrivUnitEvent, Sampling
from dpfedexp.clipping import Clipped, row_norms
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms.base import Noise, Release, Report, make_sums, total
from dpfedexp.mechanisms.scalardp import ScalarDP
from dpfedexp.sums import Sums

GammaRule = Literal["exact", "paper", "optimal"]
_FEW = 2**12
_NOTHING = 1e-30
"""Norms below this are zero, because their inverse is not a float32."""


@dataclass(frozen=True)
class Direction:
    """The constants of PrivUnit on the sphere in R^d: P(cap) = p, cap {⟨v,u⟩ ≥ γ} of mass q, and log m with ‖z‖ = 1/m."""

    dimension: int
    p: float
    gamma: float
    q: float
    log_m: float

    @property
    def m(self) -> float:
        return math.exp(self.log_m)

    @property
    def epsilon(self) -> float:
        """The exact ε of V: the log of the ratio of the density inside the cap to that outside."""
        return math.log(self.p / (1 - self.p)) + math.log((1 - self.q) / self.q)


def _direction(dimension: int, p: float, gamma: float, q: float) -> Direction:
    half = (dimension - 1) / 2
    log_m = (
        -betaln(0.5, half)
        + half * math.log1p(-gamma * gamma)
        - math.log(dimension - 1)
        + math.log((p - q) / (q * (1 - q)))
    )
    return Direction(dimension, p, gamma, q, float(log_m))


@lru_cache(maxsize=256)
def direction(dimension: int, epsilon0: float, epsilon1: float, rule: GammaRule = "exact") -> Direction:
    """PrivUnit's constants.

    exact    the largest γ that ε₁ allows: q = 1/(1 + e^{ε₁})
    paper    γ = tanh(ε₁/2)·sqrt(π/(2(d−1))), the paper's first condition: only sufficient, and unsound at d = 2
    optimal  ε₀ + ε₁ split so that 1/m, and with it the variance, is smallest (Asi, Feldman and Talwar 2022)
    """
    require(dimension >= 2, f"PrivUnit needs a model of at least 2 parameters; this one has {dimension}.")
    for name, value in (("epsilon0", epsilon0), ("epsilon1", epsilon1)):
        require(0 < value <= 500, f"{name} is {value}; it must be above 0 and at most 500.")
    if rule == "optimal":
        total = epsilon0 + epsilon1
        best = minimize_scalar(
            lambda e0: -direction(dimension, e0, total - e0).log_m,
            bounds=(1e-3 * total, 0.999 * total),
            method="bounded",
            options={"xatol": 1e-6 * total},
        )
        return direction(dimension, float(best.x), total - float(best.x))
    p = 1 / (1 + math.exp(-epsilon0))
    half = (dimension - 1) / 2
    if rule == "exact":
        q = 1 / (1 + math.exp(epsilon1))
        return _direction(dimension, p, math.sqrt(betainccinv(0.5, half, 2 * q)), q)
    if rule != "paper":
        raise InputError(f"gamma is {rule!r}; it must be 'exact', 'paper' or 'optimal'.")
    gamma = math.tanh(epsilon1 / 2) * math.sqrt(math.pi / (2 * (dimension - 1)))
    require(
        gamma < 1,
        f"the paper's rule gives gamma = {gamma:.3f} for epsilon1 = {epsilon1} and {dimension} parameters, an empty cap; "
        "use gamma='exact'.",
    )
    return _direction(dimension, p, gamma, 0.5 * float(betaincc(0.5, half, gamma * gamma)))


@lru_cache(maxsize=256)
def best_split(epsilon: float, dimension: int) -> tuple[float, float, float]:
    """(ε₀, ε₁, ε₂) with sum ε that give c the least variance for a client at the clip: E[r̂²]/m² at r = C.

    Searched over shares of ε₂, because its number of levels k makes the variance jump.
    """

    def variance(epsilon2: float) -> float:
        scalar = ScalarDP(epsilon2, 1.0)
        e, top = math.exp(epsilon2), scalar.a * (scalar.k - scalar.b)
        others = sum((scalar.a * (j - scalar.b)) ** 2 for j in range(scalar.k)) if scalar.k < 10_000 else math.inf
        half = (epsilon - epsilon2) / 2
        return (e * top**2 + others) / (e + scalar.k) / direction(dimension, half, half, "optimal").m ** 2

    require(0 < epsilon <= 500, f"epsilon is {epsilon}; it must be above 0 and at most 500.")
    epsilon2 = min((share * epsilon for share in np.linspace(0.02, 0.8, 79) if share * epsilon < 25), key=variance)
    chosen = direction(dimension, (epsilon - epsilon2) / 2, (epsilon - epsilon2) / 2, "optimal")
    require(
        chosen.p < 1, f"epsilon is {epsilon} a round, which leaves nothing random in double precision; ask for less."
    )
    epsilon0 = math.log(chosen.p / (1 - chosen.p))
    return epsilon0, float(epsilon - epsilon2 - epsilon0), float(epsilon2)


def sample_height(constants: Direction, uniform: Tensor) -> Tensor:
    """⟨V,u⟩ from uniforms [n, 2] by inverse distribution functions: no rejection, exact for every dimension.

    T = ⟨V,u⟩ of a uniform V has T² ~ Beta(½, (d−1)/2). Inside the cap its upper tail is q·U; outside its lower tail is (1−q)·U.
    """
    choose, position = uniform[:, 0].numpy(), uniform[:, 1].numpy()
    half = (constants.dimension - 1) / 2
    inside = choose < constants.p
    height = np.empty(len(choose))
    height[inside] = np.sqrt(betainccinv(0.5, half, 2 * constants.q * position[inside]))
    tail = (1 - constants.q) * position[~inside]
    below = tail < 0.5
    outside = np.empty(len(tail))
    outside[below] = -np.sqrt(betainccinv(0.5, half, 2 * tail[below]))
    outside[~below] = np.sqrt(betaincinv(0.5, half, 2 * tail[~below] - 1))
    height[~inside] = outside
    return torch.from_numpy(height)


def sample_direction(
    source: Tensor, constants: Direction, gaussian: Tensor, uniform: Tensor, norms: Tensor | None = None
) -> Tensor:
    """V = t·u + sqrt(1 − t²)·w for every row at once, with u the row's direction and w uniform on the sphere orthogonal to it.

    w is the part g − ⟨g,u⟩u of a Gaussian g, of norm sqrt(‖g‖² − ⟨g,u⟩²), so V is a combination of the row and g: a product, two
    norms and one pass over both. In few dimensions that norm can cancel, hence double precision there. Known `norms` save one.
    """
    if source.shape[1] <= _FEW and source.dtype != torch.float64:
        return sample_direction(source.double(), constants, gaussian.double(), uniform, norms).to(source.dtype)
    norms = row_norms(source) if norms is None else norms
    t = sample_height(constants, uniform).to(source.device)
    along = torch.linalg.vecdot(gaussian, source).double() / norms
    across = (row_norms(gaussian).square() - along.square()).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    sine = ((1 - t) * (1 + t)).clamp_min(0.0).sqrt() / across
    of_row = (t - sine * along) / norms
    return (gaussian * sine.to(source.dtype)[:, None]).addcmul_(source, of_row.to(source.dtype)[:, None])


@dataclass(frozen=True)
class PrivUnit:
    """c_i = r̂_i·z_i with z_i from PrivUnit(ε₀, ε₁) and r̂_i from ScalarDP(ε₂); sends (Ĵ, V)."""

    clip: float
    dimension: int
    epsilon0: float = 2.0
    epsilon1: float = 2.0
    epsilon2: float = 2.0
    gamma: GammaRule = "exact"

    @property
    def direction(self) -> Direction:
        return direction(self.dimension, self.epsilon0, self.epsilon1, self.gamma)

    @property
    def scalar(self) -> ScalarDP:
        return ScalarDP(self.epsilon2, self.clip)

    def width(self, dimension: int) -> int:
        return dimension

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        delta = clipped.vectors
        d = delta.shape[1]
        norms = row_norms(delta)
        zero = norms < _NOTHING
        some = bool(zero.any())
        gaussian = noise.normal(clients, 2 * d if some else d, delta.device, delta.dtype)
        uniform = noise.uniform(clients, 5)
        # An update of zero has no direction: a random one keeps E[c] = 0.
        source = torch.where(zero[:, None], gaussian[:, d:], delta) if some else delta
        known = None if some else norms
        vector = sample_direction(source, self.direction, gaussian[:, :d], uniform[:, :2], known)
        level = self.scalar.randomize(norms.cpu().clamp_max(self.clip), uniform[:, 2:])
        return Report(vector, level=level.to(delta.device))

    def reconstruct(self, report: Report) -> tuple[Tensor, Tensor]:
        """r̂ and c = r̂·V/m for every row: what the paper says the client sends."""
        assert report.level is not None
        r_hat = self.scalar.magnitude(report.level)
        return r_hat, (r_hat / self.direction.m).to(report.vector.dtype)[:, None] * report.vector

    def recover(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """r̂ and ŝ from c alone, by the nearest magnitude that ScalarDP can give."""
        r_hat = self.scalar.magnitude(self.scalar.recover_level(self.direction.m * row_norms(c)))
        return r_hat, self.scalar.squared_norm(r_hat)

    def collect(self, report: Report) -> Sums:
        r_hat, c = self.reconstruct(report)
        return make_sums(total(c), self.scalar.squared_norm(r_hat).sum(), None, len(c))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        count = max(sums.count, 1)
        return Release(sums.vector / count, float(sums.squares) / count, None, self.clip)

    def event(self, sampling: Sampling) -> Event:
        nominal = self.epsilon0 + self.epsilon1 + self.epsilon2
        p, cap = self.direction.p, self.direction.q
        return PrivUnitEvent(p, cap, self.epsilon2, self.scalar.k, nominal, sampling=sampling, attained=True)
