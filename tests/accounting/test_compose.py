"""The choice of the accountant, and what may be composed with what."""

import itertools
import math
from dataclasses import replace

import pytest
from events_by_hand import central, local

from dpfedexp.accounting import GaussianEvent, NonPrivateEvent, Query, Sampling, compose, gdp
from dpfedexp.accounting.compose import GAUSSIAN, GAUSSIAN_BOUND, NOT_PRIVATE
from dpfedexp.accounting.events import privunit as exact_event
from dpfedexp.accounting.statement import round_delta, view
from dpfedexp.errors import InputError


def test_full_participation_has_an_exact_figure_per_round_and_in_total():
    total = compose([(central(5.0), 50)], 1e-5)
    assert total.epsilon == pytest.approx(15.4562, abs=5e-5)
    assert (total.accountant, total.adjacency, total.setting) == (GAUSSIAN, "replace-one", "central")
    assert total.mu == pytest.approx(0.4 * math.sqrt(50))
    report = exact_event(2.0, 2.0, 2.0)
    central_one, local_one, report_one = (view([(event, 50)], 1e-5) for event in (central(5.0), local(0.7), report))
    assert central_one.epsilon_round == pytest.approx(gdp.epsilon(0.4, 1e-5), rel=1e-12)
    assert (local_one.epsilon_round, local_one.epsilon_total) == pytest.approx((15.658, 289.34), abs=5e-3)
    assert (report_one.epsilon_round, report_one.epsilon_total) == pytest.approx((6.0, 289.67), abs=5e-3)
    assert (round_delta([(report, 50)], 1e-5), compose([(report, 50)], 0.0).epsilon) == pytest.approx((0.0, 300.0))


def test_joint_mu_is_what_is_charged_where_the_mechanism_proves_it():
    queries = (Query("update", 1.0, 2.0, 5.0), Query("squared norms", 1.0, 1.0, 12.5))
    separate = GaussianEvent("central", "replace-one", queries)
    joint = GaussianEvent("central", "replace-one", queries, joint_mu=0.4)
    assert compose([(separate, 50)], 1e-5).epsilon == pytest.approx(15.8509, abs=5e-5)
    assert compose([(joint, 50)], 1e-5).epsilon == pytest.approx(15.4562, abs=5e-5)


def test_sampling_amplifies_nothing_against_the_server_in_the_local_setting():
    sampled = GaussianEvent("local", "replace-one", (Query("update", 1.0, 2.0, 0.7),), Sampling("poisson", 0.01))
    assert compose([(sampled, 50)], 1e-5).epsilon == compose([(local(0.7), 50)], 1e-5).epsilon


def test_different_gaussian_rounds_add_their_mu_squared():
    total = compose([(central(5.0), 30), (central(3.0), 10)], 1e-5)
    assert total.epsilon == pytest.approx(gdp.epsilon(math.sqrt(30 * 0.16 + 10 * 4 / 9), 1e-5), rel=1e-12)


def test_local_gaussian_and_privunit_rounds_compose_by_the_law_of_their_joint_loss():
    """δ of the composed ε, as the mean of the Gaussian's δ over the losses of the reports, listed one by one."""
    report, gaussian = exact_event(1.0, 1.0, 1.0), local(2.0)
    total = compose([(gaussian, 5), (report, 2)], 1e-5)
    parts = [part for part in report.losses() for _ in range(2)]
    delta = 0.0
    for drawn in itertools.product(*([(p.step, p.up), (-p.step, p.down), (0.0, p.stay)] for p in parts)):
        loss, chance = (math.fsum(step for step, _ in drawn), math.prod(chance for _, chance in drawn))
        delta += chance * gdp.delta(total.epsilon - loss, math.sqrt(5) * gaussian.mu)
    assert delta == pytest.approx(1e-5, rel=1e-8)
    added = compose([(gaussian, 5)], 1e-5).epsilon + 6.0
    assert compose([(report, 2)], 1e-5).epsilon < total.epsilon < added
    assert total.accountant == f"{GAUSSIAN_BOUND} + PrivUnit composition"
    assert not total.exact


def test_many_reports_beside_a_gaussian_cost_no_more_than_both_with_half_of_delta():
    report, gaussian = exact_event(1.0, 1.0, 1.0), local(2.0)
    total = compose([(gaussian, 5), (report, 400)], 1e-5).epsilon
    halves = compose([(gaussian, 5)], 5e-6).epsilon + compose([(report, 400)], 5e-6).epsilon
    assert total == pytest.approx(halves, rel=1e-12)


def test_a_sum_of_reports_is_exact_at_delta_0_where_each_of_them_is():
    sharp = exact_event(1.0, 1.0, 1.0)
    for rounded, exact in ((sharp, True), (replace(sharp, attained=False), False)):
        total = compose([(exact_event(2.0, 2.0, 2.0), 1), (rounded, 1)], 0.0)
        assert (total.epsilon, total.exact) == (pytest.approx(9.0, rel=1e-12), exact)


@pytest.mark.parametrize(("other", "field"), [(central(5, adjacency="add-remove"), "adjacency"), (local(5), "setting")])
def test_adjacencies_and_settings_are_never_mixed(other, field):
    with pytest.raises(InputError, match=f"the charges have {field}"):
        compose([(central(5.0), 1), (other, 1)], 1e-5)


def test_nothing_costs_nothing_and_one_non_private_round_everything():
    for nothing in ([], [(central(5.0), 0)]):
        assert (compose(nothing, 1e-5).epsilon, compose(nothing, 1e-5).exact) == (0.0, True)
    total = compose([(central(5.0), 10), (NonPrivateEvent(), 1)], 1e-5)
    assert (total.epsilon, total.accountant) == (math.inf, NOT_PRIVATE)


def test_bad_input_is_a_sentence():
    with pytest.raises(InputError, match=r"delta is 1\.5"):
        compose([(central(5.0), 1)], 1.5)
    with pytest.raises(InputError, match="number of rounds is -1"):
        compose([(central(5.0), -1)], 1e-5)
