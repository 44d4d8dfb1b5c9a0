"""The step-size rules: from what a mechanism released to η_g. Each is an equation of `step_size.py`, and post-processing.

A rule is a function of the release. One that looks back too has an `init`, and is given its memory of the rounds before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from dpfedexp.core import step_size
from dpfedexp.errors import InputError, nearest, require
from dpfedexp.mechanisms import Release

Rule = Callable[[Release], float]
Memory = dict[str, Tensor]
"""What rounds leave for later ones, by name. A checkpoint holds it, so it must follow from released values alone."""
Step = Literal["safe", "paper"]
"""Whether the step size is capped by the progress that the releases show, or is what the paper's rule says."""


@runtime_checkable
class RuleWithMemory(Protocol):
    """A step-size rule that looks back. Its names in the memory begin with "step."."""

    def init(self, w: Tensor) -> Memory:
        """What it remembers before the first round.

        Args:
            w: the initial parameters [d], in the run's type and on the server's device (`round.server_device`).
        """
        ...

    def __call__(self, release: Release, memory: Memory) -> tuple[float, Memory]:
        """η_g, and what to remember, by the same names.

        Args:
            release: what the round let out.
            memory: what the rounds before left, not to be changed in place.
        """
        ...


AnyRule = Rule | RuleWithMemory


def initial_memory(rule: AnyRule, w: Tensor) -> Memory:
    """What a rule remembers before the first round: nothing, for a function of the release alone."""
    return rule.init(w) if isinstance(rule, RuleWithMemory) else {}


def next_step(rule: AnyRule, release: Release, memory: Memory) -> tuple[float, Memory]:
    """η_g and the memory after the round, in which whatever else remembers something is left as it was."""
    if not isinstance(rule, RuleWithMemory):
        return rule(release), memory
    eta_g, changed = rule(release, memory)
    return eta_g, {**memory, **changed}


@dataclass(frozen=True)
class Safe:
    """A rule under a cap that grows while the released means show progress and falls to 1 where they do not.

    Formal guarantee: η_g is between 1 and what the rule says, at most `step_size.FIRST` in the first round and at most 3/2 of what
    the round before took in any other. It is computed from released values and public numbers, so it costs no privacy.
    """

    inner: Rule

    def init(self, w: Tensor) -> Memory:
        """No round was before."""
        none = {f"step.c_bar.{ago}": torch.zeros(w.shape, dtype=torch.float32, device=w.device) for ago in (1, 2, 3)}
        numbers = torch.tensor([0.0, step_size.PRIOR, math.inf, 0.0, *[0.0] * 4], dtype=torch.float64)
        return {**none, "step.numbers": numbers.to(w.device)}

    def __call__(self, release: Release, memory: Memory) -> tuple[float, Memory]:
        """κ_t = `step_size.safe_cap`, η_g = max{1, min{κ_t, the rule's}}."""
        c_bar = release.c_bar
        if "step.numbers" not in memory:
            memory = self.init(c_bar)
        rounds, total, ceiling, failed, *steps = memory["step.numbers"].tolist()
        number, count = int(rounds) + 1, min(int(rounds), 4)
        before = tuple(memory[f"step.c_bar.{ago}"] for ago in (1, 2, 3))
        cap = step_size.FIRST
        if count:
            turn = step_size.turn(c_bar, before[0])
            # Where the noise depends on the updates, its variance is an upper bound: it is never more than all that is seen.
            variance = min(release.variance, float(c_bar.double().square().mean()))
            drift = step_size.drift(c_bar, before[:count], variance)
            total, evidence = step_size.evidence(total, drift)
            room = step_size.room(number, int(failed))
            cap, ceiling = step_size.safe_cap(tuple(steps[-count:]), ceiling, turn, drift, evidence, room)
            if step_size.has_failed(turn, drift) and math.isfinite(ceiling):
                failed = number
        eta_g = step_size.safe(self.inner(release), cap)
        return eta_g, {
            "step.c_bar.1": c_bar.float(),
            "step.c_bar.2": before[0],
            "step.c_bar.3": before[1],
            "step.numbers": memory["step.numbers"].new_tensor([number, total, ceiling, failed, *steps[1:], eta_g]),
        }


def stepped(rule: Rule, step: Step) -> AnyRule:
    """The rule with the step that a user asks for."""
    if step not in get_args(Step):
        raise InputError(f"step is {step!r}, which does not exist.{nearest(str(step), get_args(Step))}")
    return Safe(rule) if step == "safe" else rule


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
    """FedEXP without privacy (eq:step-size-fedexp)."""
    return step_size.fedexp(release.numerator, release.c_bar)


def free(release: Release) -> float:
    """The free rule: ‖Δ‖² comes back from one more coordinate inside the same ball."""
    return step_size.free(release.numerator, release.c_bar, release.clip)


def cdp(release: Release) -> float:
    """CDP-FedEXP with the paper's own query (eq:step-size-cdp)."""
    return step_size.cdp(release.numerator, release.c_bar)


def ldp_gaussian(release: Release) -> float:
    """LDP-FedEXP with Gaussian noise, whose known part is subtracted (eq:step-size-gaussian)."""
    return step_size.ldp_gaussian(release.numerator, release.c_bar, release.sigma)


def ldp_privunit(release: Release) -> float:
    """LDP-FedEXP with PrivUnit's own estimates of the squared norms (eq:step-size-privunit)."""
    return step_size.ldp_privunit(release.numerator, release.c_bar)


def naive(release: Release) -> float:
    """The biased rule that the paper warns of (eq:naive)."""
    return step_size.naive(release.numerator, release.c_bar)
