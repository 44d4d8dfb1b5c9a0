"""FedEXP without privacy (Jhunjhunwala et al. 2023)."""

from __future__ import annotations

from dpfedexp.algorithms import rules
from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.errors import checked


@checked
def fedexp(*, step: rules.Step = "paper") -> Algorithm:
    """FedEXP without privacy (eq:step-size-fedexp).

    Args:
        step: "paper" takes what the rule says; "safe" caps it by the progress that the mean updates show, and falls back to 1.

    >>> fedexp().average_last
    2
    """
    return Algorithm("fedexp", "none", rules.stepped(rules.fedexp, step), average_last=2)
