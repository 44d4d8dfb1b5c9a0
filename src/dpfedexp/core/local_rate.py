"""The automatic local rate (`lr="auto"`): a first guess by votes before the first round, rescaled by votes after a few rounds.

In every round clients also vote on whether local training helped, and the rate falls where it did not. docs/local-rate.md has the
reasons of the votes and of their constants.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpfedexp.core.sums import VoteSpec

RATES = tuple(10.0 ** (step / 2) for step in range(-8, 5))
"""The public grid of rates: half decades from 10⁻⁴ to 10²."""
RADII = tuple(10.0 ** (step / 2) for step in range(-10, 7))
"""The public grid for the first clip: half decades from 10⁻⁵ to 10³."""
SCALES = tuple(2.0**step for step in range(-4, 8))
"""The public grid of factors by which the rate may be rescaled: from 1/16 to 128."""
SCALE_TIMES, NOISY_SCALE_TIMES = (0.06, 0.28), (0.12, 0.28, 0.55)
"""When the rate is rescaled, as shares of the rounds: after rounds 3 and 14 of 50, with large noise after rounds 6, 14 and 28."""
LARGE_NOISE = 1.0
"""Noise is large if the norm of the noise in a round's mean update exceeds this many times the clip."""
SHAKE = 0.5
"""The public noise of a vote on the factor, over the noise of all remaining rounds. Later rounds correct some earlier noise."""
MAX_LOSS_DROP, FEW_ROWS = 0.5, 9.0
"""The largest share of its loss that a client with many rows may lose in a round; with m rows it is 1 − ½·m/(m + 9)."""
PRIOR_RATE, PRIOR_SPREAD, SCALE_SPREAD = 0.2, 2.0, 1.0
"""The prior before any vote: a rate of about 0.2, within two bins; and for later votes a factor of 1, within one bin."""
PRIOR_WEIGHT, MAX_CORRECTION = 2 / 3, 1.0
"""The first guess moves from the votes toward the prior by this share of their distance in bins, and by at most one bin."""
SAME_LOSS = 1e-6
"""A loss that changes by less than this share of itself counts as unchanged."""
WIDTHS, PRESENT, MISFIT = (0.3, 0.5, 0.8, 1.2, 2.0), (0.25, 0.5, 0.75, 1.0), 0.05
"""The shapes of histograms that are considered: bells of these widths in bins, made by these shares of the clients, ±0.05 a bin."""
RATE_SHARE, CLIP_SHARE = 0.008, 0.002
"""The shares of the run's whole μ² that the votes on rate and first clip may cost: 0.4 and 0.1 percent more noise."""
IMPROVED = VoteSpec("improved")
"""The vote on whether a client's own loss was lower after its local steps than before."""
MAX_NOT_IMPROVED = 0.1
"""The share of clients without improvement above which the rate falls."""
SMOOTHING, EVIDENT_DEVIATIONS = 0.7, 3.0
"""The weight of earlier votes in the running mean, and by how many standard deviations of its noise the mean must be too low.
These votes never raise the rate again, so noise alone must not lower it."""
MIN_RATE = 1e-3 * RATES[0]
"""The smallest rate: a rate of zero could never recover."""
FALL_SPEED = 2.0
"""How fast the rate falls: a round in which no client improved lowers it by e^(−2·0.9)."""


def best_rates(before: Tensor, sizes: Tensor, after: Callable[[Tensor], Tensor]) -> Tensor:
    """Each client's best rate, as an index on `RATES` counted from 1; 0 for a client whose loss no rate changes, [n].

    A client goes up by decades while its loss falls by at most half (more with few rows); then it tries half a decade to either
    side. It stops where its loss first rises: beyond a rate at which the model diverges, a larger one may give a constant model,
    which has a lower loss but is no better rate. Where the smallest rate is already too large, the client votes for the smallest.

    Args:
        before: the clients' losses on the initial model, [n].
        sizes: how many rows each client has, [n].
        after: a function from one rate per client to the clients' losses after the local steps, [n] to [n].
    """
    drop = 1.0 - (1.0 - MAX_LOSS_DROP) * sizes / (sizes + FEW_ROWS)
    floor, flat = before - drop * before.abs(), SAME_LOSS * before.abs()
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
    """The radius nearest to each norm, as an index on `RADII` counted from 1; 0 where a norm is NaN, [n]."""
    place = (2.0 * torch.log10(norms.double() / RADII[0])).round().clamp(0, len(RADII) - 1)
    return torch.nan_to_num(place + 1, nan=0.0).long()


def rate_from_votes(shares: Tensor, deviation: float) -> float:
    """Compute the rate from the noisy histogram of the clients' best rates, [K]; `deviation` is that of its noise."""
    return grid_value(RATES, _posterior_mean(len(RATES), shares, deviation, 2.0 * math.log10(PRIOR_RATE / RATES[0])))


def first_rate(voted: float, noise_share: float) -> float:
    """The rate of the first rounds: the rate of the votes, moved toward `PRIOR_RATE` by at most one bin of the grid.

    It moves up with large noise only (n of `scale_rounds`): with little noise, later votes find a larger rate by themselves.
    """
    bins = 2.0 * PRIOR_WEIGHT * math.log10(PRIOR_RATE / voted)
    most = MAX_CORRECTION if noise_share > LARGE_NOISE else 0.0
    return voted * math.pow(10.0, min(max(bins, -MAX_CORRECTION), most) / 2.0)


