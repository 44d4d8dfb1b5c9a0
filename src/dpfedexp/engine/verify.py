"""Verification: recompute the claim of a run from its ledger.

The claim is `privacy.json`. The evidence is `ledger.jsonl` (the charges), `metrics.jsonl` (the released rounds) and, where it can
be rebuilt, the event that the configuration plans. Every disagreement is one failed check with both sides in its text.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import Event, from_json
from dpfedexp.accounting.ledger import Ledger, LedgerMark
from dpfedexp.accounting.statement import EventCounts, PrivacyStatement, View
from dpfedexp.algorithms.probe import LATER, evaluation_count
from dpfedexp.core.client_metrics import EVALUATION
from dpfedexp.engine.checkpoint import digest
from dpfedexp.engine.engine import votes_left
from dpfedexp.engine.outlets import CHECKPOINT, FACTS, LEDGER, LEDGER_HEAD, METRICS, MODEL, STATEMENT, STATEMENT_TEXT
from dpfedexp.engine.private_folder import marks_of
from dpfedexp.errors import InputError, LedgerError

_RELATIVE = 1e-9
_MAX_METRICS_LINE = 2**20
_FIGURES = ("epsilon_total", "epsilon_round", "delta", "membership_advantage", "attack_success")
_FACTS = ("rounds", "adjacency", "setting", "private", "accountant")
_OPTIONAL = (
    *("exact", "nominal_epsilon_round", "large_delta", "sampling", "no_other_adjacency", "no_models_only", "votes"),
    *("noise_cohort", "stand_ins", "other_adjacency", "models_only"),
)
"""Fields of a claim that a statement may leave out."""
CONTEXT = ("noise_cohort", "stand_ins")
"""Optional fields of a ledger's header that change what its charges promise: those of a larger deployment."""


@dataclass(frozen=True)
class Check:
    """The result of one comparison; `incomplete` if it was impossible: then nothing shows that the claim is false."""

    name: str
    passed: bool
    detail: str
    incomplete: bool = False


Outcome = Literal["holds", "false", "incomplete"]


def outcome(checks: Sequence[Check]) -> Outcome:
    """The outcome of all checks: "false" if one disagrees, "holds" if all pass, else "incomplete"."""
    if any(not check.passed and not check.incomplete for check in checks):
        return "false"
    return "holds" if all(check.passed for check in checks) else "incomplete"


def read_claim(run: Path) -> PrivacyStatement | None:
    """The privacy statement in a run's folder; None for a run that has not finished."""
    path = run / STATEMENT
    if not path.exists():
        return None
    try:
        return PrivacyStatement.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is not a privacy statement of this library ({error}).") from None


def recompute(run: Path, claim: PrivacyStatement | None = None, *, planned: int | None = None) -> PrivacyStatement:
    """The statement that the run's ledger supports. Names and numbers that a ledger lacks come from the claim or the header.

    A run without a claim counts as stopped early if it made fewer rounds than `planned`.
    """
    ledger = open_ledger(run)
    header, charges = ledger.header, ledger.charges()
    rounds = _rounds_charged(run, ledger)
    if claim is None:
        made = sum(count for _, count in rounds)
        stopped = planned is not None and 0 < made < planned
        known: dict[str, Any] = {
            "delta": float(header.get("delta", 1e-5)),
            "algorithm": str(header.get("algorithm", "this run")),
            "clients": int(header.get("clients", 0)),
            "simulated": bool(header.get("simulated", True)),
            "no_other_adjacency": str(header.get("no_other_adjacency", "")),
            "stopping": "hand" if stopped else "",
            "reporting": 0,
        }
    else:
        made, planned = claim.rounds, claim.planned_rounds
        stopped = bool(claim.stopping and planned is not None and rounds)
        known = {name: getattr(claim, name) for name in ("delta", "algorithm", "clients", "simulated", "stopping")}
        # The smallest number of clients that report in a round; 0 where unknown.
        known["reporting"] = claim.reporting or 0
        # A claim without a number for the other adjacency claims less, so its reason is accepted.
        known["no_other_adjacency"] = "" if claim.other_adjacency is not None else claim.no_other_adjacency
    # The statement of a run that stopped early includes its planned rounds, which are all alike.
    missing = [*charges, *_left(run, ledger, rounds, made, planned or 0)] if stopped else None
    if type(header.get("noise_cohort")) is int and type(header.get("stand_ins")) in (int, float):
        known |= {name: header[name] for name in CONTEXT}
    statement = PrivacyStatement.from_charges(charges, planned=missing, **known)
    if claim is None:
        return statement
    # These are not in the ledger, and the guarantee does not depend on them.
    kept = ("not_covered", "choices", "planned_rounds", "planned_epsilon_total")
    return replace(statement, **{name: getattr(claim, name) for name in kept})


