"""Votes through Flower: the app's numbers leave a node as shares within one half, and within the announced price."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from flwr.app import RecordDict

from dpfedexp.accounting import Sampling
from dpfedexp.algorithms import cdp_fedexp
from dpfedexp.core.sums import Vote, VoteSpec, within_clip_vote
from dpfedexp.flower.client import AnnouncedLimits
from dpfedexp.flower.guard import Refused
from dpfedexp.flower.messages import REPORT, REQUEST, NodeRequest
from dpfedexp.mechanisms import CentralGaussian

from .test_mod import ask

MECHANISM = CentralGaussian(0.2, 1.0, votes=(within_clip_vote(2.0), Vote("length", 0.0, 4.0, noise=2.0)))


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ({"length": 1.0, "examples": 7.0}, -0.25),
        ({"length": [1.0]}, -0.25),
        ({}, 0.0),
        ({"length": math.nan}, 0.0),
        ({"length": [1.0, 2.0]}, 0.0),
        ({"length": 1e300}, 0.5),
        ({"length": -math.inf}, -0.5),
    ],
    ids=str,
)
def test_a_message_carries_the_shares_of_its_votes_and_no_other_metric(said, share):
    """An odd answer counts as the middle or as an end."""
    reply = ask(MECHANISM, ballots=said)
    assert set(reply.content) == {REPORT, REQUEST}
    fields = reply.content.config_records[REQUEST]
    assert set(fields) == {"round", "nonce", "votes"}
    assert fields["votes"] == [-0.5, share], "the update of length 0.5 was not within the clip"


def test_clients_of_one_node_answer_in_a_list_and_their_shares_are_added():
    given = {"state": RecordDict(), "clients": (0, 1, 2), "clients_per_node": 3}
    for said, total in (([0.0, 1.0, 4.0], -0.25), ([1.0], 0.0)):
        reply = ask(MECHANISM, ballots={"length": said}, **given, rounds=2)
        assert reply.content.config_records[REQUEST]["votes"] == [-1.5, total]


def test_a_run_that_announced_its_epsilon_may_ask_for_votes_within_it_and_for_nothing_more():
    """The votes' price comes out of the update's, so that a node without a guard admits them by the announcement alone."""
    config = {"algorithm.name": "cdp_fedexp", "algorithm.clip": "adaptive", "algorithm.target_epsilon": 8.0}
    config |= {"federation.clients": 6, "federation.rounds": 3, "federation.folder": "x"}
    announced = AnnouncedLimits.of_run(config, 20)
    votes = (VoteSpec("length", 0.0, 4.0), VoteSpec("unsaid", 0.0, 10.0))
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0)
    mechanism = algorithm.bind(20, 6, Sampling(), 3, True, votes=votes)
    announced.check(NodeRequest(1, "nonce", mechanism, Sampling(), rounds=3))
    more = replace(mechanism, votes=(*mechanism.votes, Vote("one more", noise=mechanism.votes[0].noise)))
    with pytest.raises(Refused, match="above the"):
        announced.check(NodeRequest(1, "nonce", more, Sampling(), rounds=3))
