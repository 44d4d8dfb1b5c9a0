"""DP-SCAFFOLD at client level: control variates at the same ε as DP-FedAvg."""

from __future__ import annotations

from typing import Unpack, get_args

from dpfedexp.algorithms.algorithm import HINTS, Algorithm, Clip, Control, NoiseOptions, clip_of
from dpfedexp.core.step_size import one
from dpfedexp.errors import InputError, checked, require
from dpfedexp.mechanisms import mechanism_class


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
        "dp_scaffold",
        mechanism,
        one,
        clip_of(clip),
        scaffold=control,
        average_last=average_last,
        **options,
    )