def scale_rounds(rounds: int, noise_share: float) -> tuple[int, ...]:
    """The rounds after which the rate is rescaled; never the last round.

    Args:
        rounds: the number of rounds of the run.
        noise_share: n, the norm of the noise in a round's mean update over the clip (public).
    """
    times = NOISY_SCALE_TIMES if noise_share > LARGE_NOISE else SCALE_TIMES
    found = {max(1, round(share * rounds)) for share in times}
    return tuple(sorted(number for number in found if number < rounds))


def shake_of(variance: float, rounds_left: int, noise_share: float) -> float:
    """The standard deviation of ξ, the public noise that `moves` adds in a vote on the factor.

    It is divided by √max{1, n}: where noise is large, the loss prefers shorter steps than accuracy does.

    Args:
        variance: of a round's noise in a coordinate of the model.
        rounds_left: the number of remaining rounds.
        noise_share: n of `scale_rounds`.
    """
    return SHAKE * math.sqrt(variance * max(0, rounds_left) / max(1.0, noise_share))


def moves(anchor: Tensor, w: Tensor, shake: float, scale: float) -> tuple[Tensor, Tensor]:
    """The two moves that clients evaluate, s(w − a ± ξ), [d] each, from a, the model at the last vote. Terms linear in ξ cancel.

    ξ is one fixed public draw, the same for all clients.
    """
    noise = shake * torch.randn(len(w), generator=torch.Generator().manual_seed(0)).to(w)
    return scale * (w - anchor + noise), scale * (w - anchor - noise)


def best_scale(losses: Tensor) -> Tensor:
    """Each client's best factor as an index on `SCALES`, counted from 1; 0 for a client that prefers the smallest factor, [n].

    Args:
        losses: the loss of each client with each factor, [K, n].
    """
    place = torch.nan_to_num(losses, nan=math.inf).argmin(0)
    return torch.where(place > 0, place + 1, 0)


def rescaled(shares: Tensor, deviation: float) -> float:
    """Compute the factor on the rate from the noisy shares of clients that voted for each factor, [K]."""
    return grid_value(SCALES, _posterior_mean(len(SCALES), shares, deviation, SCALES.index(1.0), SCALE_SPREAD))


def clip_from_votes(shares: Tensor, deviation: float) -> float:
    """Compute the first clip from the noisy histogram of update norms, [K]; `deviation` is that of its noise."""
    return grid_value(RADII, _posterior_mean(len(RADII), shares, deviation, 2.0 * math.log10(1.0 / RADII[0])))


def _posterior_mean(bins: int, shares: Tensor, deviation: float, usual: float, spread: float = PRIOR_SPREAD) -> float:
    """The center of a noisy histogram as a fractional bin index: its posterior mean, with a prior around the bin `usual`.

    A bell with center θ and width s, made by a share a of the clients, has a(F((k + ½ − θ)/s) − F((k − ½ − θ)/s)) in bin k, F
    logistic; the bins at the ends have its tails. Each bin adds its squared distance from the bell in units of the noise and of
    `MISFIT`: so a second, smaller mode, such as a third of the clients that prefer a constant model, does not move the result.
    """
    middles = torch.arange(-0.5, bins, 0.05, dtype=torch.float64)
    walls = torch.arange(bins - 1) + 0.5
    ends = torch.zeros(len(WIDTHS), len(middles), 1, dtype=torch.float64)
    widths = torch.tensor(WIDTHS, dtype=torch.float64)[:, None, None]
    below = torch.cat([ends, torch.sigmoid((walls - middles[:, None]) / widths), ends + 1.0], dim=2)
    bells = torch.tensor(PRESENT, dtype=torch.float64)[:, None, None, None] * below.diff(dim=2)
    seen = torch.nan_to_num(shares.double().cpu(), 0.0, 1.0, 0.0)
    distance = ((seen - bells).square() / (deviation * deviation + MISFIT * MISFIT)).sum(-1)
    prior = ((middles - usual) / spread).square()
    weights = torch.softmax((-(distance + prior) / 2).flatten(), 0).reshape(distance.shape).sum((0, 1))
    return float(weights @ middles)


def grid_value(grid: tuple[float, ...], index: float) -> float:
    """The value of a geometric grid at a fractional index, which is clamped to the grid."""
    at = min(max(index, 0.0), len(grid) - 1.0) if math.isfinite(index) else 0.0
    return grid[0] * math.pow(grid[1] / grid[0], at)


def next_rate(rate: float, mean_improved: float, improved: float, deviation: float) -> tuple[float, float]:
    """Return the rate after a round, and the running mean of the votes.

    Args:
        rate: the current rate.
        mean_improved: the running mean of the share of clients that improved; 1 at the beginning.
        improved: the share that this round released.
        deviation: the standard deviation of the noise in `improved`. The mean's is √((1 − λ)/(1 + λ)) of it, λ = `SMOOTHING`.
    """
    mean = SMOOTHING * mean_improved + (1.0 - SMOOTHING) * improved
    noise = deviation * math.sqrt((1.0 - SMOOTHING) / (1.0 + SMOOTHING))
    fallen = rate * math.exp(-FALL_SPEED * max(0.0, 1.0 - MAX_NOT_IMPROVED - mean - EVIDENT_DEVIATIONS * noise))
    return max(fallen, MIN_RATE), mean
