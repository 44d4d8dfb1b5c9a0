"""DP-FedAvg, the baseline: a fixed server step."""

from __future__ import annotations

from typing import Unpack

from dpfedexp.algorithms.algorithm import HINTS, Algorithm, Clip, NoiseOptions, clip_of
from dpfedexp.core.step_size import Extrapolate, FixedRate, Momentum, Rule, ServerOptimizer, one
from dpfedexp.errors import checked


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
    return Algorithm(
        name,
        mechanism,
        rule,
        clip_of(clip),
        server=server,
        average_last=average_last,
        **options,
    )
