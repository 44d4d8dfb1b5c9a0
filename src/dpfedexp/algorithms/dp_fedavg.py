"""DP-FedAvg, the baseline: a fixed server step."""

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
    """Make DP-FedAvg: clipped updates, noise, and a fixed server step.

    Args:
        clip: the radius C of the ball that updates are clipped to, "adaptive", or an `AdaptiveClip` (central only).
        mechanism: "central-gaussian", "local-gaussian", "privunit", or another name in `MECHANISMS`.
        noise_multiplier: z, the standard deviation of the noise divided by C, on the sum (central) or on each report (local). With
            Gaussian noise pass exactly one of this and `target_epsilon`.
        target_epsilon: the largest ε of the run at `delta`; the noise is calibrated to it.
        target_per: whether the target is for all rounds together ("total") or for each ("round").
        delta: the δ at which ε is stated.
        adjacency: "replace-one" hides the data of a client, "add-remove" whether it takes part (central only).
        epsilons: PrivUnit's ε₀, ε₁, ε₂ per round, used without `target_epsilon`.
        gamma: the rule for PrivUnit's cap: "exact", "paper" or "optimal".
        server_rate: the fixed server step η_g.
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
