"""LDP-FedEXP (Algorithm 1): every client randomizes its own update; the server's step size is adaptive."""

from __future__ import annotations

from typing import Literal, Unpack

from dpfedexp.algorithms.algorithm import HINTS, Algorithm, Clip, NoiseOptions, clip_of
from dpfedexp.core import step_size
from dpfedexp.errors import InputError, checked, nearest
from dpfedexp.mechanisms.base import Numerator

GAUSSIAN_RULES: dict[str, step_size.Rule] = {
    "free": step_size.free,
    "paper": step_size.ldp_gaussian,
    "naive": step_size.naive,
}


@checked(hints=HINTS)
def ldp_fedexp(
    *,
    clip: Clip,
    mechanism: Literal["local-gaussian", "privunit"] = "local-gaussian",
    numerator: Numerator | None = None,
    step: step_size.Step = "safe",
    average_last: int = 2,
    **options: Unpack[NoiseOptions],
) -> Algorithm:
    """Make LDP-FedEXP (Algorithm 1), with Gaussian noise or PrivUnit.

    With Gaussian noise the default is the free rule; PrivUnit uses the rule of the paper, which costs no ε either.

    Args:
        clip: the radius C of the ball that updates are clipped to.
        mechanism: "local-gaussian" or "privunit".
        numerator: the source of ‖Δ‖² with Gaussian noise: "free" (the default), "paper", or "naive", the paper's biased
            variant (eq:naive) for its figures, with `step="paper"`.
        step: "safe" caps the step size by the progress that the released means show, and falls back to 1 without progress;
            "paper" uses the step size of the rule.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

    The other options are those of `cdp_fedexp`, and PrivUnit's `epsilons` and `gamma` (`Algorithm`).

    >>> ldp_fedexp(clip=0.3, noise_multiplier=0.7).numerator
    'free'
    """
    if mechanism == "privunit":
        if numerator not in (None, "paper"):
            raise InputError(
                f"numerator is {numerator!r}, but PrivUnit's reports hold the norms already, at no cost; leave numerator out."
            )
        rule: step_size.Rule = step_size.ldp_privunit
        chosen: Numerator | None = None
    elif mechanism == "local-gaussian":
        chosen = numerator or "free"
        if chosen not in GAUSSIAN_RULES:
            raise InputError(f"numerator is {chosen!r}, which does not exist.{nearest(chosen, GAUSSIAN_RULES)}")
        rule = GAUSSIAN_RULES[chosen]
    else:
        known = ("local-gaussian", "privunit")
        raise InputError(f"mechanism is {mechanism!r} for ldp_fedexp.{nearest(str(mechanism), known)}")
    return Algorithm(
        "ldp_fedexp",
        mechanism,
        step_size.rule_with_step(rule, step),
        clip_of(clip),
        chosen,
        average_last=average_last,
        **options,
    )
