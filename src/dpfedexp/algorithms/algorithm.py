"""An algorithm: a mechanism, a clip, a step-size rule and a server optimizer, by their settings."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from dpfedexp.accounting import Event, Sampling
from dpfedexp.accounting.events import ADJACENCIES, Adjacency, GammaRule
from dpfedexp.core.clipping import AdaptiveClip, check_radius
from dpfedexp.core.step_size import AnyRule, Extrapolate, Safe, ServerOptimizer, Step, check_server
from dpfedexp.core.sums import VoteSpec
from dpfedexp.errors import InputError, checked, is_count, is_number, nearest, require
from dpfedexp.mechanisms import Mechanism, MechanismSpec, Secure, mechanism_class
from dpfedexp.mechanisms.base import Numerator, OneTimeEvents

Clip = float | AdaptiveClip | Literal["adaptive"]
Control = Literal["update", "report"]
"""What a client's own control variate follows in DP-SCAFFOLD: its clipped update, or the randomized report of it."""
Per = Literal["total", "round"]
Epsilons = tuple[float, float, float]
PAPER_EPSILONS: Epsilons = (2.0, 2.0, 2.0)
"""PrivUnit's ε₀, ε₁, ε₂ of the paper's experiments."""
Aggregation = Literal["plain", "two-party", "two-party-one-sided"]
"""Who adds the updates: one server that is trusted with them, or a server and a helper of which neither can read one
(docs/trust.md), with the noise of both or of the helper alone."""
HINTS = {
    "epsilon": "target_epsilon=8.0 for the whole run, or noise_multiplier",
    "eps": "target_epsilon=8.0 for the whole run, or noise_multiplier",
    "sigma": "noise_multiplier, the standard deviation over the clip",
    "noise": "noise_multiplier, the standard deviation over the clip",
    "clipping_norm": "clip",
    "max_grad_norm": "clip",
    "lr": "server_rate for the server; the clients' rate goes to local=Sgd(lr=…)",
}
"""Hints for arguments that have another name."""


@checked
@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm without data, model and local steps.

    Args:
        name: what statements and tables call it.
        mechanism: the name of its mechanism (`dpfedexp.mechanisms.MECHANISMS`).
        rule: from a release to η_g, with or without a memory of earlier rounds (`dpfedexp.core.step_size`).
        clip: the radius C, or how it adapts.
        numerator: which statistic the rule asks the mechanism for.
        noise_multiplier: z, the standard deviation of the noise over C, on the sum (central) or on each report (local). Exactly one
            of this and `target_epsilon` is given for Gaussian noise.
        target_epsilon: the ε that the run may cost at `delta`; the noise is calibrated for it.
        target_per: whether the target is for all rounds together or for each.
        delta: δ of the promise.
        adjacency: "replace-one" hides what a client holds, "add-remove" that it takes part at all (central only).
        epsilons: PrivUnit's ε₀, ε₁, ε₂ per round, where no target is given.
        gamma: PrivUnit's cap: "exact", "paper" or "optimal".
        server: what moves the model (`dpfedexp.core.step_size`).
        scaffold: what DP-SCAFFOLD's control variates follow, None without.
        average_last: how many of the newest iterates the reported model averages: post-processing, at no cost in privacy.

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
            if (wrong := getattr(self, name)) not in words:
                raise InputError(f"{name} is {wrong!r}, which does not exist.{nearest(str(wrong), words)}")
        require(
            isinstance(self.epsilons, (tuple, list)) and len(self.epsilons) == 3,
            f"epsilons is {self.epsilons!r}; it must be three numbers, PrivUnit's (epsilon0, epsilon1, epsilon2).",
        )
        target = self.target_epsilon
        require(target is None or 0 < target < math.inf, f"target_epsilon is {target}; it must be positive and finite.")

    @property
    def private(self) -> bool:
        """Whether it is differentially private."""
        return mechanism_class(self.mechanism).is_private

    @property
    def step(self) -> Step:
        """ "safe" where the step size is capped by the progress that the releases show, "paper" where it is the rule's own."""
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
        """The mechanism that runs in the first round, with every constant in place: on the lattice with `secure`.

        Formal guarantee: with `target_epsilon`, all rounds together (or each round, by `target_per`) stay at or below the
        target, including the cost of secure noise.

        Args:
            dimension: parameters of the model.
            cohort: the public number of clients that sums are divided by.
            sampling: who takes part, as the accountant is told.
            rounds: how many rounds the target is for.
            secure: False for plain noise, True for noise on the lattice, "strict" for discrete noise.
            votes: what is asked of every client beside its update; only a trusted server can ask.
        """
        kind = mechanism_class(self.mechanism)
        spec = self._spec(dimension=dimension, cohort=cohort, sampling=sampling, secure=secure, votes=votes)
        if self.target_per == "total":
            spec = replace(spec, rounds=rounds, one_time=one_time)
        if votes:
            kind.check_spec(spec)
        mechanism = kind.bound(spec)
        # Above all, noise that a run believes to be secure must be.
        require(
            not secure or mechanism.noise_kind == secure,
            f"secure is {secure!r}, but mechanism {self.mechanism!r} draws other noise; its `bound` must use `spec.drawn`.",
        )
        return mechanism

    def event(self, dimension: int, cohort: float, sampling: Sampling, rounds: int, secure: Secure = False) -> Event:
        """What one round of the bound algorithm charges; the arguments are those of `bind`."""
        return self.bind(dimension, cohort, sampling, rounds, secure).event(sampling)

    def _spec(self, **facts: Any) -> MechanismSpec:
        return MechanismSpec(
            **{f.name: getattr(self, f.name) for f in fields(MechanismSpec) if hasattr(self, f.name)} | facts
        )


def clip_of(clip: Clip) -> float | AdaptiveClip:
    """The clip from what a user may write for it."""
    if isinstance(clip, AdaptiveClip):
        return clip
    if clip == "adaptive":
        return AdaptiveClip(quantile="auto")
    require(is_number(clip), f"clip is {clip!r}; it must be a positive number or 'adaptive'.")
    return float(clip)


def with_aggregation(algorithm: Algorithm, aggregation: Aggregation) -> Algorithm:
    """The algorithm of central privacy with its sums made by two aggregators; "plain" leaves it as it is."""
    words = get_args(Aggregation)
    if aggregation not in words:
        raise InputError(f"aggregation is {aggregation!r}, which does not exist.{nearest(str(aggregation), words)}")
    if aggregation in ("plain", algorithm.mechanism):
        return algorithm
    require(
        algorithm.mechanism == "central-gaussian",
        f"aggregation is {aggregation!r} with mechanism {algorithm.mechanism!r}; it needs 'central-gaussian', whose sum the two "
        "aggregators make.",
    )
    return replace(algorithm, mechanism=aggregation)


def resolve_clip(algorithm: Algorithm, mechanism: Mechanism, dimension: int, cohort: float) -> Algorithm:
    """Replace an automatic quantile of the adaptive clip by a number, once the mechanism is bound."""
    if not isinstance(algorithm.clip, AdaptiveClip):
        return algorithm
    return replace(algorithm, clip=algorithm.clip.resolve_quantile(mechanism.noise_share(dimension, cohort)))
