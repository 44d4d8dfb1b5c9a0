"""The server's step: its length by a step-size rule, its direction by a server optimizer.

A rule computes η_g from what a round released: one function per equation of the paper, then the free rule and the safe step, which
caps η_g by the progress that the released means of the last four rounds show (docs/step-size.md has the reasoning). `round.advance`
alone moves the model, w ← w + η_g·direction, so no optimizer can skip the step size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from dpfedexp.core.sums import Release
from dpfedexp.errors import InputError, check_known, checked, is_number, require

Rule = Callable[[Release], float]
Memory = dict[str, Tensor]
"""State of a rule or a server optimizer from round to round, by name. A checkpoint has it: it depends on released values only."""
Step = Literal["safe", "paper"]
"""The step size: "safe" caps it by the progress that the releases show, "paper" takes the value of the paper's rule."""


@runtime_checkable
class RuleWithMemory(Protocol):
    """A step-size rule with memory of earlier rounds. Its keys in the memory begin with "step."."""

    def init(self, w: Tensor) -> Memory:
        """Return the memory before the first round, from the initial parameters [d] on the server's device."""
        ...

    def __call__(self, release: Release, memory: Memory) -> tuple[float, Memory]:
        """Return η_g and the new memory, with the same keys; `memory` must not be changed in place."""
        ...


AnyRule = Rule | RuleWithMemory


def initial_memory(rule: AnyRule, w: Tensor) -> Memory:
    return rule.init(w) if isinstance(rule, RuleWithMemory) else {}


def next_step(rule: AnyRule, release: Release, memory: Memory) -> tuple[float, Memory]:
    """Return η_g and the memory after the round; entries that are not the rule's are unchanged."""
    if not isinstance(rule, RuleWithMemory):
        return rule(release), memory
    eta_g, changed = rule(release, memory)
    return eta_g, {**memory, **changed}


def one(release: Release) -> float:
    """η_g = 1: FedAvg."""
    return 1.0


@dataclass(frozen=True)
class FixedRate:
    """η_g = rate: FedAvg with a server learning rate."""

    rate: float

    def __post_init__(self) -> None:
        require(0 < self.rate < math.inf, f"server rate is {self.rate}; it must be a positive number.")

    def __call__(self, release: Release) -> float:
        return self.rate


def fedexp(release: Release) -> float:
    """eq:step-size-fedexp: (1/M) Σ‖Δ_i‖² / ‖Δ̄‖², at least 1 by Jensen's inequality."""
    return _ratio(release.numerator, release.c_bar)


def naive(release: Release) -> float:
    """eq:naive: (1/M) Σ‖c_i‖² / ‖c̄‖². Biased by the clients' own noise: ‖c_i‖² has dσ² of it, which averages do not reduce."""
    return _ratio(release.numerator, release.c_bar)


def target(mean_square: float, c_bar: Tensor) -> float:
    """eq:optimal-eta-g: (1/M) Σ‖Δ_i‖² / ‖c̄‖². Not private: no server may compute it."""
    return _ratio(mean_square, c_bar)


def ldp_gaussian(release: Release) -> float:
    """eq:step-size-gaussian: max{1, ((1/M) Σ‖c_i‖² − dσ²) / ‖c̄‖²}."""
    return max(1.0, _ratio(release.numerator - release.c_bar.numel() * release.sigma**2, release.c_bar))


def ldp_privunit(release: Release) -> float:
    """eq:step-size-privunit: max{1, (1/M) Σ ŝ_i / ‖c̄‖²}."""
    return max(1.0, _ratio(release.numerator, release.c_bar))


def cdp(release: Release) -> float:
    """eq:step-size-cdp: max{1, ((1/M) Σ‖Δ_i‖² + ξ) / ‖c̄‖²}; ξ is the noise that the mechanism has added."""
    return max(1.0, _ratio(release.numerator, release.c_bar))


def free(release: Release) -> float:
    """The free rule: max{1, (C² − C·ū_{d+1}) / ‖c̄‖²}, where u_i = (Δ_i, (C² − ‖Δ_i‖²)/C) is in the ball of radius C, like Δ_i.

    The numerator is unbiased for (1/M) Σ‖Δ_i‖² and costs no privacy beyond that of the update itself.
    """
    return max(1.0, _ratio(release.clip * release.clip - release.clip * release.numerator, release.c_bar))


