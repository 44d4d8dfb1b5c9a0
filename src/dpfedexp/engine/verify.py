"""Verification: recompute the claim of a run from its ledger.

The claim is `privacy.json`. Each of its fields is compared with the statement that `ledger.jsonl` supports by itself: by charges
and the terms of the run. Further evidence is `metrics.jsonl` (the released rounds), model, checkpoint, this machine's anchors and,
where it can be rebuilt, the event that the configuration plans. Every disagreement is one failed check with both sides in its text.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import Event, from_json
from dpfedexp.accounting.ledger import Ledger, LedgerMark
from dpfedexp.accounting.statement import EventCounts, PrivacyStatement
from dpfedexp.algorithms.probe import LATER
from dpfedexp.engine.checkpoint import digest, read_progress
from dpfedexp.engine.engine import evaluated, evaluations_left, votes_left
from dpfedexp.engine.outlets import CHECKPOINT, FACTS, LEDGER, LEDGER_HEAD, METRICS, MODEL, STATEMENT, STATEMENT_TEXT
from dpfedexp.engine.private_folder import SharedAnchor, marks_of, other_ledgers
from dpfedexp.errors import InputError, LedgerError

_MAX_METRICS_LINE = 2**20
EXEMPT = {
    "choices": "sentences about settings, which the guarantee does not depend on; they are known after the ledger is closed",
    "shown": "follows from the fields of the claim, and is compared with them",
    "text": "follows from the fields of the claim, and is compared with them",
}
"""Fields of a claim that are not compared with the ledger, and why. Every other field is."""


@dataclass(frozen=True)
class Check:
    """The result of one comparison; `incomplete` if it was impossible. If it passed nevertheless, the outcome says less."""

    name: str
    passed: bool
    detail: str
    incomplete: bool = False


def outcome(checks: Sequence[Check]) -> Literal["holds", "false", "incomplete"]:
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
        claim = PrivacyStatement.from_json(path.read_text(encoding="utf-8"))
        claim.to_json()  # raises for words that no statement has
        return claim
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is not a privacy statement of this library ({error}).") from None


def recompute(run: Path, ledger: Ledger | None = None, *, killed: bool = False) -> PrivacyStatement:
    """The statement that the run's ledger supports, from its charges and the run's terms alone.

    `killed`: an unfinished run counts as interrupted by hand if its terms name no reason.
    """
    ledger = open_ledger(run) if ledger is None else ledger
    own, charges = _run_of(run, ledger), ledger.charges()
    terms = ledger.terms(own)
    try:
        rounds, planned = _rounds_charged(ledger, own), terms.get("planned_rounds")
        unfinished = planned is not None and not terms.get("complete", False) and bool(rounds)
        stopping: Any = terms.get("stopping", "") or ("hand" if killed else "")
        return PrivacyStatement.from_charges(
            charges,
            float(terms.get("delta", 1e-5)),
            algorithm=terms.get("algorithm", "this run"),
            clients=terms.get("clients", 0),
            simulated=terms.get("simulated", True),
            # The missing rounds on top of all charges in the ledger, because other runs may share the ledger.
            planned=[*charges, *_left(ledger, own, rounds, terms)] if unfinished else None,
            not_covered=terms.get("not_covered", ()),
            reporting=terms.get("reporting", 0),
            no_other_adjacency=terms.get("no_other_adjacency", ""),
            stopping=stopping if unfinished else "",
            noise_cohort=terms.get("noise_cohort"),
            stand_ins=terms.get("stand_ins"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LedgerError(f"{run / LEDGER}: the terms of the run {own!r} can't be read ({error}).") from None


def _left(ledger: Ledger, own: str, rounds: EventCounts, terms: Mapping[str, Any]) -> list[tuple[Event, int]]:
    """Planned charges that an unfinished run did not make: rounds, votes and evaluations by its clients."""
    usual, _ = max(rounds, key=lambda charge: charge[1])
    made = {entry.round for entry in ledger.entries if entry.run == own and not entry.event.question}
    planned = int(terms["planned_rounds"])
    left = [(usual, max(0, planned - len(made)))]
    for vote in terms.get("votes", ()):
        event, numbers = from_json(vote["event"]), [int(number) for number in vote["rounds"]]
        left.append((event, votes_left(event, numbers, ledger, own)))
    if evaluation := terms.get("evaluation"):
        left.append((from_json(evaluation["event"]), evaluations_left(int(evaluation["every"]), planned, ledger, own)))
    return [(event, count) for event, count in left if count]


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
        own = _run_of(run, ledger)
        marks: list[tuple[Path, LedgerMark]] = []
        with contextlib.suppress(InputError):  # this machine has no private folder, or can't read it
            marks = marks_of(own, ledger.first_hash)
        # Reopen: a run in progress charges its ledger before it moves its anchors, so the ledger must be read after the marks.
        ledger = open_ledger(run)
        proven = recompute(run, ledger)
    except LedgerError as error:
        return [Check("ledger", False, str(error))]
    checks = [Check("ledger", True, f"{len(ledger)} charges; the hash chain is whole")]
    checks += _check_newest(run, ledger, own, marks, simulated=proven.simulated)
    checks += _check_released(run, ledger, own)
    claim = read_claim(run)
    if claim is None:
        missing = f"{STATEMENT} does not exist, so the run claims nothing: it has not finished, or the file was removed"
        checks.append(Check("claim", False, missing, incomplete=True))
    else:
        if not _rounds_charged(ledger, own) and not ledger.terms(own).get("complete"):
            early = "the run ended before its first round, so what it had planned is not in its ledger"
            checks.append(Check("claim", False, early, incomplete=True))
        else:
            checks += _check_claim(run, claim, proven)
        if (text := run / STATEMENT_TEXT).exists():
            same = text.read_text(encoding="utf-8").strip() == claim.text.strip()
            says = f"{'says' if same else 'does not say'} what {STATEMENT} says"
            checks.append(Check(STATEMENT_TEXT, same, says))
        checks += _check_sealed(run, ledger, own)
    if planned is not None:
        checks.append(_check_planned(ledger, planned, before, proven.delta))
    return checks


def _check_newest(
    run: Path, ledger: Ledger, own: str, marks: Sequence[tuple[Path, LedgerMark]], *, simulated: bool
) -> list[Check]:
    """Compare the ledger with what this machine knows of it (`private_folder`)."""
    checks, name = [], "newest copy"
    for file, mark in marks:
        held, knows = ledger.holds(mark), f"{str(file)!r} knows of {mark.count} charges"
        lost = (
            "that this ledger does not hold: another copy of the run went on, or this one was replaced by an older copy, and its "
            "claim leaves out what was spent there"
        )
        checks.append(Check(name, held, f"{knows}, and all of them are here" if held else f"{knows} {lost}"))
        # Every run moves the ledger's own anchor; that of a run knows nothing of other runs.
        shared = file == SharedAnchor.of(ledger.first_hash).file
        runs = [entry.run for entry in ledger.entries[mark.count :]]
        runs += [note["run"] for note in ledger.notes_since(mark)] if held else []
        if held and (more := sum(shared or one == own for one in runs)):
            why = "A run that is open, or that crashed, can have written them: resume it. Otherwise the ledger was edited."
            added = f"{more} charges, terms or seals at the end of the ledger are unknown to {str(file)!r}. {why}"
            checks.append(Check(name, False, added, incomplete=True))
    others: list[Path] = []
    with contextlib.suppress(InputError, OSError):
        others = other_ledgers(ledger.first_hash, own, run / LEDGER)
    for file in others:
        # Another run's folder may have been copied to the path of an earlier run.
        replaced = file.stem != own
        why = f"{str(file)!r} names another ledger for this {'path' if replaced else 'run'}: the ledger was replaced or rewritten"
        remedy = "; if a run of another machine was copied here, move it to a new folder" if replaced else ""
        checks.append(Check(name, False, why + remedy, incomplete=replaced))
    if not checks and not simulated:
        unseen = "this machine has no anchor of the ledger, so it can't see whether it was rewritten or rolled back"
        checks.append(Check(name, True, f"{unseen}: verify where the run was made", incomplete=True))
    return checks


def _run_of(folder: Path, ledger: Ledger) -> str:
    """The name of the folder's run, from `run.json`, from its checkpoint, or from the header of its ledger."""
    names: list[Any] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        names.append(json.loads((folder / FACTS).read_text(encoding="utf-8"))["run"])
    with contextlib.suppress(InputError):
        names.append(getattr(read_progress(folder), "run", ""))
    known = {entry.run for entry in ledger.entries} | {note["run"] for _, note in ledger.notes}
    return str(next((name for name in names if isinstance(name, str) and name in known), ledger.header.get("run", "")))


