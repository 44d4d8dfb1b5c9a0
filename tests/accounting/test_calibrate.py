"""Calibration inverts the accountants, on the safe side of the target."""

import math

import pytest
from events_by_hand import central, local
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpfedexp.accounting import GaussianEvent, NonPrivateEvent, Sampling, compose, gdp
from dpfedexp.accounting.calibrate import affordable_rounds, calibrate_noise, calibrate_privunit, epsilon, noise, rounds
from dpfedexp.accounting.events import central_gaussian
from dpfedexp.accounting.events import privunit as exact_event
from dpfedexp.errors import InputError


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.floats(-1, 2), st.floats(-10, -2), st.integers(1, 5000), st.sampled_from([central, local]))
def test_calibrate_of_epsilon_is_the_noise(log_z, log_delta, rounds, make):
    z, delta = 10.0**log_z, 10.0**log_delta
    target = compose([(make(z), rounds)], delta).epsilon
    assume(target > 1e-3)
    found = calibrate_noise(make, target_epsilon=target, delta=delta, rounds=rounds)
    assert found == pytest.approx(z, rel=1e-6)
    assert compose([(make(found), rounds)], delta).epsilon <= target


def test_calibrate_of_epsilon_is_the_noise_under_poisson_sampling():
    def make(noise: float) -> GaussianEvent:
        return central(noise, rate=0.1, adjacency="add-remove")

    target = compose([(make(1.0), 100)], 1e-5).epsilon
    assert calibrate_noise(make, target_epsilon=target, delta=1e-5, rounds=100) == pytest.approx(1.0, rel=1e-6)
    assert calibrate_noise(central, target_epsilon=8.0, delta=1e-5, rounds=50) == pytest.approx(8.48852, abs=1e-5)


def test_affordable_rounds_is_the_last_that_fits():
    for z, target in ((5.0, 8.0), (5.0, 15.4562), (2.0, 3.0), (20.0, 1.0)):
        rounds = affordable_rounds(central(z), target, 1e-5)
        assert rounds == 0 or compose([(central(z), rounds)], 1e-5).epsilon <= target
        assert compose([(central(z), rounds + 1)], 1e-5).epsilon > target
    assert affordable_rounds(central(5.0), 15.4562, 1e-5) == 50
    assert affordable_rounds(central(0.1), 1.0, 1e-5) == 0


def privunit(total: float):
    return exact_event(total / 3, total / 3, total / 3)


@pytest.mark.parametrize("one", [0.3, 6.0])
def test_privunit_target_in_total_inverts_the_tight_composition(one):
    target = compose([(privunit(one), 50)], 1e-5).epsilon
    found = calibrate_privunit(privunit, target_epsilon=target, delta=1e-5, rounds=50)
    assert found == pytest.approx(one, rel=1e-6)
    assert compose([(privunit(found), 50)], 1e-5).epsilon <= target
    assert found > target / 50
    assert calibrate_privunit(privunit, target_epsilon=one) == pytest.approx(one, rel=1e-6), "pure, for one report"


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


def found(event, target):
    return calibrate_noise(lambda z: event, target_epsilon=target, delta=1e-5, rounds=1)


def found_report(one, target):
    return calibrate_privunit(lambda _: privunit(3.0 * one), target_epsilon=target)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: found(NonPrivateEvent(), 1.0), "no noise multiplier up to"),
        (lambda: found(central(5.0), 100.0), "costs less. Lower target_epsilon"),
        (lambda: found_report(0.1, 5.0), "too costly for it. Lower it"),
        (lambda: found_report(1.0, 0.5), "no report is private enough"),
        (lambda: noise(0.0, 5, 1e-5), r"target_epsilon is 0.*above 0"),
        (lambda: noise(1.0, 0, 1e-5), "rounds is 0; it must be 1 or more"),
        (lambda: epsilon(0.0, 5, 1e-5), "noise_multiplier is 0.0; it must be a positive number."),
        (lambda: epsilon(1.0, 0, 1e-5), "rounds is 0; it must be a positive whole number."),
        (lambda: epsilon(1.0, 5, 1e-5, sampling_rate=0), "sampling_rate is 0; it must be above 0 and at most 1."),
        (lambda: epsilon(1.0, 5, 1e-5, adjacency="zero-out"), "adjacency is 'zero-out'; it must be"),
        (lambda: epsilon(1.0, 5, 2.0), "delta is 2.0; it must be"),
        (lambda: rounds(100.0, 1e9, 1e-5), f"more than {2**40} rounds fit in it. Lower it"),
        (lambda: noise(1.0, 5, 0.0), "delta is 0.0; Gaussian noise needs a delta above 0."),
        (lambda: noise(eps=1.0, rounds=5, delta=1e-5), "noise has no argument 'eps'"),
    ],
)
def test_wrong_uses_are_answered_in_a_sentence(call, sentence):
    with pytest.raises((InputError, TypeError), match=sentence):
        call()