def _left(run: Path, ledger: Ledger, rounds: EventCounts, made: int, planned: int) -> list[tuple[Event, int]]:
    """Planned charges that a run that stopped early did not make: rounds, votes and evaluations by its clients."""
    usual, _ = max(rounds, key=lambda charge: charge[1])
    left, own = [(usual, max(0, planned - made))], _run_of(run, ledger)
    try:
        for vote in _announced(run, ledger, own, "votes") or ():
            event, numbers = from_json(vote["event"]), [int(number) for number in vote["rounds"]]
            left.append((event, votes_left(event, numbers, ledger, own or "")))
        announced = _announced(run, ledger, own, "evaluation")
        if isinstance(announced, dict) and announced:
            event, every = from_json(announced["event"]), int(announced["every"])
            asked = sum(entry.run == own and entry.event.question == EVALUATION for entry in ledger.entries)
            # `made` and `planned` may count other runs' rounds on the same ledger.
            own_rounds = planned - made + sum(count for _, count in rounds)
            left.append((event, max(0, evaluation_count(own_rounds, every) - asked)))
    except (KeyError, TypeError, ValueError):
        raise InputError("the run does not say which votes and evaluations by its clients it planned.") from None
    return [(event, count) for event, count in left if count]


def _announced(run: Path, ledger: Ledger, own: str | None, name: str) -> Any:
    """A field that the run announced before its first round: in its ledger's header, or in `run.json` for a shared ledger."""
    if ledger.header.get("run") == own:
        return ledger.header.get(name)
    return _fact(run, name)


