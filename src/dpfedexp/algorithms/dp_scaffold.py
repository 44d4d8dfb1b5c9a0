"""DP-SCAFFOLD at client level: control variates at the same ε as DP-FedAvg."""

from typing import get_args

from dpfedexp.accounting.events import Adjacency, GammaRule
from dpfedexp.algorithms.algorithm import HINTS, PAPER_EPSILONS, Algorithm, Clip, Control, Epsilons, Per, clip_of
from dpfedexp.core.step_size import one
from dpfedexp.errors import InputError, checked, require
from dpfedexp.mechanisms import mechanism_class


@checked(hints=HINTS)
def dp_scaffold(
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
    control: Control = "update",
    average_last: int = 1,
) -> Algorithm:
    """Make DP-SCAFFOLD at client level: the server's control variate is computed from the release, at the same ε as DP-FedAvg.

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
        control: the vector that a client's control variate follows: its clipped "update", which never leaves the client, or, in a
            local setting, the noisy "report" that it sent.
        average_last: the reported model is the mean of this many last iterates: post-processing, at no cost in privacy.

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
        noise_multiplier=noise_multiplier,
        target_epsilon=target_epsilon,
        target_per=target_per,
        delta=delta,
        adjacency=adjacency,
        epsilons=epsilons,
        gamma=gamma,
        scaffold=control,
        average_last=average_last,
    )
