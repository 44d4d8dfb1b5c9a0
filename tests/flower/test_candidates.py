"""Candidates in a deployment: disjoint groups, the votes that were announced and no other, two aggregators, crashes, settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

from dpfedexp.algorithms.probe import CANDIDATE, CLIP, RATE, SCALE, UPDATE
from dpfedexp.engine.engine import Engine
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import InputError, RoundFailed
from dpfedexp.flower import cohort, serve, strategy_from
from dpfedexp.flower.app_settings import read_candidates
from dpfedexp.flower.client import AnnouncedLimits, admit_announced, try_training
from dpfedexp.flower.guard import Guard, Refused
from dpfedexp.flower.messages import MODEL, REQUEST, ROWS, NodeRequest, as_array, layout_of
from dpfedexp.mechanisms import CentralGaussian
from tests.engine.small import Crash, crash_in, entries

from ..engine.test_cohorts import (
    CANDIDATES,
    EPSILON,
    PHASES,
    charges,
    networks,
    play,
    problem,
    tournament_config,
    tournament_grid,
)
from ..mechanisms.parties import charges as helper_charges
from ..mechanisms.parties import helper_file, public_key
from .loopback import counts
from .test_hostile_votes import asked, node_of
from .test_mod import guard_file

CLIENTS = 10
FEW = {"federation.clients": CLIENTS}
MANY = {**FEW, "federation.clients_per_node": 5}
GIVEN = {"algorithm.clip": "adaptive", "algorithm.noise_multiplier": 1.0, "local.lr": "auto", "local.steps": 2}
SAMPLED = {
    **MANY,
    **GIVEN,
    "algorithm.noise_multiplier": 9.0,
    "federation.epsilon": None,
    "participation.kind": "poisson",
    "participation.rate": 0.5,
}
HIDDEN = {**FEW, "algorithm.adjacency": "add-remove"}


def config_of(folder, **more):
    """The configuration of a small tournament; None removes a setting."""
    return {name: value for name, value in tournament_config(folder, **{**FEW, **more}).items() if value is not None}


def zeros(message, context, models, rows):
    """The reply of a node whose clients answer nothing but zeros."""
    request, layout = NodeRequest.from_message(message), layout_of(message.content.array_records[MODEL])
    sent = np.zeros(request.shape(layout.dimension), np.float32)
    return Message(RecordDict({ROWS: ArrayRecord({"rows": as_array(sent)})}), reply_to=message)


def requests(grid):
    """(round, candidate, clients of the node) of every request for an update that was sent, in order."""
    found = []
    for message in grid.sent:
        one = message.content.config_records[REQUEST]
        if one["purpose"] == UPDATE:
            clients = [(message.metadata.dst_node_id, client) for client in one["clients"] or [0]]
            found.append((one["round"], one["candidate"], clients))
    return found


def queries(strategy):
    """How often each question was charged."""
    return Counter(query for _, (query, *_) in charges(strategy.opened.ledger))


@pytest.mark.parametrize("more", [FEW, MANY, SAMPLED, HIDDEN], ids=["one each", "several", "sampled", "add-remove"])
def test_every_client_of_a_round_answers_for_one_candidate(more, tmp_path, silent):
    config = config_of(tmp_path, **more, **{"federation.min_reply_fraction": 0.1, "federation.rounds": 3})
    grid = tournament_grid(config, answer=zeros)
    strategy = play(config, grid)
    assert strategy.state.round == 3
    divisions = []
    for number in (1, 2):
        groups = [(candidate, clients) for at, candidate, clients in requests(grid) if at == number]
        everyone = [client for _, clients in groups for client in clients]
        assert len(everyone) == len(set(everyone))
        sizes = Counter(candidate for candidate, clients in groups for _ in clients)
        if more in (FEW, MANY):
            assert len(everyone) == strategy.history[number - 1]["valid"] == CLIENTS
            assert sorted(sizes.values()) == ([3, 3, 4] if number == 1 else [5, 5])
        divisions.append({client: candidate for candidate, clients in groups for client in clients})
    assert divisions[0] != divisions[1]


def test_clients_that_share_a_node_play_for_their_own_candidates(tmp_path, silent):
    few = {"federation.clients": 4, "federation.clients_per_node": 2, "federation.rounds": 2}
    config = config_of(tmp_path, **few, **dict.fromkeys(name for name in CANDIDATES if "net" in name))
    assert [(line["candidates"], line["valid"]) for line in play(config).history] == [(2, 4), (1, 4)]


def test_groups_that_share_a_client_are_not_even_asked(tmp_path, monkeypatch, silent):
    choose = cohort.choose
    monkeypatch.setattr(cohort, "choose", lambda *who, equal: choose(*who[:3]) * who[3])
    config = config_of(tmp_path)
    grid = tournament_grid(config)
    with pytest.raises(RoundFailed, match="two candidates"):
        play(config, grid)
    assert not requests(grid)
    assert {entry.round for entry in entries(tmp_path)} == {0}


def test_each_group_needs_its_share_of_answers(tmp_path, silent):
    """All in all two thirds answer, and none of one candidate's group."""

    def lost(message, reply):
        one = message.content.config_records[REQUEST]
        return None if (one["purpose"], one["candidate"]) == (UPDATE, 1) else reply

    config = config_of(tmp_path, **{"federation.min_reply_fraction": 0.5})
    with pytest.raises(RoundFailed, match="0 of 3 clients answered well, and at least 2 must"):
        play(config, tournament_grid(config, answer=zeros, reply_of=lost), timeout=0.1)


