"""One function per equation of the paper, named after it, then the free rule and the safe step.

Every rule takes the mean square in its numerator (as the setting provides it) and c̄, and returns η_g. Only released values may be
passed in a private run; `target` is the exception, and is for simulations that are labelled non-private. The safe step caps what a
rule says by what the released means of the last four rounds show (docs/step-size.md has the reasoning).
"""

from __future__ import annotations

import math

from torch import Tensor

FIRST = 4.0
"""The cap of the first round, before which nothing is known: four times the plain step at most."""
GROWTH = 1.5
"""What the cap grows by in a round of evident progress."""
CREEP = 1.1
"""What it grows by instead where the last step went too far for its own direction, or near a step that failed before."""
SHRINKAGE = 0.5
"""What it shrinks by where progress has ended, so that it is back at 1 after log₂ η_g rounds."""
RETREAT = 0.25
"""After a step that failed, growth is fast again only up to this share of it, the ceiling, and slow up to twice as much: half of a
step that failed did not fail, and a run must not try again and again, the last time in its last round."""
MEMORY = 2.0
"""How many times as old a run is as it was at a failure, when longer steps are tried again: the first rounds, in which everything
changes, say little about late ones."""
SHARPEST_TURN = -0.5
"""120°. Once the signal is gone, the turn along an eigenvalue a of a quadratic is −aη/2: here half of an unstable step."""
FORGETTING = 0.8
"""The weight of the evidence so far in the next round: what five rounds say counts."""
LOUDEST = 3.0
"""The most standard deviations that one round counts for, so that a strong beginning is soon forgotten."""
FAILED = -2.0
"""Standard deviations of one round's drift below which the steps have failed. Noise alone does so once in 44 rounds."""
PRIOR = 10.0 / 3.0
"""A₁, which makes evidence of 2: the paper's step is believed until the first rounds speak against it."""
EVIDENT = 2.0
"""The evidence from which the cap grows: noise alone reaches it once in 22 rounds. It shrinks below 0, where the evidence is
against progress (noise alone: every other round), and stays as it is between the two."""


def fedexp(mean_square: float, delta_bar: Tensor) -> float:
    """eq:step-size-fedexp: (1/M) Σ‖Δ_i‖² / ‖Δ̄‖², at least 1 by Jensen's inequality."""
    return _ratio(mean_square, delta_bar)


def naive(mean_square_c: float, c_bar: Tensor) -> float:
    """eq:naive: (1/M) Σ‖c_i‖² / ‖c̄‖². Biased by the noise's own energy dσ², which no number of clients averages out."""
    return _ratio(mean_square_c, c_bar)


def target(mean_square: float, c_bar: Tensor) -> float:
    """eq:optimal-eta-g: (1/M) Σ‖Δ_i‖² / ‖c̄‖². Not private: no server may compute it."""
    return _ratio(mean_square, c_bar)


def ldp_gaussian(mean_square_c: float, c_bar: Tensor, sigma: float) -> float:
    """eq:step-size-gaussian: max{1, ((1/M) Σ‖c_i‖² − dσ²) / ‖c̄‖²}."""
    return max(1.0, _ratio(mean_square_c - c_bar.numel() * sigma**2, c_bar))


def ldp_privunit(mean_s_hat: float, c_bar: Tensor) -> float:
    """eq:step-size-privunit: max{1, (1/M) Σ ŝ_i / ‖c̄‖²}."""
    return max(1.0, _ratio(mean_s_hat, c_bar))


def cdp(noisy_mean_square: float, c_bar: Tensor) -> float:
    """eq:step-size-cdp: max{1, ((1/M) Σ‖Δ_i‖² + ξ) / ‖c̄‖²}; the mechanism has added ξ already."""
    return max(1.0, _ratio(noisy_mean_square, c_bar))


def free(last_coordinate: float, c_bar: Tensor, clip: float) -> float:
    """max{1, (C² − C·ū_{d+1}) / ‖c̄‖²}, where u_i = (Δ_i, (C² − ‖Δ_i‖²)/C) lies in the same ball of radius C as Δ_i.

    The numerator is unbiased for (1/M) Σ‖Δ_i‖² and costs no privacy beyond that of the update itself.
    """
    return max(1.0, _ratio(clip * clip - clip * last_coordinate, c_bar))


def turn(c_bar: Tensor, before: Tensor) -> float:
    """cos(c_t, c_{t−1}): how sharply the released mean turns from one round to the next; 0 where one of them is zero.

    Args:
        c_bar: the released mean c_t.
        before: c_{t−1}.
    """
    return _cosine(c_bar.double(), before.double())


