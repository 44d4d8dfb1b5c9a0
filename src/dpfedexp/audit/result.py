"""What one audit found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Result:
    """A measured lower bound beside the claim that it must not exceed.

    unit     what both are: "ε at δ = 0.01", "μ", "ε"
    curve    (δ, lower bound, claim) at several δ, for the picture
    detail   what was done, in a few words
    """

    kind: str
    name: str
    unit: str
    lower: float
    claim: float
    confidence: float
    detail: str = ""
    curve: tuple[tuple[float, float, float], ...] = field(default=(), repr=False)

    @property
    def holds(self) -> bool:
        """Whether the claim survived. A relative 1e-9 is for the rounding of claims that are exact."""
        return self.lower <= self.claim * (1.0 + 1e-9)

    @property
    def share(self) -> float:
        """How much of the claim was reached: the power of the audit."""
        return self.lower / self.claim if self.claim > 0 else math.nan
