"""DP-FedAvg, the baseline."""

from dpfedexp.accounting.events import Adjacency, GammaRule
from dpfedexp.algorithms.algorithm import HINTS, PAPER_EPSILONS, Algorithm, Clip, Epsilons, Per, clip_of
from dpfedexp.core.step_size import Extrapolate, FixedRate, Momentum, Rule, ServerOptimizer, one
from dpfedexp.errors import checked


@checked(hints=HINTS)
def dp_fedavg(
    *,
    clip: Clip,
    mechanism: str = "central-gaussian",
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_per: Per = "total",
    delta: float = 1e-5,
    adjacency: Adjacency = "replace-one",
    epsilons: Epsilons = PAPER_EPSILONS,
    gamma: GammaRule = "exact",
    server_rate: float = 1.0,
    server_momentum: float | None = None,
    average_last: int = 1,
) -> Algorithm:
    """DP-FedAvg: clipped updates, noise, and a fixed step of the server.

    Args:
        clip: the radius C of the ball that updates are clipped to, "adaptive", or an `AdaptiveClip` (central only).
        mechanism: who adds the noise: "central-gaussian", "local-gaussian", "privunit", or another that is registered.
        noise_multiplier: z, the standard deviation of the noise over C, on the sum (central) or on each report (local). Exactly one
            of this and `target_epsilon` is given for Gaussian noise.
        target_epsilon: the ε that the run may cost at `delta`; the noise is calibrated for it.
        target_per: whether the target is for all rounds together or for each.
        delta: δ of the promise.
        adjacency: "replace-one" hides what a client holds, "add-remove" that it takes part at all (central only).
        epsilons: PrivUnit's ε₀, ε₁, ε₂ per round, where no target is given.
        gamma: PrivUnit's cap: "exact", "paper" or "optimal".
        server_rate: a fixed global step size η_g.
        server_momentum: momentum of the server, None for none.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

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
        noise_multiplier=noise_multiplier,
        target_epsilon=target_epsilon,
        target_per=target_per,
        delta=delta,
        adjacency=adjacency,
        epsilons=epsilons,
        gamma=gamma,
        server=server,
        average_last=average_last,
    )
