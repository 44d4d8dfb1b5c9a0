"""Votes through Flower: the app's numbers leave a node as shares within one half, and count as they do in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from dpfedexp.accounting import Ledger, Sampling
from dpfedexp.algorithms import cdp_fedexp, ldp_fedexp
from dpfedexp.algorithms.probe import bind
from dpfedexp.algorithms.round import Full
from dpfedexp.core.sums import Vote, VoteSpec
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import InputError
from dpfedexp.flower import DpFedExp, private_training
from dpfedexp.flower.client import AnnouncedLimits
from dpfedexp.flower.guard import Refused
from dpfedexp.flower.messages import BALLOTS, REPORT, REQUEST, NodeRequest

from .loopback import LOCAL, LoopbackGrid, Silence, plain_app, problem
from .test_agreement import hosting_app, silent_streams

ALGORITHM = cdp_fedexp(clip="adaptive", noise_multiplier=1e-4)
LENGTH, UNSAID = VoteSpec("length", 0.0, 4.0), VoteSpec("unsaid", 0.0, 10.0)
VOTES = (LENGTH, UNSAID)


def answering(federation, model, values=None):
    """The plain app, which also says how far its parameters moved; `values` may replace what it says."""
    app, inner = ClientApp(), plain_app(federation, model, LOCAL, mods=())

    @app.train(mods=[private_training])
    def train(message, context):
        start = torch.cat([torch.from_numpy(a.numpy()).flatten() for a in message.content["arrays"].values()])
        reply = inner(message, context)
        end = torch.cat([torch.from_numpy(a.numpy()).flatten() for a in reply.content["arrays"].values()])
        said = {"length": float((end - start).norm()), "examples": 7.0} if values is None else values(context.node_id)
        return Message(RecordDict({**reply.content, BALLOTS: MetricRecord(said)}), reply_to=message)

    return app


def flower_run(folder, model, grid, clients=6, timeout=5, **options):
    given = {"folder": folder, "rounds": 2, "node_timeout": 1, "noise": Silence, "votes": VOTES}
    strategy = DpFedExp(ALGORITHM, clients=clients, **given, **options)
    return strategy, strategy.start(grid, ArrayRecord(model.state_dict()), timeout=timeout)


def lengths(request, clients, updates):
    own = updates[: len(clients)].double().norm(dim=1)
    return torch.stack([own, torch.full_like(own, math.nan)], dim=1)


def simulated(monkeypatch, federation, model):
    silent_streams(monkeypatch)
    made, _ = prepare(model, federation, ALGORITHM, local=LOCAL, rounds=2, execution="cpu")
    cohort = replace(made.cohort, ballots=lengths)
    made = replace(made, mechanism=ALGORITHM.bind(20, 6, made.sampling, 2, votes=VOTES), cohort=cohort)
    state, ledger, found = made.begin(), Ledger.in_memory(), []
    for _ in range(2):
        state, result = made.step(state, ledger)
        found.append(result)
    return state, found, ledger


def test_votes_agree_with_the_simulators_and_what_is_not_said_is_the_middle(tmp_path, monkeypatch):
    federation, model = problem()
    strategy, result = flower_run(tmp_path, model, LoopbackGrid(answering(federation, model), 6))
    state, found, ledger = simulated(monkeypatch, federation, model)
    for number, expected in enumerate(found, start=1):
        shown = result.train_metrics_clientapp[number]
        assert 0.0 < shown["noisy_mean_length"] < 4.0
        # float32 programs of a few dozen operations, and a lattice of 2⁻²⁰ noises.
        assert shown["noisy_mean_length"] == pytest.approx(expected.extra["noisy_mean_length"], rel=2e-5)
        assert shown["noisy_mean_within_clip"] == pytest.approx(expected.extra["noisy_mean_within_clip"], abs=1e-9)
        assert shown["noisy_mean_unsaid"] == expected.extra["noisy_mean_unsaid"] == 5.0
    torch.testing.assert_close(strategy.state.w, state.w, rtol=2e-5, atol=2e-6)
    assert strategy.history[-1]["epsilon_total"] == pytest.approx(ledger.guarantee(1e-5).epsilon, rel=1e-9)
    assert '"within clip", "length", "unsaid"' in strategy.statement.text


def test_a_message_carries_the_shares_of_its_votes_and_no_other_metric(tmp_path):
    federation, model = problem()
    replies = []
    grid = LoopbackGrid(answering(federation, model), 6, reply_of=lambda asked, reply: replies.append(reply) or reply)
    flower_run(tmp_path, model, grid)
    for reply in replies:
        assert set(reply.content) == {REPORT, REQUEST}
        fields = reply.content.config_records[REQUEST]
        assert set(fields) == {"round", "nonce", "votes"}
        assert len(fields["votes"]) == 3
        assert all(-0.5 <= share <= 0.5 for share in fields["votes"])


ODD = [{}, {"length": math.nan}, {"length": [1.0]}, {"length": [1.0, 2.0]}, {"length": 1e300}, {"length": -math.inf}]


@pytest.mark.parametrize("said", ODD, ids=str)
def test_one_apps_odd_answer_counts_as_the_middle_or_an_end(said, tmp_path):
    federation, model = problem()
    means = []
    for values in (lambda node: {"length": 1.0}, lambda node: said if node == 3 else {"length": 1.0}):
        _, result = flower_run(tmp_path / str(len(means)), model, LoopbackGrid(answering(federation, model, values), 6))
        means.append(result.train_metrics_clientapp[1]["noisy_mean_length"])
        assert result.train_metrics_clientapp[1]["valid"] == 6
    given = said.get("length")
    # A list of one number is that number; a number of no use is the middle, 2.
    own = given[0] if given == [1.0] else 4.0 if given == 1e300 else 0.0 if given == -math.inf else 2.0
    assert means[0] == pytest.approx(1.0, abs=1e-5)
    assert means[1] - means[0] == pytest.approx((own - 1.0) / 6, abs=1e-5)


def test_nodes_that_host_many_clients_add_their_votes(tmp_path, silent):
    federation, model = problem()
    answers = lambda first: {"length": [float(first + own) / 2 for own in range(3)], "unsaid": [1.0]}  # noqa: E731
    app = hosting_app(federation, model, answers)
    _, result = flower_run(tmp_path, model, LoopbackGrid(app, 2), clients_per_node=3)
    shown = result.train_metrics_clientapp[1]
    assert shown["noisy_mean_length"] == pytest.approx(sum(n / 2 for n in range(6)) / 6, abs=1e-5)
    assert shown["noisy_mean_unsaid"] == 5.0, "one number for three clients is odd"


def test_a_client_that_is_missing_counts_as_the_middle(tmp_path):
    federation, model = problem()
    app = answering(federation, model, lambda node: {"length": 4.0})
    grid = LoopbackGrid(app, 6, reply_of=lambda asked, reply: None if asked.metadata.dst_node_id == 2 else reply)
    _, result = flower_run(tmp_path, model, grid, timeout=0.5)
    assert result.train_metrics_clientapp[1]["noisy_mean_length"] == pytest.approx((5 * 4.0 + 2.0) / 6, abs=1e-5)


def test_a_run_that_announced_its_epsilon_may_ask_for_votes_within_it_and_for_nothing_more():
    """The votes' price comes out of the update's, so that a node without a guard admits them by the announcement alone."""
    config = {"algorithm.name": "cdp_fedexp", "algorithm.clip": "adaptive", "algorithm.target_epsilon": 8.0}
    config |= {"federation.clients": 6, "federation.rounds": 3, "federation.folder": "x"}
    announced = AnnouncedLimits.of_run(config, 20)
    mechanism, *_ = bind(cdp_fedexp(clip="adaptive", target_epsilon=8.0), None, 20, 6, Full(), 3, True, VOTES)
    announced.check(NodeRequest(1, "nonce", mechanism, Sampling(), rounds=3))
    more = replace(mechanism, votes=(*mechanism.votes, Vote("one more", noise=mechanism.votes[0].noise)))
    with pytest.raises(Refused, match="above the"):
        announced.check(NodeRequest(1, "nonce", more, Sampling(), rounds=3))


def test_local_privacy_has_no_votes_on_flower_either(tmp_path):
    _, model = problem()
    algorithm = ldp_fedexp(clip=0.5, noise_multiplier=0.7)
    strategy = DpFedExp(algorithm, clients=6, rounds=1, folder=tmp_path, votes=(LENGTH,))
    with pytest.raises(InputError, match="votes are asked for in a local setting"):
        strategy.start(LoopbackGrid(plain_app(*problem()), 6), ArrayRecord(model.state_dict()))
