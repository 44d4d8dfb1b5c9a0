"""Whether rows of draws that must be independent are: every row against every other and itself, at every shift."""

from __future__ import annotations

import math

import numpy as np

from dpfedexp.audit.bounds import Floats


def rare(confidence: float) -> float:
    """The failure probability of a limit of chance: a hundredth of a bound's, because limits are tight, and there are many."""
    return (1.0 - confidence) / 100.0


def largest_correlation(rows: Floats) -> float:
    """The largest |correlation| of two rows, one of them shifted around by any number of places (not by none against itself)."""
    centred = rows - rows.mean(1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    if not bool((norms > 0).all()):
        return 1.0
    spectra = np.fft.rfft(centred / norms, axis=1)
    largest = 0.0
    for n, spectrum in enumerate(spectra):
        found = np.abs(np.fft.irfft(spectra[n:].conj() * spectrum, n=rows.shape[1], axis=1))
        found[0, 0] = 0.0
        largest = max(largest, float(found.max()))
    return min(1.0, largest)


def correlation_limit(rows: int, length: int, failure: float) -> float:
    """What independent normal rows exceed with probability at most `failure`.

    One correlation exceeds t with probability at most (1 − t²)^(n/2): for two rows this is the tail of a point on a sphere, for a
    row against itself shifted it is Chernoff's bound, whose eigenvalues are the cosines. The mean that is taken out costs a
    dimension.
    """
    tests = rows * (rows + 1) / 2 * length
    return math.sqrt(-math.expm1(2.0 * math.log(failure / (2.0 * tests)) / (length - 3)))


def distance_limit(samples: int, failure: float) -> float:
    """Of an empirical distribution function from the true one (Dvoretzky, Kiefer, Wolfowitz; Massart's constant)."""
    return math.sqrt(math.log(2.0 / failure) / (2.0 * samples))


def distance(uniforms: Floats) -> float:
    """The largest distance of the samples' distribution function from that of the uniform law."""
    ordered = np.sort(uniforms)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
