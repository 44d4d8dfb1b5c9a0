"""The local rate that sets itself: a first guess by votes before the first round, rescaled by votes after a few rounds.

Before the first round every client looks for its own best rate on a public grid, on the first model; the guess is the middle of the
noisy histogram. It can be far off: clients that hold few labels learn their own rows at rates at which the federation hardly moves,
and noise is not in it. So after a few rounds clients look at what the federation did: where the model went, s times as far, for s
on a grid, with public noise such as the rounds that are left would add at s times the rate. Each votes for the s with the lowest
loss on its rows, and rate and clip become s times as large. In every round clients say whether local training helped, and the rate
falls where it did not. A client whose own loss rose in its local steps sends nothing, which costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpfedexp.core.sums import VoteSpec

RATES = tuple(10.0 ** (step / 2) for step in range(-8, 5))
"""The public grid: half decades from 10⁻⁴ to 10²."""
RADII = tuple(10.0 ** (step / 2) for step in range(-10, 7))
"""The grid on which the first clip is looked for: half decades from 10⁻⁵ to 10³."""
SCALES = tuple(2.0**step for step in range(-4, 8))
"""The factors that the rate may be rescaled by: from 1/16 to 128."""
SCALE_TIMES = (0.06, 0.28, 0.55)
"""When it is rescaled, as shares of the rounds: after rounds 3, 14 and 28 of 50. The first time most of the way is still to come.
The second time the first, easy gains are over, and the direction is that of later rounds. The third time is for large noise only,
where the first votes see little else. With small noise it would lower rates that are still needed."""
LARGE_NOISE = 1.0
"""Noise is large where that of a round's mean update is longer than the clip."""
SHAKE = 0.6
"""The public noise of such a vote, over that which all rounds that are left would add. The rounds take back some of their noise."""
MAX_LOSS_DROP = 0.5
"""A round that takes away more than half of a client's loss overfits that client: the rate is too large."""
PRIOR_RATE, PRIOR_SPREAD, SCALE_SPREAD = 0.1, 2.0, 1.0
"""What is believed before any vote: a rate of about 0.1, within two bins, and later one that is right within one. It decides only
where too few clients have voted."""
SAME_LOSS = 1e-6
"""A change of a loss by less than this share of it is none."""
WIDTHS, PRESENT, MISFIT = (0.3, 0.5, 0.8, 1.2, 2.0), (0.25, 0.5, 0.75, 1.0), 0.05
"""What a histogram may look like: a bell of these widths in half decades, made by these shares of the clients, to 0.05 a bin."""
RATE_SHARE, CLIP_SHARE = 0.008, 0.002
"""The shares of the run's whole μ² that the two probes may cost: 0.4 and 0.1 percent more noise. A rate that is too large can end
a run, a first clip that is off by half a decade costs a round or two."""
IMPROVED = VoteSpec("improved")
"""Whether a client's own loss was lower after its local steps than before."""
MAX_NOT_IMPROVED = 0.1
"""The rate falls where a larger share of clients did not improve."""
SMOOTHING, EVIDENT_DEVIATIONS = 0.7, 3.0
"""The weight of the votes so far in the mean that is compared with it, and the deviations of its noise by which it must be below.
The rate never rises again, so noise must not lower it."""
MIN_RATE = 1e-3 * RATES[0]
"""The smallest rate: a rate of zero could never recover."""
FALL_SPEED = 2.0
"""How fast the rate falls: a round in which no client improved lowers it by e^(−2·0.9)."""


def best_rates(before: Tensor, after: Callable[[Tensor], Tensor]) -> Tensor:
    """Each client's best rate, as an index on the grid counted from 1; 0 for a client that no rate improves, [n].

    A client goes up by decades while its loss falls, and falls by at most half; then it tries half a decade to either side. It
    stops where its loss first rises: beyond a rate at which the model diverges, a larger one may give a constant model, which
    has a lower loss but is no better rate. Where the smallest rate is too large already, that is its vote.

    Args:
        before: their losses on the first model.
        after: from a rate for each to their losses after the local steps.
    """
    floor, flat = before - MAX_LOSS_DROP * before.abs(), SAME_LOSS * before.abs()
    walking, moved = torch.ones_like(before, dtype=torch.bool), torch.zeros_like(before, dtype=torch.bool)
    place, least = torch.zeros_like(before, dtype=torch.int64), before
    for number in range(0, len(RATES), 2):
        loss = after(torch.full_like(before, RATES[number]))
        walking &= (loss <= least + flat) & (loss >= floor)
        moved |= ~((loss - before).abs() <= flat)
        place, least = torch.where(walking, number, place), torch.where(walking, loss, least)
    grid = torch.tensor(RATES, dtype=before.dtype, device=before.device)
    lower, higher = ((place + step).clamp(0, len(RATES) - 1) for step in (-1, 1))
    below, above = after(grid[lower]), after(grid[higher])
    place = torch.where(below < least, lower, torch.where((above < least) & (above >= floor), higher, place))
    return torch.where(moved, place + 1, 0)


def nearest_radii(norms: Tensor) -> Tensor:
    """The radius of the grid that is nearest to each norm, by its number counted from 1, and 0 where a norm is no number, [n]."""
    place = (2.0 * torch.log10(norms.double() / RADII[0])).round().clamp(0, len(RADII) - 1)
    return torch.nan_to_num(place + 1, nan=0.0).long()


def rate_from_votes(shares: Tensor, deviation: float) -> float:
    """The rate from the noisy histogram of the clients' best rates, [K], with noise of this deviation."""
    return grid_value(RATES, _posterior_mean(len(RATES), shares, deviation, 2.0 * math.log10(PRIOR_RATE / RATES[0])))


