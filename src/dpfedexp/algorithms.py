"""The paper's algorithms by name, each a few lines that compose the parts: a mechanism, a clip, a step size, a server.

An `Algorithm` is what the user asks for; `bind` completes it for a federation (dimension, clients, cohort, rounds), where noise
that was asked for by its ε is calibrated for the mechanism that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from dpfedexp import step_size
from dpfedexp.accounting import Event, Sampling, calibrate_noise, compose
from dpfedexp.accounting.events import ADJACENCIES, Adjacency
from dpfedexp.clipping import AdaptiveClip, check_radius
from dpfedexp.errors import InputError, nearest, require
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, Mechanism, NoPrivacy, PrivUnit, Release
from dpfedexp.mechanisms.gaussian import Numerator
from dpfedexp.mechanisms.privunit import GammaRule, best_split
from dpfedexp.mechanisms.secure import Secure, secure_mechanism
from dpfedexp.server import Adam, Extrapolate, Momentum, ServerOptimiser

MechanismName = Literal["none", "central-gaussian", "local-gaussian", "privunit"]
MECHANISMS = ("none", "central-gaussian", "local-gaussian", "privunit")
Clip = float | AdaptiveClip | Literal["adaptive"]
Control = Literal["update", "report"]
"""What a client's own control variate follows in DP-SCAFFOLD: its clipped update, or the randomised report of it."""
Rule = Callable[[Release, Mechanism], float]


