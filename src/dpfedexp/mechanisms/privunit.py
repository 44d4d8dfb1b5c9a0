"""PrivUnit × ScalarDP (Bhowmick et al. 2018): direction and norm of an update are randomized independently.

Formal guarantee: the structured report (Ĵ, V) is ε-locally differentially private with ε = log(p(1−q)/(q(1−p))) + ε₂, where q is
the mass of the cap {⟨v,u⟩ ≥ γ} and p the probability of drawing from it; c, r̂ and ŝ are post-processing. The paper's box draws
from the cap "with probability γ", which must read p: taken literally, E[z] points away from u.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from scipy.special import betainccinv, betaincinv
from torch import Tensor

from dpfedexp.accounting import compose
from dpfedexp.accounting.events import Direction, GammaRule, PrivUnitEvent, Sampling, direction, level_count, privunit
from dpfedexp.core.clipping import Clipped, row_norms
from dpfedexp.core.noise import Noise
from dpfedexp.core.sums import Sums
from dpfedexp.errors import InputError, checked, require
from dpfedexp.mechanisms.base import Mechanism, MechanismSpec, OnGrid, Part, Release, Report, make_sums, total

_FEW = 2**12
"""Up to this dimension, float32 directions are computed in double precision."""
_NOTHING = 1e-30
"""Norms below this number count as zero, because their inverse is not a float32."""


@dataclass(frozen=True)
class ScalarDP:
    """ScalarDP (Algorithm 4 of the paper's appendix; Bhowmick et al. 2018) and the norm estimate of Algorithm `norm-privunit`.

    A magnitude r ∈ [0, C] is rounded at random to a level J ∈ {0, …, k}, the level goes through (k+1)-ary randomized response, and
    the result is debiased. Formal guarantee: the level Ĵ is ε₂-differentially private for r; everything else is post-processing.

    The paper's algorithm box has k = e^⌈ε₂/3⌉; its lemma has k = ⌈e^{ε₂/3}⌉, which the variance bound needs and this class uses.
    """

    epsilon2: float
    clip: float

    def __post_init__(self) -> None:
        require(0 < self.epsilon2 <= 60, f"epsilon2 is {self.epsilon2}; it must be above 0 and at most 60.")

    @property
    def k(self) -> int:
        return level_count(self.epsilon2)

    @property
    def a(self) -> float:
        e = math.exp(self.epsilon2)
        return (e + self.k) / (e - 1) * self.clip / self.k

    @property
    def b(self) -> float:
        return self.k * (self.k + 1) / (2 * (math.exp(self.epsilon2) + self.k))

    @property
    def mean_square_at_clip(self) -> float:
        """E[r̂²] at r = C, where J = k and each of the k other levels is drawn with probability 1/(e^ε₂ + k)."""
        e, k, b = math.exp(self.epsilon2), self.k, self.b
        others = k * (k - 1) * (2 * k - 1) / 6 - b * k * (k - 1) + k * b**2  # Σ (j − b)² over j < k
        return self.a**2 * (e * (k - b) ** 2 + others) / (e + k)

    def randomize(self, r: Tensor, uniform: Tensor) -> Tensor:
        """Return randomized levels Ĵ for magnitudes r (float64, [n]), from uniform draws [n, 3]."""
        scaled = (self.k * (r / self.clip)).clamp(0.0, float(self.k))
        floor = scaled.floor()
        level = torch.where(uniform[:, 0] < scaled - floor, floor + 1, floor)
        keep = uniform[:, 1] < 1.0 / (1.0 + self.k * math.exp(-self.epsilon2))
        # A uniform draw from the k other levels, skipping J.
        other = (uniform[:, 2] * self.k).floor().clamp_max(self.k - 1)
        other = torch.where(other >= level, other + 1, other)
        return torch.where(keep, level, other).to(torch.int64)

    def magnitude(self, level: Tensor) -> Tensor:
        """Return r̂ = a(Ĵ − b), an unbiased estimate of r."""
        return self.a * (level.double() - self.b)

    def squared_norm(self, r_hat: Tensor) -> Tensor:
        """Return ŝ of Algorithm `norm-privunit`: E[ŝ] = r² − (C/k)²(f − ½)² with f = frac(kr/C), never above r²."""
        e, k, c = math.exp(self.epsilon2), self.k, self.clip
        c1 = (k + 1) / (e - 1)
        c2 = -c1 * c
        c3 = (c1 + 1) * c**2 / (4 * k**2) + c1 * c**2 * (
            (2 * k + 1) * (e + k) / (6 * k * (e - 1)) - (k + 1) / (4 * (e - 1))
        )
        return (r_hat.square() - c2 * r_hat - c3) / (1 + c1)


@lru_cache(maxsize=256)
def best_split(epsilon: float, dimension: int) -> tuple[float, float, float]:
    """Find (ε₀, ε₁, ε₂) with sum ε and the smallest variance of c for an update of norm C: E[r̂²]/m² at r = C.

    The share of ε₂ is searched on a grid, because the variance jumps with the number of levels k.
    """

    def variance(epsilon2: float) -> float:
        half = (epsilon - epsilon2) / 2
        return ScalarDP(epsilon2, 1.0).mean_square_at_clip / direction(dimension, half, half, "optimal").m ** 2

    require(0 < epsilon <= 500, f"epsilon is {epsilon}; it must be above 0 and at most 500.")
    epsilon2 = min((share * epsilon for share in np.linspace(0.02, 0.8, 79) if share * epsilon < 25), key=variance)
    chosen = direction(dimension, (epsilon - epsilon2) / 2, (epsilon - epsilon2) / 2, "optimal")
    require(
        chosen.p < 1, f"epsilon is {epsilon} a round, which leaves nothing random in double precision; ask for less."
    )
    epsilon0 = math.log(chosen.p / (1 - chosen.p))
    return epsilon0, float(epsilon - epsilon2 - epsilon0), float(epsilon2)


def sample_height(constants: Direction, uniform: Tensor) -> Tensor:
    """Sample ⟨V,u⟩ from uniform draws [n, 2] by inverse distribution functions, without rejection, exactly in every dimension.

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
    """Sample V = t·u + sqrt(1 − t²)·w for every row, with u the direction of the row and w uniform on the sphere orthogonal to u.

    w is the normalized g − ⟨g,u⟩u of a Gaussian g, whose norm is sqrt(‖g‖² − ⟨g,u⟩²), so V is a combination of the row and g. In
    few dimensions the difference under the root can cancel, so it is computed in double precision. `norms` are those of the rows.
    """
    if source.shape[1] <= _FEW and source.dtype != torch.float64:
        return sample_direction(source.double(), constants, gaussian.double(), uniform, norms).to(source.dtype)
    norms = row_norms(source) if norms is None else norms
    t = sample_height(constants, uniform).to(source.device)
    along = torch.linalg.vecdot(gaussian, source).double() / norms
    across = (row_norms(gaussian).square() - along.square()).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    sine = ((1 - t) * (1 + t)).clamp_min(0.0).sqrt() / across
    of_row = (t - sine * along) / norms
    directions: Tensor = gaussian * sine.to(source.dtype)[:, None]
    return directions.addcmul_(source, of_row.to(source.dtype)[:, None])


@checked
@dataclass(frozen=True)
class PrivUnit(Mechanism):
    """Local mechanism with reports (Ĵ, V), from which c_i = r̂_i·z_i: z_i from PrivUnit(ε₀, ε₁), r̂_i from ScalarDP(ε₂)."""

    kind = "privunit"
    is_local = True

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

    @classmethod
    def check_spec(cls, spec: MechanismSpec) -> None:
        super().check_spec(spec)
        require(
            spec.noise_multiplier is None,
            f"noise_multiplier is {spec.noise_multiplier} with PrivUnit, which has none; give target_epsilon or epsilons.",
        )

    @classmethod
    def bound(cls, spec: MechanismSpec) -> Mechanism:
        if spec.target_epsilon is None:
            return spec.drawn(PrivUnit(spec.radius, spec.dimension, *spec.epsilons, gamma=spec.gamma))
        one = spec.target_epsilon / spec.rounds
        # The exact ε of a report is computed from its probabilities, and may differ from the requested ε in the last digits.
        for less in (0.0, *(2.0**-k for k in range(52, 1, -2))):
            split = best_split(one * (1.0 - less), spec.dimension)
            mechanism = PrivUnit(spec.radius, spec.dimension, *split)
            if compose([(mechanism.event(Sampling()), spec.rounds)], 0.0).epsilon <= spec.target_epsilon:
                return spec.drawn(mechanism)
        raise InputError(
            f"target_epsilon is {spec.target_epsilon:g} over {spec.rounds} rounds, where PrivUnit's probabilities are no longer "
            "below 1; lower it."
        )

    def check_model(self, dimension: int) -> None:
        matches = self.dimension == dimension
        require(matches, f"the mechanism is for {self.dimension} parameters, but the model has {dimension}.")
        # Missing constants must raise before a report is charged.
        exist = math.isfinite(self.direction.log_m) and self.scalar.k >= 1
        require(exist, "PrivUnit has no constants for these epsilons.")

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        delta = clipped.vectors
        d = delta.shape[1]
        norms = row_norms(delta)
        zero = norms < _NOTHING
        some = bool(zero.any())
        gaussian = noise.normal(clients, 2 * d if some else d, delta.device, delta.dtype)
        uniform = noise.uniform(clients, 5)
        # A zero update has no direction: a random direction keeps E[c] = 0.
        source = torch.where(zero[:, None], gaussian[:, d:], delta) if some else delta
        known = None if some else norms
        vector = sample_direction(source, self.direction, gaussian[:, :d], uniform[:, :2], known)
        level = self.scalar.randomize(norms.cpu().clamp_max(self.clip), uniform[:, 2:])
        return Report(vector, level=level.to(delta.device))

    def reconstruct(self, report: Report) -> tuple[Tensor, Tensor]:
        """Return r̂ and c = r̂·V/m for every row. Clients send (Ĵ, V), because r̂ can't be recovered from c in floating point."""
        if report.level is None:
            raise InputError("the report has no level; PrivUnit sends the norm as a level, beside its direction.")
        r_hat = self.scalar.magnitude(report.level)
        return r_hat, (r_hat / self.direction.m).to(report.vector.dtype)[:, None] * report.vector

    def estimate(self, report: Report) -> Tensor:
        return self.reconstruct(report)[1]

    def collect(self, report: Report) -> Sums:
        r_hat, c = self.reconstruct(report)
        return make_sums(total(c), self.scalar.squared_norm(r_hat).sum(), None, len(c))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        count = max(sums.count, 1)
        variance = self.noise_norm(len(sums.vector), denominator, count) ** 2 / len(sums.vector)
        return Release(sums.vector / count, float(sums.squares) / count, {}, self.clip, variance=variance)

    def noise_norm(self, dimension: int, denominator: float, count: float) -> float:
        """Return sqrt((E[r̂²]/m² − C²)/count) at r = C; the noise of a shorter update depends on its norm."""
        square = self.scalar.mean_square_at_clip / self.direction.m**2
        return math.sqrt(max(square - self.clip**2, 0.0) / max(count, 1))

    @property
    def parts(self) -> tuple[Part, ...]:
        return ("level",)

    def check_report(self, report: Report) -> None:
        levels = torch.zeros(0) if report.level is None else report.level
        require(
            len(levels) > 0 and bool(((levels >= 0) & (levels <= self.scalar.k)).all()), "its level is out of range"
        )
        require(float((row_norms(report.vector) - 1.0).abs().max()) < 1e-3, "its direction is not a unit vector")

    def norm_bound(self, width: int) -> float:
        levels = torch.arange(self.scalar.k + 1)
        return float(self.scalar.magnitude(levels).abs().max()) / self.direction.m * (1 + 1e-3)

    def square_bounds(self, width: int) -> tuple[float, float]:
        """Return symmetric bounds, because an unbiased estimate of a square can be negative."""
        most = self.norm_bound(width) ** 2
        return -most, most

    def event(self, sampling: Sampling) -> PrivUnitEvent:
        epsilons = (self.epsilon0, self.epsilon1, self.epsilon2)
        return privunit(*epsilons, gamma=self.gamma, dimension=self.dimension, sampling=sampling)

    def log_ratio(self, seen: np.ndarray, here: Tensor, there: Tensor) -> np.ndarray | None:
        """Return the log-likelihood ratio, from the cap and the level of each report, for opposite directions of norm C and 0."""
        gamma, u = self.direction.gamma, here[0].double().numpy()
        height, level = seen[:, :-1] @ (u / np.linalg.norm(u)), seen[:, -1]
        caps = self.direction.epsilon * ((height >= gamma).astype(float) - (height <= -gamma))
        ratios: np.ndarray = caps + self.epsilon2 * ((level == self.scalar.k).astype(float) - (level == 0))
        return ratios

    def secure(self, strict: bool = False) -> Mechanism:
        require(not strict, "secure is 'strict' with PrivUnit, which draws no Gaussian noise; use secure = true.")
        return SecurePrivUnit(**self.settings())


@dataclass(frozen=True)
class SecurePrivUnit(OnGrid, PrivUnit):
    """`PrivUnit` computed in double precision and rounded to a public lattice of about 2⁻¹²/√d.

    Formal guarantee: the report is the rounding of an ideal direction, for which the guarantee of `PrivUnit` holds. The computed
    direction differs from the ideal one by about 2⁻⁵²/√d per coordinate, so with probability about d·2⁻⁴⁰ a report is not exactly
    the rounding of the ideal one.
    """

    @property
    def step(self) -> float:
        return 2.0 ** (math.frexp(self.dimension**-0.5)[1] - 1 - 12)

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        kind = clipped.vectors.dtype
        report = super().randomize(Clipped(clipped.vectors.double(), clipped.within), clients, noise)
        return Report((report.vector / self.step).round().mul(self.step).to(kind), level=report.level)

    def event(self, sampling: Sampling) -> PrivUnitEvent:
        return replace(super().event(sampling), attained=False)
