"""The guard charges what a node's data can do to its answers, and its ledger can't be begun anew unnoticed."""

import itertools
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from dpfedexp.accounting import Ledger, Sampling, gdp
from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.ledger import LedgerMark
from dpfedexp.core.clipping import clip
from dpfedexp.core.sums import within_clip_vote
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.flower import Guard
from dpfedexp.flower import guard as guard_ledger
from dpfedexp.flower.guard import Refused, node_charge, total
from dpfedexp.flower.messages import NodeRequest
from dpfedexp.flower.monitor import guard_summary
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, PrivUnit
from dpfedexp.mechanisms.base import with_secure_noise
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

from .loopback import dying_at
from .test_mod import ask, guard_file

DELTA = 1e-5
WIDE = {"max_epsilon_per_round": 1e6, "max_epsilon_total": 1e6}
JOINT = CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=1.0, votes=(within_clip_vote(4.0),))


def book(folder) -> Ledger:
    return Ledger.open(folder / "guard.ledger.jsonl", read_only=True)


def request(mechanism=LocalGaussian(0.3, 9.0), round=1, **given) -> NodeRequest:
    return NodeRequest(round, "n", mechanism, Sampling(), **given)


def admitted_of(guard: Guard, requests, reason: str) -> int:
    """How many requests of run "r" are admitted before one is refused, for this reason."""
    with pytest.raises(Refused, match=reason):
        all(guard.admit(given, run="r") is None for given in requests)
    return len(book(guard.path.parent))


def made(folder, **changes) -> Guard:
    folder.mkdir(exist_ok=True)
    return Guard.load(guard_file(folder, **{**WIDE, **changes}))


@pytest.fixture
def guard(tmp_path) -> Guard:
    return made(tmp_path)


def refuses(guard: Guard, reason: str, **given) -> None:
    with pytest.raises(Refused, match=reason):
        guard.admit(request(round=99), **given)


def spend(guard: Guard, charges: int) -> None:
    for number in range(1, charges + 1):
        guard.admit(request(round=number))


FILES = ("guard.ledger.jsonl", "guard.ledger.jsonl.head", "guard.anchor.json")
LEDGER = FILES[:2]