def _rounds_charged(ledger: Ledger, own: str) -> list[tuple[Event, int]]:
    """(event, count) of the rounds that a run charged, without votes and evaluations."""
    events = Counter(entry.event for entry in ledger.entries if entry.run == own)
    return [(event, count) for event, count in events.items() if not event.question]


def _check_sealed(run: Path, ledger: Ledger, own: str) -> list[Check]:
    sealed = ledger.sealed(own)
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
            last = read_progress(run) if name == "checkpoint" else None
        except FileNotFoundError:
            checks.append(Check(name, False, f"{file} does not exist; put it back", incomplete=True))
            continue
        except (SafetensorError, OSError, InputError):
            checks.append(Check(name, False, f"{file} can't be read: it is damaged"))
            continue
        same = found == sealed[name] and (last is None or (last.run == own and ledger.holds(last.ledger)))
        checks.append(Check(name, same, f"{file} is {'' if same else 'not '}the one that the ledger was charged for"))
    return checks


def _check_released(run: Path, ledger: Ledger, own: str) -> list[Check]:
    # A ledger that no run created names no run.
    files = (METRICS, FACTS) if "run" in ledger.header else ()
    lacking = [name for name in files if not (run / name).exists()]
    checks = [Check(name, False, f"{name} does not exist; put it back", incomplete=True) for name in lacking]
    # Charges of other runs on the same ledger do not count.
    charged = {entry.round for entry in ledger.entries if entry.run == own}
    released = set(_released_rounds(run / METRICS))
    missing = sorted(released - charged)
    unpaid = sorted(set(_released_rounds(run / METRICS, "clients_")) - evaluated(ledger, own))
    if unpaid:
        what = f"what clients measured after round {unpaid[0]} was never charged"
    elif missing:
        what = f"{len(missing)} released rounds were never charged, the first is {missing[0]}"
    else:
        what = f"{len(released)} released, all of them charged"
    return [*checks, Check("released rounds", not unpaid and not missing, what)]


