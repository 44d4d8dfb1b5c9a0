"""The guard charges what a node's data can do to its answers, and its ledger can't be begun anew unnoticed."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from dpfedexp.accounting import Ledger, Sampling, gdp
from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.ledger import Mark
from dpfedexp.core.clipping import Clipped, clip
from dpfedexp.core.votes import within_clip
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.flower import Guard, private_training
from dpfedexp.flower import guard as guard_ledger
from dpfedexp.flower.guard import Refused, node_charge, total
from dpfedexp.flower.messages import REPORT, REQUEST, Request, deployed
from dpfedexp.flower.monitor import guard_summary
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, PrivUnit
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

from .test_mod import ask, guard_file

DELTA = 1e-5
WIDE = {"max_epsilon_per_round": 1e6, "max_epsilon_total": 1e6}


def book(folder) -> Ledger:
    return Ledger.open(folder / "guard.ledger.jsonl", read_only=True)


def request(mechanism=LocalGaussian(0.3, 9.0), round=1, **given) -> Request:
    return Request(round, "n", mechanism, Sampling(), **given)


def admitted_of(guard: Guard, requests, reason: str) -> int:
    """How many requests of run "r" are admitted before one is refused, for this reason."""
    for count, given in enumerate(requests):
        try:
            guard.admit(given, run="r")
        except Refused as refusal:
            if reason not in str(refusal):
                raise
            return count
    raise AssertionError("nothing was refused")


@pytest.fixture
def guard(tmp_path) -> Guard:
    return Guard.load(guard_file(tmp_path, **WIDE))


def test_a_request_for_many_hosted_clients_is_charged_for_all_of_them_or_refused(tmp_path):
    """The attack: one client costs 3.92 of a limit of 4, and a server that asks for 14 in one message learns ε = 82."""
    mechanism = CentralGaussian(0.3, 2.2)
    one = mechanism.client_event()
    assert compose([(one, 1)], DELTA).epsilon == pytest.approx(3.92, abs=0.1)
    real = gdp.epsilon(14 * one.mu, DELTA)
    assert real > 80
    node = {"dpfedexp-guard": str(guard_file(tmp_path))}
    reply = ask(mechanism, node, clients=tuple(range(14)), hosted=14)
    assert f"the round costs epsilon {real:.4g} at delta 1e-05" in reply.error.reason
    assert not ask(mechanism, node, clients=(3,), hosted=14).has_error(), "one of them is within the limit"


@pytest.mark.parametrize(
    "mechanism",
    [
        CentralGaussian(0.3, 5.0, numerator="free"),
        CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=1.0, votes=(within_clip(4.0),)),
        LocalGaussian(0.3, 2.0, "paper"),
    ],
    ids=["free", "paper and count", "local"],
)
def test_what_is_charged_covers_the_shift_that_replacing_every_hosted_client_makes(mechanism):
    """The sum of 9 clients at one pole of the ball against 9 at the other, in units of the noise that is on it."""
    mechanism = deployed(mechanism)
    event, count = node_charge(mechanism, 9)
    mu = event.mu * math.sqrt(count)
    if isinstance(mechanism, LocalGaussian):
        # Nine reports, each with noise of its own: the shift is 9·2C and the noise 3·zC.
        assert mu == pytest.approx(9 * 2 / (3 * 2.0))
        return
    shifts = []
    for other in (-1.0, -0.3, 0.0, 0.3):
        sums = [
            mechanism.collect(mechanism.randomize(_clipped(row, mechanism.clip), torch.arange(9), None))
            for row in (1.0, other)
        ]
        parts = [float((sums[0].vector - sums[1].vector).norm()) / (mechanism.noise_multiplier * mechanism.clip)]
        if mechanism.scalar_multiplier:
            parts.append(float(sums[0].squares - sums[1].squares) / (mechanism.scalar_multiplier * mechanism.clip**2))
        parts += [9 / vote.noise for vote in mechanism.votes]
        shifts.append(math.hypot(*parts))
    # Rows are clipped a little inside the ball, and the pairs tried here need not be the worst one.
    assert 0.9 * mu < max(shifts) <= mu


def _clipped(value: float, radius: float) -> Clipped:
    rows = torch.zeros(9, 4)
    rows[:, 0] = value * radius
    return clip(rows, radius)


def test_a_privunit_node_is_charged_once_for_every_hosted_report(tmp_path):
    guard = Guard.load(guard_file(tmp_path, mechanisms=["privunit"], **WIDE))
    guard.admit(request(PrivUnit(0.3, 4), clients=(0, 1, 2), hosted=3))
    assert [entry.event for entry in book(tmp_path).entries] == [PrivUnit(0.3, 4).client_event()] * 3
    with pytest.raises(Refused, match="max_epsilon_per_round of 17"):
        replace(guard, max_epsilon_per_round=17.0).admit(request(PrivUnit(0.3, 4), round=2, clients=(0, 1, 2, 3)))


def test_requests_for_different_hosted_clients_of_one_round_share_its_limit(tmp_path):
    """Each alone is within the limit of 4; the server could add all of them into one sum with one noise, where shifts add."""
    guard = Guard.load(guard_file(tmp_path, max_epsilon_total=1e6))
    mechanism = CentralGaussian(0.3, 8.0)
    admitted = admitted_of(
        guard, (request(mechanism, clients=(c,), hosted=100) for c in range(100)), "max_epsilon_per_round of 4"
    )
    one = mechanism.client_event().mu
    assert admitted == max(k for k in range(100) if gdp.epsilon(k * one, DELTA) <= 4.0)
    assert gdp.compose(e.event.mu for e in book(tmp_path).entries) == pytest.approx(admitted * one)
    guard.admit(request(mechanism, round=2, clients=(0,), hosted=100), run="r")
    guard.admit(request(mechanism, round=1, clients=(0,), hosted=100), run="another")


def test_repeated_local_requests_of_one_round_compose_against_its_limit(tmp_path):
    guard = Guard.load(guard_file(tmp_path, max_epsilon_total=1e6))
    event = LocalGaussian(0.3, 5.0).client_event()
    admitted = admitted_of(guard, [request(LocalGaussian(0.3, 5.0))] * 100, "max_epsilon_per_round of 4")
    assert admitted == max(n for n in range(100) if total([(event, n)], DELTA) <= 4.0)


def test_local_and_two_party_rounds_of_one_node_compose(tmp_path):
    """What was shown: 4 local and 12 two-party rounds were added up to 18.65, where their composition is 14.33."""
    guard = Guard.load(guard_file(tmp_path, mechanisms=["local-gaussian", "two-party"], **WIDE))
    local, two_party = LocalGaussian(0.5, 3.0), TwoPartyGaussian(0.5, 3.0)
    for number in range(1, 17):
        guard.admit(request(local if number <= 4 else two_party, round=number))
    mu = local.client_event().mu
    assert two_party.client_event().mu == mu
    spent = guard_summary(guard)["epsilon"]
    assert spent == pytest.approx(gdp.epsilon(4.0 * mu, DELTA), rel=1e-12)
    assert spent == pytest.approx(14.33, abs=0.005)
    with pytest.raises(Refused, match=r"total to epsilon 14\.9"):
        replace(guard, max_epsilon_total=14.5).admit(request(local, round=17))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tau_eta_l": math.nan}, "tau_eta_l is nan; it must be finite"),
        ({"tau_eta_l": 0.5, "clients": (0, 1), "hosted": 2}, "asks hosted clients for SCAFFOLD"),
        ({"tau_eta_l": 0.5}, "carries no control variate"),
        ({"round": -3}, "round is -3; it must be a positive whole number"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_costs_nothing(changes, reason, tmp_path):
    reply = ask(CentralGaussian(0.3, 9.0), {"dpfedexp-guard": str(guard_file(tmp_path))}, **changes)
    assert reason in reply.error.reason
    assert not (tmp_path / "guard.ledger.jsonl").exists()


def scaffold(control: float, travel: float, state: RecordDict, trained=(1.5, 1.0, 1.0, 1.0)) -> Message:
    given = Request(1, "n", CentralGaussian(0.2, 1.0), Sampling(), tau_eta_l=travel, rounds=9)
    arrays = {
        "arrays": ArrayRecord({"w": Array(np.ones(4, dtype=np.float32))}),
        "dpfedexp.control": ArrayRecord({"w": Array(np.full(4, control, dtype=np.float32))}),
    }

    def app(message: Message, context: Context) -> Message:
        correction = message.content.array_records["correction"]["w"].numpy()
        values = np.asarray(trained, dtype=np.float32) + correction
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(values)})}), reply_to=message)

    message = Message(RecordDict({**arrays, REQUEST: given.to_record()}), 7, "train")
    return private_training(message, Context(1, 7, {}, state, {}), app)


def test_a_control_variate_that_is_not_finite_is_refused():
    for control in (math.nan, math.inf):
        assert "is not finite" in scaffold(control, 0.5, RecordDict()).error.reason


@pytest.mark.parametrize(("control", "travel"), [(0.1, 1e-45), (0.1, 1e300), (3e38, 0.5), (-3e38, 1e-300)])
def test_no_control_variate_or_travel_moves_an_answer_out_of_the_ball_or_spoils_the_next(control, travel):
    """Whatever the server puts into c and τη_l, an answer stays within C, and the node's own c_i stays finite."""
    state = RecordDict()
    for _ in range(3):
        reply = scaffold(control, travel, state)
        assert not reply.has_error(), reply.error.reason
        assert np.linalg.norm(reply.content.array_records[REPORT]["vector"].numpy().astype(np.float64)) <= 0.2
        assert np.isfinite(state.array_records["dpfedexp.own-control"]["c_i"].numpy()).all()