def keep(folder, *names) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def restore(folder, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_a_request_for_many_clients_is_charged_for_all_of_them_or_refused(tmp_path):
    """The attack: one client costs 3.92 of a limit of 4, and a server that asks for 14 in one message learns ε = 82."""
    mechanism = CentralGaussian(0.3, 2.2)
    one = mechanism.client_event()
    assert compose([(one, 1)], DELTA).epsilon == pytest.approx(3.92, abs=0.1)
    real = gdp.epsilon(14 * one.mu, DELTA)
    assert real > 80
    node = {"dpfedexp-guard": str(guard_file(tmp_path))}
    reply = ask(mechanism, node, clients=tuple(range(14)), clients_per_node=14)
    assert f"the round costs epsilon {real:.4g} at delta 1e-05" in reply.error.reason
    assert not (tmp_path / LEDGER[0]).exists(), "no ledger begins with a refusal"
    assert not ask(mechanism, node, clients=(3,), clients_per_node=14).has_error(), "one of them is within the limit"


@pytest.mark.parametrize("mechanism", [CentralGaussian(0.3, 5.0, numerator="free"), JOINT], ids=["free", "joint"])
def test_what_is_charged_covers_the_shift_that_replacing_every_hosted_client_makes(mechanism):
    """The sum of 9 clients at one pole of the ball against 9 at the other, in units of the noise that is on it."""
    mechanism = with_secure_noise(mechanism)
    event, count = node_charge(mechanism, 9)
    shifts = []
    for other in (-1.0, -0.3, 0.0, 0.3):
        rows = [clip(torch.tensor([[end, 0.0, 0.0]] * 9) * mechanism.clip, mechanism.clip) for end in (1.0, other)]
        sums = [mechanism.collect(mechanism.randomize(row, torch.arange(9), None)) for row in rows]
        parts = [float((sums[0].vector - sums[1].vector).norm()) / (mechanism.noise_multiplier * mechanism.clip)]
        if mechanism.scalar_multiplier:
            parts.append(float(sums[0].squares - sums[1].squares) / (mechanism.scalar_multiplier * mechanism.clip**2))
        parts += [9 / vote.noise for vote in mechanism.votes]
        shifts.append(math.hypot(*parts))
    # Rows are clipped a little inside the ball, and the pairs tried here need not be the worst one.
    assert (count, 0.9 * event.mu < max(shifts) <= event.mu) == (1, True)


@pytest.mark.parametrize("mechanism", [PrivUnit(0.3, 4), LocalGaussian(0.3, 2.0)], ids=["privunit", "gaussian"])
def test_a_node_with_local_privacy_is_charged_for_every_hosted_report(mechanism, tmp_path):
    guard, event = made(tmp_path, mechanisms=[mechanism.kind]), mechanism.client_event()
    guard.admit(request(mechanism, clients=(0, 1, 2), clients_per_node=3))
    assert total(book(tmp_path).charges(), DELTA) == pytest.approx(total([(event, 3)], DELTA), rel=1e-9)
    less = replace(guard, max_epsilon_per_round=0.999 * total([(event, 4)], DELTA))
    with pytest.raises(Refused, match="above this node's max_epsilon_per_round"):
        less.admit(request(mechanism, round=2, clients=(0, 1, 2, 3)))


@pytest.mark.parametrize("mechanism", [CentralGaussian(0.3, 8.0), LocalGaussian(0.3, 5.0)], ids=["central", "local"])
def test_requests_for_different_hosted_clients_of_one_round_share_its_limit(mechanism, tmp_path):
    """Each alone is within the limit of 4. A server could add central answers into one sum with one noise: shifts add."""
    guard = made(tmp_path, max_epsilon_per_round=4.0)
    requests = [request(mechanism, clients=(c,), clients_per_node=100) for c in range(100)]
    admitted = admitted_of(guard, requests, "max_epsilon_per_round of 4")
    assert admitted == max(k for k in range(1, 100) if total([node_charge(mechanism, k)], DELTA) <= 4.0)
    spent = total(book(tmp_path).charges(), DELTA)
    assert spent == pytest.approx(total([node_charge(mechanism, admitted)], DELTA))
    guard.admit(replace(requests[0], round=2), run="r")
    guard.admit(requests[0], run="another")


def test_local_and_two_party_rounds_of_one_node_compose(tmp_path):
    """What was shown: 4 local and 12 two-party rounds were added up to 18.65, where their composition is 14.33."""
    guard = made(tmp_path, mechanisms=["local-gaussian", "two-party"])
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


def test_the_ledger_and_its_anchor_agree_before_an_answer_exists(guard, tmp_path):
    for number in (1, 2, 3):
        guard.admit(request(round=number))
        mark = book(tmp_path).mark()
        assert guard_ledger._read_anchor(tmp_path / "guard.anchor.json") == mark
        assert mark.count == number


def test_a_deleted_ledger_is_refused_until_its_traces_are_deleted_knowingly(guard, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "state"))
    spend(guard, 1)
    reasons = (
        r"missing beside guard\.anchor\.json and .*head; restore it from a backup",
        r"missing beside guard\.anchor\.json; restore it",
        r"guard\.toml was charged before 1 times, as .* has seen .*remove the line id",
    )
    for name, reason in zip(FILES, reasons, strict=True):
        (tmp_path / name).unlink()
        refuses(guard, reason)
    assert "was charged before 1 times" in guard_summary(guard)["problem"]
    guard_file(tmp_path, **WIDE)
    refuses(guard, r"is missing, and .* has seen 1 charges at this place; restore that ledger")
    shutil.rmtree(tmp_path / "state" / "ledgers")
    spend(guard, 1)
    assert len(book(tmp_path)) == 1


@pytest.mark.parametrize(("own", "theirs"), [(0, 3), (3, 3), (1, 0)])
def test_the_ledger_of_another_node_is_refused_alone_or_with_its_head_anchor_and_guard(own, theirs, guard, tmp_path):
    """The attack: all files are exchanged for a set that agrees with itself, and nothing was ever spent."""
    other = made(tmp_path / "other")
    for one, charges in ((guard, own), (other, theirs)):
        with guard_ledger.guard_ledger(one.path):
            pass
        spend(one, charges)
    for names in (LEDGER, FILES):
        restore(tmp_path, keep(other.path.parent, *names))
        refuses(guard, r"is another ledger: it belongs to the guard with id")
    restore(tmp_path, keep(other.path.parent, "guard.toml"))
    if own:
        refuses(guard, rf"is another ledger, and .* has seen {own} charges at this place")


