"""DP-FedAdam: Adam on the server (Reddi et al. 2021)."""

from __future__ import annotations

from typing import Unpack

from dpfedexp.algorithms.algorithm import HINTS, Algorithm, Clip, NoiseOptions, clip_of
from dpfedexp.core.step_size import Adam, one
from dpfedexp.errors import checked


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
        "dp_fedadam",
        mechanism,
        one,
        clip_of(clip),
        server=Adam(lr=server_rate),
        average_last=average_last,
        **options,
    )