@dataclass(frozen=True)
class Algorithm:
    """What is run: everything but the data, the model and the local steps.

    Exactly one of `noise_multiplier` and `target_epsilon` is given for Gaussian noise; `target_epsilon` is for all rounds together
    unless `target_per` is "round". PrivUnit takes its three ε per round, or a target that `bind` splits.

    >>> dp_fedavg(clip=1.0, noise_multiplier=5.0).private
    True
    """

    name: str
    mechanism: MechanismName
    rule: Rule = field(repr=False)
    clip: float | AdaptiveClip = math.inf
    numerator: Numerator | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_per: Literal["total", "round"] = "total"
    delta: float = 1e-5
    adjacency: Adjacency = "replace-one"
    epsilons: tuple[float, float, float] = (2.0, 2.0, 2.0)
    gamma: GammaRule = "exact"
    server: ServerOptimiser = field(default_factory=Extrapolate)
    scaffold: Control | None = None
    average_last: int = 1

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise InputError(
                f"mechanism is {self.mechanism!r}, which does not exist.{nearest(self.mechanism, MECHANISMS)}"
            )
        require(
            isinstance(self.average_last, int) and self.average_last >= 1,
            f"average_last is {self.average_last!r}; it must be a positive whole number.",
        )
        adaptive = isinstance(self.clip, AdaptiveClip)
        radius = self.clip.initial if isinstance(self.clip, AdaptiveClip) else self.clip
        if self.mechanism != "none" or radius != math.inf:
            check_radius("clip", radius)
        if self.mechanism == "none":
            return
        require(not adaptive or self.mechanism == "central-gaussian", _ADAPTIVE_LOCAL)
        require(0 < self.delta < 1, f"delta is {self.delta}; it must be between 0 and 1.")
        if self.adjacency not in ADJACENCIES:
            raise InputError(
                f"adjacency is {self.adjacency!r}, which does not exist.{nearest(self.adjacency, ADJACENCIES)}"
            )
        require(
            self.adjacency == "replace-one" or self.mechanism == "central-gaussian",
            "adjacency is 'add-remove' in a local setting: a client that reports at all can only be replaced; use 'replace-one'.",
        )
        if self.target_epsilon is not None:
            require(self.target_epsilon > 0, f"target_epsilon is {self.target_epsilon}; it must be positive.")
        if self.mechanism in ("central-gaussian", "local-gaussian"):
            require(
                (self.noise_multiplier is None) != (self.target_epsilon is None),
                f"noise_multiplier is {self.noise_multiplier} and target_epsilon is {self.target_epsilon}; "
                "give exactly one of them.",
            )
            z = self.noise_multiplier
            require(z is None or 0 < z < math.inf, f"noise_multiplier is {z}; it must be a positive number.")

    @property
    def private(self) -> bool:
        return self.mechanism != "none"

    def bind(
        self, dimension: int, clients: int, cohort: float, sampling: Sampling, rounds: int, secure: Secure = False
    ) -> Mechanism:
        """The mechanism that runs in the first round, with every constant in place: on the grid with `secure`.

        Formal guarantee: noise that was asked for by its ε is enough for the events of this very mechanism, with whatever its grid
        or its discrete noise costs: all the rounds together (or one of them, by `target_per`) stay at or below the target.

        Args:
            dimension: parameters of the model.
            clients: the public number of clients.
            cohort: the public number of clients that sums are divided by.
            sampling: who takes part, as the accountant is told.
            rounds: how many rounds the target is for.
            secure: False for plain noise, True for noise on the grid, "strict" for discrete noise.
        """

        def drawn(mechanism: Mechanism) -> Mechanism:
            return secure_mechanism(mechanism, strict=secure == "strict") if secure else mechanism

        if self.mechanism == "none":
            return drawn(NoPrivacy(self.clip if isinstance(self.clip, float) else math.inf))
        count = rounds if self.target_per == "total" else 1
        if self.mechanism == "privunit":
            return drawn(self._privunit(dimension, count))
        z = self.noise_multiplier
        if z is None:
            z = self._calibrate(lambda trial: drawn(self._gaussian(trial, dimension, cohort)).event(sampling), count)
        return drawn(self._gaussian(z, dimension, cohort))

    def _privunit(self, dimension: int, rounds: int) -> PrivUnit:
        assert not isinstance(self.clip, AdaptiveClip)
        if self.target_epsilon is None:
            return PrivUnit(self.clip, dimension, *self.epsilons, gamma=self.gamma)
        one = self.target_epsilon / rounds
        # The ε of a report is computed from its probabilities, so it need not be what was asked for to the last digit.
        for less in (0.0, *(2.0**-k for k in range(52, 1, -2))):
            bound = PrivUnit(self.clip, dimension, *best_split(one * (1.0 - less), dimension))
            if compose([(bound.event(Sampling()), rounds)], 0.0).epsilon <= self.target_epsilon:
                return bound
        raise InputError(
            f"target_epsilon is {self.target_epsilon:g} over {rounds} rounds, where PrivUnit's probabilities are no longer "
            "below 1; lower it."
        )

    def _calibrate(self, event: Callable[[float], Event], rounds: int) -> float:
        assert self.target_epsilon is not None
        most = math.inf
        if isinstance(self.clip, AdaptiveClip) and self.clip.count_noise is not None:
            # From z = 2·count_noise on the count alone would cost more than z does.
            most = 2.0 * self.clip.count_noise * (1.0 - 1e-6)
            require(
                compose([(event(most), rounds)], self.delta).epsilon < self.target_epsilon,
                f"adaptive clip: count_noise is {self.clip.count_noise:.4g}, and the count alone costs more than the "
                f"target_epsilon of {self.target_epsilon:g} over {rounds} rounds; raise it, or leave it out.",
            )
        z = calibrate_noise(
            lambda trial: event(min(trial, most)), target_epsilon=self.target_epsilon, delta=self.delta, rounds=rounds
        )
        return min(z, most)

    def _gaussian(self, z: float, dimension: int, cohort: float) -> CentralGaussian | LocalGaussian:
        if self.mechanism == "local-gaussian":
            assert not isinstance(self.clip, AdaptiveClip)
            return LocalGaussian(self.clip, z, self.numerator)
        assert self.numerator != "naive"
        if not isinstance(self.clip, AdaptiveClip):
            radius, count_noise, z_update = self.clip, None, z
        else:
            radius, count_noise = self.clip.initial, self.clip.noise_for(cohort, z)
            # The count's share of the budget comes out of the update's: together they cost what z alone costs.
            share = z**-2 - (2 * count_noise) ** -2
            require(
                share > 0,
                f"adaptive clip: count_noise is {count_noise:.4g}, too little for a noise multiplier of {z:.4g}; "
                f"it must be above {z / 2:.4g}.",
            )
            z_update = share**-0.5
        # σ_ξ = dσ²/M with σ² = z²C²/M, as a multiple of C² on the sum.
        scalar = dimension * z * z / cohort if self.numerator == "paper" else None
        return CentralGaussian(radius, z_update, self.adjacency, self.numerator, scalar, count_noise)

    def event(
        self, dimension: int, clients: int, cohort: float, sampling: Sampling, rounds: int, secure: Secure = False
    ) -> Event:
        """What one round of the bound algorithm charges."""
        return self.bind(dimension, clients, cohort, sampling, rounds, secure).event(sampling)


