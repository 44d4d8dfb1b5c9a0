"""Calibration inverts the accountants, on the safe side of the target."""

from __future__ import annotations

import numpy as np
import pytest
from events_by_hand import central, local
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpfedexp.accounting import (
    GaussianEvent,
    NonPrivateEvent,
    Query,
    affordable_rounds,
    calibrate_noise,
    calibrate_privunit,
    compose,
)
from dpfedexp.accounting.charges import privunit as exact_event
from dpfedexp.errors import InputError


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    log_z=st.floats(-1, 2),
    log_delta=st.floats(-10, -2),
    rounds=st.integers(1, 5000),
    make=st.sampled_from([central, local]),
)
def test_calibrate_of_epsilon_is_the_noise(log_z, log_delta, rounds, make):
    z, delta = 10.0**log_z, 10.0**log_delta
    target = compose([(make(z), rounds)], delta).epsilon
    assume(target > 1e-3)
    assert calibrate_noise(make, target_epsilon=target, delta=delta, rounds=rounds) == pytest.approx(z, rel=1e-6)


def test_calibrate_of_epsilon_is_the_noise_with_the_papers_scalar_query():
    """Its noise is proportional to z², so there is no closed form."""

    def make(z: float) -> GaussianEvent:
        return GaussianEvent(
            "central", "replace-one", (Query("u", 1.0, 2.0, z), Query("s", 1.0, 1.0, 500 * z * z / 1000))
        )

    target = compose([(make(5.0), 50)], 1e-5).epsilon
    assert calibrate_noise(make, target_epsilon=target, delta=1e-5, rounds=50) == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize(
    ("z", "rate", "rounds", "adjacency"), [(1.0, 0.1, 100, "add-remove"), (2.0, 0.3, 20, "replace-one")]
)
def test_calibrate_of_epsilon_is_the_noise_under_poisson_sampling(z, rate, rounds, adjacency):
    def make(noise: float) -> GaussianEvent:
        return central(noise, rate=rate, adjacency=adjacency)

    target = compose([(make(z), rounds)], 1e-5).epsilon
    assert calibrate_noise(make, target_epsilon=target, delta=1e-5, rounds=rounds) == pytest.approx(z, rel=1e-6)


def test_calibrated_noise_never_exceeds_the_target():
    random = np.random.default_rng(6)
    for _ in range(100):
        target, delta, rounds = (
            10 ** random.uniform(-2, 3),
            10 ** random.uniform(-10, -2),
            int(10 ** random.uniform(0, 4)),
        )
        z = calibrate_noise(central, target_epsilon=target, delta=delta, rounds=rounds)
        assert compose([(central(z), rounds)], delta).epsilon <= target


def test_noise_is_monotone_in_every_argument():
    def noise(
        target: float = 8.0, delta: float = 1e-5, rounds: int = 50, adjacency: str = "replace-one", rate: float = 1.0
    ) -> float:
        make = lambda z: central(z, adjacency=adjacency, rate=rate)  # noqa: E731
        return calibrate_noise(make, target_epsilon=target, delta=delta, rounds=rounds)

    here = noise()
    assert here == pytest.approx(8.48852, abs=1e-5)
    assert noise(target=4.0) > here > noise(target=16.0)
    assert noise(delta=1e-7) > here > noise(delta=1e-3)
    assert noise(rounds=100) > here > noise(rounds=25)
    assert here == pytest.approx(2 * noise(adjacency="add-remove"), rel=1e-6)
    assert noise(rate=0.3, rounds=4) < noise(rounds=4)


def test_affordable_rounds_is_the_last_that_fits():
    for z, target in ((5.0, 8.0), (5.0, 15.4562), (2.0, 3.0), (20.0, 1.0)):
        rounds = affordable_rounds(central(z), target, 1e-5)
        assert rounds == 0 or compose([(central(z), rounds)], 1e-5).epsilon <= target
        assert compose([(central(z), rounds + 1)], 1e-5).epsilon > target
    assert affordable_rounds(central(5.0), 15.4562, 1e-5) == 50
    assert affordable_rounds(central(0.1), 1.0, 1e-5) == 0


def test_affordable_rounds_is_monotone():
    by_noise = [affordable_rounds(central(z), 8.0, 1e-5) for z in (1.0, 2.0, 5.0, 10.0)]
    by_target = [affordable_rounds(central(5.0), e, 1e-5) for e in (1.0, 2.0, 8.0, 100.0)]
    assert by_noise == sorted(by_noise)
    assert by_target == sorted(by_target)


def privunit(total: float):
    return exact_event(total / 3, total / 3, total / 3)


def test_privunit_target_per_round_is_the_epsilon_of_one_report():
    assert calibrate_privunit(privunit, target_epsilon=6.0) == pytest.approx(6.0, rel=1e-6)


@pytest.mark.parametrize("one", [0.3, 1.0, 3.0, 6.0])
def test_privunit_target_in_total_inverts_the_tight_composition(one):
    target = compose([(privunit(one), 50)], 1e-5).epsilon
    found = calibrate_privunit(privunit, target_epsilon=target, delta=1e-5, rounds=50)
    assert found == pytest.approx(one, rel=1e-6)
    assert compose([(privunit(found), 50)], 1e-5).epsilon <= target
    assert found > target / 50


def test_impossible_targets_are_sentences():
    with pytest.raises(InputError, match=r"target_epsilon is 0.*above 0"):
        calibrate_noise(central, target_epsilon=0.0, delta=1e-5, rounds=1)
    with pytest.raises(InputError, match="delta is 0"):
        calibrate_noise(central, target_epsilon=1.0, delta=0.0, rounds=1)
    with pytest.raises(InputError, match="no noise multiplier up to"):
        calibrate_noise(lambda z: NonPrivateEvent(), target_epsilon=1.0, delta=1e-5, rounds=1)
    with pytest.raises(InputError, match="nothing to calibrate"):
        calibrate_noise(lambda z: central(5.0), target_epsilon=100.0, delta=1e-5, rounds=1)
    with pytest.raises(InputError, match="sets no limit"):
        affordable_rounds(central(1e9), 100.0, 1e-5)
    with pytest.raises(InputError, match="rounds is 0"):
        calibrate_noise(central, target_epsilon=1.0, delta=1e-5, rounds=0)
