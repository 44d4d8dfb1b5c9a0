"""Who takes part, and what the accountant is told of it."""

from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dpfedexp import FixedSize, InputError, Poisson
from dpfedexp.accounting import Sampling, compose
from dpfedexp.algorithms.round import Full, LargerCohort
from dpfedexp.core.noise import ChaChaNoise, Streams
from dpfedexp.mechanisms import CentralGaussian


def test_poisson_with_rate_1_is_full_participation_in_who_comes_and_in_what_it_costs():
    """Down to the joint discount of the paper's two queries, which only rounds with everybody have."""
    everybody = Poisson(1.0)
    assert everybody.expected(30) == 30.0
    for noise in (Streams(0).at("participation", 1), ChaChaNoise()):
        assert torch.equal(everybody.cohort(30, noise), torch.arange(30))
    for adjacency in ("replace-one", "add-remove"):
        mechanism = CentralGaussian(0.3, 5.0, adjacency, "paper", 4.0)
        full, sampled = (mechanism.event(p.sampling(30)) for p in (Full(), everybody))
        assert sampled == full
        assert compose([(sampled, 7)], 1e-5) == compose([(full, 7)], 1e-5)
    assert Poisson(np.nextafter(1.0, 0.0)).sampling(30).kind == "poisson"


@pytest.mark.parametrize("rate", [1e-3, 0.1, 1 / 3, 0.7, 2.0**-53, 1e-17])
def test_the_rate_that_is_drawn_is_never_above_the_rate_that_is_charged(rate):
    """Of the 2⁵³ equally likely draws, those that take a client in are the ones below rate·2⁵³: counted at the boundary."""
    last = int(Fraction(rate) * 2**53)
    noise = Mock()
    noise.generator.return_value.random.return_value = np.array([max(last - 1, 0), last, last + 1]) * 2.0**-53
    # The draws 0, …, last − 1 take a client in.
    assert Poisson(rate).cohort(3, noise).tolist() == ([0] if last > 0 else [])
    assert Fraction(last, 2**53) <= Fraction(Poisson(rate).sampling(1000).rate)


def test_a_fixed_cohort_of_all_clients_is_full_and_a_smaller_one_is_not():
    assert FixedSize(30).sampling(30) == Sampling()
    assert FixedSize(29).sampling(30) == Sampling("fixed", 29 / 30)
    with pytest.raises(InputError, match="at most 28"):
        FixedSize(29).sampling(28)
    with pytest.raises(InputError, match=r"cohort is 2\.5"):
        FixedSize(2.5)


@pytest.mark.parametrize("noise", [Streams(0).at("participation", 1), ChaChaNoise()], ids=["seed", "system"])
def test_a_fixed_cohort_holds_different_clients_and_never_more_than_there_are(noise):
    for there in (1, 9, 10, 40):
        drawn = FixedSize(10).cohort(there, noise).tolist()
        assert drawn == sorted(set(drawn))
        assert len(drawn) == min(10, there)
        assert set(drawn) <= set(range(there))


@pytest.mark.parametrize("cohort", [9, 10.5, True])
def test_a_larger_cohort_is_a_whole_number_of_clients_and_no_smaller_than_the_simulated_one(cohort):
    assert LargerCohort(FixedSize(10), 10, stand_ins=10.0).factor == 1.0
    with pytest.raises(InputError, match="at least the 10 that a round simulates"):
        LargerCohort(FixedSize(10), cohort, stand_ins=10.0)
