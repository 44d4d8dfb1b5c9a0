"""FedAvg and FedEXP without privacy."""

from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.core import step_size
from dpfedexp.errors import checked


@checked
def fedavg(*, server_rate: float = 1.0) -> Algorithm:
    """Make FedAvg without privacy: the unweighted mean of the updates.

    Args:
        server_rate: the fixed server step η_g.

    >>> fedavg().private
    False
    """
    return Algorithm("fedavg", "none", step_size.FixedRate(server_rate))


@checked
def fedexp(*, step: step_size.Step = "paper") -> Algorithm:
    """Make FedEXP without privacy (eq:step-size-fedexp).

    Args:
        step: "paper" uses the step size of the rule; "safe" caps it by the progress that the mean updates show, or falls back to 1.

    >>> fedexp().average_last
    2
    """
    return Algorithm("fedexp", "none", step_size.rule_with_step(step_size.fedexp, step), average_last=2)
