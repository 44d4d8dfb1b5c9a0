"""DP-FedAdam: Adam on the server (Reddi et al. 2021)."""

from dpfedexp.accounting.events import Adjacency, GammaRule
from dpfedexp.algorithms.algorithm import HINTS, PAPER_EPSILONS, Algorithm, Clip, Epsilons, Per, clip_of
from dpfedexp.core.step_size import Adam, one
from dpfedexp.errors import checked


@checked(hints=HINTS)
def dp_fedadam(
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
    server_rate: float = 0.03,
    average_last: int = 1,
) -> Algorithm:
    """Make DP-FedAdam: the server uses the released mean as a pseudo-gradient for Adam (Reddi et al. 2021).

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
        server_rate: the learning rate of Adam on the server.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

    >>> dp_fedadam(clip=1.0, noise_multiplier=5.0).server.lr
    0.03
    """
    return Algorithm(
        "dp_fedadam",
        mechanism,
        one,
        clip_of(clip),
        noise_multiplier=noise_multiplier,
        target_epsilon=target_epsilon,
        target_per=target_per,
        delta=delta,
        adjacency=adjacency,
        epsilons=epsilons,
        gamma=gamma,
        server=Adam(lr=server_rate),
        average_last=average_last,
    )