_ADAPTIVE_LOCAL = (
    "clip is 'adaptive' in a local setting: its count is released by a trusted server (Andrew et al. 2021), "
    "so it needs mechanism 'central-gaussian'."
)


def _clip(clip: Clip) -> float | AdaptiveClip:
    if isinstance(clip, AdaptiveClip):
        return clip
    if isinstance(clip, str):
        if clip != "adaptive":
            raise InputError(f"clip is {clip!r}; it must be a positive number or 'adaptive'.")
        return AdaptiveClip()
    return float(clip)


def _one(release: Release, mechanism: Mechanism) -> float:
    return 1.0


@dataclass(frozen=True)
class FixedRate:
    """The step-size rule η_g = rate: FedAvg with a server learning rate."""

    rate: float

    def __post_init__(self) -> None:
        require(0 < self.rate < math.inf, f"server rate is {self.rate}; it must be a positive number.")

    def __call__(self, release: Release, mechanism: Mechanism) -> float:
        return self.rate


def _fedexp(release: Release, mechanism: Mechanism) -> float:
    assert release.statistic is not None
    return step_size.fedexp(release.statistic, release.c_bar)


def _free(release: Release, mechanism: Mechanism) -> float:
    assert release.statistic is not None
    return step_size.free(release.statistic, release.c_bar, release.clip)


def _cdp(release: Release, mechanism: Mechanism) -> float:
    assert release.statistic is not None
    return step_size.cdp(release.statistic, release.c_bar)


def _ldp_gaussian(release: Release, mechanism: Mechanism) -> float:
    assert release.statistic is not None
    assert isinstance(mechanism, LocalGaussian)
    return step_size.ldp_gaussian(release.statistic, release.c_bar, mechanism.sigma)


def _ldp_privunit(release: Release, mechanism: Mechanism) -> float:
    assert release.statistic is not None
    return step_size.ldp_privunit(release.statistic, release.c_bar)


def _naive(release: Release, mechanism: Mechanism) -> float:
    assert release.statistic is not None
    return step_size.naive(release.statistic, release.c_bar)


def fedavg(*, server_rate: float = 1.0) -> Algorithm:
    """FedAvg without privacy: the mean of the updates, every client weighing the same.

    >>> fedavg().private
    False
    """
    return Algorithm("fedavg", "none", FixedRate(server_rate))


def fedexp() -> Algorithm:
    """FedEXP without privacy (eq:step-size-fedexp).

    >>> fedexp().average_last
    2
    """
    return Algorithm("fedexp", "none", _fedexp, average_last=2)


def dp_fedavg(
    *,
    clip: Clip,
    mechanism: MechanismName = "central-gaussian",
    server_rate: float = 1.0,
    server_momentum: float | None = None,
    **privacy,
) -> Algorithm:
    """DP-FedAvg; with `server_rate` a fixed global step size, with `server_momentum` momentum on the server.

    >>> dp_fedavg(clip=1.0, noise_multiplier=5.0).name
    'dp_fedavg'
    """
    if server_momentum is not None:
        return Algorithm(
            "dp_fedavgm", mechanism, _one, _clip(clip), server=Momentum(server_rate, server_momentum), **privacy
        )
    return Algorithm("dp_fedavg", mechanism, FixedRate(server_rate), _clip(clip), **privacy)


def dp_fedadam(
    *, clip: Clip, mechanism: MechanismName = "central-gaussian", server_rate: float = 0.03, **privacy
) -> Algorithm:
    """DP-FedAdam: the released mean as a pseudo-gradient for Adam (Reddi et al. 2021).

    >>> dp_fedadam(clip=1.0, noise_multiplier=5.0).server.lr
    0.03
    """
    return Algorithm("dp_fedadam", mechanism, _one, _clip(clip), server=Adam(lr=server_rate), **privacy)


