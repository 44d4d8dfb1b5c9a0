"""Events from settings beside those that the mechanisms make."""

from __future__ import annotations

import pytest

from dpfedexp.accounting.charges import central_gaussian as central_gaussian_event
from dpfedexp.accounting.charges import local_gaussian as local_gaussian_event
from dpfedexp.accounting.charges import votes_only
from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import Sampling
from dpfedexp.core.votes import within_clip
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian

SAMPLINGS = [Sampling(), Sampling("poisson", 0.1), Sampling("fixed", 0.3)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.kind)
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_a_central_mechanism_charges_the_event_of_its_settings(sampling, adjacency):
    plain = CentralGaussian(0.3, 5.0, adjacency)
    paper = CentralGaussian(0.3, 5.0, adjacency, "paper", 7.0, (within_clip(4.0),))
    assert plain.event(sampling) == central_gaussian_event(5.0, adjacency, sampling)
    joint = central_gaussian_event(5.0, adjacency, sampling, scalar_multiplier=7.0, votes=(("within clip", 4.0),))
    assert paper.event(sampling) == joint
    assert [query.name for query in joint.queries] == ["update", "squared norms", "within clip"]


VOTES = (("within clip", 4.0), ("loss", 5.0), ("loss fell", 7.0))


@pytest.mark.parametrize("rounds", [1, 50])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_votes_beside_an_update_cost_what_they_cost_one_by_one(adjacency, rounds):
    """The joint shift is that of the queries composed separately, under both adjacencies: an upper bound, for votes may be tied."""
    joint = central_gaussian_event(5.0, adjacency, votes=VOTES)
    single = [central_gaussian_event(5.0, adjacency), *(votes_only((vote,), adjacency) for vote in VOTES)]
    together = votes_only(VOTES, adjacency)
    assert not joint.exact
    assert together.exact
    assert [query.name for query in together.queries] == [name for name, _ in VOTES]
    for view in ("replace-one", "add-remove"):
        one_by_one = compose([(event.under(view), rounds) for event in single], 1e-5).epsilon
        assert compose([(joint.under(view), rounds)], 1e-5).epsilon == pytest.approx(one_by_one, rel=1e-9)
        two = compose([(single[0].under(view), rounds), (together.under(view), rounds)], 1e-5).epsilon
        assert two == pytest.approx(one_by_one, rel=1e-9)


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_under_sampling_votes_are_composed_with_the_update_and_cost_something(adjacency):
    sampling = Sampling("poisson", 0.1)
    alone = central_gaussian_event(5.0, adjacency, sampling)
    asking = central_gaussian_event(5.0, adjacency, sampling, votes=VOTES)
    assert asking.joint_mu is None
    assert not asking.exact
    assert asking.mu == pytest.approx(central_gaussian_event(5.0, adjacency, votes=VOTES).mu, rel=1e-12)
    costs = [compose([(event, 20)], 1e-5).epsilon for event in (alone, asking)]
    assert costs[0] < costs[1]


def test_a_release_of_votes_has_some_and_each_has_noise():
    with pytest.raises(InputError, match="votes is empty"):
        votes_only(())
    with pytest.raises(InputError, match="'loss' has noise 0"):
        votes_only((("loss", 0.0),))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.kind)
def test_a_local_mechanism_charges_the_event_of_its_settings(sampling):
    assert LocalGaussian(0.3, 0.7).event(sampling) == local_gaussian_event(0.7, sampling)
    assert LocalGaussian(0.3, 0.7, "naive").event(sampling) == local_gaussian_event(0.7, sampling, squares=True)


def test_squared_norms_without_a_noise_are_refused_and_not_left_out_of_the_charge():
    with pytest.raises(InputError, match="scalar_multiplier is missing"):
        CentralGaussian(0.3, 5.0, numerator="paper").event(Sampling())
