"""What leaves a node, votes included, and what a node refuses."""

import logging
import math

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from scipy.stats import kstest

from dpfedexp.accounting import Sampling
from dpfedexp.core.sums import Vote, within_clip_vote
from dpfedexp.flower import private_training
from dpfedexp.flower.messages import BALLOTS, REPORT, REQUEST, ROWS, NodeRequest
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit

from .loopback import through_the_wire


def claimed(shape: tuple[int, ...], values: np.ndarray) -> Array:
    """An array that says of itself what is not so."""
    return Array(dtype="float32", shape=shape, stype="numpy.ndarray", data=Array(values).data)


@pytest.mark.parametrize(
    "array",
    [
        claimed((-1,), np.zeros(3, np.float32)),
        claimed((2**45,), np.zeros(3, np.float32)),
        claimed((3,), np.zeros(4, np.float32)),
        claimed((3,), np.zeros(3, np.complex64)),
    ],
    ids=["fewer than none", "too many for any machine", "another number", "complex"],
)
def test_a_model_that_is_not_what_it_claims_is_refused(array, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *size, **options: pytest.fail("made room before it looked"))
    reply = ask(LocalGaussian(0.3, 2.2), records={"arrays": ArrayRecord({"w": array})})
    assert reply.error.reason.startswith("dpfedexp: the array 'w'")


MODEL, UPDATED = Array(np.ones(4, dtype=np.float32)), [1.5, 1.0, 1.0, 1.0]


def ask(mechanism, node=None, trained=UPDATED, state=None, run=1, run_config=None, ballots=None, records=(), **request):
    """The mod's reply for a model of 4 ones whose app returns `trained` (for every client of the node), or raises it.

    `records` are further ones of the message, and `ballots` the app's answers to votes.
    """
    given = NodeRequest(**{"round": 1, **request}, nonce="n" * 32, mechanism=mechanism, sampling=Sampling())
    asked = {"arrays": ArrayRecord({"w": MODEL}), "config": ConfigRecord(), REQUEST: given.to_record()}
    message = Message(RecordDict({**asked, **dict(records)}), 7, "train")
    message.metadata.__dict__["_message_id"] = "m"
    context = Context(run, 7, node or {}, RecordDict() if state is None else state, run_config or {})

    def app(message: Message, context: Context) -> Message:
        if isinstance(trained, Exception):
            raise trained
        values = trained(message) if callable(trained) else trained
        arrays = values if isinstance(values, dict) else {"w": values}
        named = {name: Array(np.asarray(values, dtype=np.float32)) for name, values in arrays.items()}
        content = RecordDict({"arrays": ArrayRecord(named), "m": ConfigRecord({"loss": 0.123})})
        if given.clients:
            rows = np.tile(named["w"].numpy() - 1, (len(given.clients), 1))
            content = RecordDict({ROWS: ArrayRecord({"rows": Array(rows)})})
        if ballots is not None:
            content[BALLOTS] = MetricRecord(ballots)
        return Message(content, reply_to=message)

    return private_training(through_the_wire(message), context, app)


def control(value: float) -> dict:
    """The server's control variate, the same in every coordinate."""
    return {"dpfedexp.control": ArrayRecord({"w": Array(np.full(4, value, dtype=np.float32))})}


def sent(reply: Message) -> np.ndarray:
    assert not reply.has_error(), reply.error.reason
    assert set(reply.content) == {REPORT, REQUEST}, "nothing but the report may leave"
    return reply.content.array_records[REPORT]["vector"].numpy()