def test_an_older_ledger_is_refused_also_with_its_own_head_and_anchor_until_forgotten_knowingly(
    guard, tmp_path, monkeypatch
):
    """The attack, or a back-up of the whole folder: the three agree with each other, and what was spent since is forgotten."""
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "state"))
    spend(guard, 1)
    old = keep(tmp_path, *FILES)
    guard.admit(request(round=2))
    new = keep(tmp_path, *LEDGER)
    restore(tmp_path, {name: old[name] for name in LEDGER})
    refuses(guard, r"an older copy: it holds 1 charges, and its anchor .* was written after 2")
    restore(tmp_path, new)
    guard.admit(request(round=3))
    restore(tmp_path, old)
    refuses(guard, r"holds 1 charges, and .* has seen 3 of .*put back together with its anchor")
    assert "has seen 3 of" in guard_summary(guard)["problem"]
    shutil.rmtree(tmp_path / "state" / "ledgers")
    guard.admit(request(round=3))
    assert len(book(tmp_path)) == 2


def test_a_node_whose_state_folder_is_missing_or_full_answers_nothing(guard, tmp_path, monkeypatch):
    """Without it a copy of the guard would not be noticed."""
    with monkeypatch.context() as patched:
        patched.setattr(guard_ledger.SharedAnchor, "remember", Mock(side_effect=OSError(28, "No space left on device")))
        refuses(guard, "No space left on device")
    with monkeypatch.context() as patched:
        patched.delenv("DPFEDEXP_PRIVATE")
        patched.delenv("XDG_STATE_HOME", raising=False)
        patched.setattr(
            "pathlib.Path.expanduser", Mock(side_effect=RuntimeError("Could not determine home directory."))
        )
        refuses(guard, "this user has no home folder; set DPFEDEXP_PRIVATE")
    guard.admit(request(round=3))
    assert len(book(tmp_path)) == 1


def test_a_guard_file_that_was_renamed_goes_on_with_its_ledger(guard, tmp_path):
    spend(guard, 14)
    renamed = Guard.load(guard.path.rename(tmp_path / "site.toml"))
    assert guard_summary(renamed)["charges"] == 14
    renamed.admit(request(round=15))
    assert len(book(tmp_path)) == guard_summary(renamed)["charges"] == 15


@pytest.mark.parametrize("move", [shutil.copy, shutil.move], ids=["copied", "moved"])
def test_a_guard_file_without_its_ledger_is_refused_and_says_what_to_move(move, guard, tmp_path, monkeypatch):
    """What was shown: 14 charges, and none for a copy of the guard file elsewhere. Another machine knows the drawn id alone."""
    spend(guard, 14)
    (tmp_path / "new").mkdir()
    moved = Guard.load(move(guard.path, tmp_path / "new" / "guard.toml"))
    sentence = r"guard\.toml was charged before 14 times, as .* has seen .* move guard\.ledger\.jsonl, its \.head and its guard\."
    refuses(moved, sentence, charge=False)
    assert "was charged before 14 times" in guard_summary(moved)["problem"]
    with monkeypatch.context() as patched:
        patched.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "another machine"))
        refuses(moved, r"guard\.toml was charged before \(id '[0-9a-f]{16}'\), and its ledger is not beside it")
    for name in FILES:
        shutil.move(tmp_path / name, tmp_path / "new" / name)
    moved.admit(request(round=15))
    assert guard_summary(moved)["charges"] == 15


def copy_of(folder, name: str) -> Guard:
    """A copy of a whole guard, in a folder of its own."""
    shutil.copytree(folder, folder / name, ignore=shutil.ignore_patterns("copy*"))
    return Guard.load(folder / name / "guard.toml")


def test_of_two_copies_of_a_whole_guard_the_one_that_is_behind_is_refused_before_an_app_trains(guard, tmp_path):
    spend(guard, 3)
    copied = copy_of(tmp_path, "copy")
    copied.admit(request(round=4), charge=False)
    copied.admit(request(round=4))
    behind = r"holds 3 charges, and .* has seen 4 of the guard .* another copy of it was charged since"
    refuses(guard, behind, charge=False)
    copied.admit(request(round=5))


def admitted_at_once(guards) -> list[str]:
    """What each of the guards says to a request of its own round, all at the same time: "" where it is admitted."""
    start = threading.Barrier(len(guards))

    def admit(number: int, guard: Guard) -> str:
        start.wait()
        try:
            guard.admit(request(LocalGaussian(0.3, 3.0), round=10 + number))
        except Refused as reason:
            return str(reason)
        return ""

    with ThreadPoolExecutor(len(guards)) as pool:
        return list(pool.map(admit, range(len(guards)), guards))


def test_two_copies_that_charge_at_once_never_both_pass(guard, tmp_path):
    """Each copy has a folder and a lock of its own; the anchor of the id is the one thing that they share."""
    spend(guard, 1)
    assert admitted_at_once([copy_of(tmp_path, f"copy{number}") for number in range(6)]).count("") == 1


