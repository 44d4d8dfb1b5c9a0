"""Which floats are reachable tells neighboring inputs apart under plain noise, and tells nothing on the grid.

Mironov (2012) for Laplace noise; the same holds for Gaussian noise in floating point: near 0 floats are finer than near 1, so a
small output with bits below those of 1 can't have come from an input of 1.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from dpfedexp.core.noise import ChaChaNoise
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian

from .one_round import collected

TRIALS, WIDTH = 300, 256
CLIP, Z = 1.0, 0.7
CHANCE = 5.2 * 0.5 / np.sqrt(2 * TRIALS)
"""How far from one half a blind guess may come in all trials, once in ten million runs."""


def outputs(mechanism, bit, noise, trials=TRIALS):
    """What an observer sees of two neighbors: a client whose update is 0, or (1/16, …, 1/16) of norm 1 − a little."""
    row = torch.full((1, WIDTH), bit * CLIP / np.sqrt(WIDTH) * (1 - 2.0**-20))
    seen = [collected(mechanism, row, noise) for _ in range(trials)]
    return np.array([mechanism.release(sums, 1.0, noise, noise).c_bar.numpy() for sums in seen])


def guess(seen, input_bits):
    """0 where a small output has bits below those that an input of 1/16 leaves, else 1."""
    small = np.abs(seen) < CLIP / np.sqrt(WIDTH) / 2
    fine = np.mod(seen * 2.0**input_bits, 1.0) != 0
    return 1 - (small & fine).any(axis=1).astype(int)


def accuracy(mechanism, input_bits, trials=TRIALS):
    noise = ChaChaNoise()
    zero, one = (guess(outputs(mechanism, bit, noise, trials), input_bits) for bit in (0, 1))
    return ((zero == 0).mean() + (one == 1).mean()) / 2


CASES = {
    # Just below 1/16 the last bit is 2^-28 in float32 and 2^-57 in float64.
    "local float32": (LocalGaussian(CLIP, Z), 28),
    "central float64": (CentralGaussian(CLIP, Z), 57),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_noise_gives_its_input_away_through_its_low_bits(name):
    assert accuracy(*CASES[name]) > 0.98


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_noise_on_the_grid_gives_nothing_away(name, strict):
    mechanism, bits = CASES[name]
    trials = TRIALS // 6 if strict else TRIALS
    assert abs(accuracy(mechanism.secure(strict), bits, trials) - 0.5) < CHANCE * (TRIALS / trials) ** 0.5


@pytest.mark.parametrize("name", CASES)
def test_on_the_grid_the_low_bits_of_both_inputs_have_the_same_law(name):
    """The last four bits of the whole numbers: uniform under either input, so they are the same function of nothing."""
    mechanism = CASES[name][0].secure()
    step = 2.0**-21
    for bit in (0, 1):
        units = outputs(mechanism, bit, ChaChaNoise(), 400) / step
        near = np.abs(units) < 2**23  # Beyond that a float32 report has no room for the last bits.
        assert np.array_equal(units, np.round(units))
        counts = np.bincount(np.mod(units[near], 16).astype(int), minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-6