def test_the_ledger_and_its_anchor_agree_before_an_answer_exists(guard, tmp_path):
    for number in (1, 2, 3):
        guard.admit(request(round=number))
        mark = book(tmp_path).mark()
        assert guard_ledger._read(tmp_path / "guard.anchor.json") == mark
        assert mark.count == number


def keep(folder, *names) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


LEDGER = ("guard.ledger.jsonl", "guard.ledger.jsonl.head")


def restore(folder, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_a_deleted_ledger_is_refused_until_its_traces_are_deleted_knowingly(guard, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "state"))
    guard.admit(request())
    (tmp_path / LEDGER[0]).unlink()
    with pytest.raises(Refused, match=r"missing beside guard\.anchor\.json and .*head; restore it from a back-up"):
        guard.admit(request())
    (tmp_path / LEDGER[1]).unlink()
    with pytest.raises(Refused, match=r"missing beside guard\.anchor\.json; restore it"):
        guard.admit(request())
    (tmp_path / "guard.anchor.json").unlink()
    with pytest.raises(Refused, match=r"guard\.toml was charged before 1 times, as .* has seen .*take the line id out"):
        guard.admit(request())
    assert "was charged before 1 times" in guard_summary(guard)["problem"]
    guard_file(tmp_path, **WIDE)
    with pytest.raises(Refused, match=r"is missing, and .* has seen 1 charges at this place; restore that ledger"):
        guard.admit(request())
    for path in (tmp_path / "state" / "ledgers").iterdir():
        path.unlink()
    guard.admit(request())
    assert len(book(tmp_path)) == 1