def _fact(run: Path, name: str) -> Any:
    """A field of `run.json`; None where the file or the field is missing."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return json.loads((run / FACTS).read_text(encoding="utf-8"))[name]
    return None


def open_ledger(run: Path) -> Ledger:
    if not run.is_dir():
        raise InputError(
            f"the run {str(run)!r} is not a folder; give the folder that a run wrote, with {LEDGER} in it."
        )
    return Ledger.open(run / LEDGER, read_only=True)


def verify_run(run: Path, planned: Event | None = None, before: Sequence[Event] = ()) -> list[Check]:
    """Run all checks of one run folder. The configuration plans the event of a round, and votes and evaluations `before`."""
    if run.is_dir() and not (run / LEDGER).exists():
        taken = f"but {LEDGER_HEAD} does: it was taken away. Put it back"
        elsewhere = "a run that charges a ledger elsewhere can be checked only with a copy of it under this name"
        why = f", {taken}" if (run / LEDGER_HEAD).exists() else f"; {elsewhere}"
        return [Check("ledger", False, f"{LEDGER} does not exist{why}", incomplete=True)]
    try:
        ledger = open_ledger(run)
        marks: list[tuple[Path, LedgerMark]] = []
        with contextlib.suppress(InputError):  # this machine has no private folder, or can't read it
            marks = marks_of(ledger.header.get("run"), ledger.first_hash)
        # Reopen: a run in progress charges its ledger before it moves its anchors, so the ledger must be read after the marks.
        ledger = open_ledger(run)
    except LedgerError as error:
        return [Check("ledger", False, str(error))]
    checks = [Check("ledger", True, f"{len(ledger)} charges; the hash chain is whole")]
    for file, mark in marks:
        held, knows = ledger.holds(mark), f"{str(file)!r} knows of {mark.count} charges"
        lost = (
            "that this ledger does not hold: another copy of the run went on, or this one was replaced by an older copy, and its "
            "claim leaves out what was spent there"
        )
        checks.append(Check("newest copy", held, f"{knows}, and all of them are here" if held else f"{knows} {lost}"))
    checks.append(_check_released(run, ledger))
    claim = read_claim(run)
    if claim is None:
        missing = f"{STATEMENT} does not exist, so the run claims nothing: it has not finished, or the file was removed"
        checks.append(Check("claim", False, missing, incomplete=True))
    else:
        if claim.stopping and not _rounds_charged(run, ledger):
            early = "the run was stopped before its first round, so what it had planned is not in its ledger"
            checks.append(Check("claim", False, early, incomplete=True))
        else:
            checks += _check_claim(claim, recompute(run, claim))
        if (text := run / STATEMENT_TEXT).exists():
            same = text.read_text(encoding="utf-8").strip() == claim.text.strip()
            says = f"{'says' if same else 'does not say'} what {STATEMENT} says"
            checks.append(Check(STATEMENT_TEXT, same, says))
        checks += _check_sealed(run, ledger)
    if planned is not None:
        checks.append(_check_planned(ledger, planned, before, claim.delta if claim is not None else 1e-5))
    return checks


def _run_of(folder: Path, ledger: Ledger) -> str | None:
    """The name of the folder's run, from `run.json`, or from the header of its ledger."""
    named = _fact(folder, "run")
    known = named if isinstance(named, str) and any(entry.run == named for entry in ledger.entries) else None
    return known or ledger.header.get("run")


def _rounds_charged(folder: Path, ledger: Ledger) -> list[tuple[Event, int]]:
    """(event, count) of the rounds that the folder's run charged, without votes and evaluations."""
    own = _run_of(folder, ledger)
    events = Counter(entry.event for entry in ledger.entries if own is None or entry.run == own)
    return [(event, count) for event, count in events.items() if not event.question]


def _check_sealed(run: Path, ledger: Ledger) -> list[Check]:
    sealed = ledger.sealed(_run_of(run, ledger) or "")
    if sealed is None or "model" not in sealed:
        unbound = f"the ledger names no model: the run has not finished; {MODEL} is not bound to it"
        return [Check("model", False, unbound, incomplete=True)]
    checks = []
    for name, file in (("model", MODEL), ("checkpoint", CHECKPOINT)):
        if name not in sealed:
            continue
        try:
            with safe_open(run / file, framework="pt") as tensors:
                found = digest({key: tensors.get_tensor(key) for key in tensors.keys()})  # noqa: SIM118
        except FileNotFoundError:
            checks.append(Check(name, False, f"{file} does not exist; put it back", incomplete=True))
            continue
        except (SafetensorError, OSError):
            checks.append(Check(name, False, f"{file} can't be read: it is damaged"))
            continue
        same = found == sealed[name]
        checks.append(Check(name, same, f"{file} is {'' if same else 'not '}the one that the ledger was charged for"))
    return checks


def _check_released(run: Path, ledger: Ledger) -> Check:
    # Charges of other runs on the same ledger do not count.
    own = _run_of(run, ledger)
    charged = {entry.round for entry in ledger.entries if own is None or entry.run == own}
    released = set(_released_rounds(run / METRICS))
    missing = sorted(released - charged)
    paid = {entry.round for entry in ledger.entries if entry.run == own and entry.event.question == EVALUATION}
    unpaid = sorted(set(_released_rounds(run / METRICS, "clients_")) - paid)
    if unpaid:
        what = f"what clients measured after round {unpaid[0]} was never charged"
        return Check("released rounds", False, what)
    uncharged = f"{len(missing)} released rounds were never charged, the first is {missing[0]}" if missing else ""
    return Check("released rounds", not missing, uncharged or f"{len(released)} released, all of them charged")


