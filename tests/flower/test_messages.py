"""Requests and reports go through the wire as they are, and every part that is wrong is refused by its name."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, RecordDict
from scipy.stats import chi

from dpfedexp.accounting import Sampling
from dpfedexp.core.clipping import Clipped
from dpfedexp.core.noise import Streams, step_for
from dpfedexp.core.sums import Sums, Vote, within_clip_vote
from dpfedexp.errors import InputError
from dpfedexp.flower.messages import (
    REPORT,
    REQUEST,
    NodeRequest,
    as_array,
    read_sums,
    report_content,
    strict_array,
    sums_content,
)
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit, Report
from dpfedexp.mechanisms.base import with_secure_noise
from dpfedexp.mechanisms.serialization import decode, encode

WIDTH = 3
COUNTED = CentralGaussian(0.5, 1.0, votes=(within_clip_vote(2.0),))
PAPER = CentralGaussian(0.5, 1.0, numerator="paper", scalar_multiplier=3.0)
HALVES = np.ones((2, 3), dtype=np.float16)


@pytest.mark.parametrize(
    "values",
    [np.array(3.0, "f4"), np.zeros((0, 3)), np.arange(12.0).reshape(3, 4).T, np.arange(5, dtype="<u8"), HALVES],
    ids=["single", "empty", "transposed", "words", "half"],
)
def test_an_array_has_the_bytes_that_flower_writes(values):
    ours, flowers = as_array(values), Array(np.require(values, requirements="C"))
    assert all(getattr(ours, name) == getattr(flowers, name) for name in ("dtype", "shape", "stype", "data"))
    assert np.array_equal(ours.numpy(), values)


def test_a_site_reads_a_transposed_parameter_of_its_app_and_the_server_none():
    """Flower writes it column by column: a node that enforces had no report of an honest app."""
    values = np.arange(6.0, dtype="f4").reshape(2, 3).T
    assert np.array_equal(strict_array(Array(values), "float32", (3, 2), of_app=True), values)
    with pytest.raises(InputError, match="its header is wrong"):
        strict_array(Array(values), "float32", (3, 2))


def message(content: RecordDict) -> Message:
    """All that is read of a message; a whole one can be made only inside a running app."""
    return SimpleNamespace(content=content)  # type: ignore[return-value]


def received(**changes) -> NodeRequest:
    """What a node reads of a request in which these values were changed."""
    mechanism, sampling = with_secure_noise(COUNTED), Sampling("poisson", 0.25)
    given = NodeRequest(2, "nonce", mechanism, sampling, rounds=7, clients_per_node=4)
    return NodeRequest.from_message(message(RecordDict({REQUEST: ConfigRecord({**given.to_record(), **changes})})))


def read(content: RecordDict, request: NodeRequest, **changes) -> Sums:
    """What the server reads of a reply in which these values were changed."""
    said = ConfigRecord({**content.config_records[REQUEST], **changes})
    return read_sums(message(RecordDict({REPORT: content[REPORT], REQUEST: said})), request, WIDTH)


def added(mechanism=COUNTED, vector=(2.0, 0.0, 0.0), **changes) -> Sums:
    """What the server reads of the sums of four clients of a node, each one of norm C and within the clip."""
    request = NodeRequest(1, "nonce", mechanism, Sampling(), (0, 1, 2, 3))
    squares = torch.tensor(1.0 if mechanism is PAPER else 0.0)
    votes = torch.full((len(mechanism.votes),), 2.0, dtype=torch.float64)
    sums = Sums(torch.tensor(vector, dtype=torch.float64), squares, votes, 4)
    return read(sums_content(sums, request), request, **changes)


def test_a_request_arrives_as_it_was_sent():
    for given in (
        NodeRequest(2, "nonce", with_secure_noise(COUNTED), Sampling("poisson", 0.25), rounds=7, clients_per_node=4),
        NodeRequest(1, "nonce", with_secure_noise(PAPER), Sampling(), clients=(3, 0), clients_per_node=4),
        NodeRequest(1, "nonce", with_secure_noise(LocalGaussian(0.3, 0.7)), Sampling(), tau_eta_l=0.5),
        NodeRequest(1, "nonce", with_secure_noise(COUNTED), Sampling(), candidate=7),
    ):
        assert NodeRequest.from_message(message(RecordDict({REQUEST: given.to_record()}))) == given
    assert NodeRequest(1, "n", COUNTED, Sampling()).size == 1
    assert NodeRequest(1, "n", COUNTED, Sampling(), clients=(4, 2)).size == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"nonce": 1}, "nonce"),
        ({"mechanism": 1.0}, "mechanism"),
        ({"sampling": 0}, "sampling"),
        ({"rate": 1}, "rate"),
        ({"tau_eta_l": "0"}, "tau_eta_l"),
        ({"tau_eta_l": -1e-9}, "tau_eta_l"),
        ({"tau_eta_l": math.inf}, "tau_eta_l"),
        ({"tau_eta_l": math.nan}, "tau_eta_l is nan; it must be finite"),
        ({"round": 0}, "round is 0; it must be a whole number from 1"),
        ({"round": True}, "round"),
        ({"rounds": 1.0}, "rounds"),
        ({"clients_per_node": 0}, "clients_per_node"),
        ({"candidate": -1}, "candidate is -1; it must be a whole number from 0 to 7"),
        ({"candidate": 8}, "candidate is 8; it must be a whole number from 0 to 7"),
        ({"clients": 3}, "clients"),
        ({"clients": [1.0]}, "clients"),
        ({"clients": [0, -1]}, "clients"),
        ({"clients": [1, 1]}, "client twice"),
        ({"clients": [1], "tau_eta_l": 0.5}, "SCAFFOLD"),
    ],
)
def test_a_request_with_a_wrong_value_is_refused_by_its_name(changes, field):
    assert received().rounds == 7
    with pytest.raises(InputError, match=field):
        received(**changes)


@pytest.mark.parametrize(
    "mechanism", [COUNTED, PAPER, LocalGaussian(0.5, 0.7), PrivUnit(0.5, WIDTH)], ids=lambda m: type(m).__name__
)
def test_a_report_counts_as_much_through_the_wire_as_without_it(mechanism):
    rows = torch.tensor([[0.1, -0.2, 0.3]])
    report = mechanism.randomize(Clipped(rows, torch.tensor([True])), torch.arange(1), Streams(0).at("noise", 1))
    request = NodeRequest(1, "nonce", mechanism, Sampling())
    content = report_content(report, request)
    assert content[REPORT]["vector"].numpy().shape == (WIDTH,)
    through, without = read_sums(message(content), request, WIDTH), mechanism.collect(report)
    assert torch.equal(through.vector, without.vector)
    assert (through.squares, through.count) == (without.squares, without.count)
    assert torch.equal(through.votes, without.votes)


@pytest.mark.parametrize(
    "votes", [[-0.6, 0.0], [0.0, math.inf], [math.nan, 0.0], [0.5], [0.5, 0.1, 0.1], 0.5, "1", [1, 0]]
)
def test_votes_are_as_many_as_were_asked_and_each_within_a_half(votes):
    asking = replace(COUNTED, votes=(*COUNTED.votes, Vote("loss", 0.0, 10.0, noise=3.0)))
    request = NodeRequest(1, "nonce", asking, Sampling())
    content = report_content(Report(torch.zeros(1, WIDTH), votes=torch.tensor([[0.5, 0.1]])), request)
    with pytest.raises(InputError, match="votes"):
        read(content, request, votes=votes)


def test_a_level_is_one_of_those_that_exist():
    mechanism = PrivUnit(0.5, WIDTH)
    request = NodeRequest(1, "nonce", mechanism, Sampling())
    content = report_content(Report(torch.tensor([[1.0, 0.0, 0.0]]), level=torch.tensor([0])), request)
    for level in (0, mechanism.scalar.k):
        assert read(content, request, level=level).count == 1
    for level in (-1, mechanism.scalar.k + 1, 1.0):
        with pytest.raises(InputError, match="level is out of range"):
            read(content, request, level=level)


@pytest.mark.parametrize("mechanism", [COUNTED, PAPER], ids=["count", "squares"])
def test_hosted_clients_may_all_lie_on_the_ball_and_within_the_clip(mechanism):
    sums = added(mechanism)
    assert (sums.count, sums.votes.tolist()) == (4, [2.0] * len(mechanism.votes))
    assert float(sums.squares) == (1.0 if mechanism is PAPER else 0.0)
    assert sums.vector.tolist() == [2.0, 0.0, 0.0]


def test_hosted_privunit_reports_may_all_have_the_least_estimate_of_a_square():
    mechanism = PrivUnit(0.5, WIDTH)
    for bound in mechanism.square_bounds(WIDTH):
        given = {"mechanism": mechanism, "vector": (0.0, 0.0, 0.0)}
        assert float(added(**given, squares=4 * bound).squares) == 4 * bound
        with pytest.raises(InputError, match="statistics"):
            added(**given, squares=4.004 * bound)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"votes": [2.5]}, "votes"),
        ({"votes": []}, "votes"),
        ({"votes": [math.nan]}, "votes"),
        ({"squares": 1.001}, "statistics"),
        ({"squares": -1.001}, "statistics"),
        ({"count": 3}, "count"),
        ({"vector": (2.001, 0.0, 0.0)}, "longer"),
        ({"nonce": "another"}, "another message"),
    ],
)
def test_sums_that_so_many_clients_can_not_have_are_refused(changes, reason):
    with pytest.raises(InputError, match=reason):
        added(PAPER if "squares" in changes else COUNTED, **changes)


def test_the_bound_on_a_report_is_the_clip_and_the_noise_that_honest_clients_exceed_once_in_1e15():
    assert COUNTED.norm_bound(100) == 0.5
    local = LocalGaussian(0.5, 0.7)
    assert local.norm_bound(100) == pytest.approx(0.5 + 0.35 * chi(100).isf(1e-15), rel=1e-9)


def test_every_honest_privunit_report_is_within_the_bound_though_its_direction_is_rounded():
    mechanism = PrivUnit(0.5, WIDTH)
    levels = mechanism.scalar.magnitude(torch.arange(mechanism.scalar.k + 1)).abs().max()
    longest = float(levels) / mechanism.direction.m
    # A direction counts as one up to 1e-3, so c may be longer by that much, and no more.
    assert mechanism.norm_bound(WIDTH) == pytest.approx(longest * 1.001, rel=1e-12)


@pytest.mark.parametrize("field", ["clip", "noise_multiplier"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "1", None, 1e-31, 1e31])
def test_a_number_of_a_mechanism_is_positive_finite_and_in_its_range(field, value):
    values = json.loads(encode(LocalGaussian(0.3, 0.7)))
    for good in (1e-30, 1e30):
        assert getattr(decode(json.dumps({**values, field: good})), field) == good
    with pytest.raises(InputError, match=f"mechanism's {field} is"):
        decode(json.dumps({**values, field: value}))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("naive", "nave", "numerator is 'nave'"),
        ("local-gaussian", "local-gausian", "Did you mean 'local-gaussian'"),
        ('"clip":0.3,', "", "it must have"),
        ('"local-gaussian"', "[]", r"kind is \[\], which does not exist"),
        ('"local-gaussian"', "{}", r"kind is \{\}, which does not exist"),
        (None, "{", "not valid JSON"),
        (None, "[]", "not a JSON object"),
    ],
)
def test_a_mechanism_that_makes_no_sense_is_a_sentence(old, new, sentence):
    text = encode(LocalGaussian(0.3, 0.7, "naive"))
    with pytest.raises(InputError, match=sentence):
        decode(new if old is None else text.replace(old, new))


def test_the_sums_of_a_node_are_put_on_the_grid_of_the_servers_noise():
    mechanism = with_secure_noise(PAPER)
    given = Sums(torch.full((WIDTH,), 1 / 3).double(), torch.tensor(1 / 7).double(), torch.zeros(0).double(), 2)
    found = mechanism.prepare_sums(given)
    for value, before, step in (
        (found.vector, given.vector, step_for(mechanism.noise_multiplier * mechanism.clip)),
        (found.squares, given.squares, step_for(mechanism.scalar_multiplier * mechanism.clip**2)),
    ):
        assert torch.equal(value, (before / step).trunc() * step)
        assert not torch.equal(value, before)


def test_a_mechanism_whose_secure_variant_draws_plain_noise_is_refused_on_a_node(monkeypatch):
    """Low bits of a release would tell what the noise was added to. The server refuses it too: `test_registry`."""
    mechanism = CentralGaussian(0.5, 1.0)
    asked = message(RecordDict({REQUEST: NodeRequest(1, "n", mechanism, Sampling()).to_record()}))
    assert with_secure_noise(NoPrivacy()) == NoPrivacy()
    assert with_secure_noise(mechanism) == NodeRequest.from_message(asked).mechanism != mechanism
    monkeypatch.setattr(CentralGaussian, "secure", lambda self, strict=False: self)
    plain = "'central-gaussian' draws plain noise where a deployment asked for secure noise"
    with pytest.raises(InputError, match=plain):
        with_secure_noise(mechanism)
    with pytest.raises(InputError, match=plain):
        NodeRequest.from_message(asked)
