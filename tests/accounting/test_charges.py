"""What a round charges: by its settings, by its mechanism, jointly, and for releases that are ε-DP by themselves."""

import json
import math
from dataclasses import asdict, replace

import pytest
from events_by_hand import central

from dpfedexp.accounting import PureEvent, Query, Sampling, compose, gdp
from dpfedexp.accounting.events import central_gaussian, from_json, local_gaussian, privunit, to_json, votes_only
from dpfedexp.accounting.gdp import joint_mu
from dpfedexp.accounting.pld import UNAMPLIFIED
from dpfedexp.accounting.statement import NOT_LEFT_OUT, other_adjacency
from dpfedexp.core.sums import within_clip_vote
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian

SAMPLINGS = [Sampling(), Sampling("poisson", 0.1), Sampling("fixed", 0.3)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.kind)
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_a_mechanism_charges_the_event_of_its_settings(sampling, adjacency):
    assert LocalGaussian(0.3, 0.7).event(sampling) == local_gaussian(0.7, sampling)
    assert LocalGaussian(0.3, 0.7, "naive").event(sampling) == local_gaussian(0.7, sampling, squares=True)
    plain = CentralGaussian(0.3, 5.0, adjacency)
    paper = CentralGaussian(0.3, 5.0, adjacency, "paper", 7.0, (within_clip_vote(4.0),))
    assert plain.event(sampling) == central_gaussian(5.0, adjacency, sampling)
    joint = central_gaussian(5.0, adjacency, sampling, scalar_multiplier=7.0, votes=(("within clip", 4.0),))
    assert paper.event(sampling) == joint
    both = 2.0 if adjacency == "replace-one" else 1.0
    assert joint.queries == (
        Query("update", 1.0, both, 5.0, diameter=2.0),
        Query("squared norms", 1.0, 1.0, 7.0, diameter=1.0),
        Query("within clip", 0.5, 0.5 * both, 4.0, diameter=1.0),
    )
    if sampling.kind == "full":
        # A bit moves from −½ to ½ whatever the vector does, so its shift comes on top of the joint one.
        replaced = joint.under("replace-one").mu
        assert replaced == pytest.approx(math.hypot(joint_mu(1.0, 5.0, 7.0), 1.0 / 4.0), rel=1e-14)
        return
    # One side of a sampled pair is a round without the client, so the two worst cases no longer exclude each other.
    assert joint.joint_mu is joint.other_mu is None
    assert not joint.exact
    shifts = (1.0 / 5.0, 1.0 / 7.0, 0.5 / 4.0)
    assert joint.radius == pytest.approx(math.hypot(*shifts), rel=1e-14)
    assert joint.mu == pytest.approx(math.hypot(both * shifts[0], shifts[1], both * shifts[2]), rel=1e-14)
    if sampling.kind == "poisson":
        assert compose([(plain.event(sampling), 20)], 1e-5).epsilon < compose([(joint, 20)], 1e-5).epsilon


VOTES = (("within clip", 4.0), ("loss", 5.0), ("loss fell", 7.0))


@pytest.mark.parametrize("rounds", [1, 50])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_votes_beside_an_update_cost_what_they_cost_one_by_one(adjacency, rounds):
    """The joint shift is that of the queries composed separately, under both adjacencies: an upper bound, for votes may be tied."""
    joint = central_gaussian(5.0, adjacency, votes=VOTES)
    single = [central_gaussian(5.0, adjacency), *(votes_only((vote,), adjacency) for vote in VOTES)]
    together = votes_only(VOTES, adjacency)
    assert not joint.exact
    assert together.exact
    assert [query.name for query in together.queries] == [name for name, _ in VOTES]
    for view in ("replace-one", "add-remove"):
        one_by_one = compose([(event.under(view), rounds) for event in single], 1e-5).epsilon
        assert compose([(joint.under(view), rounds)], 1e-5).epsilon == pytest.approx(one_by_one, rel=1e-9)
        two = compose([(single[0].under(view), rounds), (together.under(view), rounds)], 1e-5).epsilon
        assert two == pytest.approx(one_by_one, rel=1e-9)


def test_a_replacement_moves_a_sum_by_its_diameter_or_by_twice_the_bound_where_that_is_not_known():
    assert local_gaussian(0.7).queries == (Query("update", 1.0, 2.0, 0.7, diameter=2.0),)
    for bound in (0.5, 3.0):
        left_out = Query("update", bound, bound, 1.0)
        assert left_out.under("replace-one", "add-remove").sensitivity == 2.0 * bound
        known = Query("update", bound, bound, 1.0, diameter=1.5 * bound)
        assert known.under("replace-one", "add-remove").sensitivity == 1.5 * bound


def test_a_report_of_smaller_epsilons_tells_no_more_and_one_part_larger_tells_more():
    announced = privunit(2.0, 2.0, 4.0)
    smaller = [privunit(1.0, 2.0, 4.0), privunit(2.0, 1.0, 4.0), privunit(2.0, 2.0, 2.0), privunit(1.0, 1.0, 1.0)]
    for event in smaller:
        assert event.tells_no_more_than(announced, 1.0)
        assert not announced.tells_no_more_than(event, 1.0)
    # The same epsilon in fewer levels: the true one shows more often.
    assert not replace(announced, k=announced.k - 1).tells_no_more_than(announced, 1.0)