def test_an_empty_ledger_of_another_node_with_its_head_and_anchor_is_refused(guard, tmp_path):
    """The attack: all three files are exchanged for a set that agrees with itself, and nothing was ever spent."""
    other = tmp_path / "other"
    other.mkdir()
    neighbour = Guard.load(guard_file(other, **WIDE))
    with guard_ledger.guard_ledger(neighbour.path):
        pass
    guard.admit(request())
    restore(tmp_path, keep(other, *LEDGER, "guard.anchor.json"))
    with pytest.raises(Refused, match=r"is another ledger: it belongs to the guard with id"):
        guard.admit(request(round=2))
    restore(tmp_path, keep(other, "guard.toml"))
    with pytest.raises(Refused, match=r"is another ledger, and .* has seen 1 charges at this place"):
        guard.admit(request(round=2))


def test_an_older_ledger_with_its_own_head_is_refused(guard, tmp_path):
    guard.admit(request())
    old = keep(tmp_path, *LEDGER)
    guard.admit(request(round=2))
    new = keep(tmp_path, *LEDGER)
    restore(tmp_path, old)
    with pytest.raises(Refused, match=r"an older copy: it holds 1 charges, and its anchor .* was written after 2"):
        guard.admit(request(round=3))
    restore(tmp_path, new)
    guard.admit(request(round=3))


