"""A node without a guard file gives a run no more than the run announced when the node joined it."""

import math
import re

import pytest
from flwr.app import ArrayRecord, RecordDict

from dpfedexp.core.sums import within_clip_vote
from dpfedexp.flower import strategy_from
from dpfedexp.flower.client import AnnouncedLimits
from dpfedexp.flower.guard import total
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit

from .loopback import grid_of, problem
from .test_mod import ask, guard_file

LOCAL = {
    "federation.clients": 3,
    "federation.rounds": 2,
    "federation.folder": "runs",
    "algorithm.name": "ldp_fedexp",
    "algorithm.clip": 0.5,
    "algorithm.noise_multiplier": 3.0,
}
OPEN = {**{k: v for k, v in LOCAL.items() if k.startswith("federation")}, "algorithm.name": "fedavg"}
GOOD = LocalGaussian(0.5, 3.0)


def reason(mechanism, **given) -> str:
    reply = ask(mechanism, **given)
    assert reply.has_error(), "the node must refuse"
    return reply.error.reason


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("candidates.a.rate", 1.0),
        ("federation.epsilom", 1.0),
        ("federation.evaluate", "10 classes"),
        ("federation.clients", -1),
    ],
)
def test_a_configuration_whose_limits_cannot_be_read_is_refused_and_not_taken_from_the_request(setting, value):
    for mechanism in (GOOD, NoPrivacy()):
        said = reason(mechanism, run_config={**LOCAL, setting: value})
        assert "announces no limits that this node can check" in said


def test_mechanism_none_is_refused_unless_the_configuration_or_the_guard_says_so(tmp_path):
    for config in ({}, LOCAL):
        assert "mechanism 'none'" in reason(NoPrivacy(), run_config=config)
    assert not ask(NoPrivacy(), run_config=OPEN).has_error()
    limits = {"mechanisms": ["none"], "max_clip": math.inf, "max_epsilon_total": math.inf}
    node = {"dpfedexp-guard": str(guard_file(tmp_path, **limits, max_epsilon_per_round=math.inf))}
    assert not ask(NoPrivacy(), node).has_error()
    guard_file(tmp_path, **limits)
    assert "costs epsilon inf" in reason(NoPrivacy(), node=node)


@pytest.mark.parametrize(
    ("mechanism", "why"),
    [
        (NoPrivacy(), "mechanism 'none' is not the one that this run announced, 'local-gaussian'"),
        (CentralGaussian(0.5, 3.0), "mechanism 'central-gaussian' is not the one that this run announced"),
        (LocalGaussian(0.5, 2.9), "the round costs epsilon 2.861 .* above the 2.753 that this run announced"),
        (LocalGaussian(0.51, 3.0), "clip 0.51 is above the 0.5 that this run announced"),
    ],
    ids=["none", "central", "dearer", "larger clip"],
)
@pytest.mark.parametrize("config", [LOCAL, {}], ids=["configuration", "first request"])
def test_a_request_for_more_than_was_announced_is_refused(config, mechanism, why):
    given = {"run_config": config, "state": RecordDict(), "rounds": 9}
    assert not ask(GOOD, **given).has_error()
    assert re.search(why, reason(mechanism, **given))
    assert not ask(LocalGaussian(0.4, 4.0), **given).has_error(), "less is fine"


@pytest.mark.parametrize("config", [LOCAL, {}], ids=["configuration", "first request"])
def test_a_run_gets_as_many_answers_as_it_announced_rounds(config):
    """The same round asked again counts too: its report has new noise and costs again. Another run has rounds of its own."""
    state = RecordDict()
    for number in (1, 1):
        assert not ask(GOOD, run_config=config, state=state, round=number, rounds=2).has_error()
    assert "answered 2 times" in reason(GOOD, run_config=config, state=state, round=2, rounds=10**6)
    assert not ask(GOOD, run_config=config, state=state, run=2, rounds=2).has_error()
    assert "answered 2 times" in reason(GOOD, run_config=config, state=state, round=2, rounds=10**6), "still the first"


def test_a_refused_request_neither_joins_nor_counts():
    state = RecordDict()
    reason(LocalGaussian(0.5, 1.0), run_config=LOCAL, state=state)
    reason(NoPrivacy(), state=state)
    assert not list(state)


@pytest.mark.parametrize("config", [{**LOCAL, "federation.clients_per_node": 3}, {}], ids=["configuration", "request"])
def test_no_more_hosted_clients_are_answered_for_than_were_announced(config):
    given = {"run_config": config, "state": RecordDict(), "rounds": 9}
    for clients in ((0,), (0, 1, 2)):
        assert not ask(GOOD, **given, clients=clients, clients_per_node=3).has_error()
    said = reason(GOOD, **given, clients=(0, 1, 2, 3), clients_per_node=4)
    assert "for 4 clients, and this run announced 3" in said


@pytest.mark.parametrize("split", [(5.99, 0.005, 0.005), (0.005, 0.005, 5.99), (2.9, 0.1, 3.0)])
def test_an_equal_pure_epsilon_that_composes_to_more_is_refused(split):
    """Fifty reports of (2, 2, 2) cost ε = 289.7 at δ = 1e-5, of (2.9, 0.1, 3) 299.8, and a single one of each 6."""
    announced, other = PrivUnit(0.5, 4, 2.0, 2.0, 2.0), PrivUnit(0.5, 4, *split)
    assert total([(other.client_event(), 50)], 1e-5) > total([(announced.client_event(), 50)], 1e-5)
    state = RecordDict()
    assert not ask(announced, state=state, rounds=50).has_error()
    assert "the parts of the report's epsilon are not those" in reason(other, state=state, rounds=50)
    assert not ask(PrivUnit(0.5, 4, 1.9, 2.0, 1.5), state=state, rounds=50).has_error(), "less is fine"


def test_an_adaptive_clip_may_move_but_its_cost_may_not():
    given, votes = {"state": RecordDict(), "rounds": 9}, (within_clip_vote(20.0),)
    for clip in (1.0, 7.0):
        assert not ask(CentralGaussian(clip, 5.0, votes=votes), **given).has_error()
    assert "above the" in reason(CentralGaussian(0.1, 4.9, votes=votes), **given)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ldp_fedexp", "clip": 0.5, "noise_multiplier": 3.0},
        {"name": "ldp_fedexp", "clip": 0.5, "target_epsilon": 6.0, "delta": 1e-5},
        {"name": "ldp_fedexp", "clip": 0.5, "mechanism": "privunit", "target_epsilon": 6.0},
        {"name": "cdp_fedexp", "clip": "adaptive", "target_epsilon": 8.0},
        {"name": "cdp_fedexp", "clip": 0.5, "numerator": "paper", "target_epsilon": 8.0},
        {"name": "fedexp"},
    ],
    ids=["multiplier", "target", "privunit", "adaptive", "paper", "not private"],
)
def test_what_a_server_asks_for_is_what_its_configuration_announces(algorithm, tmp_path):
    """Server and nodes read the same configuration: two rounds with every node within the announcement."""
    config = {**OPEN, "federation.folder": str(tmp_path), **{f"algorithm.{k}": v for k, v in algorithm.items()}}
    strategy = strategy_from({**config, "federation.node_timeout": 1.0})
    strategy.start(grid_of(run_config=config), ArrayRecord(problem(3)[1].state_dict()), timeout=5)
    assert [line["valid"] for line in strategy.history] == [3, 3]
    announced = AnnouncedLimits.of_run(config, 20)
    assert announced is not None
    assert (announced.mechanism, announced.rounds) == (strategy.opened.description.engine.mechanism, 2)
