"""Votes before the first round against a hostile server and hostile clients: no way round the price of an update."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from dpfedexp import Sgd, fedavg
from dpfedexp.accounting import Sampling
from dpfedexp.algorithms.probe import CLIP, RATE, UPDATE
from dpfedexp.core.client_metrics import EVALUATION
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import InputError, RoundFailed
from dpfedexp.flower.client import AnnouncedLimits, admit_announced
from dpfedexp.flower.guard import Guard, Refused
from dpfedexp.flower.messages import REPORT, REQUEST, NodeRequest
from dpfedexp.mechanisms import CentralGaussian, PrivUnit
from dpfedexp.mechanisms.serialization import decode, encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian
from tests.engine.small import entries

from ..engine.test_cohorts import ALGORITHMS, EPSILON, MEASURING, ROUNDS, M, announced, flower_app, problem
from ..mechanisms.parties import helper_file, round_of
from .loopback import LoopbackGrid, deploy, stop_after
from .test_mod import guard_file

ALGORITHM, LOCAL = ALGORITHMS["fit"]
CONFIG = announced(ALGORITHM)
QUESTION = CentralGaussian(1.0, 1.0).asking(RATE, 4.0)
EVALUATING = CentralGaussian(1.0, 1.0).asking(EVALUATION, 4.0)


def asked(mechanism, purpose, round=0, **more) -> NodeRequest:
    record = NodeRequest(round, "n" * 32, mechanism, Sampling(), purpose=purpose, **more).to_record()
    return NodeRequest.from_message(Message(RecordDict({REQUEST: record}), dst_node_id=1, message_type="train"))


def node_of(config, dimension=6):
    """What a run announces to a node, and how that node admits requests."""
    context = Context(1, 1, {}, RecordDict(), config)
    return AnnouncedLimits.of_run(config, dimension), partial(admit_announced, context=context, dimension=dimension)


@pytest.mark.parametrize(
    "more",
    [{"clip": 1000.0}, {"numerator": "paper", "scalar_multiplier": 1e-4}, {"numerator": "free"}],
    ids=["clip", "squared norm", "coordinate"],
)
@pytest.mark.parametrize("kind", [CentralGaussian, TwoPartyGaussian])
def test_a_question_can_not_carry_more_than_an_answer(kind, more):
    """The attack: an update with next to no noise was charged as a vote."""
    with pytest.raises(InputError, match="must have clip ½"):
        kind(**{**QUESTION.settings(), **more})
    text = encode(QUESTION).replace('"clip":0.5', '"clip":1000.0')
    with pytest.raises(InputError, match="must have clip ½"):
        decode(text)


def test_a_request_and_its_mechanism_are_for_the_same_purpose():
    update = CentralGaussian(0.5, 5.0)
    wrong = ((QUESTION, UPDATE, 1), (update, RATE, 0), (QUESTION, CLIP, 0), (PrivUnit(0.5, 2), CLIP, 0))
    for mechanism, purpose, round in wrong:
        with pytest.raises(InputError, match="its mechanism is not one for that"):
            asked(mechanism, purpose, round)
    for more, why in (({"round": 3}, "comes before the first round"), ({"tau_eta_l": 0.1}, "for updates alone")):
        with pytest.raises(InputError, match=why):
            asked(QUESTION, RATE, **more)
    with pytest.raises(InputError, match="round is 0"):
        asked(EVALUATING, EVALUATION, 0)
    assert asked(EVALUATING, EVALUATION, 2).purpose == EVALUATION
    assert asked(QUESTION, RATE).purpose == RATE


def test_a_node_answers_as_many_updates_as_were_announced_and_every_vote_once():
    """The attack: votes that were not asked paid for two updates more."""
    made, admit = node_of(CONFIG)
    for round in range(1, ROUNDS + 1):
        admit(asked(made.mechanism, UPDATE, round))
    with pytest.raises(Refused, match="as often as this run announced rounds"):
        admit(asked(made.mechanism, UPDATE, 9))
    for purpose, rounds in ((RATE, [0]), (CLIP, [0]), (EVALUATION, [2, 3])):
        votes = [asked(made.others[purpose][0], purpose, round) for round in rounds]
        for vote in votes:
            admit(vote)
        with pytest.raises(Refused, match="a repeated answer is charged again"):
            admit(votes[-1])
    with pytest.raises(Refused, match="had 6 when this run began"):
        admit(asked(made.mechanism, UPDATE, 1), dimension=7)


def test_votes_and_evaluations_are_answered_where_they_were_announced_and_at_their_price():
    made, _ = node_of(CONFIG)
    evaluation, _ = made.others[EVALUATION]
    made.check(asked(evaluation, EVALUATION, 2))
    with pytest.raises(Refused, match="above the"):
        made.check(asked(replace(evaluation, noise_multiplier=evaluation.noise_multiplier / 2), EVALUATION, 2))
    fixed, _ = node_of({**CONFIG, "algorithm.clip": 0.5, "federation.evaluate": ""})
    fixed.check(asked(fixed.others[RATE][0], RATE))
    for one in (asked(replace(fixed.others[RATE][0], question=CLIP), CLIP), asked(evaluation, EVALUATION, 2)):
        with pytest.raises(Refused, match="which this run did not announce"):
            fixed.check(one)


def test_a_guard_that_allows_a_round_allows_each_vote_whatever_its_largest_clip(tmp_path):
    made = AnnouncedLimits.of_run({**CONFIG, "federation.rounds": 100, "federation.epsilon": 8.0}, 6)
    limits = {"max_clip": 0.3, "max_epsilon_per_round": 2.0, "max_epsilon_total": 50.0}
    file = guard_file(tmp_path, **limits, mechanisms=["central-gaussian"])
    guard = Guard.load(file)
    for purpose in (RATE, CLIP):
        guard.admit(asked(made.others[purpose][0], purpose), run="1")
    with pytest.raises(Refused, match="above this node's max_clip"):
        guard.admit(asked(replace(made.mechanism, clip=0.5), UPDATE, 1), run="1")


def test_a_guard_charges_every_repeated_answer_as_one_sum(tmp_path):
    """The attack: from the third answer on, what was charged for the second was forgotten."""
    file = guard_file(tmp_path, max_epsilon_per_round=100.0, max_epsilon_total=1000.0, mechanisms=["central-gaussian"])
    guard = Guard.load(file)
    evaluating = CentralGaussian(1.0, 1.0).asking(EVALUATION, 10.0)
    for count in range(1, 6):
        guard.admit(asked(evaluating, EVALUATION, 2), run="1")
        with guard.open_ledger() as ledger:
            spent = math.sqrt(sum(entry.event.mu**2 for entry in ledger.entries))
        assert spent == pytest.approx(count * 0.1)


def test_a_helper_answers_each_vote_once_and_no_other_question(tmp_path):
    file = helper_file(tmp_path, per_round=100.0, total=1000.0)
    vote = TwoPartyGaussian(**QUESTION.settings())
    file.admit((round_of(vote, number=0, columns=13), vote))
    again = replace(vote, noise_multiplier=vote.noise_multiplier * (1 + 1e-6))
    with pytest.raises(Refused, match="every round is answered once"):
        file.admit((round_of(again, number=0, columns=13), again))
    rival = replace(round_of(vote, number=0, columns=13), candidate=1)
    file.admit((rival, vote))
    with pytest.raises(Refused, match="every round is answered once"):
        file.admit((replace(rival, nonce="d" * 32), vote))
    measured = replace(vote, question=EVALUATION)
    update = replace(vote, question="", clip=0.3)
    file.admit((round_of(update, number=1, columns=13), update))
    file.admit((round_of(measured, number=1, columns=13, nonce="b" * 32), measured))
    for one in (measured, update):
        with pytest.raises(Refused, match="every round is answered once"):
            file.admit((round_of(one, number=1, columns=13, nonce="c" * 32), one))
    for other, number in ((replace(vote, question="x"), 0), (vote, 3), (measured, 0)):
        with pytest.raises(Refused, match="comes before the first round"):
            file.admit((round_of(other, number=number, columns=13), other))


def deployed(folder, grid, algorithm=ALGORITHM, local=LOCAL, timeout=1.0, **options):
    given = {"clients": M, "rounds": ROUNDS, "local": local, "node_timeout": 1, "timeout": timeout, **options}
    return deploy(folder, algorithm, grid, model=problem()[1], **given)[0]


def test_one_client_with_an_unreadable_reply_stops_no_vote(tmp_path):
    """The attack: a header with an unhashable key ended the server, and did so again after every resume."""

    def spoilt(message, reply):
        if message.metadata.dst_node_id != 2:
            return reply
        honest = reply.content.array_records[REPORT]["vector"]
        text = b"{[]:1}".ljust(118) + b"\n"
        data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + honest.data[128:]
        array = Array(dtype=honest.dtype, shape=honest.shape, stype=honest.stype, data=data)
        fields = ConfigRecord(dict(reply.content.config_records[REQUEST]))
        return Message(RecordDict({REPORT: ArrayRecord({"vector": array}), REQUEST: fields}), reply_to=message)

    grid = LoopbackGrid(flower_app(*problem(), LOCAL), M, run_config=CONFIG, reply_of=spoilt)
    strategy = deployed(tmp_path, grid, on_round=stop_after(1), **MEASURING)
    assert strategy.history[0]["refused"] == 1


def failing(times, group):
    """No node answers messages of this group so many times."""
    left = [times * M]

    def lost(message, reply):
        purpose = message.content.config_records[REQUEST]["purpose"]
        if purpose == group and left[0] > 0:
            left[0] -= 1
            return None
        return reply

    return lost


def test_a_vote_that_was_released_is_not_asked_again_and_the_folder_says_what_was_spent(tmp_path):
    grid = LoopbackGrid(flower_app(*problem(), LOCAL), M, run_config=CONFIG, reply_of=failing(1, CLIP))
    with pytest.raises(RoundFailed, match="the vote on the first clip failed"):
        deployed(tmp_path, grid, timeout=0.1, **MEASURING)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["round"]) == ("failed", 0)
    assert status["epsilon"] > 0
    assert outcome(verify_run(tmp_path)) != "false"
    # As in a new run of Flower, nodes have answered nothing yet.
    for context in grid.contexts.values():
        context.state = RecordDict()
    done = deployed(tmp_path, grid, **MEASURING)
    names = [entry.event.queries[0].name for entry in done.opened.ledger.entries]
    assert names[:4] == ["local rate", "first clip", "update", "rate scale"]
    assert names[4:] == ["update", "evaluation", "update", "evaluation"]
    assert done.statement.epsilon_total <= EPSILON * (1 + 1e-9)


def test_votes_without_privacy_are_charged_as_such(tmp_path):
    run_config = {name: value for name, value in CONFIG.items() if name.startswith("federation.")}
    run_config.pop("federation.epsilon")
    run_config |= {"algorithm.name": "fedavg", "local.lr": "auto", "local.steps": 3}
    local = Sgd(lr="auto", steps=3)
    grid = LoopbackGrid(flower_app(*problem(), local), M, run_config=run_config, reply_of=failing(9, UPDATE))
    with pytest.raises(RoundFailed):
        deployed(tmp_path, grid, fedavg(), local, timeout=0.1, rounds=2)
    assert [entry.round for entry in entries(tmp_path)] == [0]
