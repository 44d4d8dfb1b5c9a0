"""A question in bins in place of an update: the noise that is charged for is on every bin, and a client moves only so much."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpfedexp.accounting import Sampling
from dpfedexp.algorithms.probe import bin_answers
from dpfedexp.core.noise import ChaChaNoise
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, Report
from dpfedexp.mechanisms.serialization import decode, encode
from dpfedexp.mechanisms.two_party import OneSidedGaussian, TwoPartyGaussian

from .one_round import collected

PLAIN = CentralGaussian(3.0, 7.0, numerator="free").asking("loss fell", 4.0)
LEAVING = CentralGaussian(3.0, 7.0, "add-remove").asking("loss fell", 4.0)


@pytest.mark.parametrize("mechanism", [PLAIN, PLAIN.secure(), TwoPartyGaussian(**vars(PLAIN))])
def test_every_bin_has_independent_noise_of_the_size_that_is_charged(mechanism):
    """500 releases of five bins: the law of each by Kolmogorov and Smirnov, and correlations below 6/√500."""
    added, system = collected(mechanism, bin_answers(torch.arange(20) % 5 + 1, 5)), ChaChaNoise()
    assert added.vector.tolist() == pytest.approx([2.0] * 5, rel=1e-5), "four clients in each bin"
    drawn = [mechanism.release(added, 20, system, system).c_bar.tolist() for _ in range(500)]
    draws = len(getattr(mechanism, "sides", ("server",)))
    standard = (np.array(drawn) * 20 - 2.0) / (4.0 * draws**0.5)
    for column in standard.T:
        assert stats.kstest(column, "norm").pvalue > 1e-7
    between = np.corrcoef(standard, rowvar=False) - np.eye(5)
    assert float(np.abs(between).max()) < 6 / np.sqrt(500)


@pytest.mark.parametrize(("mechanism", "mu"), [(PLAIN, 1 / 4), (LEAVING, 0.5 / 4)])
def test_all_the_bins_are_charged_as_one_vote(mechanism, mu):
    event = mechanism.event(Sampling())
    assert [query.name for query in event.queries] == ["loss fell"]
    assert (event.mu, event.exact) == (mu, True)
    other = "add-remove" if mechanism is PLAIN else "replace-one"
    assert event.under(other).mu == pytest.approx(0.375 - mu, rel=1e-15)
    secure, strict = (mechanism.secure(strict=kind).event(Sampling()) for kind in (False, True))
    assert (secure.mu, secure.exact) == (mu, False)
    assert strict.mu == pytest.approx(mu * (1 + 2.0**-20), rel=1e-15)
    assert mechanism.client_event().question


@pytest.mark.parametrize("mechanism", [PLAIN, PLAIN.secure(), OneSidedGaussian(**vars(PLAIN))])
def test_whatever_a_client_sends_moves_all_the_bins_together_by_at_most_a_half(mechanism):
    generator = torch.Generator().manual_seed(1)
    honest = bin_answers(torch.tensor([1, 5, 0]), 5)
    base = mechanism.collect(Report(honest)).vector
    for scale in (1e-3, 1.0, 1e6):
        own = scale * torch.randn(1, 5, generator=generator)
        moved = mechanism.collect(Report(torch.cat([honest, own]))).vector - base
        assert float(moved.norm()) <= 0.5 * (1 + 1e-6)


def test_an_answer_is_one_bin_and_who_abstains_sends_nothing():
    assert bin_answers(torch.tensor([2, 0]), 3).tolist() == [[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_a_question_travels_as_text():
    assert decode(encode(PLAIN)) == PLAIN
    with pytest.raises(InputError, match="question is"):
        decode(encode(PLAIN).replace("loss fell", "x" * 61))


def test_what_has_no_gaussian_noise_on_a_sum_asks_no_question():
    assert NoPrivacy(1.0).asking("rate", 0.0) == NoPrivacy(0.5, question="rate")
    with pytest.raises(InputError, match="its noise is not Gaussian"):
        LocalGaussian(1.0, 1.0).asking("rate", 1.0)
    assert replace(PLAIN, question="").event(Sampling()).queries[0].name == "update"
