"""Sums add, field by field. Votes: a client's share is within one half, and all votes together cost next to nothing."""

import itertools
import math

import pytest
import torch

from dpfedexp import cdp_fedexp, dp_fedavg, fedexp, ldp_fedexp
from dpfedexp.accounting import Sampling, compose
from dpfedexp.core import sums
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.noise import step_for
from dpfedexp.core.sums import Sums, Vote, VoteSpec, default_noise, shares, sum_shares, to_shares
from dpfedexp.errors import InputError


def test_every_field_adds():
    one = Sums(torch.tensor([1.0, 2.0]).double(), torch.tensor(3.0).double(), torch.tensor([4.0]).double(), 5)
    two = Sums(torch.tensor([10.0, 20.0]).double(), torch.tensor(30.0).double(), torch.tensor([40.0]).double(), 50)
    both = one + two
    assert both.vector.tolist() == [11.0, 22.0]
    assert (float(both.squares), float(both.votes), both.count) == (33.0, 44.0, 55)


def test_zero_is_of_its_width_in_double_precision():
    zero = Sums.zero(3, votes=1)
    assert zero.vector.tolist() == [0.0] * 3
    assert zero.vector.dtype == zero.squares.dtype == zero.votes.dtype == torch.float64
    assert (float(zero.squares), float(zero.votes), zero.count) == (0.0, 0.0, 0)
    # Squares and counts are separate numbers: adding to one in place must not show in the other.
    zero.squares.add_(1.0)
    assert float(zero.votes) == 0.0


LOSS = Vote("loss", -2.0, 8.0, noise=3.0)
ODD = [1e9, -1e9, math.inf, -math.inf, math.nan, 8.0, -2.0, 8.0000001, 1e308, -1e308, 0.0]


def test_a_share_is_within_a_half_whatever_the_value_and_the_middle_where_it_is_no_number():
    found = to_shares(torch.tensor(ODD, dtype=torch.float64), LOSS)
    assert found.dtype == torch.float64
    assert found.tolist() == [0.5, -0.5, 0.5, -0.5, 0.0, 0.5, -0.5, 0.5, 0.5, -0.5, -0.3]


def test_the_mean_of_values_inside_the_range_is_estimated_without_bias():
    values = torch.linspace(-2.0, 8.0, 11, dtype=torch.float64)
    assert sums.estimate(float(to_shares(values, LOSS).sum()), 11.0, LOSS) == pytest.approx(3.0, abs=1e-14)
    assert sums.estimate(0.0, 7.0, LOSS) == 3.0, "a client that does not answer counts as the middle"


def test_one_vote_has_the_noise_that_the_count_of_the_clip_always_had():
    for cohort, z in ((10, 5.0), (1000, 5.0), (30, 2.4), (4000, 0.3)):
        assert default_noise(cohort, z, 1) == max(cohort / 20.0, 5.0 * z)
    for votes, z in itertools.product((2, 3, 8), (0.5, 5.0, 80.0)):
        noise = default_noise(1.0, z, votes)
        assert 1.0 < (1.0 - votes * (z / (2.0 * noise)) ** 2) ** -0.5 <= 1.01, "a percent in the smallest cohort"


ASKS = (VoteSpec("loss", 0.0, 10.0), VoteSpec("loss fell"), VoteSpec("accuracy"))


@pytest.mark.parametrize(("epsilon", "votes", "secure"), [(1.0, 2, True), (8.0, 3, False), (16.0, 3, True)])
def test_votes_of_a_cohort_of_1000_cost_at_most_a_per_cent_more_noise_at_the_same_epsilon(epsilon, votes, secure):
    """With an adaptive clip and without: T = 50, δ = 1e-5. The run as a whole stays at its ε."""
    plain = dp_fedavg(clip=1.0, target_epsilon=epsilon)
    z = plain.bind(237, 1000, Sampling(), 50, secure).noise_multiplier
    for algorithm, asks in ((plain, ASKS[:votes]), (dp_fedavg(clip="adaptive", target_epsilon=epsilon), ASKS[1:votes])):
        bound = algorithm.bind(237, 1000, Sampling(), 50, secure, votes=asks)
        assert len(bound.votes) == votes
        assert 1.0 < bound.noise_multiplier / z <= 1.01
        spent = compose([(bound.event(Sampling()), 50)], 1e-5).epsilon
        assert 0.999 * epsilon < spent <= epsilon


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_a_noise_multiplier_buys_the_update_and_its_votes_together(adjacency):
    for clip in (1.0, AdaptiveClip(count_noise=30.0)):
        algorithm = cdp_fedexp(clip=clip, noise_multiplier=5.0, adjacency=adjacency)
        alone = cdp_fedexp(clip=1.0, noise_multiplier=5.0, adjacency=adjacency).bind(20, 100, Sampling(), 1)
        bound = algorithm.bind(20, 100, Sampling(), 1, votes=ASKS)
        assert bound.event(Sampling()).mu == pytest.approx(alone.event(Sampling()).mu, rel=1e-12)
        assert [vote.name for vote in bound.votes][-3:] == ["loss", "loss fell", "accuracy"]
        assert (bound.votes[-3].low, bound.votes[-3].high) == (0.0, 10.0)


