"""FedEXP without privacy (Jhunjhunwala et al. 2023)."""

from __future__ import annotations

from dpfedexp.algorithms import rules
from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.arguments import checked


@checked
def fedexp() -> Algorithm:
    """FedEXP without privacy (eq:step-size-fedexp).

    >>> fedexp().average_last
    2
    """
    return Algorithm("fedexp", "none", rules.fedexp, average_last=2)
