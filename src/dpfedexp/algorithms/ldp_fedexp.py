"""LDP-FedEXP (Algorithm 1): every client randomizes its own update; the server's step size is adaptive."""

from dataclasses import replace
from typing import Literal

from dpfedexp.accounting.events import Adjacency, GammaRule
from dpfedexp.algorithms.algorithm import HINTS, PAPER_EPSILONS, Algorithm, Clip, Epsilons, Per, clip_of
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
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_per: Per = "total",
    delta: float = 1e-5,
    adjacency: Adjacency = "replace-one",
    epsilons: Epsilons = PAPER_EPSILONS,
    gamma: GammaRule = "exact",
    numerator: Numerator | None = None,
    step: step_size.Step = "safe",
    average_last: int = 2,
) -> Algorithm:
    """Make LDP-FedEXP (Algorithm 1), with Gaussian noise or PrivUnit.

    With Gaussian noise the default is the free rule; PrivUnit uses the rule of the paper, which costs no ε either.

    Args:
        clip: the radius C of the ball that updates are clipped to.
        mechanism: "local-gaussian" or "privunit".
        noise_multiplier: z, the standard deviation of the noise divided by C, on the sum (central) or on each report (local). With
            Gaussian noise pass exactly one of this and `target_epsilon`.
        target_epsilon: the largest ε of the run at `delta`; the noise is calibrated to it.
        target_per: whether the target is for all rounds together ("total") or for each ("round").
        delta: the δ at which ε is stated.
        adjacency: "replace-one", because a report shows that its client takes part.
        epsilons: PrivUnit's ε₀, ε₁, ε₂ per round, used without `target_epsilon`.
        gamma: the rule for PrivUnit's cap: "exact", "paper" or "optimal".
        numerator: the source of ‖Δ‖² with Gaussian noise: "free" (the default), "paper" or "naive".
        step: "safe" caps the step size by the progress that the released means show, and falls back to 1 without progress;
            "paper" uses the step size of the rule.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

    >>> ldp_fedexp(clip=0.3, noise_multiplier=0.7).numerator
    'free'
    """
    if mechanism == "privunit":
        if numerator not in (None, "paper"):
            raise InputError(
                f"numerator is {numerator!r} with PrivUnit; its norm estimate is free already, leave it out."
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
        noise_multiplier=noise_multiplier,
        target_epsilon=target_epsilon,
        target_per=target_per,
        delta=delta,
        adjacency=adjacency,
        epsilons=epsilons,
        gamma=gamma,
        average_last=average_last,
    )


@checked(hints=HINTS)
def naive_ldp_fedexp(
    *,
    clip: Clip,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_per: Per = "total",
    delta: float = 1e-5,
    adjacency: Adjacency = "replace-one",
    average_last: int = 2,
) -> Algorithm:
    """Make the paper's biased variant (eq:naive), for its figures; do not train with it.

    Args:
        clip: the radius C of the ball that updates are clipped to.
        noise_multiplier: z, the standard deviation of the noise divided by C, on the sum (central) or on each report (local). With
            Gaussian noise pass exactly one of this and `target_epsilon`.
        target_epsilon: the largest ε of the run at `delta`; the noise is calibrated to it.
        target_per: whether the target is for all rounds together ("total") or for each ("round").
        delta: the δ at which ε is stated.
        adjacency: "replace-one", because a report shows that its client takes part.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

    >>> naive_ldp_fedexp(clip=0.3, noise_multiplier=0.7).numerator
    'naive'
    """
    naive = ldp_fedexp(
        clip=clip,
        numerator="naive",
        step="paper",
        noise_multiplier=noise_multiplier,
        target_epsilon=target_epsilon,
        target_per=target_per,
        delta=delta,
        adjacency=adjacency,
        average_last=average_last,
    )
    return replace(naive, name="naive_ldp_fedexp")