FIRST_CAP = 4.0
"""The cap on η_g in the first round, before there is any evidence: four times the step of FedAvg."""
GROWTH = 1.5
"""The factor on the cap in a round of evident progress."""
SLOW_GROWTH = 1.1
"""The factor on the cap in a round of evident progress if the released mean turned by more than 90°, or above the ceiling."""
SHRINKAGE = 0.5
"""The factor on the cap in a round without progress: from η_g, the cap is back at 1 after log₂ η_g such rounds."""
CEILING_SHARE = 0.25
"""The ceiling after a failed step, as a share of that step. The cap grows fast only up to the ceiling, and slowly up to twice the
ceiling: steps of half the length had worked, and a run must not fail again and again, perhaps in its last round."""
FAILURE_MEMORY = 2.0
"""Longer steps are tried again when a run is this many times as old as it was at the failure: the first rounds, in which
everything changes, say little about late ones."""
SHARPEST_TURN = -0.5
"""cos 120°: with a sharper turn the step has failed. On a quadratic with eigenvalue a, noise alone gives a turn of −aη/2. Steps are
unstable above aη = 2, so a turn of −½ belongs to half of the largest stable step."""
EVIDENCE_DECAY = 0.8
"""The weight of earlier evidence in the next round: about five rounds count."""
MAX_DRIFT = 3.0
"""The largest drift of one round, in standard deviations, so that a strong start is soon forgotten."""
FAILED_DRIFT = -2.0
"""The drift of one round, in standard deviations, below which the steps have failed. Noise alone causes that once in 44 rounds."""
PRIOR_EVIDENCE = 10.0 / 3.0
"""A₁, which gives evidence of 2: the paper's step is trusted until the first rounds contradict it."""
NOISE_SUBTRACTED = 0.5
"""The largest share of the noise's energy that the safe step subtracts with an automatic local rate. With a share of 1 the rule
would be infinite wherever the noise hides the mean, and only the cap would hold it."""
EVIDENCE_TO_GROW = 2.0
"""The evidence from which the cap grows; noise alone reaches it once in 22 rounds. The cap shrinks if the evidence is negative
(noise alone: every other round) and is unchanged in between."""


def turn(c_bar: Tensor, before: Tensor) -> float:
    """cos(c_t, c_{t−1}): 1 if two successive released means have the same direction, −1 if opposite; 0 where either is zero."""
    now, then = c_bar.double(), before.double()
    norms = float(now.norm()) * float(then.norm())
    return float(now @ then) / norms if norms > 0 else 0.0


def drift(c_bar: Tensor, before: tuple[Tensor, ...], variance: float) -> float:
    """⟨c_t + c_{t−1}, c_{t−2} + c_{t−3}⟩ in standard deviations of its value under noise alone, clamped to ±`MAX_DRIFT`.

    An oscillation of period 2 cancels in sums of two moves, so this measures whether the average of the last models still moves.
    `before` has c_{t−1}, c_{t−2} and c_{t−3}, as far as those rounds exist; `variance` is that of the noise in each coordinate
    of a released mean. Without noise, only the sign counts.
    """
    now, then = [c_bar, *before[:1]] if len(before) > 1 else [c_bar], before[1:] or before
    product = float(sum(c.double() for c in now) @ sum(c.double() for c in then))  # type: ignore[operator]
    deviation = variance * math.sqrt(len(now) * len(then) * c_bar.numel())
    if not math.isfinite(product) or product == 0.0:
        return 0.0
    score = product / deviation if deviation > 0 else math.copysign(math.inf, product)
    return max(-MAX_DRIFT, min(MAX_DRIFT, score))


def evidence(sum_before: float, drift: float) -> tuple[float, float]:
    """Return A_t = λA_{t−1} + drift_t, and the evidence A_t·√(1 − λ²): mean 0 and variance 1 + λ/2 = 1.4 under noise alone.

    For independent drifts the variance would be 1. Drifts of consecutive rounds share one of four products: they correlate by ¼.
    `sum_before` is A_{t−1}, and `PRIOR_EVIDENCE` before the second round.
    """
    total = EVIDENCE_DECAY * sum_before + drift
    return total, total * math.sqrt(1.0 - EVIDENCE_DECAY**2)


def room(round: int, failed: int) -> float:
    """max{1, t/(`FAILURE_MEMORY`·f)}: in round t, the factor on the limit that a failed step in round f set; f = 0: none failed."""
    return max(1.0, round / (FAILURE_MEMORY * failed)) if failed else 1.0


def has_failed(turn: float, drift: float) -> bool:
    """Whether the steps that were taken have failed: turn_t < `SHARPEST_TURN`, or drift_t < `FAILED_DRIFT`."""
    return not (drift >= FAILED_DRIFT and turn >= SHARPEST_TURN)