def test_an_anchor_that_moved_while_the_ledger_was_in_use_is_not_written_over(guard):
    spend(guard, 1)
    anchor, _ = guard_ledger._shared_anchor(guard_summary(guard)["id"])

    def charge_meanwhile() -> None:
        with guard_ledger.guard_ledger(guard.path) as ledger:
            anchor.remember(LedgerMark(7, "another's"))
            ledger.charge(2, LocalGaussian(0.3, 9.0).client_event())

    with pytest.raises(LedgerError, match=r"was changed while guard\.ledger\.jsonl was in use"):
        charge_meanwhile()
    assert anchor.mark() == LedgerMark(7, "another's")


def test_the_id_is_written_into_the_guard_file_once_or_taken_from_it(guard, tmp_path):
    spend(guard, 2)
    text = guard.path.read_text()
    assert text.count("\nid = ") == 1
    assert guard_summary(guard)["id"] in text
    guard_file(tmp_path, **WIDE)  # as a template of the operator's would write it again
    spend(guard, 1)
    assert guard.path.read_text() == text
    assert (tmp_path / LEDGER[0]).stat().st_mode & 0o077 == 0
    for name in ("7", "x" * 100):
        assert guard_summary(made(tmp_path / "short", id=name))["id"] == name
    named = made(tmp_path / "named", id="ward 7")
    spend(named, 1)
    assert guard_summary(named)["id"] == "ward 7"
    with pytest.raises(InputError, match=r"guard: id is 7; it must be a name of 1 to 100 characters"):
        made(tmp_path / "named", id=7)


def test_a_guard_file_that_the_node_can_not_write_needs_an_id_of_the_operators(guard, tmp_path, monkeypatch):
    monkeypatch.setattr(guard_ledger, "_write_id", Mock(side_effect=PermissionError(13, "Permission denied")))
    refuses(guard, r"no id, and one can't be written into it \(Permission denied\); add a line")
    assert {path.name for path in tmp_path.iterdir()} == {"guard.toml", "guard.lock"}
    spend(made(tmp_path, id="ward 8"), 1)
    assert guard_summary(guard)["id"] == "ward 8"


def test_an_anchor_that_is_missing_or_was_changed_is_refused_and_the_ledgers_head_can_be_copied(guard, tmp_path):
    spend(guard, 1)
    anchor = tmp_path / "guard.anchor.json"
    for text in ("", "{}", "[]", '{"count": -1, "hash": "x"}', '{"count": "1", "hash": "x"}'):
        anchor.write_text(text)
        refuses(guard, "was changed after it was written")
    anchor.unlink()
    refuses(guard, r"copy guard\.ledger\.jsonl\.head to guard\.anchor\.json")
    anchor.write_bytes((tmp_path / LEDGER[1]).read_bytes())
    guard.admit(request(round=2))
    assert len(book(tmp_path)) == 2


def test_of_many_messages_at_once_only_those_within_the_total_are_admitted(tmp_path):
    guard, event = made(tmp_path, max_epsilon_total=9.0), LocalGaussian(0.3, 3.0).client_event()
    affordable = max(n for n in range(1, 50) if total([(event, n)], DELTA) <= 9.0)
    assert 2 <= affordable < 12
    answers = admitted_at_once([guard] * 12)
    assert answers.count("") == affordable == len(book(tmp_path))
    assert all("above its max_epsilon_total of 9" in answer for answer in answers if answer), answers


def test_what_costs_exactly_the_limits_is_admitted(tmp_path):
    exact = total([node_charge(LocalGaussian(0.3, 9.0), 1)], DELTA)
    limits = {"max_epsilon_per_round": exact, "max_epsilon_total": exact, "max_clip": 0.3}
    assert admitted_of(made(tmp_path, **limits), [request(), request(round=2)], "max_epsilon_total") == 1


def test_a_scaled_charge_is_scaled_under_the_other_adjacency_too():
    """What was shown: the ledger of a node with ten clients said ε 4.5 under add-remove, the price of one of them."""
    one, (ten, _) = JOINT.client_event(), node_charge(JOINT, 10)
    for adjacency in ("replace-one", "add-remove"):
        assert ten.under(adjacency).mu == pytest.approx(10 * one.under(adjacency).mu)
        for small, large in zip(one.under(adjacency).queries, ten.under(adjacency).queries, strict=True):
            assert large.sensitivity == pytest.approx(10 * small.sensitivity)