def cdp_fedexp(
    *, clip: Clip, numerator: Literal["free", "paper"] = "free", average_last: int = 2, **privacy
) -> Algorithm:
    """CDP-FedEXP (Algorithm 2). The free rule by default: the paper's step size at DP-FedAvg's own ε.

    The reported model is the mean of the `average_last` newest iterates: post-processing, at no cost in privacy.

    >>> cdp_fedexp(clip="adaptive", target_epsilon=8.0, delta=1e-5).clip.initial
    1.0
    """
    rules = {"free": _free, "paper": _cdp}
    if numerator not in rules:
        raise InputError(f"numerator is {numerator!r}, which does not exist.{nearest(str(numerator), rules)}")
    return Algorithm(
        "cdp_fedexp", "central-gaussian", rules[numerator], _clip(clip), numerator, average_last=average_last, **privacy
    )


def ldp_fedexp(
    *,
    clip: Clip,
    mechanism: Literal["local-gaussian", "privunit"] = "local-gaussian",
    numerator: Numerator | None = None,
    average_last: int = 2,
    **privacy,
) -> Algorithm:
    """LDP-FedEXP (Algorithm 1), Gaussian or PrivUnit.

    The Gaussian default is the free rule; PrivUnit has the paper's, which costs nothing either.

    >>> ldp_fedexp(clip=0.3, noise_multiplier=0.7).numerator
    'free'
    """
    if mechanism == "privunit":
        if numerator not in (None, "paper"):
            raise InputError(
                f"numerator is {numerator!r} with PrivUnit; its norm estimate is free already, leave it out."
            )
        return Algorithm("ldp_fedexp", mechanism, _ldp_privunit, _clip(clip), average_last=average_last, **privacy)
    if mechanism != "local-gaussian":
        known = ("local-gaussian", "privunit")
        raise InputError(f"mechanism is {mechanism!r} for ldp_fedexp.{nearest(str(mechanism), known)}")
    rules: dict[str, Rule] = {"free": _free, "paper": _ldp_gaussian, "naive": _naive}
    chosen = numerator or "free"
    if chosen not in rules:
        raise InputError(f"numerator is {chosen!r}, which does not exist.{nearest(chosen, rules)}")
    return Algorithm("ldp_fedexp", mechanism, rules[chosen], _clip(clip), chosen, average_last=average_last, **privacy)


def naive_ldp_fedexp(*, clip: Clip, **privacy) -> Algorithm:
    """The paper's biased variant (eq:naive), for its figures: do not train with it.

    >>> naive_ldp_fedexp(clip=0.3, noise_multiplier=0.7).numerator
    'naive'
    """
    return replace(ldp_fedexp(clip=clip, numerator="naive", **privacy), name="naive_ldp_fedexp")


def dp_scaffold(
    *, clip: Clip, mechanism: MechanismName = "central-gaussian", control: Control = "update", **privacy
) -> Algorithm:
    """DP-SCAFFOLD at client level: the server's control variate comes from what is released anyway, at DP-FedAvg's ε.

    A client's own follows its clipped update, which never leaves it; with `control="report"`, in a local setting, it follows what
    the client sent, noise and all.

    >>> dp_scaffold(clip=1.0, noise_multiplier=5.0).scaffold
    'update'
    """
    if control not in get_args(Control):
        raise InputError(f"control is {control!r}; it must be 'update' or 'report'.")
    require(
        control == "update" or mechanism in ("local-gaussian", "privunit"),
        "control is 'report', but only in a local setting does a client randomise what it sends; use 'update'.",
    )
    return Algorithm("dp_scaffold", mechanism, _one, _clip(clip), scaffold=control, **privacy)


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedexp": fedexp,
    "dp_fedavg": dp_fedavg,
    "dp_fedadam": dp_fedadam,
    "cdp_fedexp": cdp_fedexp,
    "ldp_fedexp": ldp_fedexp,
    "naive_ldp_fedexp": naive_ldp_fedexp,
    "dp_scaffold": dp_scaffold,
}