def _released_rounds(path: Path, prefix: str = "") -> Iterator[int]:
    """Yield the rounds in a metrics file whose records have a field with this prefix."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_METRICS_LINE), b""), start=1):
            if not line.endswith(b"\n") and len(line) < _MAX_METRICS_LINE:
                return  # cut by a crash; its round was charged before
            try:
                record = json.loads(line)
                if any(name.startswith(prefix) for name in record):
                    yield int(record["round"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise InputError(f"{path}, line {number}: not a record of a round.") from None


def _check_claim(claim: PrivacyStatement, proven: PrivacyStatement) -> list[Check]:
    checks = []
    for name in (*_FIGURES, *_FACTS, *_OPTIONAL):
        claimed, recomputed = getattr(claim, name), getattr(proven, name)
        if name in _OPTIONAL and claimed == recomputed and claimed in (None, "", ()):
            continue  # neither side has a value
        same = _same(name, claimed, recomputed)
        differs = "" if same else f"claimed {_show(claimed)}, but the ledger gives "
        checks.append(Check(name, same, differs + _show(recomputed)))
    return checks


def _same(name: str, claimed: Any, recomputed: Any) -> bool:
    if isinstance(claimed, View) and isinstance(recomputed, View):
        fields = ("epsilon_round", "epsilon_total", "adjacency", "accountant", "exact")
        return all(_same(field, getattr(claimed, field), getattr(recomputed, field)) for field in fields)
    return _close(claimed, recomputed) if name in _FIGURES else bool(claimed == recomputed)


def _check_planned(ledger: Ledger, planned: Event, before: Sequence[Event], delta: float) -> Check:
    """Check the ε of one round against the plan. Raw scales are not compared: an adaptive clip changes clip and noise together.

    Charges without an update must match one of the events `before`.
    """
    want = compose([(planned, 1)], delta)
    for event, _ in ledger.charges():
        have = compose([(event, 1)], delta)
        if any(_close(have.epsilon, compose([(one, 1)], delta).epsilon) and _alike(event, one) for one in before):
            continue
        same = _close(have.epsilon, want.epsilon) and (event.family == "none") == (planned.family == "none")
        if not same or (have.adjacency, have.setting) != (want.adjacency, want.setting):
            return Check(
                "configuration",
                False,
                f"plans epsilon {_show(want.epsilon)} a round ({want.setting}, {want.adjacency}), but the ledger has "
                f"{_show(have.epsilon)} ({have.setting}, {have.adjacency})",
            )
    before = list(dict.fromkeys(before))
    votes_before = [one for one in before if one.question not in LATER]
    unpaid = [one for one in votes_before if not any(_alike(event, one) for event, _ in ledger.charges())]
    if unpaid and any(entry.round > 0 for entry in ledger.entries):
        names = ", ".join(one.question for one in unpaid)
        return Check("configuration", False, f"plans votes before the first round that were never charged: {names}")
    votes = f", {len(votes_before)} votes before the first" if votes_before else ""
    votes += ", and others after some of them" if len(before) > len(votes_before) else ""
    return Check("configuration", True, f"plans epsilon {_show(want.epsilon)} a round{votes}, as charged")


def _alike(a: Event, b: Event) -> bool:
    """Whether both events are answers to the same question."""
    return bool(a.question) and (a.question, a.adjacency) == (b.question, b.adjacency)


def _close(a: Any, b: Any) -> bool:
    if not all(isinstance(value, (int, float)) for value in (a, b)):
        return False
    return a == b or math.isclose(a, b, rel_tol=_RELATIVE)


def _show(value: Any) -> str:
    if isinstance(value, View):
        return f"{value.epsilon_total:.6g} ({value.adjacency}, {'exact' if value.exact else 'upper bound'})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