def test_ledger_head_and_anchor_put_back_together_are_refused_until_it_is_forgotten_knowingly(
    guard, tmp_path, monkeypatch
):
    """The attack, or a back-up of the whole folder: the three agree with each other, and what was spent since is forgotten."""
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "state"))
    guard.admit(request())
    old = keep(tmp_path, *LEDGER, "guard.anchor.json")
    guard.admit(request(round=2))
    restore(tmp_path, old)
    with pytest.raises(Refused, match=r"holds 1 charges, and .* has seen 2 of .*put back together with its anchor"):
        guard.admit(request(round=3))
    for path in (tmp_path / "state" / "ledgers").iterdir():
        path.unlink()
    guard.admit(request(round=3))
    assert len(book(tmp_path)) == 2


def test_a_node_whose_state_folder_is_missing_or_full_answers_nothing(guard, tmp_path, monkeypatch):
    """Without it a copy of the guard would not be noticed."""

    def nowhere(*_):
        raise RuntimeError("Could not determine home directory.")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(guard_ledger.SharedAnchor, "remember", full)
    with pytest.raises(Refused, match="No space left on device"):
        guard.admit(request(round=1))
    monkeypatch.undo()
    monkeypatch.delenv("DPFEDEXP_PRIVATE")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.expanduser", nowhere)
    with pytest.raises(Refused, match="this user has no home folder; set DPFEDEXP_PRIVATE"):
        guard.admit(request(round=2))
    monkeypatch.undo()
    guard.admit(request(round=3))
    assert len(book(tmp_path)) == 1


def spend(guard: Guard, charges: int) -> None:
    for number in range(1, charges + 1):
        guard.admit(request(round=number))


def test_a_guard_file_that_was_renamed_goes_on_with_its_ledger(guard, tmp_path):
    """What was shown: 14 charges, and none after `mv guard.toml site.toml`."""
    spend(guard, 14)
    renamed = Guard.load(guard.path.rename(tmp_path / "site.toml"))
    assert guard_summary(renamed)["charges"] == 14
    renamed.admit(request(round=15))
    assert len(book(tmp_path)) == guard_summary(renamed)["charges"] == 15


@pytest.mark.parametrize("move", [shutil.copy, shutil.move], ids=["copied", "moved"])
def test_a_guard_file_without_its_ledger_is_refused_and_says_what_to_move(move, guard, tmp_path):
    """What was shown: 14 charges, and none for a copy of the guard file elsewhere."""
    spend(guard, 14)
    (tmp_path / "new").mkdir()
    moved = Guard.load(move(guard.path, tmp_path / "new" / "guard.toml"))
    sentence = r"guard\.toml was charged before 14 times, as .* has seen .* move guard\.ledger\.jsonl, its \.head and its guard\."
    with pytest.raises(Refused, match=sentence):
        moved.admit(request(round=15), charge=False)
    assert "was charged before 14 times" in guard_summary(moved)["problem"]
    for name in (*LEDGER, "guard.anchor.json"):
        shutil.move(tmp_path / name, tmp_path / "new" / name)
    moved.admit(request(round=15))
    assert guard_summary(moved)["charges"] == 15


