"""The privacy loss of a report as a sum of independent three-point variables."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ThreePoint:
    """A privacy loss that is +step with probability `up`, −step with probability `up`·e^{−step}, and 0 otherwise."""

    step: float
    up: float

    @property
    def down(self) -> float:
        return self.up * math.exp(-self.step)

    @property
    def stay(self) -> float:
        return max(0.0, 1.0 - self.up - self.down)


def randomised_response(epsilon: float) -> ThreePoint:
    """The loss that dominates every release that is ε-DP."""
    return ThreePoint(epsilon, 1.0 / (1.0 + math.exp(-epsilon)))