def _released_rounds(path: Path, prefix: str = "") -> Iterator[int]:
    """Yield the rounds in a metrics file whose records have a field with this prefix."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_METRICS_LINE), b""), start=1):
            try:
                record = json.loads(line)
                if any(name.startswith(prefix) for name in record):
                    yield int(record["round"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                if not line.endswith(b"\n") and len(line) < _MAX_METRICS_LINE:
                    return  # cut by a crash; its round was charged before
                raise InputError(f"{path}, line {number}: not a record of a round.") from None


def _check_claim(run: Path, claim: PrivacyStatement, proven: PrivacyStatement) -> list[Check]:
    """Compare every field of the claim's file with the ledger, but for those in `EXEMPT`."""
    claimed = json.loads((run / STATEMENT).read_text(encoding="utf-8"))
    recomputed, repeated = (json.loads(one.to_json()) for one in (proven, claim))
    checks = []
    for name in dict.fromkeys([*recomputed, *claimed]):
        mine, theirs = claimed.get(name), recomputed.get(name)
        if name in EXEMPT or (mine == theirs and mine in (None, "", [], False)):
            continue
        same = _same(mine, theirs)
        differs = "" if same else f"claimed {_show(mine)}, but the ledger gives "
        checks.append(Check(name, same, differs + _show(theirs)))
    own = all(claimed.get(name) == repeated[name] for name in ("shown", "text"))
    checks.append(Check(STATEMENT, own, f"its text and figures are {'' if own else 'not '}those of its fields"))
    return checks


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same, numbers to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return _close(one, other) or (type(one) is type(other) and one == other)


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
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b)):
        return False
    return a == b or math.isclose(a, b, rel_tol=1e-9)


def _show(value: Any) -> str:
    if isinstance(value, dict) and "epsilon_total" in value:
        return f"{_show(value['epsilon_total'])} ({value.get('adjacency')}, {'exact' if value.get('exact') else 'upper bound'})"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
