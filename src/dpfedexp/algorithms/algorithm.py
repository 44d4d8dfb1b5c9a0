"""The class `Algorithm`: the settings of a mechanism, a clip, a step-size rule and a server optimizer."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, get_args

from dpfedexp.accounting import Sampling
from dpfedexp.accounting.events import ADJACENCIES, Adjacency, GammaRule
from dpfedexp.core.clipping import AdaptiveClip, check_radius
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.core.step_size import NOISE_SUBTRACTED, AnyRule, Extrapolate, Safe, ServerOptimizer, Step, check_server
from dpfedexp.core.sums import WITHIN_CLIP, VoteSpec
from dpfedexp.errors import check_known, checked, is_count, is_number, require
from dpfedexp.mechanisms import Mechanism, MechanismSpec, Secure, mechanism_class
from dpfedexp.mechanisms.base import Numerator, OneTimeEvents

Clip = float | AdaptiveClip | Literal["adaptive"]
Control = Literal["update", "report"]
"""The vector that a client's control variate follows in DP-SCAFFOLD: its clipped update, or its randomized report."""
Per = Literal["total", "round"]
Epsilons = tuple[float, float, float]
PAPER_EPSILONS: Epsilons = (2.0, 2.0, 2.0)
"""PrivUnit's (ε₀, ε₁, ε₂) in the experiments of the paper."""
Aggregation = Literal["plain", "two-party", "two-party-one-sided"]
"""The parties that sum the updates: one trusted server, or a server and a helper that can't read any update (docs/trust.md), with
noise from both parties or from the helper alone."""


class NoiseOptions(TypedDict, total=False):
    """Options of algorithms with any mechanism; `cdp_fedexp` and, for PrivUnit, `Algorithm` explain them."""

    noise_multiplier: float | None
    target_epsilon: float | None
    target_per: Per
    delta: float
    adjacency: Adjacency
    epsilons: Epsilons
    gamma: GammaRule


HINTS = {
    **dict.fromkeys(("epsilon", "eps"), "target_epsilon=8.0 for the whole run, or noise_multiplier"),
    **dict.fromkeys(("sigma", "noise"), "noise_multiplier, the standard deviation over the clip"),
    **dict.fromkeys(("clipping_norm", "max_grad_norm"), "clip"),
    "lr": "server_rate for the server; the clients' rate goes to local=Sgd(lr=…)",
}
"""Wrong argument name → what to write instead."""


