"""The accountant in three functions says what the accountant says, and refuses in one sentence."""

import math

import pytest

from dpfedexp.accounting import Sampling, compose, epsilon, gdp, noise, rounds
from dpfedexp.accounting.charges import central_gaussian
from dpfedexp.errors import InputError


@pytest.mark.parametrize(("adjacency", "shift"), [("replace-one", 2.0), ("add-remove", 1.0)])
def test_without_sampling_epsilon_is_that_of_gaussian_differential_privacy(adjacency, shift):
    expected = gdp.epsilon(shift * math.sqrt(50) / 5.0, 1e-5)
    assert epsilon(5.0, 50, 1e-5, adjacency=adjacency) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("sampling", "adjacency"), [("poisson", "add-remove"), ("fixed", "replace-one")])
def test_sampling_is_handed_to_the_accountant(sampling, adjacency):
    event = central_gaussian(1.0, adjacency, Sampling(sampling, 0.02))
    found = epsilon(1.0, 200, 1e-6, sampling_rate=0.02, sampling=sampling, adjacency=adjacency)
    assert found == compose([(event, 200)], 1e-6).epsilon
    assert found < epsilon(1.0, 200, 1e-6, adjacency=adjacency)


def test_the_three_are_inverse_to_each_other():
    how = {"adjacency": "add-remove"}
    z = noise(3.0, 40, 1e-5, **how)
    assert epsilon(z, 40, 1e-5, **how) <= 3.0 < epsilon(z * 0.999, 40, 1e-5, **how)
    assert rounds(3.0, z, 1e-5, **how) == 40
    assert rounds(1e-3, 1.0, 1e-5, **how) == 0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: epsilon(0.0, 5, 1e-5), "noise_multiplier is 0.0; it must be a positive number."),
        (lambda: epsilon(1.0, 0, 1e-5), "rounds is 0; it must be a positive whole number."),
        (lambda: epsilon(1.0, 5, 1e-5, sampling_rate=0), "sampling_rate is 0; it must be above 0 and at most 1."),
        (lambda: epsilon(1.0, 5, 1e-5, adjacency="zero-out"), "adjacency is 'zero-out'; it must be"),
        (lambda: epsilon(1.0, 5, 2.0), "delta is 2.0; it must be"),
        (lambda: noise(1.0, 5, 0.0), "delta is 0.0; Gaussian noise needs a delta above 0."),
        (lambda: noise(eps=1.0, rounds=5, delta=1e-5), "noise has no argument 'eps'"),
    ],
)
def test_wrong_uses_are_answered_in_a_sentence(call, sentence):
    with pytest.raises((InputError, TypeError), match=sentence.replace("(", r"\(")):
        call()
