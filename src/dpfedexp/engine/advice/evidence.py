"""Two tests of whether released updates hold anything but noise. Post-processing: they read released and public numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import chdtrc

LEVEL = 0.01
"""How often a test takes noise for a signal. A run of nothing but noise is recognised all but one time in a hundred."""
DEVIATIONS = 2.326
"""How many standard deviations a normal number exceeds with probability `LEVEL`."""


def is_longer_than_noise(squares: Sequence[float], variances: Sequence[float], dimension: int) -> bool:
    """Whether updates are longer than noise alone: Σ‖c̄_t‖²/v_t of T rounds is χ² with dT degrees of freedom if they are not.

    Args:
        squares: ‖c̄_t‖² of each round.
        variances: v_t, the variance of the noise in a coordinate of each.
        dimension: d.

    >>> is_longer_than_noise([100.0, 100.0], [1.0, 1.0], 100), is_longer_than_noise([200.0], [1.0], 100)
    (False, True)
    """
    total = sum(square / variance for square, variance in zip(squares, variances, strict=True))
    return not float(chdtrc(dimension * len(squares), total)) > LEVEL


def alignment(moves: Sequence[float], travelled: float, dimension: int) -> float:
    """How far the moves of T rounds agree in direction, in standard deviations of what independent random directions would do.

    Moves of lengths a_t in independent uniform directions end at a squared distance with mean Σa² and variance
    2((Σa²)² − Σa⁴)/d. Rounds that push the same way end farther, rounds that take back what others did nearer. A signal that stays
    adds up over rounds while noise averages out, so this finds signals that no single round shows. It needs no noise level.

    Args:
        moves: a_t, how far the model moved in each round.
        travelled: how far it is from its start.
        dimension: d.

    >>> alignment([1.0] * 9, 3.0, 50)
    0.0
    >>> alignment([1.0] * 9, 9.0, 50) > 30
    True
    """
    squares = [move**2 for move in moves]
    total = sum(squares)
    spread = math.sqrt(max(2 * (total**2 - sum(square**2 for square in squares)) / dimension, 0.0))
    return (travelled**2 - total) / spread if spread > 0 else 0.0


def is_heard(signal: float, dimension: int) -> bool:
    """Whether `alignment` would notice pushes that all go the same way, with this signal over noise of all rounds together.

    T pushes of length s and noises of norm n travel T²s² + Tn² in squared distance. Noise alone travels Tn², with a standard
    deviation of Tn²·√(2/d), so the pushes make signal²·√(d/2) deviations, with signal = √T·s/n.
    """
    return signal**2 * math.sqrt(dimension / 2) >= DEVIATIONS