@checked
@dataclass(frozen=True)
class Algorithm:
    """The settings of a federated algorithm, without data, model and local steps.

    Args:
        name: its name in statements and tables.
        mechanism: the name of its mechanism (`dpfedexp.mechanisms.MECHANISMS`).
        rule: function from a release to η_g, with or without a memory of earlier rounds (`dpfedexp.core.step_size`).
        clip: the radius C, or the settings of an adaptive clip.
        numerator: the statistic that the rule needs from the mechanism.
        noise_multiplier: z, the standard deviation of the noise divided by C, on the sum (central) or on each report (local). With
            Gaussian noise pass exactly one of this and `target_epsilon`.
        target_epsilon: the largest ε of the run at `delta`; the noise is calibrated to it.
        target_per: whether the target is for all rounds together ("total") or for each ("round").
        delta: the δ at which ε is stated.
        adjacency: "replace-one" hides the data of a client, "add-remove" whether it takes part (central only).
        epsilons: PrivUnit's ε₀, ε₁, ε₂ per round, used without `target_epsilon`.
        gamma: the rule for PrivUnit's cap: "exact", "paper" or "optimal".
        server: the server optimizer (`dpfedexp.core.step_size`).
        scaffold: the vector that DP-SCAFFOLD's control variates follow; None without DP-SCAFFOLD.
        average_last: the number of last iterates that the reported model averages: post-processing, at no cost in privacy.

    >>> from dpfedexp import dp_fedavg
    >>> dp_fedavg(clip=1.0, noise_multiplier=5.0).private
    True
    """

    name: str
    mechanism: str
    rule: AnyRule = field(repr=False)
    clip: float | AdaptiveClip = math.inf
    numerator: Numerator | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_per: Per = "total"
    delta: float = 1e-5
    adjacency: Adjacency = "replace-one"
    epsilons: Epsilons = PAPER_EPSILONS
    gamma: GammaRule = "exact"
    server: ServerOptimizer = field(default_factory=Extrapolate)
    scaffold: Control | None = None
    average_last: int = 1

    def __post_init__(self) -> None:
        kind = mechanism_class(self.mechanism)
        require(
            is_count(self.average_last), f"average_last is {self.average_last!r}; it must be a positive whole number."
        )
        radius = self.clip.initial if isinstance(self.clip, AdaptiveClip) else self.clip
        if kind.is_private or radius != math.inf:
            check_radius("clip", radius)
        check_server(self.server)
        require(callable(self.rule), f"rule is {self.rule!r}; it must be a function from a release to a step size.")
        if kind.is_private:
            self._check_privacy()
            kind.check_spec(self._spec())
            return
        for name in ("noise_multiplier", "target_epsilon"):
            require(
                getattr(self, name) is None,
                f"{name} is {getattr(self, name)} with mechanism {self.mechanism!r}, which is not private; leave it out.",
            )

    def _check_privacy(self) -> None:
        for name in ("noise_multiplier", "target_epsilon", "delta"):
            value = getattr(self, name)
            require(value is None or is_number(value), f"{name} is {value!r}; it must be a number.")
        require(0 < self.delta < 1, f"delta is {self.delta}; it must be between 0 and 1.")
        for name, words in (("adjacency", ADJACENCIES), ("target_per", get_args(Per)), ("gamma", get_args(GammaRule))):
            check_known(name, getattr(self, name), words)
        require(
            isinstance(self.epsilons, (tuple, list)) and len(self.epsilons) == 3,
            f"epsilons is {self.epsilons!r}; it must be three numbers, PrivUnit's (epsilon0, epsilon1, epsilon2).",
        )
        target = self.target_epsilon
        require(target is None or 0 < target < math.inf, f"target_epsilon is {target}; it must be positive and finite.")

    @property
    def private(self) -> bool:
        """Whether the algorithm is differentially private."""
        return mechanism_class(self.mechanism).is_private

    @property
    def step(self) -> Step:
        """ "safe" if the progress in the releases caps the step size, "paper" if the rule alone determines it."""
        return "safe" if isinstance(self.rule, Safe) else "paper"

    def bind(
        self,
        dimension: int,
        cohort: float,
        sampling: Sampling,
        rounds: int,
        secure: Secure = False,
        *,
        votes: tuple[VoteSpec, ...] = (),
        one_time: OneTimeEvents | None = None,
    ) -> Mechanism:
        """Build the mechanism of the first round, with all constants.

        Formal guarantee: with `target_epsilon`, all rounds together (or each round, by `target_per`) stay at or below the
        target, including the cost of secure noise.

        Args:
            dimension: number of parameters of the model.
            cohort: the public number of clients by which sums are divided.
            sampling: how the clients of a round are drawn, for the accountant.
            rounds: the number of rounds that the target is for.
            secure: False for plain noise, True for noise on the lattice, "strict" for discrete noise.
            votes: the votes that every client sends beside its update; only in central privacy.
        """
        kind = mechanism_class(self.mechanism)
        spec = self._spec(dimension=dimension, cohort=cohort, sampling=sampling, secure=secure, votes=votes)
        if self.target_per == "total":
            spec = replace(spec, rounds=rounds, one_time=one_time)
        if votes:
            kind.check_spec(spec)
        mechanism = kind.bound(spec)
        # A run that asks for secure noise must never get plain noise.
        require(
            not secure or mechanism.noise_kind == secure,
            f"secure is {secure!r}, but mechanism {self.mechanism!r} draws no secure noise; its `bound` must return "
            "`spec.drawn(mechanism)`. A simulation can use secure=False.",
        )
        return mechanism

    def _spec(self, **facts: Any) -> MechanismSpec:
        return MechanismSpec(
            **{f.name: getattr(self, f.name) for f in fields(MechanismSpec) if hasattr(self, f.name)} | facts
        )


def clip_of(clip: Clip) -> float | AdaptiveClip:
    """Return the clip from a number, "adaptive" or an `AdaptiveClip`."""
    if isinstance(clip, AdaptiveClip):
        return clip
    if clip == "adaptive":
        return AdaptiveClip(quantile="auto")
    require(is_number(clip), f"clip is {clip!r}; it must be a positive number or 'adaptive'.")
    return float(clip)


def with_aggregation(algorithm: Algorithm, aggregation: Aggregation) -> Algorithm:
    """Return the algorithm with two-party aggregation of its sums (central privacy only); "plain" returns it unchanged."""
    check_known("aggregation", aggregation, get_args(Aggregation))
    if aggregation in ("plain", algorithm.mechanism):
        return algorithm
    require(
        algorithm.mechanism == "central-gaussian",
        f"aggregation is {aggregation!r} with mechanism {algorithm.mechanism!r}; two-party aggregation needs "
        "'central-gaussian'.",
    )
    return replace(algorithm, mechanism=aggregation)


def resolve_algorithm(
    algorithm: Algorithm, local: LocalOptimizer | None, mechanism: Mechanism, dimension: int, cohort: float
) -> Algorithm:
    """Set what depends on the noise of the bound mechanism: the adaptive clip, and longer steps with an automatic local rate."""
    if isinstance(algorithm.clip, AdaptiveClip):
        share, noise = mechanism.noise_share(dimension, cohort), mechanism.vote_noise(WITHIN_CLIP)
        algorithm = replace(algorithm, clip=algorithm.clip.resolve(share, noise / cohort))
    if isinstance(algorithm.rule, Safe) and local is not None and local.automatic:
        algorithm = replace(algorithm, rule=replace(algorithm.rule, subtracted=NOISE_SUBTRACTED))
    return algorithm
