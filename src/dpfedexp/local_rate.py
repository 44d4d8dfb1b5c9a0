"""The local rate that sets itself: chosen by votes before the first round, watched by votes from then on.

Before the first round every client tries one rate of a public grid, the one of its bin, on the first model, and says whether it
wants more. Rates below the right one are wanted by nearly all clients and rates above it by nearly none: the right one is where the
bins' means step down. In every later round clients say whether local training helped, and the rate falls where it did
not.

A client whose own loss rose in its local steps sends nothing. That is its own business, and costs no privacy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpfedexp.votes import Ask

RATES = tuple(10.0 ** (step / 2) for step in range(-8, 5))
"""The public grid: half decades from 10⁻⁴ to 10²."""
RADII = tuple(10.0 ** (step / 2) for step in range(-10, 7))
"""The grid on which the first clip is looked for: half decades from 10⁻⁵ to 10³."""
BELOW = (10.0**-0.5, 0.1)
"""The rates that a client compares its own with, as shares of it. Two of them: where one destroys the model, a larger one may end
in a model that says nothing, which is better than that and no reason to want more."""
MOST_PROGRESS = 0.5
"""A round that takes away more than half of a client's loss learns that client by heart: the rate is too large."""
USUAL, SPREAD = 0.1, 1.0
"""What is believed before any vote: about 0.1, within a decade. It decides only where too few clients have voted."""
WIDTH, MISFIT = 0.5, 0.15
"""How votes fall from all to none: from nine tenths to one within a decade of the grid, and within 0.15 of that."""
RATE_SHARE, CLIP_SHARE = 0.008, 0.002
"""The shares of the run's whole μ² that the two probes may cost: 0.4 and 0.1 per cent more noise. A rate that is too large can end
a run, a first clip that is off by half a decade costs a round or two."""
HELPED = Ask("helped")
"""Whether a client's own loss was lower after its local steps than before."""
MOST_HARMED = 0.1
"""Where more clients than this say that local training did not help, the rate falls."""
SMOOTHING, EVIDENT = 0.7, 3.0
"""The weight of the votes so far in the mean that is compared with it, and the deviations of its noise by which it must be below.
The rate never rises again, so noise must not lower it."""
FALL = 2.0
"""How fast: a round in which nobody was helped lowers the rate by e^(−2·0.9)."""


def wants_more(before: Tensor, after: Tensor, smaller: Tensor) -> Tensor:
    """Which clients want a rate at least as large as the one they tried, [n] bool.

    Args:
        before: their losses on the first model.
        after: their losses after the local steps at the rate.
        smaller: their least losses after the local steps at the rates of `BELOW`, which must have been worse.
    """
    return (after < before) & (after < smaller) & (before - after <= MOST_PROGRESS * before.abs())


def probe_noise(mu: float, rounds: int, share: float) -> float:
    """The noise on each bin's sum of shares with which a probe costs a share of what so many rounds of μ cost together."""
    return 1.0 / (mu * math.sqrt(share * rounds))


def chosen(means: Tensor, deviations: Tensor) -> float:
    """The rate from the bins' noisy means: with clean votes, the largest rate of the grid that clients still want.

    Args:
        means: which share of the clients of each bin wants more, noisy, [K].
        deviations: the standard deviations of that noise, [K].
    """
    return on_grid(RATES, _edge(RATES, means, deviations, USUAL) - 0.5)


def slowed(rate: float, noise_share: float) -> float:
    """The rate over max{1, n}, where n is the norm of the noise in a round's mean update over the clip, a public number.

    Of gradient descent with noise of norm n, the best fixed step falls like 1/n. The clip follows the rate, and the noise the clip:
    where a round's noise is longer than any update, a shorter step leaves less of it in the model.

    Args:
        rate: what votes say, which were cast without that noise.
        noise_share: n.
    """
    return rate / max(1.0, noise_share)


def located(means: Tensor, deviations: Tensor) -> float:
    """The first clip: the radius that half of the updates exceed.

    Args:
        means: which share of each bin's clients had updates longer than its radius, noisy, [K].
        deviations: the standard deviations of that noise, [K].
    """
    return on_grid(RADII, _edge(RADII, means, deviations, 1.0))


def _edge(grid: tuple[float, ...], means: Tensor, deviations: Tensor, usual: float) -> float:
    """Where on the grid shares fall from 1 to 0: the mean of its posterior, from a prior around the usual point.

    A step at θ has the shares 1/(1 + e^((k − θ)/`WIDTH`)). Each bin adds its squared distance from them in units of its own noise,
    and of `MISFIT`, so that a share which no step explains, such as a third of the clients who are content with a model that says
    nothing, decides nothing.
    """
    edges = torch.arange(-0.5, len(grid), 0.05, dtype=torch.float64)
    shares = torch.sigmoid((edges[:, None] - torch.arange(len(grid))) / WIDTH)
    seen = torch.nan_to_num(means.double().cpu(), 0.5, 1.0, 0.0)
    distance = ((seen - shares).square() / (deviations.double().cpu().square() + MISFIT**2)).sum(1)
    prior = ((edges - 0.5 - 2.0 * math.log10(usual / grid[0])) / (2.0 * SPREAD)).square()
    weights = torch.softmax(-(distance + prior) / 2, 0)
    return float(weights @ edges)


def on_grid(grid: tuple[float, ...], index: float) -> float:
    """The point of a half-decade grid at a fractional index, inside the grid."""
    at = min(max(index, 0.0), len(grid) - 1.0) if math.isfinite(index) else 0.0
    return grid[0] * math.pow(10.0, at / 2)


def watched(rate: float, mean_helped: float, helped: float, deviation: float) -> tuple[float, float]:
    """The rate after a round, and the mean of the votes so far.

    Args:
        rate: in force.
        mean_helped: the smoothed share of clients that were helped so far; 1 at the beginning.
        helped: the round's released share.
        deviation: the standard deviation of its noise. The mean's is √((1 − λ)/(1 + λ)) of it, λ = `SMOOTHING`.
    """
    mean = SMOOTHING * mean_helped + (1.0 - SMOOTHING) * helped
    noise = deviation * math.sqrt((1.0 - SMOOTHING) / (1.0 + SMOOTHING))
    return rate * math.exp(-FALL * max(0.0, 1.0 - MOST_HARMED - mean - EVIDENT * noise)), mean