def test_the_update_is_the_difference_clipped_and_alone():
    vector = sent(ask(CentralGaussian(0.2, 1.0)))
    assert vector.dtype == np.float32
    np.testing.assert_allclose(vector, [0.2, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(sent(ask(CentralGaussian(2.0, 1.0))), [0.5, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_an_update_that_is_not_finite_becomes_zero_and_a_huge_one_is_clipped(bad):
    vector = sent(ask(CentralGaussian(0.2, 1.0), trained=[bad, 1.0, 1.0, 1.0]))
    np.testing.assert_allclose(vector, [0.2 if bad == 1e30 else 0, 0, 0, 0], atol=1e-6)


def test_local_noise_has_its_size_and_is_never_the_same_twice():
    """Two nodes with the same update send different reports, each with noise zC: 400 standardized draws are normal."""
    mechanism = LocalGaussian(0.2, 3.0)
    rows = np.array([sent(ask(mechanism)) for _ in range(100)])
    z = (rows - [0.2, 0, 0, 0]) / mechanism.sigma
    assert kstest(z.ravel(), "norm").pvalue > 1e-7
    assert len({row.tobytes() for row in rows}) == 100


def test_privunit_for_another_dimension_is_refused():
    reply = ask(PrivUnit(0.2, 5))
    assert "for 5 parameters, but the model has 4" in reply.error.reason


def test_a_failing_app_tells_the_server_nothing_about_why(caplog):
    with caplog.at_level(logging.ERROR, logger="flwr"):
        reply = ask(CentralGaussian(0.2, 1.0), trained=ValueError("row 17 of patient Smith is negative"))
    assert reply.has_error()
    assert "Smith" not in reply.error.reason
    assert "Smith" in caplog.text, "the node's own log must say what happened"


@pytest.mark.parametrize("arrays", [{"v": np.zeros(4)}, {"w": np.zeros(5)}, {"w": np.zeros((2, 2))}])
def test_an_app_that_returns_other_arrays_gets_an_error(arrays):
    assert ask(CentralGaussian(0.2, 1.0), trained=arrays).has_error()


LIMITS = {"max_epsilon_per_round": 4.0, "max_epsilon_total": 9.0, "delta": 1e-5, "max_clip": 1.0}
LIMITS |= {"mechanisms": ["local-gaussian", "central-gaussian"]}


def guard_file(folder, **changes):
    path = folder / "guard.toml"
    path.write_text(tomli_w.dumps({**LIMITS, **changes}))
    return path


@pytest.mark.parametrize(
    ("mechanism", "reason"),
    [
        (LocalGaussian(0.3, 0.7), "above this node's max_epsilon_per_round of 4"),
        (LocalGaussian(1.01, 9.0), "clip 1.01 is above this node's max_clip of 1"),
        (PrivUnit(0.3, 4), "mechanism 'privunit' is not allowed here"),
        (NoPrivacy(), "mechanism 'none' is not allowed here"),
        (CentralGaussian(0.3, 0.1), "above this node's max_epsilon_per_round of 4"),
    ],
)
def test_the_guard_refuses_and_says_why(mechanism, reason, tmp_path):
    reply = ask(mechanism, {"dpfedexp-guard": str(guard_file(tmp_path))})
    assert reply.has_error()
    assert reason in reply.error.reason
    assert not (tmp_path / "guard.ledger.jsonl").exists(), "what was refused costs nothing"


def test_the_guard_is_found_through_the_environment_too(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_GUARD", str(guard_file(tmp_path, mechanisms=[])))
    assert "is not allowed here; allowed: none" in ask(LocalGaussian(0.3, 9.0)).error.reason


def test_a_guard_that_is_missing_or_damaged_or_whose_ledger_was_changed_refuses_everything(tmp_path):
    path = tmp_path / "guard.toml"

    def asked():
        return ask(LocalGaussian(0.3, 9.0), {"dpfedexp-guard": str(path)})

    unusable = "dpfedexp: this node's guard file can't be used; see the node's log."
    assert asked().error.reason == unusable
    for text in ("max_clip = 1.0", "max_clip = ", "max_clop = 1.0"):
        path.write_text(text)
        assert asked().error.reason == unusable
    guard_file(tmp_path)
    assert not asked().has_error()
    ledger = tmp_path / "guard.ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("9.0", "90.0"))
    assert "this node's own ledger can't be used" in asked().error.reason


def test_neither_the_message_nor_the_run_can_name_the_guard(tmp_path):
    """A server that sends its own, wider guard in every record it controls is still held to the node's."""
    wide = guard_file(tmp_path, max_epsilon_per_round=1e9)
    (tmp_path / "own").mkdir()
    node = {"dpfedexp-guard": str(guard_file(tmp_path / "own"))}
    named = {"dpfedexp-guard": str(wide)}
    asked = NodeRequest(1, "n", LocalGaussian(0.3, 0.7), Sampling()).to_record()
    records = {"config": ConfigRecord(named), REQUEST: ConfigRecord({**asked, **named})}
    reply = ask(LocalGaussian(0.3, 0.7), node, records=records, run_config=named)
    assert "max_epsilon_per_round of 4" in reply.error.reason


def test_scaffold_remembers_its_own_control_variate_and_sends_none_of_it():
    corrections, state = [], RecordDict()

    def trained(message):
        corrections.append(message.content.array_records["correction"]["w"].numpy())
        return UPDATED

    for _ in range(2):
        reply = ask(CentralGaussian(10.0, 1.0), None, trained, state, records=control(0.1), tau_eta_l=0.5, rounds=2)
        np.testing.assert_allclose(sent(reply), [0.5, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(corrections[0], 0.1, atol=1e-6)
    # c_i = 0 − 0.1 − Δ/0.5, so the second correction is 0.1 − c_i = 0.2 + Δ/0.5.
    np.testing.assert_allclose(corrections[1], [1.2, 0.2, 0.2, 0.2], atol=1e-6)


def test_a_control_variate_that_is_not_finite_is_refused():
    for value in (math.nan, math.inf):
        reply = ask(CentralGaussian(0.2, 1.0), records=control(value), tau_eta_l=0.5, rounds=9)
        assert "is not finite" in reply.error.reason


@pytest.mark.parametrize(("value", "travel"), [(0.1, 1e-45), (0.1, 1e300), (3e38, 0.5), (-3e38, 1e-300)])
def test_no_control_variate_or_travel_moves_an_answer_out_of_the_ball_or_spoils_the_next(value, travel):
    """Whatever the server puts into c and τη_l, an answer stays within C, and the node's own c_i stays finite."""

    def corrected(message):
        return np.float32(UPDATED) + message.content.array_records["correction"]["w"].numpy()

    state, given = RecordDict(), {"records": control(value), "tau_eta_l": travel, "rounds": 9}
    for _ in range(3):
        reply = ask(CentralGaussian(0.2, 1.0), None, corrected, state, **given)
        assert np.linalg.norm(sent(reply).astype(np.float64)) <= 0.2
        assert np.isfinite(state.array_records["dpfedexp.own-control"]["c_i"].numpy()).all()


def test_the_control_variate_of_another_model_is_not_used():
    """Flower hands the state of one run to the next; a first run with a small model must not shut a node out of the second."""
    state = RecordDict({"dpfedexp.own-control": ArrayRecord({"c_i": Array(np.ones(3, dtype=np.float32))})})
    sent(ask(CentralGaussian(0.2, 1.0), state=state, records=control(0.1), tau_eta_l=0.5))
    assert len(state.array_records["dpfedexp.own-control"]["c_i"].numpy()) == 4


VOTING = CentralGaussian(0.2, 1.0, votes=(within_clip_vote(2.0), Vote("length", 0.0, 4.0, noise=2.0)))


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
    reply = ask(VOTING, ballots=said)
    assert set(reply.content) == {REPORT, REQUEST}
    fields = reply.content.config_records[REQUEST]
    assert set(fields) == {"round", "nonce", "votes"}
    assert fields["votes"] == [-0.5, share], "the update of length 0.5 was not within the clip"


def test_clients_of_one_node_answer_in_a_list_and_their_shares_are_added():
    given = {"state": RecordDict(), "clients": (0, 1, 2), "clients_per_node": 3}
    for said, total in (([0.0, 1.0, 4.0], -0.25), ([1.0], 0.0)):
        reply = ask(VOTING, ballots={"length": said}, **given, rounds=2)
        assert reply.content.config_records[REQUEST]["votes"] == [-1.5, total]