def drift(c_bar: Tensor, before: tuple[Tensor, ...], variance: float) -> float:
    """⟨c_t + c_{t−1}, c_{t−2} + c_{t−3}⟩ in standard deviations of what noise alone would make it, at most `LOUDEST` either way.

    No oscillation of period 2 enters the sums of two moves: this asks whether the model that is reported still goes somewhere.

    Args:
        c_bar: the released mean c_t.
        before: c_{t−1}, c_{t−2} and c_{t−3}, as far as there were such rounds; at least one.
        variance: of the noise in each coordinate of a released mean. Without noise, only the sign is left.
    """
    now, then = [c_bar, *before[:1]] if len(before) > 1 else [c_bar], before[1:] or before
    product = float(sum(c.double() for c in now) @ sum(c.double() for c in then))  # type: ignore[operator]
    deviation = variance * math.sqrt(len(now) * len(then) * c_bar.numel())
    if not math.isfinite(product) or product == 0.0:
        return 0.0
    score = product / deviation if deviation > 0 else math.copysign(math.inf, product)
    return max(-LOUDEST, min(LOUDEST, score))


def evidence(sum_before: float, drift: float) -> tuple[float, float]:
    """A_t = λA_{t−1} + drift_t, and A_t·√(1 − λ²), which has mean 0 and variance 1 + λ/2 = 1.4 where all there is is noise.

    It would be 1 if drifts were independent. Those of two rounds in a row share one of their four products: their correlation is ¼.

    Args:
        sum_before: A_{t−1}; `PRIOR` before the second round.
        drift: of this round.
    """
    total = FORGETTING * sum_before + drift
    return total, total * math.sqrt(1.0 - FORGETTING**2)


def room(round: int, failed: int) -> float:
    """max{1, t/(`MEMORY`·f)}: how many times as high as after the failure of round f steps may go in round t, with care.

    Args:
        round: t, counted from 1.
        failed: f, or 0 where there was no failure.
    """
    return max(1.0, round / (MEMORY * failed)) if failed else 1.0


def has_failed(turn: float, drift: float) -> bool:
    """Whether the steps that were taken have failed: turn_t < `SHARPEST_TURN`, or drift_t < `FAILED`."""
    return not (drift >= FAILED and turn >= SHARPEST_TURN)


def safe_cap(
    taken: tuple[float, ...], ceiling: float, turn: float, drift: float, evidence: float, room: float = 1.0
) -> tuple[float, float]:
    """κ_t and the ceiling, from the steps that were taken.

    Where a step has failed (`has_failed`), κ_t = η_{t−1}/2, and the ceiling is at most a quarter of the longest step of the last
    four rounds, if there are three of them: two means can't tell a swing from it.
    Else κ_t = η_{t−1}/2 where the evidence is negative, η_{t−1} where it is below `EVIDENT`, η_{t−1}·1.5 up to the ceiling where
    turn_t ≥ 0, and else η_{t−1}·1.1: up to twice the ceiling, and with turn_t ≥ 0 up to `room` times that.

    Args:
        taken: the steps of the last four rounds, newest last.
        ceiling: up to where growth is fast.
        turn: of this round.
        drift: of this round.
        evidence: its significance.
        room: as the function of this name has it.
    """
    cap = taken[-1]
    if has_failed(turn, drift):
        return cap * SHRINKAGE, max(1.0, min(ceiling * room, RETREAT * max(taken))) if len(taken) >= 3 else ceiling
    if evidence < 0:
        return cap * SHRINKAGE, ceiling
    if evidence < EVIDENT:
        return cap, ceiling
    if turn < 0 or cap >= ceiling:
        most = 2.0 * ceiling * (room if turn >= 0 else 1.0)
        return min(cap * CREEP, max(cap, most)), ceiling
    return min(cap * GROWTH, ceiling), ceiling


def safe(eta_g: float, cap: float) -> float:
    """max{1, min{κ_t, η_g}}: never above the rule's own η_g where that is at least 1, never below DP-FedAvg's 1.

    Args:
        eta_g: what the rule says.
        cap: κ_t.
    """
    return max(1.0, min(cap, eta_g))


def _cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is zero."""
    norms = float(a.norm()) * float(b.norm())
    return float(a @ b) / norms if norms > 0 else 0.0


def _ratio(numerator: float, c_bar: Tensor) -> float:
    """numerator/‖c̄‖²; a zero c̄ moves nothing, so its step size is 1."""
    denominator = float(c_bar.double().square().sum())
    ratio = numerator / denominator if denominator > 0 else 1.0
    return ratio if math.isfinite(ratio) else 1.0
