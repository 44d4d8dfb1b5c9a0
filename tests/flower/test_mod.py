"""What leaves a node, and what a node refuses."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from scipy.stats import ks_2samp, kstest

from dpfedexp.accounting import Ledger, Sampling
from dpfedexp.accounting.compose import compose
from dpfedexp.core.votes import Vote, within_clip
from dpfedexp.errors import InputError
from dpfedexp.flower import deployment_noise, private_training, privatize
from dpfedexp.flower.messages import HOSTED, REPORT, REQUEST, Request
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit
from dpfedexp.mechanisms.text import decode, encode

from .loopback import through_the_wire

MECHANISMS = [
    NoPrivacy(),
    CentralGaussian(0.3, 5.0, "add-remove", "free"),
    CentralGaussian(0.3, 5.0, "replace-one", "paper", 7.5, (within_clip(12.0),)),
    CentralGaussian(0.3, 5.0, votes=(within_clip(12.0), Vote("loss", -1.0, 4.0, noise=7.0))),
    NoPrivacy(0.3, (Vote("loss", noise=0.0),)),
    LocalGaussian(0.3, 0.7, "naive"),
    PrivUnit(0.3, 20, 2.0, 1.0, 2.0, "optimal"),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: type(m).__name__)
def test_a_mechanism_survives_the_wire(mechanism):
    assert decode(encode(mechanism)) == mechanism


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("0.7", "0.0"), "noise_multiplier is 0.0; it must be a positive number"),
        (lambda t: t.replace("0.7", "-1"), "noise_multiplier is -1"),
        (lambda t: t.replace("0.7", "NaN"), "noise_multiplier is nan"),
        (lambda t: t.replace("0.7", "true"), "noise_multiplier is True"),
        (lambda t: t.replace("0.3", "null"), "clip is None"),
        (lambda t: t.replace("naive", "nave"), "numerator is 'nave'"),
        (lambda t: t.replace("local-gaussian", "local-gausian"), "Did you mean 'local-gaussian'"),
        (lambda t: t.replace('"clip":0.3,', ""), "it must have"),
        (lambda t: "{", "not valid JSON"),
        (lambda t: "[]", "not a JSON object"),
        (lambda t: t.replace('"local-gaussian"', "[]"), r"kind is \[\], which does not exist"),
        (lambda t: t.replace('"local-gaussian"', "{}"), r"kind is \{\}, which does not exist"),
    ],
)
def test_a_mechanism_that_makes_no_sense_is_a_sentence(change, message):
    with pytest.raises(InputError, match=message):
        decode(change(encode(LocalGaussian(0.3, 0.7, "naive"))))


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
    given = Request(1, "n" * 32, LocalGaussian(0.3, 2.2), Sampling())
    content = RecordDict({"arrays": ArrayRecord({"w": array}), REQUEST: given.to_record()})
    message = Message(content, 7, "train")
    message.metadata.__dict__["_message_id"] = "m"
    reply = private_training(message, Context(1, 7, {}, RecordDict(), {}), lambda message, context: message)
    assert reply.error.reason.startswith("dpfedexp: the array 'w'")


def ask(
    mechanism,
    node_config=None,
    trained=None,
    sampling=Sampling(),
    state=None,
    round=1,
    run=1,
    run_config=None,
    **request,
):
    """The mod's reply for a model of 4 ones whose app returns `trained` (for every hosted client), or raises it."""
    given = Request(round, "n" * 32, mechanism, sampling, **request)
    model = ArrayRecord({"w": Array(np.ones(4, dtype=np.float32))})
    message = Message(RecordDict({"arrays": model, "config": ConfigRecord(), REQUEST: given.to_record()}), 7, "train")
    message.metadata.__dict__["_message_id"] = "m"
    context = Context(run, 7, node_config or {}, RecordDict() if state is None else state, run_config or {})

    def app(message: Message, context: Context) -> Message:
        if isinstance(trained, Exception):
            raise trained
        values = np.asarray([1.5, 1.0, 1.0, 1.0] if trained is None else trained, dtype=np.float32)
        content = RecordDict({"arrays": ArrayRecord({"w": Array(values)}), "m": ConfigRecord({"loss": 0.123})})
        if given.clients:
            rows = np.tile(values - 1, (len(given.clients), 1))
            content = RecordDict({HOSTED: ArrayRecord({"rows": Array(rows)})})
        return Message(content, reply_to=message)

    return private_training(through_the_wire(message), context, app)


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
    expected = [0.2, 0, 0, 0] if bad == 1e30 else [0, 0, 0, 0]
    np.testing.assert_allclose(vector, expected, atol=1e-6)