def rate_for_noise(rate: float, noise_share: float) -> float:
    """The first guess over √max{1, n}, where n is the norm of the noise in a round's mean update over the clip, a public number.

    The clip follows the rate, and the noise the clip: where a round's noise is longer than any update, the first rounds should be
    short enough for the votes after them to have a model worth looking at.
    """
    return rate / math.sqrt(max(1.0, noise_share))


def scale_rounds(rounds: int, noise_share: float = math.inf) -> tuple[int, ...]:
    """After which rounds the rate is rescaled; never after the last.

    Args:
        rounds: of the run.
        noise_share: n; without it, all rounds after which any run of this length is asked.
    """
    times = SCALE_TIMES if noise_share > LARGE_NOISE else SCALE_TIMES[:2]
    found = {max(1, round(share * rounds)) for share in times}
    return tuple(sorted(number for number in found if number < rounds))


def shake_of(variance: float, rounds_left: int, noise_share: float) -> float:
    """The standard deviation of the public noise.

    It is divided by √max{1, n}: where noise is large, the loss prefers steps that are shorter than those that accuracy needs.

    Args:
        variance: of a round's noise in a coordinate of the model.
        rounds_left: the rounds that are still to come.
        noise_share: n.
    """
    return SHAKE * math.sqrt(variance * max(0, rounds_left) / max(1.0, noise_share))


def moves(anchor: Tensor, w: Tensor, shake: float, scale: float) -> tuple[Tensor, Tensor]:
    """How far clients look from the anchor: s(w − a ± noise). Over the two signs no term is linear in the noise, [d] each.

    The noise is a fixed draw, the same for all clients, and public.
    """
    noise = shake * torch.randn(len(w), generator=torch.Generator().manual_seed(0)).to(w)
    return scale * (w - anchor + noise), scale * (w - anchor - noise)


def best_scale(losses: Tensor) -> Tensor:
    """Each client's own best factor as its number on `SCALES`, counted from 1; 0 for one that is best off near the anchor, [n].

    Args:
        losses: of each client with each factor, [K, n].
    """
    place = torch.nan_to_num(losses, nan=math.inf).argmin(0)
    return torch.where(place > 0, place + 1, 0)


def rescaled(shares: Tensor, deviation: float) -> float:
    """The factor on the rate, from the shares of the clients whose own best it is, [K], with noise of this deviation."""
    return grid_value(SCALES, _posterior_mean(len(SCALES), shares, deviation, SCALES.index(1.0), SCALE_SPREAD))


def clip_from_votes(shares: Tensor, deviation: float) -> float:
    """The first clip from the noisy histogram of update norms, [K], with noise of this deviation."""
    return grid_value(RADII, _posterior_mean(len(RADII), shares, deviation, 2.0 * math.log10(1.0 / RADII[0])))


def _posterior_mean(bins: int, shares: Tensor, deviation: float, usual: float, spread: float = PRIOR_SPREAD) -> float:
    """The middle of a noisy histogram, as a fractional number of a bin: the mean of its posterior, the prior around the usual one.

    A bell in the middle θ, of width s, made by a share a of the clients, has a(F((k + ½ − θ)/s) − F((k − ½ − θ)/s)) in bin k, F
    logistic; the bins at the ends have its tails. A bin adds its squared distance from that in units of the noise, and
    of `MISFIT`: so a second, smaller mode, such as a third of the clients that prefer a constant model, does not move the result.
    """
    middles = torch.arange(-0.5, bins, 0.05, dtype=torch.float64)
    walls = torch.arange(bins - 1) + 0.5
    ends = torch.zeros(len(WIDTHS), len(middles), 1, dtype=torch.float64)
    widths = torch.tensor(WIDTHS, dtype=torch.float64)[:, None, None]
    below = torch.cat([ends, torch.sigmoid((walls - middles[:, None]) / widths), ends + 1.0], dim=2)
    bells = torch.tensor(PRESENT, dtype=torch.float64)[:, None, None, None] * below.diff(dim=2)
    seen = torch.nan_to_num(shares.double().cpu(), 0.0, 1.0, 0.0)
    distance = ((seen - bells).square() / (deviation**2 + MISFIT**2)).sum(-1)
    prior = ((middles - usual) / spread).square()
    weights = torch.softmax((-(distance + prior) / 2).flatten(), 0).reshape(distance.shape).sum((0, 1))
    return float(weights @ middles)


def grid_value(grid: tuple[float, ...], index: float) -> float:
    """The point of a geometric grid at a fractional index, inside the grid."""
    at = min(max(index, 0.0), len(grid) - 1.0) if math.isfinite(index) else 0.0
    return grid[0] * math.pow(grid[1] / grid[0], at)


def next_rate(rate: float, mean_improved: float, improved: float, deviation: float) -> tuple[float, float]:
    """The rate after a round, and the mean of the votes so far.

    Args:
        rate: in force.
        mean_improved: the smoothed share of clients that were helped so far; 1 at the beginning.
        improved: the round's released share.
        deviation: the standard deviation of its noise. The mean's is √((1 − λ)/(1 + λ)) of it, λ = `SMOOTHING`.
    """
    mean = SMOOTHING * mean_improved + (1.0 - SMOOTHING) * improved
    noise = deviation * math.sqrt((1.0 - SMOOTHING) / (1.0 + SMOOTHING))
    fallen = rate * math.exp(-FALL_SPEED * max(0.0, 1.0 - MAX_NOT_IMPROVED - mean - EVIDENT_DEVIATIONS * noise))
    return max(fallen, MIN_RATE), mean
