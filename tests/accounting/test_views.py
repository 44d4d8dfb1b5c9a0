"""Both adjacencies and both readers, from the charges alone; the figures against dp-accounting, and none where there is none."""

import math
from dataclasses import replace
from itertools import product

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from events_by_hand import central, local

from dpfedexp import Sgd, dp_scaffold, train
from dpfedexp.accounting import GaussianEvent, NonPrivateEvent, Query, Sampling, compose
from dpfedexp.accounting import statement as views
from dpfedexp.accounting.events import from_json
from dpfedexp.accounting.events import privunit as exact_event
from dpfedexp.core.sums import within_clip_vote
from dpfedexp.data import synthetic_regression
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, PrivUnit
from dpfedexp.models import linear_regression

DELTA = 1e-5

REPLACE, ADD = dp_accounting.NeighboringRelation.REPLACE_ONE, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

FULL, POISSON, FIXED = Sampling(), Sampling("poisson", 0.1), Sampling("fixed", 0.1)


def theirs(relation, event) -> float:
    return PLDAccountant(relation, 1e-3).compose(event, 50).get_epsilon(DELTA)


def gaussian(noise_multiplier: float):
    return dp_accounting.GaussianDpEvent(noise_multiplier)


SAMPLED = dp_accounting.PoissonSampledDpEvent(0.1, gaussian(2.0))


@pytest.mark.parametrize(
    ("z", "sampling", "of_replacing", "of_leaving_out"),
    # dp-accounting's plain Gaussian takes the sensitivity as 1: the noise is z/2 for a replacement and z for one left out.
    [(5.0, FULL, (ADD, gaussian(2.5)), (ADD, gaussian(5.0))), (2.0, POISSON, (REPLACE, SAMPLED), (ADD, SAMPLED))],
)
def test_both_adjacencies_match_dp_accounting(z, sampling, of_replacing, of_leaving_out):
    expected = {"replace-one": theirs(*of_replacing), "add-remove": theirs(*of_leaving_out)}
    for adjacency in expected:
        charges = [(CentralGaussian(0.3, z, adjacency).event(sampling), 50)]
        own, (other, reason) = views.view(charges, DELTA), views.other_adjacency(charges, DELTA)
        assert (reason, {own.adjacency, other.adjacency}) == ("", set(expected))
        for seen in (own, other):
            # Their pessimistic grid of 1e-3 adds a few steps.
            assert seen.epsilon_total == pytest.approx(expected[seen.adjacency], abs=5e-3)
            assert seen.exact is (sampling == FULL)


def test_readers_of_the_models_match_dp_accounting():
    """The sum of n reports: a shift of 2C under noise of z·√n·C, so a noise multiplier of z·√n/2."""
    for numerator in (None, "free"):
        event = LocalGaussian(0.3, 0.7, numerator).event(FULL)
        found, reason = views.models_only([(event, 50)], DELTA, 1000, 1000)
        assert reason == ""
        assert found.exact
        assert found.epsilon_total == pytest.approx(2.6242, abs=1e-3)
        assert found.epsilon_total == pytest.approx(theirs(ADD, gaussian(0.7 * math.sqrt(1000) / 2)), abs=5e-3)
        assert views.view([(event, 50)], DELTA).epsilon_total == pytest.approx(289.3386, abs=1e-3)
        fewer, _ = views.models_only([(event, 50)], DELTA, 800, 1000)
        assert fewer.epsilon_total == pytest.approx(theirs(ADD, gaussian(0.7 * math.sqrt(800) / 2)), abs=5e-3)
        assert not fewer.exact


MECHANISMS = [
    CentralGaussian(0.3, 5.0),
    CentralGaussian(0.3, 5.0, votes=(within_clip_vote(9.0),)),
    CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=40.0),
    CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=0.3, votes=(within_clip_vote(9.0),)),
]


@pytest.mark.parametrize(("own", "other"), [("replace-one", "add-remove"), ("add-remove", "replace-one")])
def test_the_other_adjacency_is_what_a_run_under_it_is_charged_and_replacing_is_at_most_leaving_out_twice(own, other):
    for one, sampling in product(MECHANISMS, (FULL, POISSON, FIXED, Sampling("poisson", 1.0))):
        mechanism, turned = (replace(one, adjacency=adjacency) for adjacency in (own, other))
        pairs = [(mechanism, turned), *((mechanism.secure(strict), turned.secure(strict)) for strict in (False, True))]
        for ours, theirs in pairs:
            event = ours.event(sampling)
            assert event.under(other) == theirs.event(sampling)
            left_out, replaced = (event.under(name).mu for name in ("add-remove", "replace-one"))
            assert left_out <= replaced <= 2 * left_out * (1 + 1e-12)
            assert event.exact is (sampling == FULL and ours is mechanism)
    # The paper's scalar. Replaced: the joint supremum. Left out: an update of norm C moves both queries at once.
    event = CentralGaussian(0.3, 5.0, "replace-one", "paper", 2.5).event(FULL)
    assert event.mu < replace(event, joint_mu=None).mu
    assert event.under("add-remove").mu == pytest.approx(math.hypot(1 / 5.0, 1 / 2.5), rel=1e-12)


