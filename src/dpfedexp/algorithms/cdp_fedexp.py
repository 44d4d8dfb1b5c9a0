"""CDP-FedEXP (Algorithm 2): a trusted server with an adaptive step size."""

from typing import Literal

from dpfedexp.accounting.events import Adjacency
from dpfedexp.algorithms.algorithm import HINTS, Algorithm, Clip, Per, clip_of
from dpfedexp.core import step_size
from dpfedexp.errors import InputError, checked, nearest

RULES: dict[str, step_size.Rule] = {"free": step_size.free, "paper": step_size.cdp}


@checked(hints=HINTS)
def cdp_fedexp(
    *,
    clip: Clip,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_per: Per = "total",
    delta: float = 1e-5,
    adjacency: Adjacency = "replace-one",
    numerator: Literal["free", "paper"] = "free",
    step: step_size.Step = "safe",
    average_last: int = 2,
) -> Algorithm:
    """Make CDP-FedEXP (Algorithm 2). By default with the safe step size, at the same ε as DP-FedAvg.

    Args:
        clip: the radius C of the ball that updates are clipped to, "adaptive", or an `AdaptiveClip` (central only).
        noise_multiplier: z, the standard deviation of the noise divided by C, on the sum (central) or on each report (local). With
            Gaussian noise pass exactly one of this and `target_epsilon`.
        target_epsilon: the largest ε of the run at `delta`; the noise is calibrated to it.
        target_per: whether the target is for all rounds together ("total") or for each ("round").
        delta: the δ at which ε is stated.
        adjacency: "replace-one" hides the data of a client, "add-remove" whether it takes part (central only).
        numerator: the source of ‖Δ‖²: "free", one more coordinate in the same ball, or "paper", a separate noisy query.
        step: "safe" caps the step size by the progress that the released means show, and falls back to 1 without progress;
            "paper" uses the step size of the rule.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

    >>> cdp_fedexp(clip="adaptive", target_epsilon=8.0, delta=1e-5).clip.initial
    1.0
    """
    if numerator not in RULES:
        raise InputError(f"numerator is {numerator!r}, which does not exist.{nearest(str(numerator), RULES)}")
    return Algorithm(
        "cdp_fedexp",
        "central-gaussian",
        step_size.rule_with_step(RULES[numerator], step),
        clip_of(clip),
        numerator,
        noise_multiplier=noise_multiplier,
        target_epsilon=target_epsilon,
        target_per=target_per,
        delta=delta,
        adjacency=adjacency,
        average_last=average_last,
    )