def test_a_used_guard_file_that_came_to_another_machine_without_its_ledger_is_refused(guard, tmp_path, monkeypatch):
    spend(guard, 1)
    (tmp_path / "new").mkdir()
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "another machine"))
    moved = Guard.load(shutil.copy(guard.path, tmp_path / "new"))
    with pytest.raises(
        Refused, match=r"guard\.toml was charged before \(id '[0-9a-f]{16}'\), and its ledger is not beside it"
    ):
        moved.admit(request(round=2))


def test_of_two_copies_of_a_whole_guard_the_one_that_is_behind_is_refused_before_an_app_trains(guard, tmp_path):
    spend(guard, 3)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy, ignore=lambda *_: ["copy"])
    copied = Guard.load(copy / "guard.toml")
    copied.admit(request(round=4), charge=False)
    copied.admit(request(round=4))
    with pytest.raises(
        Refused, match=r"holds 3 charges, and .* has seen 4 of the guard .* another copy of it was charged since"
    ):
        guard.admit(request(round=4), charge=False)
    copied.admit(request(round=5))


def test_two_copies_that_charge_at_once_never_both_pass(guard, tmp_path):
    """Each copy has a folder and a lock of its own; the anchor of the id is the one thing that they share."""
    spend(guard, 1)
    copies = []
    for number in range(6):
        folder = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path, folder, ignore=lambda *_: [f"copy{i}" for i in range(6)])
        copies.append(Guard.load(folder / "guard.toml"))
    start = threading.Barrier(6)

    def admit(copied: Guard) -> bool:
        start.wait()
        try:
            copied.admit(request(round=2))
        except Refused:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(admit, copies)) == 1


def test_an_anchor_that_moved_while_the_ledger_was_in_use_is_not_written_over(guard):
    spend(guard, 1)
    anchor = guard_ledger._outside(guard_summary(guard)["id"])

    def charge_meanwhile() -> None:
        with guard_ledger.guard_ledger(guard.path) as ledger:
            anchor.remember(Mark(7, "another's"))
            ledger.charge(2, LocalGaussian(0.3, 9.0).client_event())

    with pytest.raises(LedgerError, match=r"was changed while guard\.ledger\.jsonl was in use"):
        charge_meanwhile()
    assert anchor.mark() == Mark(7, "another's")


def test_the_id_is_written_into_the_guard_file_once_or_taken_from_it(guard, tmp_path):
    spend(guard, 2)
    text = guard.path.read_text()
    assert text.count("\nid = ") == 1
    assert guard_summary(guard)["id"] in text
    guard_file(tmp_path, **WIDE)  # as a template of the operator's would write it again
    spend(guard, 1)
    assert guard.path.read_text() == text
    (tmp_path / "named").mkdir()
    named = Guard.load(guard_file(tmp_path / "named", id="ward 7", **WIDE))
    named.admit(request())
    assert guard_summary(named)["id"] == "ward 7"
    with pytest.raises(InputError, match=r"guard: id is 7; it must be a name of 1 to 100 characters"):
        Guard.load(guard_file(tmp_path / "named", id=7, **WIDE))


