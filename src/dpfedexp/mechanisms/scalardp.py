"""ScalarDP (Algorithm 4 of the paper's appendix; Bhowmick et al. 2018) and the norm estimate of Algorithm `norm-privunit`.

A magnitude r ∈ [0, C] is rounded at random to a level J ∈ {0, …, k}, the level goes through (k+1)-ary randomised response, and the
result is debiased. Formal guarantee: the level Ĵ is ε₂-differentially private for r; everything else is post-processing.

The paper's box prints k = e^⌈ε₂/3⌉; its own lemma has k = ⌈e^{ε₂/3}⌉, which is what the variance bound needs and what is used here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.accounting.events.cap import level_count
from dpfedexp.errors import InputError, require


@dataclass(frozen=True)
class ScalarDP:
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
        """Levels Ĵ for magnitudes r (float64, [n]) from uniforms [n, 3]."""
        scaled = (self.k * (r / self.clip)).clamp(0.0, float(self.k))
        floor = scaled.floor()
        level = torch.where(uniform[:, 0] < scaled - floor, floor + 1, floor)
        keep = uniform[:, 1] < 1.0 / (1.0 + self.k * math.exp(-self.epsilon2))
        # One of the k other levels: a uniform draw that steps over J.
        other = (uniform[:, 2] * self.k).floor().clamp_max(self.k - 1)
        other = torch.where(other >= level, other + 1, other)
        return torch.where(keep, level, other).to(torch.int64)

    def magnitude(self, level: Tensor) -> Tensor:
        """r̂ = a(Ĵ − b), unbiased for r."""
        return self.a * (level.double() - self.b)

    def squared_norm(self, r_hat: Tensor) -> Tensor:
        """ŝ of Algorithm `norm-privunit`: E[ŝ] = r² − (C/k)²(f − ½)² with f = frac(kr/C), never above r²."""
        e, k, c = math.exp(self.epsilon2), self.k, self.clip
        c1 = (k + 1) / (e - 1)
        c2 = -c1 * c
        c3 = (c1 + 1) * c**2 / (4 * k**2) + c1 * c**2 * (
            (2 * k + 1) * (e + k) / (6 * k * (e - 1)) - (k + 1) / (4 * (e - 1))
        )
        return (r_hat.square() - c2 * r_hat - c3) / (1 + c1)

    def recover_level(self, magnitude: Tensor) -> Tensor:
        """Ĵ from |r̂| by the nearest of {a|j − b|}, where only c is at hand.

        The paper's test "J̃ is an integer" fails in floating point. Where two levels have the same |r̂| (ε₂ = ln 4, ln 9) no test can
        tell them apart, and this is an error.
        """
        levels = torch.arange(self.k + 1, dtype=torch.float64, device=magnitude.device)
        candidates, order = (self.a * (levels - self.b).abs()).sort()
        gap = float(candidates.diff().min()) if self.k else math.inf
        if gap < 1e-4 * self.a:
            raise InputError(
                f"epsilon2 is {self.epsilon2}: two levels of ScalarDP then have the same magnitude, so c alone does not tell "
                "them apart; send the structured report (level, direction) or change epsilon2 by a few per cent."
            )
        at = torch.searchsorted((candidates[1:] + candidates[:-1]) / 2, magnitude.double().contiguous())
        return order[at]
