"""The paper's algorithms: FedEXP without privacy, LDP-FedEXP (Algorithm 1) and CDP-FedEXP (Algorithm 2), and those that it compares
with: FedAvg without privacy, DP-FedAvg, DP-FedAdam and DP-SCAFFOLD.
"""

from __future__ import annotations  # `checked` reads Unpack[…] as text

from typing import Literal, Unpack, get_args

from dpfedexp.accounting.events import Adjacency
from dpfedexp.algorithms.algorithm import HINTS, Algorithm, Clip, Control, NoiseOptions, Per, clip_of
from dpfedexp.core import step_size
from dpfedexp.errors import check_known, checked, nearest, require
from dpfedexp.mechanisms import mechanism_class
from dpfedexp.mechanisms.base import Numerator

CENTRAL_RULES: dict[str, step_size.Rule] = {"free": step_size.free, "paper": step_size.cdp}
LOCAL_RULES: dict[str, step_size.Rule] = {
    "free": step_size.free,
    "paper": step_size.ldp_gaussian,
    "naive": step_size.naive,
}


@checked
def fedexp(*, step: step_size.Step = "paper") -> Algorithm:
    """Make FedEXP without privacy (eq:step-size-fedexp).

    Args:
        step: "paper" uses the step size of the rule; "safe" caps it by the progress that the mean updates show, or falls back to 1.

    >>> fedexp().average_last
    2
    """
    return Algorithm("fedexp", "none", step_size.rule_with_step(step_size.fedexp, step), average_last=2)


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
    known = ("local-gaussian", "privunit")
    require(mechanism in known, f"mechanism is {mechanism!r} for ldp_fedexp.{nearest(str(mechanism), known)}")
    if mechanism == "local-gaussian":
        numerator = numerator or "free"
        check_known("numerator", numerator, LOCAL_RULES)
        rule = LOCAL_RULES[numerator]
    else:
        require(
            numerator in (None, "paper"),
            f"numerator is {numerator!r}, but PrivUnit's reports hold the norms already, at no cost; leave numerator out.",
        )
        rule, numerator = step_size.ldp_privunit, None
    return Algorithm(
        "ldp_fedexp",
        mechanism,
        step_size.rule_with_step(rule, step),
        clip_of(clip),
        numerator,
        average_last=average_last,
        **options,
    )


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
    check_known("numerator", numerator, CENTRAL_RULES)
    return Algorithm(
        "cdp_fedexp",
        "central-gaussian",
        step_size.rule_with_step(CENTRAL_RULES[numerator], step),
        clip_of(clip),
        numerator,
        noise_multiplier=noise_multiplier,
        target_epsilon=target_epsilon,
        target_per=target_per,
        delta=delta,
        adjacency=adjacency,
        average_last=average_last,
    )


@checked
def fedavg(*, server_rate: float = 1.0) -> Algorithm:
    """Make FedAvg without privacy: the unweighted mean of the updates.

    Args:
        server_rate: the fixed server step η_g.

    >>> fedavg().private
    False
    """
    return Algorithm("fedavg", "none", step_size.FixedRate(server_rate))


@checked(hints=HINTS)
def dp_fedavg(
    *,
    clip: Clip,
    mechanism: str = "central-gaussian",
    server_rate: float = 1.0,
    server_momentum: float | None = None,
    average_last: int = 1,
    **options: Unpack[NoiseOptions],
) -> Algorithm:
    """Make DP-FedAvg: clipped updates, noise, and a fixed server step.

    Args:
        clip: the radius C of the ball that updates are clipped to, "adaptive", or an `AdaptiveClip` (central only).
        mechanism: "central-gaussian", "local-gaussian", "privunit", or another name in `MECHANISMS`.
        server_rate: the fixed server step η_g.
        server_momentum: momentum of the server, None for none.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

    The other options are those of `cdp_fedexp`, and PrivUnit's `epsilons` and `gamma` (`Algorithm`).

    >>> dp_fedavg(clip=1.0, noise_multiplier=5.0).name
    'dp_fedavg'
    """
    name = "dp_fedavg"
    rule: step_size.Rule = step_size.FixedRate(server_rate)
    server: step_size.ServerOptimizer = step_size.Extrapolate()
    if server_momentum is not None:
        name, rule, server = "dp_fedavgm", step_size.one, step_size.Momentum(server_rate, server_momentum)
    return Algorithm(name, mechanism, rule, clip_of(clip), server=server, average_last=average_last, **options)


@checked(hints=HINTS)
def dp_fedadam(
    *,
    clip: Clip,
    mechanism: str = "central-gaussian",
    server_rate: float = 0.03,
    average_last: int = 1,
    **options: Unpack[NoiseOptions],
) -> Algorithm:
    """Make DP-FedAdam: the server uses the released mean as a pseudo-gradient for Adam (Reddi et al. 2021).

    Args:
        clip: the radius C of the ball that updates are clipped to, "adaptive", or an `AdaptiveClip` (central only).
        mechanism: "central-gaussian", "local-gaussian", "privunit", or another name in `MECHANISMS`.
        server_rate: the learning rate of Adam on the server.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

    The other options are those of `cdp_fedexp`, and PrivUnit's `epsilons` and `gamma` (`Algorithm`).

    >>> dp_fedadam(clip=1.0, noise_multiplier=5.0).server.lr
    0.03
    """
    server = step_size.Adam(lr=server_rate)
    return Algorithm(
        "dp_fedadam", mechanism, step_size.one, clip_of(clip), server=server, average_last=average_last, **options
    )


@checked(hints=HINTS)
def dp_scaffold(
    *,
    clip: Clip,
    mechanism: str = "central-gaussian",
    control: Control = "update",
    average_last: int = 1,
    **options: Unpack[NoiseOptions],
) -> Algorithm:
    """Make DP-SCAFFOLD at client level: the server's control variate is computed from the release, at the same ε as DP-FedAvg.

    Args:
        clip: the radius C of the ball that updates are clipped to, "adaptive", or an `AdaptiveClip` (central only).
        mechanism: "central-gaussian", "local-gaussian", "privunit", or another name in `MECHANISMS`.
        control: the vector that a client's control variate follows: its clipped "update", which never leaves the client, or, in a
            local setting, the noisy "report" that it sent.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

    The other options are those of `cdp_fedexp`, and PrivUnit's `epsilons` and `gamma` (`Algorithm`).

    >>> dp_scaffold(clip=1.0, noise_multiplier=5.0).scaffold
    'update'
    """
    require(control in get_args(Control), f"control is {control!r}; it must be 'update' or 'report'.")
    require(
        control == "update" or mechanism_class(mechanism).is_local,
        "control is 'report', but only in a local setting does a client randomize what it sends; use 'update'.",
    )
    return Algorithm(
        "dp_scaffold", mechanism, step_size.one, clip_of(clip), scaffold=control, average_last=average_last, **options
    )