@pytest.mark.parametrize("charges", [0, 3])
def test_the_ledger_of_another_node_is_refused(charges, guard, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    neighbour = Guard.load(guard_file(other, **WIDE))
    for number in (1, 2, 3):
        neighbour.admit(request(round=number))
    for number in range(1, charges + 1):
        guard.admit(request(round=number))
    if charges == 0:
        with guard_ledger.guard_ledger(guard.path):
            pass
    restore(tmp_path, keep(other, *LEDGER))
    with pytest.raises(Refused, match="is another ledger"):
        guard.admit(request(round=4))


def test_a_guard_file_that_the_node_can_not_write_needs_an_id_of_the_operators(guard, tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(guard_ledger, "_write_id", denied)
    with pytest.raises(Refused, match=r"no id, and one can't be written into it \(Permission denied\); add a line"):
        guard.admit(request())
    assert {path.name for path in tmp_path.iterdir()} == {"guard.toml", "guard.lock"}
    guard_file(tmp_path, id="ward 8", **WIDE)
    guard.admit(request())
    assert guard_summary(guard)["id"] == "ward 8"


def test_a_ledger_without_its_anchor_is_refused_and_its_head_can_be_copied(guard, tmp_path):
    guard.admit(request())
    anchor = tmp_path / "guard.anchor.json"
    anchor.unlink()
    with pytest.raises(Refused, match=r"copy guard\.ledger\.jsonl\.head to guard\.anchor\.json"):
        guard.admit(request(round=2))
    anchor.write_bytes((tmp_path / LEDGER[1]).read_bytes())
    guard.admit(request(round=2))
    assert len(book(tmp_path)) == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"count": -1, "hash": "x"}', '{"count": "1", "hash": "x"}'])
def test_an_anchor_that_was_changed_is_refused(text, guard, tmp_path):
    guard.admit(request())
    (tmp_path / "guard.anchor.json").write_text(text)
    with pytest.raises(Refused, match="was changed after it was written"):
        guard.admit(request(round=2))


def test_of_many_messages_at_once_only_those_within_the_total_are_admitted(tmp_path):
    guard = Guard.load(guard_file(tmp_path, max_epsilon_per_round=1e6))
    mechanism = LocalGaussian(0.3, 3.0)
    affordable = max(n for n in range(1, 50) if total([(mechanism.client_event(), n)], DELTA) <= 9.0)
    assert 2 <= affordable < 12

    def admit(number: int) -> str:
        try:
            guard.admit(request(mechanism, round=number))
        except Refused as reason:
            return str(reason)
        return "admitted"

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(admit, range(1, 13)))
    assert answers.count("admitted") == affordable == len(book(tmp_path))
    assert all(a == "admitted" or "above its max_epsilon_total of 9" in a for a in answers), answers


def test_a_scaled_charge_is_scaled_under_the_other_adjacency_too():
    """What was shown: the ledger of a node that hosts ten said ε 4.5 under add-remove, the price of one of them."""
    mechanism = CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=1.0, votes=(within_clip(4.0),))
    one, (ten, count) = mechanism.client_event(), node_charge(mechanism, 10)
    assert count == 1
    for adjacency in ("replace-one", "add-remove"):
        assert ten.under(adjacency).mu == pytest.approx(10 * one.under(adjacency).mu)
        for small, large in zip(one.under(adjacency).queries, ten.under(adjacency).queries, strict=True):
            assert large.sensitivity == pytest.approx(10 * small.sensitivity)


def test_the_server_learns_neither_what_was_spent_in_other_runs_nor_where_files_are(tmp_path, caplog):
    """How often a node was drawn in another server's run is secret there; its own operator reads it in the log."""
    node = {"dpfedexp-guard": str(guard_file(tmp_path, max_epsilon_total=4.0))}
    asked = {"mechanism": LocalGaussian(0.3, 3.0), "node_config": node}
    replies = []
    for rounds_elsewhere in range(1, 9):
        reply = ask(**asked, round=rounds_elsewhere, run=1)
        if reply.has_error():
            break
        replies.append(reply)
    assert replies, "some are within the total"
    shown = ask(**asked, run=2).error.reason
    assert shown == "dpfedexp: the round would take this node above its max_epsilon_total of 4."
    assert "would take this node's total to epsilon" in caplog.text
    (tmp_path / LEDGER[0]).unlink()
    shown = ask(**asked, run=2).error.reason
    assert shown == "dpfedexp: this node's own ledger can't be used; the node's own log says why."
    assert "guard.ledger.jsonl is missing beside" in caplog.text


