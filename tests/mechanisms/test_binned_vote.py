"""One vote over bins: the noise that is charged for is on every bin, and a client that leaves moves only its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpfedexp.accounting import Sampling
from dpfedexp.core.noise.chacha import ChaChaNoise
from dpfedexp.core.noise.lattice import STRICT_EXCESS
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.votes import Vote
from dpfedexp.errors import InputError
from dpfedexp.mechanisms.binned_vote import BinnedVote

PROBE = BinnedVote(Vote("loss fell", noise=4.0), 5)
LEAVING = replace(PROBE, adjacency="add-remove")


def released(probe, noise, count=1500):
    sums = probe.collect(torch.ones(20), torch.arange(20) % 5)
    return np.array([probe.release(sums, 20, noise(n)).tolist() for n in range(count)])


@pytest.mark.parametrize("secure", [False, True])
def test_every_bin_has_independent_noise_of_the_size_that_is_charged(secure):
    """1500 releases of five bins: the law of each by Kolmogorov and Smirnov, and correlations below 6/√1500."""
    probe = replace(PROBE, secure=secure)
    system = ChaChaNoise()
    found = released(probe, (lambda n: system) if secure else lambda n: Streams(n).at("probe", 1))
    standard = (
        (found - 0.6) * 20 / 4.0
    )  # four of the twenty clients stand in each bin with a share of ½; noise 4 on their sum
    for column in standard.T:
        assert stats.kstest(column, "norm").pvalue > 1e-7
    between = np.corrcoef(standard, rowvar=False) - np.eye(5)
    assert float(np.abs(between).max()) < 6 / np.sqrt(1500)


@pytest.mark.parametrize(("probe", "mu"), [(PROBE, 1 / 4), (LEAVING, 0.5 / 4)])
def test_all_the_bins_are_charged_as_one_vote(probe, mu):
    event = probe.event(Sampling())
    assert [query.name for query in event.queries] == ["loss fell"]
    assert (event.mu, event.exact) == (mu, True)
    other = "add-remove" if probe is PROBE else "replace-one"
    assert event.under(other).mu == pytest.approx(0.375 - mu, rel=1e-15)
    secure, strict = (replace(probe, secure=kind).event(Sampling()) for kind in (True, "strict"))
    assert (secure.mu, secure.exact) == (mu, False)
    assert strict.mu == pytest.approx(mu * (1 + STRICT_EXCESS), rel=1e-15)


def test_a_client_that_changes_its_bin_with_its_value_moves_less_than_one_that_stays():
    here = PROBE.collect(torch.tensor([1.0]), torch.tensor([0]))
    there = PROBE.collect(torch.tensor([0.0]), torch.tensor([3]))
    assert float((here - there).norm()) == pytest.approx(0.5**0.5, rel=1e-12)


@pytest.mark.parametrize("wrong", [{"bins": 0}, {"bins": 2.5}, {"vote": Vote("x", noise=0.0)}])
def test_a_probe_without_bins_or_noise_is_refused(wrong):
    with pytest.raises(InputError, match=r"bins is|noise 0"):
        replace(PROBE, **wrong)