def test_events_that_leave_fields_out_get_sound_figures():
    """No diameter: twice the bound. No word on what the server computes: nothing exact, no second reader."""
    query = {"name": "squared norms", "bound": 1.0, "sensitivity": 1.0, "noise": 2.5}
    short = {"kind": "GaussianEvent", "setting": "central", "adjacency": "add-remove", "queries": [query]}
    event = from_json({**short, "sampling": {"kind": "full", "rate": 1.0}, "joint_mu": None})
    assert event.mu == pytest.approx(0.4)
    assert event.under("replace-one").mu == pytest.approx(0.8)
    assert not event.exact
    swapped = replace(event, adjacency="replace-one")
    assert swapped.under("add-remove").under("replace-one").mu == swapped.mu
    report = {"kind": "PrivUnitEvent", "p": 0.6, "cap": 0.4, "epsilon2": 0.1, "k": 1, "nominal": 1.0}
    report = from_json({**report, "setting": "local", "adjacency": "replace-one"})
    assert not report.exact
    assert views.models_only([(report, 3)], DELTA, 10**6, 10**6) == (None, views.NOT_GAUSSIAN)
    before = GaussianEvent("local", "replace-one", (Query("update", 1.0, 2.0, 0.7),))
    assert views.models_only([(before, 3)], DELTA, 1000, 1000) == (None, views.MORE_THAN_THE_SUM["unknown"])
    assert not before.exact


PAPER, PLAIN = LocalGaussian(0.3, 0.7, "paper"), LocalGaussian(0.3, 0.7)


@pytest.mark.parametrize(
    ("events", "reporting", "words"),
    [
        ([local(0.7), PAPER.event(FULL)], 10_000, "squared norm"),
        ([local(0.7), exact_event(0.1, 0.1, 0.1)], 10_000, "Gaussian noise"),
        ([PLAIN.event(POISSON)], 10_000, "only some"),
        ([PLAIN.event(FIXED)], 10_000, "only some"),
        ([PLAIN.secure(True).event(FULL)], 10_000, "rounded"),
        ([PLAIN.event(FULL)], 0, "not known how many"),
        ([local(0.7), central(5.0)], 10_000, None),
        ([central(5.0)], 10_000, None),
        ([], 10_000, None),
    ],
)
def test_where_readers_of_the_models_get_no_figure_in_one_round_they_get_none_but_the_reason(events, reporting, words):
    charges = [(event, 49) for event in events]
    found, reason = views.models_only(charges, DELTA, reporting, 10_000)
    assert found is None
    assert words in reason if words else reason == ""
    assert words is None or views.other_adjacency(charges, DELTA) == (None, views.NO_ADD_REMOVE)
    assert views.other_adjacency([(NonPrivateEvent(), 50)], DELTA) == views.other_adjacency([], DELTA) == (None, "")


@pytest.mark.parametrize(("control", "known"), [("update", True), ("report", False)])
def test_clients_that_remember_their_own_noise_leave_readers_of_the_models_without_a_figure(control, known):
    """With control="report" the noise of one round moves the next update, so the noises of two sums are not independent."""
    clients = synthetic_regression(4, 3, seed=0).federation
    algorithm = dp_scaffold(clip=1.0, mechanism="local-gaussian", noise_multiplier=2.0, control=control)
    done = train(linear_regression(3), clients, algorithm, local=Sgd(lr=0.01, steps=2), rounds=2)
    assert (done.privacy.models_only is not None) is known
    assert ("not known how many" in done.privacy.no_models_only) is not known


@pytest.mark.parametrize(("n", "z"), [(1, 0.7), (10, 0.3), (1000, 0.7), (10**6, 5.0)])
def test_readers_of_the_models_never_learn_more_than_the_server(n, z):
    for mechanism in (LocalGaussian(0.3, z), LocalGaussian(0.3, z).secure(), PrivUnit(0.3, 50, 0.1 * z, 0.1 * z, 0.1)):
        charges = [(mechanism.event(FULL), 20)]
        found, reason = views.models_only(charges, DELTA, n, n)
        assert (found is None) == bool(reason)
        if found is not None:
            assert found.epsilon_total <= compose(charges, DELTA).epsilon
            assert found.exact is (type(mechanism) is LocalGaussian)


TWO_QUERIES = (Query("update", 1.0, 2.0, 5.0), Query("squared norms", 1.0, 1.0, 5.0))


@pytest.mark.parametrize(
    ("charges", "exact"),
    [
        ([(central(5.0), 50), (central(2.0), 3)], True),
        ([(central(5.0, rate=0.1), 5)], False),
        ([(central(5.0, rate=0.1, kind="fixed", adjacency="add-remove"), 5)], False),
        ([(central(5.0), 5), (central(5.0, rate=0.1), 5)], False),
        ([(CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=2.5).event(FULL), 5)], True),
        ([(GaussianEvent("central", "replace-one", TWO_QUERIES, attained=True), 5)], False),
        ([(CentralGaussian(0.3, 5.0).secure(True).event(FULL), 5)], False),
        ([(central(5.0), 5), (CentralGaussian(0.3, 5.0).secure().event(FULL), 5)], False),
        ([(LocalGaussian(0.3, 0.7, "paper").event(FULL), 5)], True),
        ([(LocalGaussian(0.3, 0.7).event(POISSON), 5)], False),
        ([(LocalGaussian(0.3, 0.7).secure().event(FULL), 5)], False),
        ([(PrivUnit(0.3, 50).event(FULL), 50)], True),
        ([(PrivUnit(0.3, 50).event(POISSON), 50)], False),
        ([(PrivUnit(0.3, 50).secure().event(FULL), 50)], False),
        ([(exact_event(2.0, 2.0, 2.0), 10**6)], False),
        ([(exact_event(2.0, 2.0, 2.0), 5), (local(0.7), 5)], False),
    ],
)  # fmt: skip
def test_exact_is_said_only_of_what_is_exact(charges, exact):
    total = compose(charges, DELTA)
    assert total.exact is exact
    assert total.accountant.startswith("exact") is exact