def test_a_mechanism_whose_constants_do_not_exist_is_a_sentence_and_costs_nothing(tmp_path):
    node = {"dpfedexp-guard": str(guard_file(tmp_path, mechanisms=["privunit"], **WIDE))}
    for given in ((400.0, 400.0, 400.0), (1e-30, 1e-30, 1e-30)):
        for rule in ("exact", "paper", "optimal"):
            reply = ask(PrivUnit(0.3, 4, *given, rule), node)
            assert reply.has_error()
            assert reply.error.reason.startswith("dpfedexp: ")
            assert "app's train function" not in reply.error.reason
    assert not (tmp_path / LEDGER[0]).exists() or len(book(tmp_path)) == 0


def test_the_control_variate_of_another_model_is_not_used():
    """Flower hands the state of one run to the next; a first run with a small model must not shut a node out of the second."""
    state = RecordDict({"dpfedexp.own-control": ArrayRecord({"c_i": Array(np.ones(3, dtype=np.float32))})})
    reply = scaffold(0.1, 0.5, state)
    assert not reply.has_error(), reply.error.reason
    assert len(state.array_records["dpfedexp.own-control"]["c_i"].numpy()) == 4


class Crash(BaseException): ...


@pytest.mark.parametrize("mechanism", [LocalGaussian(0.3, 9.0), PrivUnit(0.3, 4)], ids=["gaussian", "privunit"])
def test_a_crash_at_any_write_charges_every_answer_and_locks_nobody_out(mechanism, tmp_path, monkeypatch):
    """Each write of two answers for two hosted clients in turn is the last one that happens."""
    original, left = os.replace, [0]

    def crash(source, target):
        left[0] -= 1
        if left[0] == 0:
            raise Crash
        original(source, target)

    monkeypatch.setattr("os.fsync", lambda fd: None)
    for write in itertools.count(1):
        folder = tmp_path / str(write)
        folder.mkdir()
        guard = Guard.load(guard_file(folder, mechanisms=["local-gaussian", "privunit"], **WIDE))
        monkeypatch.setattr("os.replace", crash)
        left[0], admitted = write, 0
        try:
            for number in (1, 2):
                guard.admit(request(mechanism, round=number, clients=(0, 1), hosted=2))
                admitted += 1
        except Crash:
            pass
        monkeypatch.setattr("os.replace", original)
        _, each = node_charge(mechanism, 2)
        assert len(book(folder)) >= each * admitted
        guard.admit(request(mechanism, round=3, clients=(0, 1), hosted=2))
        assert len(book(folder)) >= each * (admitted + 1)
        if left[0] > 0:
            break
    assert write > 5, "a head and an anchor for the ledger and for every answer"


@pytest.mark.parametrize(("config", "environment"), [({"dpfedexp-guard": ""}, {}), ({}, {"DPFEDEXP_GUARD": " "})])
def test_a_guard_that_is_set_to_nothing_is_not_taken_for_none(config, environment):
    with pytest.raises(InputError, match="is empty; it must name the guard file"):
        Guard.of_node(config, environment)
    assert Guard.of_node({}, {}) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"delta": 1}, "delta"),
        ({"delta": 1.5}, "delta"),
        ({"delta": 0}, "delta"),
        ({"max_clip": 0.0}, "max_clip"),
        ({"max_epsilon_total": -1.0}, "max_epsilon_total"),
        ({"mechanisms": ["privunits"]}, "privunits"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_its_name(changes, field, tmp_path):
    assert Guard.load(guard_file(tmp_path, delta=0.999)).delta == 0.999
    with pytest.raises(InputError, match=field):
        Guard.load(guard_file(tmp_path, **changes))