def test_the_server_learns_neither_what_was_spent_in_other_runs_nor_where_files_are(tmp_path, caplog):
    """How often a node was drawn in another server's run is secret there; its own operator reads it in the log."""
    node = {"dpfedexp-guard": str(guard_file(tmp_path, max_epsilon_total=4.0))}
    asked = {"mechanism": LocalGaussian(0.3, 3.0), "node": node}
    answered = [not ask(**asked, round=number, run=1).has_error() for number in range(1, 9)]
    assert answered[0], "some are within the total"
    event = LocalGaussian(0.3, 3.0).client_event()
    assert answered.count(True) == max(n for n in range(9) if total([(event, n)], DELTA) <= 4.0)
    shown = ask(**asked, run=2).error.reason
    assert shown == "dpfedexp: the round would take this node above its max_epsilon_total of 4."
    assert "would take this node's total to epsilon" in caplog.text
    (tmp_path / LEDGER[0]).unlink()
    shown = ask(**asked, run=2).error.reason
    assert shown == "dpfedexp: this node's own ledger can't be used; see the node's log."
    assert "guard.ledger.jsonl is missing beside" in caplog.text


def test_a_request_that_makes_no_sense_is_a_sentence_and_costs_nothing(tmp_path):
    node = {"dpfedexp-guard": str(guard_file(tmp_path, mechanisms=["central-gaussian", "privunit"], **WIDE))}
    assert "carries no control variate" in ask(CentralGaussian(0.3, 9.0), node, tau_eta_l=0.5).error.reason
    assert not (tmp_path / LEDGER[0]).exists()
    for epsilon, rule in itertools.product((400.0, 1e-30), ("exact", "paper", "optimal")):
        reason = ask(PrivUnit(0.3, 4, epsilon, epsilon, epsilon, rule), node).error.reason
        assert reason.startswith("dpfedexp: ")
        assert "app's train function" not in reason
    assert not (tmp_path / LEDGER[0]).exists() or len(book(tmp_path)) == 0


@pytest.mark.parametrize("mechanism", [LocalGaussian(0.3, 9.0), PrivUnit(0.3, 4)], ids=["gaussian", "privunit"])
def test_a_crash_at_any_write_charges_every_answer_and_leaves_no_lock(mechanism, tmp_path, monkeypatch):
    """Each write of two answers for two clients of a node in turn is the last one that happens."""
    _, each = node_charge(mechanism, 2)
    for write in itertools.count(1):
        folder, admitted = tmp_path / str(write), 0
        guard = made(folder, mechanisms=["local-gaussian", "privunit"])
        with dying_at(write, monkeypatch) as left:
            for number in (1, 2):
                guard.admit(request(mechanism, round=number, clients=(0, 1), clients_per_node=2))
                admitted += 1
        assert len(book(folder)) >= each * admitted
        guard.admit(request(mechanism, round=3, clients=(0, 1), clients_per_node=2))
        assert len(book(folder)) >= each * (admitted + 1)
        if left[0] > 0:
            break
    assert write > 5, "a head and an anchor for the ledger and for every answer"


@pytest.mark.parametrize(("config", "environment"), [({"dpfedexp-guard": ""}, {}), ({}, {"DPFEDEXP_GUARD": " "})])
def test_a_guard_that_is_set_to_nothing_is_not_taken_for_none(config, environment):
    with pytest.raises(InputError, match="is empty; it must name a file"):
        Guard.of_node(config, environment)
    assert Guard.of_node({}, {}) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"delta": 1}, "delta"),
        ({"delta": 0}, "delta"),
        ({"max_clip": 0.0}, "max_clip"),
        ({"max_epsilon_total": -1.0}, "max_epsilon_total"),
        ({"max_clip": True}, "max_clip"),
        ({"mechanisms": ["privunits"]}, "privunits"),
        ({"mechanisms": "privunit"}, "mechanisms must be a list"),
        *(({"apps": wrong}, "apps must be a list of hashes") for wrong in (["0" * 64, "1"], 3)),
        ({"answer_failures": 1}, "answer_failures is 1"),
        ({"id": ""}, "id is ''"),
        ({"id": "x" * 101}, "id is 'x"),
        *(({"overrides": wrong}, "overrides is .* a list of") for wrong in ("federation.folder", ["a", 1], True)),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_its_name(changes, field, tmp_path):
    assert Guard.load(guard_file(tmp_path, delta=0.999)).delta == 0.999
    with pytest.raises(InputError, match=field):
        Guard.load(guard_file(tmp_path, **changes))