def test_local_noise_has_its_size_and_is_never_the_same_twice():
    """Two nodes with the same update send different reports, each with noise zC: 400 standardised draws are normal."""
    mechanism = LocalGaussian(0.2, 3.0)
    rows = np.array([sent(ask(mechanism)) for _ in range(100)])
    z = (rows - [0.2, 0, 0, 0]) / mechanism.sigma
    assert kstest(z.ravel(), "norm").pvalue > 1e-7
    assert len({row.tobytes() for row in rows}) == 100


def test_deployment_noise_ignores_every_seed():
    torch.manual_seed(0)
    np.random.seed(0)
    first = deployment_noise().normal(torch.zeros(1, dtype=torch.int64), 500, torch.device("cpu"), torch.float64)
    torch.manual_seed(0)
    np.random.seed(0)
    second = deployment_noise().normal(torch.zeros(1, dtype=torch.int64), 500, torch.device("cpu"), torch.float64)
    assert not torch.equal(first, second)
    assert abs(float((first * second).mean())) < 5 / math.sqrt(500), "two sources must not be related"
    assert ks_2samp(first[0], second[0]).pvalue > 1e-7


def test_the_structured_privunit_report_is_a_level_and_a_unit_vector():
    reply = ask(PrivUnit(0.2, 4))
    assert np.linalg.norm(sent(reply)) == pytest.approx(1.0, abs=2e-4), "up to the grid of secure noise"
    assert 0 <= reply.content.config_records[REQUEST]["level"] <= PrivUnit(0.2, 4).scalar.k


def test_privunit_for_another_dimension_is_refused():
    reply = ask(PrivUnit(0.2, 5))
    assert "for 5 parameters, but the model has 4" in reply.error.reason


def test_privatize_takes_rows_and_single_updates():
    mechanism = CentralGaussian(1.0, 1.0, numerator="free")
    one = privatize(torch.tensor([3.0, 4.0]), mechanism)
    many = privatize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), mechanism)
    torch.testing.assert_close(one.vector[0], many.vector[0])
    assert float(many.vector.norm(dim=1).max()) <= 1.0


def test_a_failing_app_tells_the_server_nothing_about_why(caplog):
    with caplog.at_level(logging.ERROR, logger="flwr"):
        reply = ask(CentralGaussian(0.2, 1.0), trained=ValueError("row 17 of patient Smith is negative"))
    assert reply.has_error()
    assert "Smith" not in reply.error.reason
    assert "Smith" in caplog.text, "the node's own log must say what happened"


@pytest.mark.parametrize("names", [{"v": (4,)}, {"w": (5,)}, {"w": (2, 2)}])
def test_an_app_that_returns_other_arrays_gets_an_error(names):
    def app(message, context):
        arrays = {name: Array(np.zeros(shape, dtype=np.float32)) for name, shape in names.items()}
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    request = Request(1, "n", CentralGaussian(0.2, 1.0), Sampling())
    model = ArrayRecord({"w": Array(np.ones(4, dtype=np.float32))})
    message = Message(RecordDict({"arrays": model, REQUEST: request.to_record()}), 7, "train")
    assert private_training(message, Context(1, 7, {}, RecordDict(), {}), app).has_error()


LIMITS = {
    "max_epsilon_per_round": 4.0,
    "max_epsilon_total": 9.0,
    "delta": 1e-5,
    "mechanisms": ["local-gaussian", "central-gaussian"],
    "max_clip": 1.0,
}


def guard_file(folder, **changes):
    path = folder / "guard.toml"
    path.write_text(tomli_w.dumps({**LIMITS, **changes}))
    return path