def safe_cap(
    taken: tuple[float, ...], ceiling: float, turn: float, drift: float, evidence: float, room: float = 1.0
) -> tuple[float, float]:
    """Return the cap κ_t and the ceiling, from the steps that were taken.

    After a failure (`has_failed`), κ_t = η_{t−1}/2, and the ceiling is at most a quarter of the longest step of the last four
    rounds. It is unchanged before there are three steps: two means can't distinguish a failure from an oscillation.
    Otherwise κ_t is η_{t−1}/2 if the evidence is negative, η_{t−1} if it is below `EVIDENCE_TO_GROW`, η_{t−1}·1.5 up to the
    ceiling if turn_t ≥ 0, and else η_{t−1}·1.1, up to twice the ceiling, or `room` times that if turn_t ≥ 0.
    `taken` has the steps of the last four rounds, newest last.
    """
    cap = taken[-1]
    if has_failed(turn, drift):
        lower = max(1.0, min(ceiling * room, CEILING_SHARE * max(taken)))
        return cap * SHRINKAGE, lower if len(taken) >= 3 else ceiling
    if evidence < 0:
        return cap * SHRINKAGE, ceiling
    if evidence < EVIDENCE_TO_GROW:
        return cap, ceiling
    if turn < 0 or cap >= ceiling:
        most = 2.0 * ceiling * (room if turn >= 0 else 1.0)
        return min(cap * SLOW_GROWTH, max(cap, most)), ceiling
    return min(cap * GROWTH, ceiling), ceiling


def safe(eta_g: float, cap: float) -> float:
    """max{1, min{κ_t, η_g}}: never above the rule's own η_g where that is at least 1, never below DP-FedAvg's 1."""
    return max(1.0, min(cap, eta_g))


@dataclass(frozen=True)
class Safe:
    """A rule under a cap that grows while the released means show progress and falls to 1 where they do not.

    `subtracted` is the largest share of the noise's energy that is subtracted from ‖c̄‖² before the rule divides by it: noise makes
    the paper's rule say 1 where the clients' mean is far shorter. The cap still needs evidence of progress.

    Formal guarantee: η_g is between 1 and the rule's value (at `subtracted`), at most `FIRST_CAP` in the first round and at most
    3/2 of the last round's step in any other. It is computed from released values and public numbers, so it costs no privacy.
    """

    inner: Rule
    subtracted: float = 0.0

    def init(self, w: Tensor) -> Memory:
        none = {f"step.c_bar.{ago}": torch.zeros(w.shape, dtype=torch.float32, device=w.device) for ago in (1, 2, 3)}
        numbers = torch.tensor([0.0, PRIOR_EVIDENCE, math.inf, 0.0, *[0.0] * 4], dtype=torch.float64)
        return {**none, "step.numbers": numbers.to(w.device)}

    def __call__(self, release: Release, memory: Memory) -> tuple[float, Memory]:
        """Return η_g = max{1, min{κ_t, the rule's η_g}}, with κ_t from `safe_cap`, and the new memory."""
        c_bar = release.c_bar
        if "step.numbers" not in memory:
            memory = self.init(c_bar)
        rounds, total, ceiling, failed, *steps = memory["step.numbers"].tolist()
        number, count = int(rounds) + 1, min(int(rounds), 4)
        before = tuple(memory[f"step.c_bar.{ago}"] for ago in (1, 2, 3))
        cap = FIRST_CAP
        if count:
            angle = turn(c_bar, before[0])
            # Where the noise depends on the updates, `variance` is an upper bound; the mean square of c̄ is another.
            variance = min(release.variance, float(c_bar.double().square().mean()))
            progress = drift(c_bar, before[:count], variance)
            total, significance = evidence(total, progress)
            space = room(number, int(failed))
            cap, ceiling = safe_cap(tuple(steps[-count:]), ceiling, angle, progress, significance, space)
            if has_failed(angle, progress) and math.isfinite(ceiling):
                failed = number
        eta_g = safe(self.inner(without_noise(release, self.subtracted)), cap)
        return eta_g, {
            "step.c_bar.1": c_bar.float(),
            "step.c_bar.2": before[0],
            "step.c_bar.3": before[1],
            "step.numbers": memory["step.numbers"].new_tensor([number, total, ceiling, failed, *steps[1:], eta_g]),
        }


def without_noise(release: Release, share: float) -> Release:
    """The release with a shorter c̄: ‖c̄‖² less a share of the noise's expected dσ², but at least (1 − share)·dσ².

    With ‖c̄‖² = dσ² the ratio is at most C²/(dσ²) = 1/n². The share is 0 where that reaches `FIRST_CAP` (noise hides no such step),
    and else as large as is needed for that, at most `share`.
    """
    square, energy = float(release.c_bar.double().square().sum()), release.c_bar.numel() * release.variance
    share = min(share, 1.0 - release.clip * release.clip / (FIRST_CAP * energy)) if energy > 0 else 0.0
    if share <= 0.0:
        return release
    left = max(square - share * energy, (1.0 - share) * energy)
    if not 0.0 < left < square:
        return release
    return replace(release, c_bar=release.c_bar * math.sqrt(left / square))