def test_a_count_noise_that_the_target_can_not_pay_is_refused_and_one_near_its_limit_is_not():
    with pytest.raises(InputError, match=r"count_noise is 0\.1.*target_epsilon of 8"):
        cdp_fedexp(clip=AdaptiveClip(count_noise=0.1), target_epsilon=8.0).bind(9, 100, Sampling(), 5, votes=ASKS)
    with pytest.raises(InputError, match=r"count_noise is 2.*must be above 2\.5"):
        cdp_fedexp(clip=AdaptiveClip(count_noise=2.0), noise_multiplier=5.0).bind(9, 10, Sampling(), 5, votes=ASKS)
    dear = cdp_fedexp(clip=AdaptiveClip(count_noise=1.3), target_epsilon=8.0).bind(9, 10, Sampling(), 4, votes=ASKS)
    assert compose([(dear.event(Sampling()), 4)], 1e-5).epsilon <= 8.0


def test_local_privacy_refuses_votes_and_without_privacy_they_have_no_noise():
    for algorithm in (ldp_fedexp(clip=0.3, noise_multiplier=0.7), ldp_fedexp(clip=0.3, mechanism="privunit")):
        with pytest.raises(InputError, match="local setting: one number of one client would need noise"):
            algorithm.bind(20, 100, Sampling(), 5, votes=ASKS)
    bound = fedexp().bind(20, 100, Sampling(), 5, votes=ASKS)
    assert [vote.noise for vote in bound.votes] == [0.0] * 3


def test_votes_have_names_of_their_own():
    loss, other = VoteSpec("loss"), VoteSpec("loss", 0.0, 2.0)
    within, wider = VoteSpec("within clip"), VoteSpec("within clip", 0.0, 2.0)
    for votes in ((loss, other), (loss, within), (wider,), (within,)):
        reason = "'loss' twice" if other in votes else "is the vote of adaptive clipping"
        with pytest.raises(InputError, match=reason):
            dp_fedavg(clip=1.0, noise_multiplier=1.0).bind(2, 10, Sampling(), 1, votes=votes)


def test_a_vote_that_makes_no_sense_is_refused():
    names = [{"name": name} for name in ("", "x" * 61, "a\nb")]
    ranges = [{"low": low} for low in (1.0, -math.inf, math.nan, "0")]
    noises = [{"noise": noise} for noise in ("1", -1.0, math.nan, math.inf)]
    for wrong in (*names, *ranges, *noises, {"high": math.inf}, {"low": -1e308, "high": 1e308}):
        with pytest.raises(InputError, match="vote"):
            Vote(**({"name": "loss", "noise": 1.0} | wrong))


def test_ballots_have_a_row_for_each_client_and_a_column_for_each_vote_that_is_theirs():
    within = torch.tensor([True, False])
    votes = (Vote("within clip", noise=2.0), LOSS)
    found = shares(votes, within, torch.tensor([[8.0], [3.0]]))
    assert found.tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    assert shares((), within, None) is None
    for wrong in (None, torch.zeros(2, 2), torch.zeros(3, 1), torch.zeros(2)):
        with pytest.raises(InputError, match=r"ballots has shape .* must be \(2, 1\).*loss"):
            shares(votes, within, wrong)
    with pytest.raises(InputError, match="none"):
        shares((), within, torch.zeros(2, 1))


@pytest.mark.parametrize("secure", [False, True, "strict"])
def test_no_client_moves_a_sum_by_more_than_a_half_whatever_it_sends(secure):
    votes = (Vote("within clip", noise=2.0), LOSS)
    known = torch.tensor([[0.5, 0.25], [-0.5, -0.125]], dtype=torch.float64)
    base = sum_shares(known, votes, secure)
    for value in ODD:
        sent = torch.cat([known, torch.full((1, 2), value, dtype=torch.float64)])
        moved = (sum_shares(sent, votes, secure) - base).abs()
        assert bool((moved <= 0.5).all()), value
        assert bool((moved == 0.0).all()) == (math.isnan(value) or value == 0.0)


def test_a_report_without_its_votes_is_refused():
    for sent in (None, torch.zeros(3), torch.zeros(3, 2)):
        with pytest.raises(InputError, match="votes have shape"):
            sum_shares(sent, (LOSS,))


@pytest.mark.parametrize("noise", [0.01, 1.0, 50.0, 3e5, 1e9])
@pytest.mark.parametrize("secure", [True, "strict"])
def test_the_lattice_of_a_vote_has_the_ends_on_it_and_rounds_to_the_nearest_point(noise, secure):
    """With ten million clients a twentieth is 5e5, and a lattice of a quarter: truncation would halve what clients say."""
    vote = Vote("loss", noise=noise)
    step = min(0.5, step_for(noise, secure == "strict"))
    values = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64)[:, None]
    found = sums.on_lattice(values, (vote,), secure)
    assert bool((found / step == (found / step).round()).all())
    assert float(found.abs().max()) == 0.5
    assert float((found - values).abs().max()) <= step / 2 * (1 + 1e-9)
    assert float(found.mean().abs()) < 1e-3