@pytest.mark.parametrize(
    ("name", "when"), [("_vote", 5), ("step", 2), ("_vote", 6)], ids=["vote", "phase", "vote on the scale"]
)
def test_a_tournament_that_crashed_goes_on_from_its_folder(name, when, tmp_path, monkeypatch, silent):
    config = config_of(tmp_path)
    with monkeypatch.context() as patched:
        crash_in(patched, Engine, name, when, before=True)
        with pytest.raises(Crash):
            play(config, tournament_grid(config, answer=zeros))
    before = len(entries(tmp_path))
    done = play(config, tournament_grid(config, answer=zeros))
    assert 0 < before < len(done.opened.ledger)
    assert queries(done) == {"update": len(PHASES), RATE: 2, CLIP: 2, SCALE: 2, CANDIDATE: 2}
    assert [line["candidates"] for line in done.history] == PHASES
    assert done.statement.epsilon_total <= EPSILON
    assert outcome(verify_run(tmp_path)) == "holds"
    with pytest.raises(InputError, match="is of another run: tournament"):
        play({**config, "candidates.faster.rate": 2.0})


def test_a_node_answers_the_votes_of_a_tournament_and_not_one_more(tmp_path):
    config, purposes = tournament_config(tmp_path), {RATE: 2, CLIP: 2, CANDIDATE: 2}
    made, admit = node_of(config)
    assert made.candidates == 3
    mechanisms = {UPDATE: made.mechanism, **{purpose: one for purpose, (one, _) in made.others.items()}}
    for purpose, times in {**purposes, SCALE: 3, UPDATE: len(PHASES)}.items():
        number = int(purpose not in (RATE, CLIP))
        given = [asked(mechanisms[purpose], purpose, number, candidate=1) for _ in range(times)]
        for one in given:
            admit(one)
        with pytest.raises(Refused, match="as often as this run announced"):
            admit(given[0])
    with pytest.raises(Refused, match="candidate 3 is not one of the 3 that"):
        admit(asked(made.mechanism, UPDATE, 1, candidate=3))
    _, plain = node_of({name: value for name, value in config.items() if not name.startswith("candidates")})
    for request in (asked(mechanisms[CANDIDATE], CANDIDATE, 1), asked(made.mechanism, UPDATE, 1, candidate=1)):
        with pytest.raises(Refused, match="this run"):
            plain(request)


def test_clients_of_a_node_are_counted_one_by_one(tmp_path):
    """A node whose clients are in three groups answers three requests in a round."""
    made, admit = node_of(config_of(tmp_path, **MANY))

    def update(*clients):
        return asked(made.mechanism, UPDATE, 1, clients=clients, clients_per_node=5)

    for _ in range(made.rounds):
        for clients in ((0, 3), (1,), (2, 4)):
            admit(update(*clients))
    for client in range(5):
        with pytest.raises(Refused, match=f"answered {len(PHASES)} times"):
            admit(update(client))
    with pytest.raises(Refused, match="for 6 clients, and this run announced 5"):
        admit(update(5))


def test_a_guard_for_the_whole_epsilon_admits_the_run_and_charges_a_second_update_as_one_sum(tmp_path):
    """The attack: one client answers for two candidates, and the server adds both updates into one sum with one noise."""
    config = config_of(tmp_path / "run")
    limits = {"max_epsilon_per_round": EPSILON, "max_epsilon_total": EPSILON, "max_clip": 1e9}
    file = guard_file(tmp_path, **limits, mechanisms=["central-gaussian"])
    grid = tournament_grid(config, answer=zeros)
    file.write_text(file.read_text() + "max_candidates = 3\n")
    grid.contexts[1].node_config["dpfedexp-guard"] = str(file)
    strategy = play(config, grid)
    guard = Guard.load(file)
    with guard.open_ledger() as ledger:
        assert len(ledger) == len(strategy.opened.ledger)
        assert ledger.guarantee(1e-6).epsilon > 0.9 * EPSILON
    made = AnnouncedLimits.of_run(config, 6)
    (tmp_path / "second").mkdir()
    wide = dict.fromkeys(limits, 1000000.0)
    strict = Guard.load(guard_file(tmp_path / "second", **wide, mechanisms=["central-gaussian"]))
    for run, guard, votes in (("r", replace(strict, max_candidates=2), 2), ("s", strict, 4)):
        for candidate in (0, 1):
            guard.admit(asked(made.mechanism, UPDATE, 1, candidate=candidate), run=run)
            guard.admit(asked(made.others[RATE][0], RATE, candidate=candidate), run=run)
        with guard.open_ledger() as ledger:
            mu = Counter()
            for entry in ledger.entries:
                if entry.run.startswith(run):
                    mu[entry.event.question] += entry.event.mu**2
        assert mu[""] == pytest.approx((2 * made.mechanism.client_event().mu) ** 2)
        assert mu[RATE] == pytest.approx(votes * made.others[RATE][0].client_event().mu ** 2)


