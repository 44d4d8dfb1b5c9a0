"""The noise multiplier that a run asks for, or the one that its target ε needs for the events of the very mechanism that runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpfedexp.accounting import Event, calibrate_noise, compose
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms.base import Mechanism, Terms


def check_gaussian(terms: Terms) -> None:
    """Exactly one of noise multiplier and target."""
    z = terms.noise_multiplier
    require(
        (z is None) != (terms.target_epsilon is None),
        f"noise_multiplier is {z} and target_epsilon is {terms.target_epsilon}; give exactly one of them.",
    )
    require(z is None or 0 < z < math.inf, f"noise_multiplier is {z}; it must be a positive number.")


def with_noise(terms: Terms, make: Callable[[float], Mechanism]) -> Mechanism:
    """`make(z)` with the z that is asked for, or the smallest one that meets the target, drawn as the terms say."""
    z = terms.noise_multiplier
    return terms.drawn(make(_calibrated(terms, make) if z is None else z))


def _calibrated(terms: Terms, make: Callable[[float], Mechanism]) -> float:
    target, most = terms.target_epsilon, math.inf
    if target is None:
        raise InputError("noise_multiplier and target_epsilon are missing; give exactly one of them.")

    def event(z: float) -> Event:
        return terms.drawn(make(min(z, most))).event(terms.sampling)

    if isinstance(terms.clip, AdaptiveClip) and terms.clip.count_noise is not None:
        # From z = 2·count_noise on the count alone would cost more than z does, and other votes cost less than 2% of z's share.
        most = 2.0 * terms.clip.count_noise * (0.99 if terms.votes else 1.0 - 1e-6)
        require(
            compose([(event(most), terms.rounds)], terms.delta).epsilon < target,
            f"adaptive clip: count_noise is {terms.clip.count_noise:.4g}, and the count alone costs more than the "
            f"target_epsilon of {target:g} over {terms.rounds} rounds; raise it, or leave it out.",
        )
    beside = terms.beside

    def once(z: float) -> Sequence[Event]:
        return () if beside is None else beside(terms.drawn(make(min(z, most))))

    return min(most, calibrate_noise(event, target_epsilon=target, delta=terms.delta, rounds=terms.rounds, beside=once))