def rule_with_step(rule: Rule, step: Step) -> AnyRule:
    check_known("step", step, get_args(Step))
    return Safe(rule) if step == "safe" else rule


def _ratio(numerator: float, c_bar: Tensor) -> float:
    """numerator/‖c̄‖²; 1 if c̄ is zero, because no step size matters then, or if the ratio is not finite."""
    denominator = float(c_bar.double().square().sum())
    ratio = numerator / denominator if denominator > 0 else 1.0
    return ratio if math.isfinite(ratio) else 1.0


@runtime_checkable
class ServerOptimizer(Protocol):
    """A server optimizer: turns a released mean into the direction of the server's step.

    A new optimizer is one frozen dataclass with these two methods; a checkpoint identifies its run by the fields too.

    >>> from dataclasses import dataclass, replace
    >>> from dpfedexp import cdp_fedexp
    >>> @dataclass(frozen=True)
    ... class Halved:
    ...     def init(self, w):
    ...         return {}
    ...
    ...     def direction(self, c_bar, moments):
    ...         return 0.5 * c_bar, moments
    >>> replace(cdp_fedexp(clip=0.3, noise_multiplier=5.0), server=Halved()).server
    Halved()
    """

    def init(self, w: Tensor) -> Memory:
        """Return the moments before the first round, by name, from the initial parameters [d] on the server's device."""
        ...

    def direction(self, c_bar: Tensor, moments: Memory) -> tuple[Tensor, Memory]:
        """Return the direction [d], which is then multiplied by η_g, and the moments with the same names.

        `c_bar` is the released mean of the clients' updates [d]; neither it nor `moments` may be changed in place.
        """
        ...


@checked
@dataclass(frozen=True)
class Extrapolate:
    """The direction c̄ itself: FedEXP with the η_g of its step-size rule, FedAvg with η_g = 1."""

    def init(self, w: Tensor) -> Memory:
        return {}

    def direction(self, c_bar: Tensor, moments: Memory) -> tuple[Tensor, Memory]:
        return c_bar, moments


@checked
@dataclass(frozen=True)
class Momentum:
    """Server momentum: v ← βv + c̄, and the direction is lr·v."""

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        _require_positive("server rate", self.lr)
        require(0 <= self.beta < 1, f"server momentum is {self.beta}; it must be at least 0 and below 1.")

    def init(self, w: Tensor) -> Memory:
        return {"v": torch.zeros_like(w)}

    def direction(self, c_bar: Tensor, moments: Memory) -> tuple[Tensor, Memory]:
        v = self.beta * moments["v"] + c_bar
        return self.lr * v, {"v": v}


@checked
@dataclass(frozen=True)
class Adam:
    """FedAdam (Reddi et al. 2021): c̄ as a pseudo-gradient, no bias correction, adaptivity floor `eps`."""

    lr: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _require_positive("server rate", self.lr)
        _require_positive("server eps", self.eps)
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"server {name} is {getattr(self, name)}; it must be in [0, 1).")

    def init(self, w: Tensor) -> Memory:
        return {"m": torch.zeros_like(w), "v": torch.full_like(w, self.eps**2)}

    def direction(self, c_bar: Tensor, moments: Memory) -> tuple[Tensor, Memory]:
        m = self.beta1 * moments["m"] + (1 - self.beta1) * c_bar
        v = self.beta2 * moments["v"] + (1 - self.beta2) * c_bar.square()
        return self.lr * m / (v.sqrt() + self.eps), {"m": m, "v": v}


def _require_positive(name: str, value: float) -> None:
    require(is_number(value) and 0 < value < math.inf, f"{name} is {value!r}; it must be a positive number.")


def check_server(server: object) -> None:
    """Raise `InputError` unless `server` is a server optimizer; it is tested on a mean of zeros before any charge."""
    name = type(server).__name__
    if not isinstance(server, ServerOptimizer):
        raise InputError(f"server is a {name}; give a server optimizer such as Momentum(lr=1.0).")
    c_bar = torch.zeros(3, dtype=torch.float64)
    try:
        moments = server.init(c_bar)
        direction, after = server.direction(c_bar, moments)
        right = direction.shape == c_bar.shape and set(after) == set(moments)
        right = right and all(isinstance(moment, Tensor) for moment in (*moments.values(), *after.values()))
    except Exception as error:
        raise InputError(f"the server optimizer {name} fails on a mean of zeros: {error}.") from error
    require(right, f"the server optimizer {name} must give a direction of the mean's shape, and the moments of init().")
