"""The local rate that sets itself: chosen by votes before the first round, watched by votes from then on.

Before the first round every client tries one rate of a public grid, the one of its bin, on the first model, and says whether it
wants more. Rates below the right one are wanted by nearly all clients and rates above it by nearly none, so the sum of the bins'
means says where the right one is. In every later round clients say whether local training helped, and the rate falls where it did
not.

A client whose own loss rose in its local steps sends nothing. That is its own business, and costs no privacy.
"""

from __future__ import annotations

import math

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
RATE_SHARE, CLIP_SHARE = 0.008, 0.002
"""The shares of the run's whole μ² that the two probes may cost: 0.4 and 0.1 per cent more noise. A rate that is too large can end
a run, a first clip that is off by half a decade costs a round or two."""
HELPED = Ask("helped")
"""Whether a client's own loss was lower after its local steps than before."""
MOST_HARMED = 0.1
"""Where more clients than this say that local training did not help, the rate falls."""
SMOOTHING = 0.7
"""The weight of the votes so far in the mean that is compared with it: noise of one round must not move the rate."""
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

    A quarter of the clients is no vote for a rate, and three quarters are as good as all: far above the right rate some clients,
    who hold little of everything, are content with a model that says nothing.

    Args:
        means: which share of the clients of each bin wants more, noisy, [K].
        deviations: the standard deviations of that noise, [K].
    """
    return _weighed(RATES, float((2.0 * means - 0.5).clamp(0.0, 1.0).sum()) - 1.0, deviations, USUAL)


def located(means: Tensor, deviations: Tensor) -> float:
    """The first clip. The sum of the means is the expected number of radii that an update exceeds: the middle on the grid's scale.

    Args:
        means: which share of each bin's clients had updates longer than its radius, noisy, [K].
        deviations: the standard deviations of that noise, [K].
    """
    return _weighed(RADII, float(means.sum()) - 0.5, deviations, 1.0)


def _weighed(grid: tuple[float, ...], index: float, deviations: Tensor, usual: float) -> float:
    """The point of a half-decade grid at an index that votes say, drawn towards the usual one as much as their noise weighs."""
    doubt, spread = float(deviations.square().sum()), 2.0 * SPREAD
    weight = spread**2 / (spread**2 + doubt)
    return on_grid(grid, weight * index + (1.0 - weight) * 2.0 * math.log10(usual / grid[0]))


def on_grid(grid: tuple[float, ...], index: float) -> float:
    """The point of a half-decade grid at a fractional index, inside the grid."""
    at = min(max(index, 0.0), len(grid) - 1.0) if math.isfinite(index) else 0.0
    return grid[0] * math.pow(10.0, at / 2)


def watched(rate: float, mean_helped: float, helped: float) -> tuple[float, float]:
    """The rate after a round, and the mean of the votes so far.

    Args:
        rate: in force.
        mean_helped: the smoothed share of clients that were helped so far; 1 at the beginning.
        helped: the round's released share.
    """
    mean = SMOOTHING * mean_helped + (1.0 - SMOOTHING) * min(max(helped, 0.0), 1.0)
    return rate * math.exp(-FALL * max(0.0, 1.0 - MOST_HARMED - mean)), mean
