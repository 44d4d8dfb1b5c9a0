"""The algorithms that the paper compares with: FedAvg without privacy, DP-FedAvg, DP-FedAdam and DP-SCAFFOLD."""

from __future__ import annotations  # `checked` reads Unpack[…] as text

from typing import Unpack, get_args

from dpfedexp.algorithms.algorithm import HINTS, Algorithm, Clip, Control, NoiseOptions, clip_of
from dpfedexp.core.step_size import Adam, Extrapolate, FixedRate, Momentum, Rule, ServerOptimizer, one
from dpfedexp.errors import InputError, checked, require
from dpfedexp.mechanisms import mechanism_class


@checked
def fedavg(*, server_rate: float = 1.0) -> Algorithm:
    """Make FedAvg without privacy: the unweighted mean of the updates.

    Args:
        server_rate: the fixed server step η_g.

    >>> fedavg().private
    False
    """
    return Algorithm("fedavg", "none", FixedRate(server_rate))


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
    rule: Rule = FixedRate(server_rate)
    server: ServerOptimizer = Extrapolate()
    if server_momentum is not None:
        name, rule, server = "dp_fedavgm", one, Momentum(server_rate, server_momentum)
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
    return Algorithm(
        "dp_fedadam", mechanism, one, clip_of(clip), server=Adam(lr=server_rate), average_last=average_last, **options
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
    if control not in get_args(Control):
        raise InputError(f"control is {control!r}; it must be 'update' or 'report'.")
    require(
        control == "update" or mechanism_class(mechanism).is_local,
        "control is 'report', but only in a local setting does a client randomize what it sends; use 'update'.",
    )
    return Algorithm(
        "dp_scaffold", mechanism, one, clip_of(clip), scaffold=control, average_last=average_last, **options
    )