def test_a_candidate_that_costs_more_than_the_first_is_refused(tmp_path):
    dear = {"candidates.net.algorithm.noise_multiplier": 0.01, "candidates.net.algorithm.clip": 1000.0}
    config = config_of(tmp_path, **GIVEN, **dear, **{"federation.epsilon": None})
    context = Context(1, 1, {}, RecordDict(), config)
    with pytest.raises(Refused, match="candidates cost different epsilons"):
        admit_announced(asked(CentralGaussian(1000.0, 0.01), UPDATE, 1, candidate=2), context, 6)


def test_two_aggregators_add_all_groups_of_a_round_in_one_answer(tmp_path):
    (tmp_path / "helper").mkdir()
    file = helper_file(tmp_path / "helper", total=1e4, per_round=1e4, max_clip=1e9, min_clients=2)
    config = config_of(tmp_path / "run", **{"algorithm.aggregation": "two-party"})
    grid = tournament_grid(config, more=1, answer=zeros)
    for node, context in grid.contexts.items():
        context.node_config["dpfedexp-helper-key"] = public_key(file)
        if node == CLIENTS + 1:
            context.node_config["dpfedexp-helper"] = str(file.path)
    # One client seals its seed for another helper: its group goes on without it.
    grid.contexts[3].node_config["dpfedexp-helper-key"] = "9c" * 32
    strategy = play(config, grid)
    assert queries(strategy) == {"update": len(PHASES), RATE: 2, CLIP: 2, SCALE: 2, CANDIDATE: 2}
    assert helper_charges(file) == len(strategy.opened.ledger)
    assert strategy.statement.epsilon_total <= EPSILON
    assert [counts(line) for line in strategy.history] == [(CLIENTS, CLIENTS - 1, 1, 0)] * len(PHASES)
    assert outcome(verify_run(tmp_path / "run")) == "holds"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"candidates.faster.rat": 2.0}, r"candidates\.faster: .*'rat'\. Did you mean 'rate'"),
        ({"candidates.faster.rate": 0.0}, r"candidates\.faster: rate is 0\.0; it must be a positive"),
        ({"candidates.faster.rate": "3"}, r"candidates\.faster: rate is '3'; it must be a positive"),
        ({"candidates.net.local.stepz": 2}, r"candidates\.net: local\.stepz is not a setting"),
        ({"candidates.net.algorithm.clip": -1.0}, r"candidates\.net: clip is -1\.0"),
        ({"candidates.net.model": "big"}, r"candidates\.net\.model is 'big'.* Known: linear, network"),
        ({"candidates.other": 3}, r"candidates\.other: it and its .* must be sections"),
        ({"candidates.other.local": 3}, r"candidates\.other: it and its .* must be sections"),
        ({"candidates.net.local.lr": 0.1}, "does not cost what"),
        ({"candidates.again.rate": 1.0}, "candidates 'again' and 'plain' are the same"),
        ({f"candidates.{n}.rate": 2.0 + n for n in range(6)}, "has 9 sections; it must have 2 to 8"),
        ({"federation.rounds": 2}, "rounds is 2, too few"),
        ({"algorithm.name": "ldp_fedexp"}, "local|adaptive"),
    ],
)
def test_candidates_that_cannot_be_compared_are_refused_before_the_folder_exists(changes, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        play(tournament_config(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_one_candidate_says_that_empty_sections_vanish(tmp_path):
    config = tournament_config(tmp_path)
    alone = {name: value for name, value in config.items() if not name.startswith(("candidates.net", "candidates.f"))}
    with pytest.raises(InputError, match=r"candidates has 1 sections.*needs rate = 1\.0"):
        strategy_from(alone)
    assert read_candidates(dict(reversed(config.items()))) == read_candidates(config), "Flower keeps no order"


def test_the_server_measures_every_candidate_with_its_own_model(tmp_path, silent):
    config, (inputs, targets) = config_of(tmp_path), problem()[0].client(3)
    grid = tournament_grid(config, answer=zeros)
    run = serve(grid, Context(1, 0, {}, RecordDict(), config), networks(), (inputs, targets))
    assert all("test_loss" in line for line in run.history)
    winner = read_candidates(config)[run.history[-1]["candidate"]].model or "linear"
    assert set(run.model.state_dict()) == set(networks()[winner].state_dict())
    try_training(networks(), (inputs, targets), None)
    with pytest.raises(InputError, match="takes 1 features"):
        try_training({**networks(), "narrow": torch.nn.Linear(1, 1)}, (inputs, targets), None)