def test_the_guard_charges_every_answer_and_stops_at_its_total_over_restarts(tmp_path):
    """So many reports compose to at most 9; one more is refused, by a node that keeps nothing but its file."""
    path = guard_file(tmp_path)
    node = {"dpfedexp-guard": str(path)}
    mechanism = LocalGaussian(0.3, 2.2)
    event = mechanism.client_event()
    affordable = max(n for n in range(1, 50) if compose([(event, n)], 1e-5).epsilon <= 9.0)
    assert 1 < affordable < 20
    for number in range(1, affordable + 1):
        assert not ask(mechanism, node, round=number).has_error()
    refused = ask(mechanism, node, round=affordable + 1)
    assert "above its max_epsilon_total of 9" in refused.error.reason
    book = Ledger.open(tmp_path / "guard.ledger.jsonl", read_only=True)
    assert len(book) == affordable
    assert book.guarantee(1e-5).epsilon <= 9.0


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


def test_a_guard_that_is_missing_or_damaged_refuses_everything(tmp_path):
    for text in (None, "max_clip = 1.0", "max_clip = ", "max_clop = 1.0"):
        path = tmp_path / "guard.toml"
        if text is not None:
            path.write_text(text)
        reason = ask(LocalGaussian(0.3, 9.0), {"dpfedexp-guard": str(path)}).error.reason
        assert reason == "dpfedexp: this node's guard file can't be used; the node's own log says why."


def test_a_guard_whose_ledger_was_changed_refuses(tmp_path):
    node = {"dpfedexp-guard": str(guard_file(tmp_path))}
    assert not ask(LocalGaussian(0.3, 9.0), node).has_error()
    ledger = tmp_path / "guard.ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("9.0", "90.0"))
    assert "this node's own ledger can't be used" in ask(LocalGaussian(0.3, 9.0), node).error.reason


def test_neither_the_message_nor_the_run_can_name_the_guard(tmp_path):
    """A server that sends its own, wider guard in every record it controls is still held to the node's."""
    wide = guard_file(tmp_path, max_epsilon_per_round=1e9)
    narrow = tmp_path / "own"
    narrow.mkdir()
    node = {"dpfedexp-guard": str(guard_file(narrow))}
    request = Request(1, "n", LocalGaussian(0.3, 0.7), Sampling())
    content = RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(np.ones(4, dtype=np.float32))}),
            "config": ConfigRecord({"dpfedexp-guard": str(wide)}),
            REQUEST: ConfigRecord({**request.to_record(), "dpfedexp-guard": str(wide)}),
        }
    )
    context = Context(1, 7, node, RecordDict(), {"dpfedexp-guard": str(wide)})
    reply = private_training(Message(content, 7, "train"), context, lambda m, c: m)
    assert "max_epsilon_per_round of 4" in reply.error.reason


def test_a_client_charges_full_price_under_sampling():
    """Amplification hides who took part from others, not from a node that knows that it was asked."""
    mechanism = CentralGaussian(0.3, 2.2, "add-remove")
    sampled = mechanism.client_event()
    assert compose([(sampled, 1)], 1e-5).epsilon == pytest.approx(
        compose([(CentralGaussian(0.3, 2.2, "replace-one").event(Sampling()), 1)], 1e-5).epsilon
    )


def test_scaffold_remembers_its_own_control_variate_and_sends_none_of_it():
    state, seen = RecordDict(), []
    request = Request(1, "n", CentralGaussian(10.0, 1.0), Sampling(), tau_eta_l=0.5, rounds=2)
    model = ArrayRecord({"w": Array(np.ones(4, dtype=np.float32))})
    control = ArrayRecord({"w": Array(np.full(4, 0.1, dtype=np.float32))})

    def app(message: Message, context: Context) -> Message:
        seen.append(message.content.array_records["correction"]["w"].numpy())
        trained = ArrayRecord({"w": Array(np.array([1.5, 1, 1, 1], dtype=np.float32))})
        return Message(RecordDict({"arrays": trained}), reply_to=message)

    for _ in range(2):
        records = {"arrays": model, "dpfedexp.control": control, REQUEST: request.to_record()}
        reply = private_training(Message(RecordDict(records), 7, "train"), Context(1, 7, {}, state, {}), app)
        np.testing.assert_allclose(sent(reply), [0.5, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(seen[0], 0.1, atol=1e-6)
    # c_i = 0 − 0.1 − Δ/0.5, so the second correction is 0.1 − c_i = 0.2 + Δ/0.5.
    np.testing.assert_allclose(seen[1], [1.2, 0.2, 0.2, 0.2], atol=1e-6)
