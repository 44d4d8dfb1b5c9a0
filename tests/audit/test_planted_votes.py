"""Bugs of votes, planted one by one: the audit catches every one of them."""

from dataclasses import dataclass, replace

import pytest
import torch

from dpfedexp.audit import audit_mechanism, standard_cases
from dpfedexp.audit.mechanisms.bins import audit_bins, bin_cases
from dpfedexp.core.votes import centred
from dpfedexp.mechanisms import CentralGaussian
from dpfedexp.mechanisms.binned_vote import BinnedVote

SAMPLES, CONFIDENCE = 4000, 1 - 1e-6
CASES = {case.name: case for case in standard_cases()}
NAMES = ["central Gaussian, votes", "central Gaussian, votes, add-remove"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def caught(name: str, kind: type, samples: int = SAMPLES) -> bool:
    case = CASES[name]
    broken = kind(**{field: getattr(case.mechanism, field) for field in case.mechanism.__dataclass_fields__})
    found = audit_mechanism(replace(case, mechanism=broken), samples, 11, CONFIDENCE)
    return any(result.outcome == "BROKEN" for result in found)


@dataclass(frozen=True)
class TrustsItsClients(CentralGaussian):
    def collect(self, report):
        return replace(super().collect(report), votes=report.votes.sum(0))


@dataclass(frozen=True)
class QuarterOfTheNoiseOnOneVote(CentralGaussian):
    def release(self, sums, denominator, noise, scalar_noise):
        first, second, third = self.votes
        votes = (first, replace(second, noise=second.noise / 4), third)
        honest = CentralGaussian(self.clip, self.noise_multiplier, self.adjacency, self.numerator, None, votes)
        return honest.release(sums, denominator, noise, scalar_noise)


@dataclass(frozen=True)
class OneDrawForAllVotes(CentralGaussian):
    """Two votes with the same draw tell their difference without noise."""

    def release(self, sums, denominator, noise, scalar_noise):
        class Repeated:
            def normal(self, clients, width, device, dtype):
                return scalar_noise.normal(clients, 1, device, dtype).expand(1, width)

        return super().release(sums, denominator, noise, Repeated())


@dataclass(frozen=True)
class CountsFromZero(CentralGaussian):
    """Not centred: a client that leaves moves each sum by one, and not by a half."""

    def collect(self, report):
        sums = super().collect(report)
        return replace(sums, votes=sums.votes + 0.5 * sums.count)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [TrustsItsClients, QuarterOfTheNoiseOnOneVote, OneDrawForAllVotes])
def test_planted_bug_of_votes_beside_an_update_is_caught(name, kind):
    assert caught(name, kind)


def test_planted_votes_that_are_not_centred_are_caught():
    assert caught(NAMES[1], CountsFromZero)


def test_planted_share_of_a_secure_vote_that_is_not_held_is_caught():
    name = NAMES[0] + ", secure"

    @dataclass(frozen=True)
    class Trusts(type(CASES[name].mechanism)):
        def collect(self, report):
            return replace(super().collect(report), votes=report.votes.sum(0))

    assert caught(name, Trusts, 1500)


BINS = bin_cases()


def bins_caught(name: str, kind: type) -> bool:
    case = BINS[name]
    broken = kind(case.vote, case.bins, case.adjacency, case.secure)
    return any(result.outcome == "BROKEN" for result in audit_bins(name, broken, 2000, 11, CONFIDENCE))


class HalfNoise(BinnedVote):
    def release(self, sums, count, noise):
        return BinnedVote(replace(self.vote, noise=self.vote.noise / 2), self.bins).release(sums, count, noise)


class OneDrawForAllBins(BinnedVote):
    def release(self, sums, count, noise):
        class Repeated:
            def normal(self, clients, width, device, dtype):
                return noise.normal(clients, 1, device, dtype).expand(1, width)

        return super().release(sums, count, Repeated())


class AnswersInEveryBin(BinnedVote):
    def collect(self, values, bins):
        return torch.stack([super(AnswersInEveryBin, self).collect(values, bins * 0 + n)[n] for n in range(self.bins)])


class HoldsTheSumOnly(BinnedVote):
    """The range is enforced on the sum of a bin instead of on each client."""

    def collect(self, values, bins):
        twice = torch.cat([values, values[-1:]]), torch.cat([bins, bins[-1:]])
        sums = torch.zeros(self.bins, dtype=torch.float64).index_add_(0, twice[1], centred(twice[0], self.vote))
        return sums.clamp(-1.0, 1.0)


@pytest.mark.parametrize("kind", [HalfNoise, OneDrawForAllBins, AnswersInEveryBin, HoldsTheSumOnly])
def test_planted_bug_of_a_vote_in_bins_is_caught(kind):
    assert bins_caught("binned vote", kind)


@pytest.mark.parametrize("name", BINS)
def test_an_honest_vote_in_bins_is_not_caught_and_the_audit_has_power(name):
    for result in audit_bins(name, BINS[name], 2000, 11, CONFIDENCE):
        assert result.outcome != "BROKEN", result
        # System noise has no seed: few samples of it prove μ all but surely, ε only as a rule.
        assert result.holds or (BINS[name].secure and result.unit != "μ"), result