def test_what_has_no_noise_is_refused_and_not_left_out_of_the_charge():
    with pytest.raises(InputError, match="votes is empty"):
        votes_only(())
    with pytest.raises(InputError, match="'loss' has noise 0"):
        votes_only((("loss", 0.0),))
    with pytest.raises(InputError, match="scalar_multiplier is missing"):
        CentralGaussian(0.3, 5.0, numerator="paper").event(Sampling())
    with pytest.raises(InputError, match=r"rate is 0\.5 with full participation"):
        Sampling("full", 0.5)


@pytest.mark.parametrize("order", [1, -1])
def test_full_rounds_beside_fixed_cohorts_under_add_remove_leave_the_price_of_those_pushed_out(order):
    """A full round moves by r, a fixed cohort by 2r whatever its rate: 3 and 5 of them make √(3 + 5·4)·r, and not √8·r."""
    full = central(5.0, adjacency="add-remove")
    fixed = central(5.0, rate=0.1, kind="fixed", adjacency="add-remove")
    both = compose([(full, 3), (fixed, 5)][::order], 1e-5)
    assert both.epsilon == pytest.approx(gdp.epsilon(math.sqrt(3 + 5 * 4) / 5.0, 1e-5), rel=1e-9)
    assert both.accountant == UNAMPLIFIED


CENTRAL, LOCAL = PureEvent(0.1, "central"), PureEvent(0.1, "local")


def test_one_release_costs_its_epsilon_and_many_compose_as_randomized_response_does():
    assert compose([(CENTRAL, 1)], 0.0).epsilon == 0.1
    assert compose([(CENTRAL, 100)], 0.0).epsilon == pytest.approx(10.0, rel=1e-12)
    total = compose([(CENTRAL, 100)], 1e-5)
    # Between the Gaussian limit √(2·100·ln(1/δ))·ε and the plain sum.
    assert 3.0 < total.epsilon < 6.0
    assert total.accountant == "composition of ε-DP releases"
    assert not total.exact


def test_answers_that_a_server_adds_into_one_release_cost_their_sum_at_every_delta():
    charges, earlier = [], []
    for _ in range(20):
        event = CENTRAL.charge_after(earlier)
        earlier.append(CENTRAL)
        charges.append((event, 1))
    assert compose(charges, 1e-5).epsilon >= 2.0 - 1e-4
    assert LOCAL.charge_after([LOCAL] * 5) == LOCAL, "reports are randomized one by one"
    assert CENTRAL.for_clients(4) == (PureEvent(0.4, "central"), 1)
    assert LOCAL.for_clients(4) == (LOCAL, 4)


def test_in_a_cohort_of_fixed_size_one_client_pushes_another_out():
    pushed = PureEvent(0.5, "central", "add-remove", Sampling("fixed", 0.1))
    assert compose([(pushed, 1)], 0.0).epsilon == 1.0
    assert compose([(PureEvent(0.5, "central", "add-remove", Sampling("poisson", 0.1)), 1)], 0.0).epsilon == 0.5


def test_replacing_is_leaving_out_and_taking_in():
    assert PureEvent(0.5, "central", "add-remove").under("replace-one") == PureEvent(1.0, "central")
    with pytest.raises(InputError, match="does not bound the removal"):
        CENTRAL.under("add-remove")
    assert other_adjacency([(CENTRAL, 3)], 1e-5) == (None, NOT_LEFT_OUT)
    turned, _ = other_adjacency([(PureEvent(0.5, "central", "add-remove"), 1)], 0.0)
    assert turned.epsilon_total == 1.0


@pytest.mark.parametrize(
    ("event", "field", "value"),
    [
        *((CENTRAL, "epsilon", one) for one in (True, -1.0, math.nan, "1")),
        *((CENTRAL, "setting", one) for one in ("none", ["central"])),
        (CENTRAL, "adjacency", "x"),
        *((central(5.0), "other_mu", one) for one in ("1", math.nan)),
        (central(5.0), "attained", 1),
        (central(5.0), "beyond_sum", ""),
        (central(5.0), "queries", []),
        (central(5.0), "queries", [asdict(Query("one of the queries", 1.0, 2.0, 5.0, diameter=-1.0))]),
    ],
)
def test_a_wrong_field_of_an_event_is_a_sentence_that_names_it(event, field, value):
    with pytest.raises(InputError, match=field):
        from_json(json.loads(json.dumps(to_json(event) | {field: value})))


def test_an_epsilon_beyond_all_promises_composes_to_a_number():
    large = PureEvent(800.0, "central")
    assert compose([(large, 5000), (PureEvent(0.3, "central"), 7)], 1e-5).epsilon > 1e5
    assert compose([(PureEvent(10**400, "central"), 2)], 1e-5).epsilon > 1e5
