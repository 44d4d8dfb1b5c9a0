"""One vector of one person: inside the promise, unbiased, in the kind it came in, and refused in one sentence."""

import math

import numpy as np
import pytest
import torch

from dpfedexp.accounting import Ledger, gdp, noise
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import privatize


def test_the_gaussian_report_costs_what_was_asked_for_and_its_noise_is_that_of_the_clip():
    report = privatize(torch.zeros(50_000), clip=0.5, epsilon=1.0, delta=1e-6)
    assert (report.epsilon, report.delta) == (pytest.approx(1.0, rel=1e-6), 1e-6)
    # Replacing one's vector moves it by 2C = 1; a standard deviation over 50,000 numbers is known to 1/√100,000: six of these.
    assert float(report.vector.std()) == pytest.approx(
        0.5 * noise(1.0, rounds=1, delta=1e-6), rel=6 / math.sqrt(100_000)
    )


def test_times_shares_the_promise_among_reports():
    one = privatize([1.0, 2.0], clip=1.0, epsilon=4.0, times=16)
    z = one.event.queries[0].noise
    assert gdp.epsilon(2.0 * math.sqrt(16) / z, 1e-5) == pytest.approx(4.0, rel=1e-6)
    assert one.epsilon < 4.0


def test_privunit_is_pure_and_unbiased():
    vector = torch.tensor([3.0, 0.0, -4.0])
    reports = [privatize(vector, clip=1.0, epsilon=6.0, mechanism="privunit", seed=seed) for seed in range(300)]
    assert (reports[0].epsilon, reports[0].delta) == (pytest.approx(6.0, rel=1e-6), 0.0)
    rows = torch.stack([report.vector for report in reports])
    # The clipped vector, to six deviations of the mean.
    assert torch.allclose(rows.mean(0), vector / 5, atol=6 * float(rows.std(0).max()) / math.sqrt(300))


def test_a_report_has_the_shape_and_kind_of_the_vector():
    array = privatize(np.ones((3, 4)), clip=1.0, epsilon=1.0)
    assert isinstance(array.vector, np.ndarray)
    assert (array.vector.shape, array.vector.dtype) == ((3, 4), np.float64)
    assert privatize(torch.ones(2, dtype=torch.bfloat16), clip=1.0, epsilon=1.0).vector.dtype == torch.float32
    assert privatize([1, 2], clip=1.0, epsilon=1.0).vector.shape == (2,)
    # What is not finite is a zero vector and does not show.
    report = privatize([math.nan, math.inf], clip=1.0, noise_multiplier=1e-6, seed=0)
    assert float(report.vector.abs().max()) < 1e-4


def test_only_a_seed_repeats_and_nothing_else_does():
    drawn = [privatize([1.0, 2.0], clip=1.0, epsilon=2.0, seed=seed) for seed in (3, 3, 4, None, None)]
    assert torch.equal(drawn[0].vector, drawn[1].vector)
    assert len({tuple(one.vector.tolist()) for one in drawn}) == 4
    # Without a seed every number lies on the lattice of secure noise, a few million steps of which make one deviation.
    exact, seeded = (privatize(np.ones(9), clip=1.0, noise_multiplier=1.0, seed=seed).vector for seed in (None, 3))
    assert np.array_equal(exact * 2.0**22, np.round(exact * 2.0**22))
    assert not np.array_equal(seeded * 2.0**22, np.round(seeded * 2.0**22))
    ledger = Ledger.in_memory()
    ledger.charge(1, drawn[-1].event)
    assert ledger.guarantee(1e-5).epsilon == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vector": ["a"]}, "vector is a list; it must be a tensor, an array or a list of numbers"),
        ({"vector": np.array(["a", "b"])}, "vector is an array of <U1; it must hold numbers"),
        ({"vector": []}, "vector is empty"),
        ({"clip": 0.0}, "clip is 0.0; it must be a positive number"),
        ({"clip": True}, "clip is True; it must be a positive number"),
        ({"epsilon": None}, "pass exactly one of"),
        ({"noise_multiplier": 1.0}, "pass exactly one of"),
        ({"mechanism": "privunit", "epsilon": None, "noise_multiplier": 1.0}, "noise_multiplier is 1.0 with PrivUnit"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"delta": 0.0}, "delta is 0.0; Gaussian noise needs a delta above 0"),
        ({"times": 0}, "times is 0; it must be a positive whole number"),
        ({"mechanism": "central-gaussian"}, "which protects a sum and not one vector"),
        ({"mechanism": "none"}, "which protects a sum and not one vector"),
        ({"mechanism": "gausian"}, "which does not exist. Did you mean"),
        ({"mechanism": "privunit", "vector": [1.0] * 3, "epsilon": 200.0}, "has an empty cap in double precision"),
    ],
)
def test_wrong_uses_are_answered_in_a_sentence(change, sentence):
    with pytest.raises(InputError, match=sentence):
        privatize(**{"vector": [1.0, 2.0], "clip": 1.0, "epsilon": 1.0, **change})
