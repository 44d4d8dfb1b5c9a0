"""The guard: limits set by a node's operator, and the ledger of charges under these limits.

    guard.toml                    the limits, and the guard's id, which stays the same if the file moves
    guard.ledger.jsonl (+ .head)  the charges; the first line has the same id
    guard.anchor.json             the ledger's number of charges at its last use, and the hash of the last one

The file is on the node; the server and the uploaded app can't change it:

    max_epsilon_per_round = 4.0
    max_epsilon_total = 20.0
    delta = 1e-5
    mechanisms = ["local-gaussian", "privunit"]
    max_clip = 1.0
    helper_key = "…"             # with two-party aggregation: the public key of the helper that this site trusts
    apps = ["9f2c…"]             # for `dpfedexp node`: hashes of the apps that may run here
    overrides = []               # for `dpfedexp node`: the settings that a run may override (`-c`); all settings if missing
    max_candidates = 1           # of a run; above 1, each may have its own votes, and the server is trusted not to add them up
    answer_failures = false      # for `dpfedexp node`: true answers an app's failure with a charged report of zero
    id = "ward 7"                # the id of guard and ledger; if missing, drawn at random and written here at the first use

The file's path comes from the node's own configuration (`--node-config 'dpfedexp-guard="…"'`) or environment (DPFEDEXP_GUARD),
never from a message. A guard file belongs to one data holder: SuperNodes that share it share one budget. The file of a helper of
two-party aggregation (`HelperFile`) has the same limits and the same kind of ledger.

Formal guarantee: everything sent under this file, to all runs, is within `max_epsilon_total` for the replacement of all of the
holder's data. An answer is charged before it exists, without amplification by sampling, and for the influence of the holder's
data: a node with k clients moves a central sum k times as far, or sends k local reports.

Charges are kept over all runs and restarts, and never reset silently. The anchor is written and synced after the charge and before
the answer exists. A ledger that is behind its anchor, missing beside its anchor, or of another id is refused. A renamed guard file
finds its ledger by the id; a guard file that was copied or moved without its ledger is refused. All these files may be rolled back
together, so the user's state folder (`dpfedexp.engine.private_folder`) has two more anchors, named by the id and by the ledger's
path. The anchor of the id is locked while its ledger is in use: of two copies, the older one is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from dpfedexp.accounting import Event, Ledger
from dpfedexp.accounting.compose import Charges, compose
from dpfedexp.accounting.events import NonPrivateEvent
from dpfedexp.accounting.ledger import LedgerMark, head_path
from dpfedexp.algorithms.probe import CLIP, LATER, MOST_CANDIDATES, RATE, SCALE
from dpfedexp.core.noise import ChaChaNoise, Noise
from dpfedexp.engine.private_folder import SharedAnchor, read_mark, write_mark
from dpfedexp.errors import InputError, LedgerError, checked, is_count, is_number, nearest, require
from dpfedexp.flower.messages import NodeRequest
from dpfedexp.mechanisms import Mechanism
from dpfedexp.mechanisms.aggregation import FEWEST, Asked, Helper, PrivateKey, check_public
from dpfedexp.mechanisms.registry import check_name

NODE_KEY, VARIABLE = "dpfedexp-guard", "DPFEDEXP_GUARD"
HELPER_KEY, HELPER_VARIABLE = "dpfedexp-helper", "DPFEDEXP_HELPER"
NUMBERS = ("max_epsilon_per_round", "max_epsilon_total", "delta", "max_clip")
_HASH = re.compile(r"[0-9a-f]{64}")
_DRAWN = re.compile(r"[0-9a-f]{16}")
"""Ids of this form are drawn when the ledger is created, so a guard file with such an id has been used."""
_LEDGER, _ANCHOR, _LOCK = ".ledger.jsonl", ".anchor.json", ".lock"
_LARGEST_HEADER = 64 * 1024


class Refused(InputError):
    """Raised when a node refuses a request. The message holds nothing about the node's data.

    `shown` is the text for the server, if the message itself would tell about other runs or the node's files. What a node has
    spent elsewhere shows how often it was drawn there, which is secret under sampling.
    """

    def __init__(self, reason: str, shown: str | None = None) -> None:
        super().__init__(reason)
        self.shown = reason if shown is None else shown


def node_charge(mechanism: Mechanism, clients: int) -> tuple[Event, int]:
    """The event of a node's answer for `clients` clients, and how often it is charged. Sampling does not lower the charge."""
    require(clients >= 1, f"the number of clients is {clients}; it must be a positive whole number.")
    return mechanism.client_event().for_clients(clients)


def total(charges: Charges, delta: float) -> float:
    """ε of all of a node's answers, against an observer who sees all of them; rounds of all settings compose as local rounds."""

    def observed(event: Event) -> Event:
        return event if isinstance(event, NonPrivateEvent) else replace(event.unsampled(), setting="local")

    return compose([(observed(event), count) for event, count in charges], delta).epsilon


@dataclass(frozen=True)
class Limits(ABC):
    """Privacy limits in a file, for a node or a two-party helper; the ledger beside the file has every answer that was charged."""

    path: Path
    max_epsilon_per_round: float
    max_epsilon_total: float
    delta: float
    max_clip: float
    mechanisms: tuple[str, ...]

    what: ClassVar[str] = "guard"
    whose: ClassVar[str] = "node"
    variable: ClassVar[str] = VARIABLE
    node_key: ClassVar[str] = NODE_KEY

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Load the file; raises `InputError` if it can't be read, lacks a limit, or has a setting that is wrong."""
        path, what = Path(path), cls.what
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"the {what} file {str(path)!r} can't be read: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"the {what} file {str(path)!r} is not valid TOML: {error}.") from None
        settings = {one.name: one.default for one in fields(cls) if one.name != "path"}
        for name, default in settings.items():
            given = name in values or default is not MISSING
            require(given, f"the {what} file {str(path)!r} has no {name}; all limits are required.")
        for name in values:
            known = (*settings, "id")
            require(name in known, f"{what}: {name} is not a setting.{nearest(name, known)}")
        for name in NUMBERS:
            value = values[name]
            require(is_number(value) and value > 0, f"{what}: {name} is {value!r}; it must be a positive number.")
        require(values["delta"] < 1, f"{what}: delta is {values['delta']}; it must be below 1.")
        require(isinstance(values["mechanisms"], list), f"{what}: mechanisms must be a list of names.")
        for name in values["mechanisms"]:
            check_name(name, f"{what}: mechanism")
        name = values.pop("id", "unset")  # `GuardFiles` reads it
        good = isinstance(name, str) and name.isprintable() and 0 < len(name) <= 100
        require(good, f"{what}: id is {name!r}; it must be a name of 1 to 100 characters that no other {what} has.")
        more = cls._checked_settings({**values, "mechanisms": tuple(values["mechanisms"])}, path.parent)
        return cls(path, **more)

    @classmethod
    @abstractmethod
    def _checked_settings(cls, values: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Check the settings of a node or of a helper alone, and convert them. `folder` is that of the file."""

    @classmethod
    def of_node(cls, node_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self | None:
        """Load the limits from the file that the operator has named for this node; None without one."""
        # The environment comes first, because the app can write to the object with the node's configuration.
        path = environment.get(cls.variable, node_config.get(cls.node_key))
        named = path is None or str(path).strip()
        require(bool(named), f"{cls.variable} or {cls.node_key} is empty; it must name a file, or not be set.")
        return None if path is None else cls.load(Path(str(path)).expanduser())

    @property
    def ledger(self) -> Path:
        return GuardFiles.of(self.path).ledger

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Raise `Refused` for a mechanism that the file does not list, or a clip above `max_clip`."""
        kind, allowed = mechanism.kind, ", ".join(self.mechanisms) or "none"
        if kind not in self.mechanisms:
            raise Refused(f"mechanism {kind!r} is not allowed here; allowed: {allowed}.")
        # A vote's clip is always ½.
        if mechanism.clip > self.max_clip and not getattr(mechanism, "question", ""):
            raise Refused(f"clip {mechanism.clip:g} is above this {self.whose}'s max_clip of {self.max_clip:g}.")

    def check_round(self, charges: Charges) -> None:
        """Raise `Refused` if the charges of one round exceed `max_epsilon_per_round`."""
        epsilon = total(charges, self.delta)
        if not epsilon <= self.max_epsilon_per_round:
            raise Refused(
                f"the round costs epsilon {epsilon:.4g} at delta {self.delta:g}, above this {self.whose}'s max_epsilon_per_round "
                f"of {self.max_epsilon_per_round:g}."
            )

    def check_total(self, charges: Charges) -> None:
        """Raise `Refused` if all charges together exceed `max_epsilon_total`; the server is not told by how much."""
        epsilon = total(charges, self.delta)
        if not epsilon <= self.max_epsilon_total:
            raise Refused(
                f"the round would take this {self.whose}'s total to epsilon {epsilon:.4g} at delta {self.delta:g}, above its "
                f"max_epsilon_total of {self.max_epsilon_total:g}.",
                shown=f"the round would take this {self.whose} above its max_epsilon_total of {self.max_epsilon_total:g}.",
            )

    @contextlib.contextmanager
    def open_ledger(self) -> Iterator[Ledger]:
        """Open the ledger for one answer; raises `Refused` if it can't be used, with the reason only in the operator's log."""
        try:
            with guard_ledger(self.path) as ledger:
                yield ledger
        except (LedgerError, OSError) as error:
            raise Refused(
                f"this {self.whose}'s own ledger can't be used: {error}",
                shown=f"this {self.whose}'s own ledger can't be used; see the {self.whose}'s log.",
            ) from None


@checked
@dataclass(frozen=True)
class Guard(Limits):
    """The limits of a node."""

    helper_key: str | None = None
    apps: tuple[str, ...] = ()
    overrides: tuple[str, ...] | None = None
    max_candidates: int = 1
    answer_failures: bool = False

    @classmethod
    def _checked_settings(cls, values: dict[str, Any], folder: Path) -> dict[str, Any]:
        if "helper_key" in values:
            values["helper_key"] = check_public(values["helper_key"], "guard: helper_key")
        apps = values.get("apps", [])
        good = isinstance(apps, list) and all(isinstance(a, str) and _HASH.fullmatch(a) for a in apps)
        hashes = "a list of hashes of 64 hexadecimal digits, as `dpfedexp flower hash` prints them"
        require(good, f"guard: apps must be {hashes}.")
        overrides = values.get("overrides")
        require(
            overrides is None or (isinstance(overrides, list) and all(isinstance(name, str) for name in overrides)),
            f'guard: overrides is {overrides!r}; it must be a list of settings, such as ["federation.folder"].',
        )
        many = values.get("max_candidates", 1)
        require(is_count(many), f"guard: max_candidates is {many!r}; it must be a positive whole number.")
        failures = values.get("answer_failures", False)
        require(isinstance(failures, bool), f"guard: answer_failures is {failures!r}; it must be true or false.")
        names = None if overrides is None else tuple(overrides)
        return {**values, "apps": tuple(apps), "overrides": names}

    def admit(self, request: NodeRequest, *, run: str = "", app: str = "", charge: bool = True) -> None:
        """Write the charge for an answer to the ledger if every limit allows it; raise `Refused` otherwise.

        The limit per round covers all answers to one round of one run, for any of the node's clients, priced as if the server added
        them into one sum; only the votes of up to `max_candidates` candidates count as sums of their own. The ledger's line
        has Flower's id of the run and the app's hash. With `charge=False` the limits are only checked.
        """
        self.check_mechanism(request.mechanism)
        event, count = node_charge(request.mechanism, request.size)
        self.check_round([(event, count)])
        # A client answers each candidate's votes on its rate and clip, but one update and one vote on the best candidate.
        if (candidate := min(request.candidate, self.max_candidates - 1)) and request.purpose in (RATE, CLIP, SCALE):
            run += f", candidate {candidate}"
        with self.open_ledger() as ledger:
            # Votes before the first round share its number; the limit per round applies to each question separately.
            asked = (run, request.round, event.question)
            earlier = [e.event for e in ledger.entries if (e.run, e.round, e.event.question) == asked]
            event = event.charge_after(earlier)
            self.check_round([*((e, 1) for e in earlier), (event, count)])
            self.check_total([*ledger.charges(), (event, count)])
            for _ in range(count if charge else 0):
                ledger.charge(request.round, event, run=run, note={"time": now(), "app": app})


@dataclass(frozen=True)
class HelperFile(Limits):
    """The limits of a helper of two-party aggregation.

    Formal guarantee: all answers under this file together are within `max_epsilon_total` for every client, for all runs, whichever
    of them the client was in.
    """

    private_key: Path
    min_clients: int
    max_columns: int = 100_000_000

    what, whose, variable, node_key = "helper", "helper", HELPER_VARIABLE, HELPER_KEY

    @classmethod
    def _checked_settings(cls, values: dict[str, Any], folder: Path) -> dict[str, Any]:
        fewest = values["min_clients"]
        require(
            is_count(fewest) and fewest >= FEWEST,
            f"helper: min_clients is {fewest!r}; it must be a whole number of at least {FEWEST}.",
        )
        longest = values.get("max_columns", 1)
        require(is_count(longest), f"helper: max_columns is {longest!r}; it must be a positive whole number.")
        require(isinstance(values["private_key"], str), "helper: private_key must be the name of a file.")
        return {**values, "private_key": folder / Path(values["private_key"]).expanduser()}

    def helper(self, noise: Callable[[], Noise] = ChaChaNoise) -> Helper:
        """The helper with this file's key, limits and ledger."""
        return Helper(PrivateKey.load(self.private_key), self.min_clients, self.admit, noise)

    def admit(self, *groups: Asked) -> None:
        """Write the charge for an answer to the ledger if it is the first for its round and nonce, and every limit allows it.

        A client is in one of the groups, whose updates cost the same, so one charge covers all of them.
        """
        (round_, mechanism), question = groups[0], groups[0][1].question
        for _, one in groups:
            self.check_mechanism(one)
        if (columns := sum(other.columns for other, _ in groups)) > self.max_columns:
            raise Refused(f"a row has {columns} numbers, above this helper's max_columns of {self.max_columns}.")
        if question not in ((RATE, CLIP) if round_.number == 0 else ("", *LATER)):
            raise Refused("only a vote on the local rate or on the first clip comes before the first round.")
        # Priced for a client in every round: the helper sees who takes part, so sampling does not amplify.
        event = mechanism.client_event()
        costs = {(other.run, other.number, one.client_event()) for other, one in groups}
        if len(costs) > 1 or (len(groups) > 1 and question):
            raise Refused("several groups are for the updates of one round, all at the same cost.")
        self.check_round([(event, 1)])
        if (last := max(other.candidate for other, _ in groups)) >= MOST_CANDIDATES:
            raise Refused(f"candidate {last} does not exist; a run has at most {MOST_CANDIDATES}.")
        nonces, candidate = {other.nonce for other, _ in groups}, f"candidate {round_.candidate}"
        with self.open_ledger() as ledger:
            # Votes before the first round share number 0, and an evaluation has the number of its round; each is answered once,
            # votes on a rate or a clip once for every candidate.
            once = question not in (RATE, CLIP, SCALE)
            own = [entry for entry in ledger.entries if entry.run == round_.run and entry.round >= round_.number]
            same = [e for e in own if question in ("", e.event.question) and (once or e.noise.endswith(candidate))]
            later = [entry.round for entry in own if entry.round > round_.number or entry in same]
            if later:
                raise Refused(
                    f"round {round_.number} comes after an answer to round {max(later)} of the same run: every round "
                    "is answered once, for one set of clients, and rounds go up."
                )
            if len(nonces) < len(groups) or any(nonces & set(entry.noise.split()) for entry in ledger.entries):
                raise Refused("the nonce was answered before; nonces must not repeat.")
            self.check_total([*ledger.charges(), (event, 1)])
            noise = " ".join([*sorted(nonces), candidate])
            ledger.charge(round_.number, event, run=round_.run, noise=noise, note={"time": now()})


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class GuardFiles:
    """The paths of a guard file and of its ledger, which may not exist yet, and the id that both contain.

    `id` is None before the first use. `stated` says whether the id is written in the guard file.
    """

    guard: Path
    ledger: Path
    id: str | None
    stated: bool

    @staticmethod
    def of(guard: Path) -> GuardFiles:
        """Find the ledger by the guard file's name, or by id if it was renamed. Raises `LedgerError` if the ids differ."""
        stated = _stated_id(guard)
        path = guard.with_name(guard.stem + _LEDGER)
        found = None
        if path.exists():
            found = _ledger_id(path)
            if None not in (stated, found) and found != stated:
                raise LedgerError(
                    f"{path.name} is another ledger: it belongs to the guard with id {found!r}, and {guard.name} has id "
                    f"{stated!r}; put the ledger of {stated!r} here, with its head and anchor."
                )
        elif stated is not None:
            others = (other for other in sorted(guard.parent.glob("*" + _LEDGER)) if _ledger_id(other) == stated)
            path = next(others, path)
        return GuardFiles(guard, path, found or stated, stated is not None)

    @property
    def files(self) -> list[Path]:
        """The existing files of the ledger: ledger, head, anchor and the guard's lock."""
        lock = self.guard.with_name(self.guard.stem + _LOCK)
        return [path for path in (self.ledger, head_path(self.ledger), self.anchor, lock) if path.exists()]

    @property
    def anchor(self) -> Path:
        return self.ledger.with_name(self.ledger.name.removesuffix(_LEDGER) + _ANCHOR)


@contextlib.contextmanager
def guard_ledger(guard: Path) -> Iterator[Ledger]:
    """Open the ledger of a guard file for one message at a time: two runs on one node must not both pass the same check.

    The anchors are moved when the context ends without an error.
    """
    with _locked(guard.with_name(guard.stem + _LOCK)):
        files = GuardFiles.of(guard)
        name = secrets.token_hex(8) if files.id is None else files.id
        path = _shared_anchor(name)[0].path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.with_suffix(_LOCK)):
            # Read again: a copy of this guard file may have created the ledger meanwhile.
            files = GuardFiles.of(guard)
            new = not files.ledger.exists()
            if new:
                _check_missing(files)
            with Ledger.create(files.ledger, holder=name) if new else Ledger.open(files.ledger) as ledger:
                mark = None if new else _check_marks(files, ledger)
                _write_id_once(files, name, ledger, new)
                seen = _shared_anchor(name)[1]
                if not mark == seen == ledger.mark():
                    _move_anchors(files, name, seen, ledger)
                before = ledger.mark()
                yield ledger
                if ledger.mark() != before:
                    _move_anchors(files, name, before, ledger)


def read_ledger(files: GuardFiles) -> Ledger | None:
    """The ledger for reading; None before the first use. Raises `LedgerError` if the node would refuse the ledger."""
    if not files.ledger.exists():
        _check_missing(files)
        return None
    ledger = Ledger.open(files.ledger, read_only=True)
    _check_marks(files, ledger)
    return ledger


def _write_id_once(files: GuardFiles, name: str, ledger: Ledger, new: bool) -> None:
    """Write the id into a guard file without one. A new ledger whose id can't be written is deleted."""
    try:
        if new:
            files.ledger.chmod(0o600)
        if not files.stated:
            _write_id(files.guard, name)
    except OSError as error:
        if new:  # an existing ledger has the id in its first line
            ledger.close()
            for path in (files.ledger, head_path(files.ledger)):
                path.unlink(missing_ok=True)
            raise LedgerError(
                f"{files.guard.name} has no id, and one can't be written into it ({error.strerror}); add a line such as "
                'id = "ward 7", with a name that no other guard has.'
            ) from None


def _check_missing(files: GuardFiles) -> None:
    """Raise `LedgerError` if traces show that a missing ledger existed before."""
    traces = [p.name for p in (files.anchor, head_path(files.ledger)) if p.exists()]
    if traces:
        raise LedgerError(
            f"{files.ledger.name} is missing beside {' and '.join(traces)}; restore it from a backup, or, to reset the spent "
            "budget on purpose, delete those too."
        )
    if files.id is not None:
        shared, seen = _shared_anchor(files.id)
        if (seen is None and _DRAWN.fullmatch(files.id)) or (seen is not None and seen.count):
            count = f" {seen.count} times, as {str(shared.path)!r} has seen" if seen else ""
            raise LedgerError(
                f"{files.guard.name} was charged before{count} (id {files.id!r}), and its ledger is not beside it; move "
                f"{files.ledger.name}, its .head and its {files.anchor.name} here from where the guard was used, or, to reset "
                "the spent budget on purpose, remove the line id from the guard file."
            )
    _check_place(files, None)


def _check_marks(files: GuardFiles, ledger: Ledger) -> LedgerMark | None:
    """Return the mark in the anchor. Raises `LedgerError` if the ledger is not the newest copy known to this user."""
    mark, path, anchor = _read_anchor(files.anchor), files.ledger, files.anchor
    if mark is None and len(ledger):
        raise LedgerError(
            f"{anchor.name} is missing beside a ledger with {len(ledger)} charges, so an older copy could not be detected; "
            f"restore it from a backup, or, if this ledger is known to be the newest, copy {head_path(path).name} to "
            f"{anchor.name}."
        )
    if mark is not None and not ledger.holds(mark):
        age = "an older copy" if len(ledger) < mark.count else "another ledger"
        raise LedgerError(
            f"{path.name} is {age}: it holds {len(ledger)} charges, and its anchor {anchor.name} was written after {mark.count}; "
            f"restore the newest ledger with its {head_path(path).name} from a backup."
        )
    if files.id is None:
        raise LedgerError(f"{path.name} has no id in its first line; it is no ledger of a guard.")
    shared, known = _shared_anchor(files.id)
    if known is not None and not ledger.holds(known):
        raise LedgerError(
            f"{path.name} holds {len(ledger)} charges, and {str(shared.path)!r} has seen {known.count} of the guard with id "
            f"{files.id!r}: another copy of it was charged since, or this one was put back together with its anchor. Go on with "
            "the newest ledger, head and anchor, or, to reset the spent budget on purpose, delete that file."
        )
    _check_place(files, ledger)
    return mark


def _check_place(files: GuardFiles, ledger: Ledger | None) -> None:
    """Raise `LedgerError` if another ledger was charged at this path before; `ledger` is None where there is no ledger."""
    shared, known = _shared_anchor(files.ledger)
    if known is not None and known.count and (ledger is None or not ledger.holds(known)):
        raise LedgerError(
            f"{files.ledger.name} is {'missing' if ledger is None else 'another ledger'}, and {str(shared.path)!r} has seen "
            f"{known.count} charges at this place; restore that ledger with its head and anchor, or, to reset the spent budget "
            "on purpose, delete that file."
        )


def _move_anchors(files: GuardFiles, name: str, seen: LedgerMark | None, ledger: Ledger) -> None:
    """Move the anchors to the ledger's mark, if the anchor of the id still has the mark that was read before."""
    shared, newest = _shared_anchor(name)
    if newest != seen:
        raise LedgerError(
            f"{str(shared.path)!r} was changed while {files.ledger.name} was in use; nothing is answered."
        )
    mark = ledger.mark()
    write_mark(files.anchor, mark)
    for anchor in (shared, _shared_anchor(files.ledger)[0]):
        anchor.remember(mark)


def _shared_anchor(name: str | Path) -> tuple[SharedAnchor, LedgerMark | None]:
    """The anchor in the user's state folder for a guard's id, or for the path of a ledger, and its mark (None: not used yet)."""
    if isinstance(name, Path):
        known = b"dpfedexp ledger at\0" + os.fsencode(name.resolve())
    else:
        known = b"dpfedexp guard\0" + name.encode()
    try:
        anchor = SharedAnchor.of(hashlib.sha256(known).hexdigest())
        return anchor, anchor.mark()
    except (InputError, RuntimeError) as error:
        raise LedgerError(str(error)) from None


def _read_anchor(anchor: Path) -> LedgerMark | None:
    """The mark in the anchor file beside a ledger; None without the file."""
    try:
        mark = read_mark(anchor)
    except FileNotFoundError:
        return None
    if mark is None:
        raise LedgerError(f"{anchor.name} was changed after it was written; restore it from a backup with its ledger.")
    return mark


def _stated_id(guard: Path) -> str | None:
    """The id in a guard file; None without one."""
    try:
        found = tomllib.loads(guard.read_text(encoding="utf-8")).get("id")
    except (OSError, ValueError) as error:
        raise LedgerError(f"the guard file {str(guard)!r} can't be read: {error}") from None
    return None if found is None else str(found)


def _write_id(guard: Path, name: str) -> None:
    """Append the id to the guard file, in place, so that the file keeps its owner and its mode."""
    text = guard.read_text(encoding="utf-8")
    with open(guard, "a", encoding="utf-8") as file:
        file.write("" if text.endswith("\n") else "\n")
        file.write(f'id = "{name}"  # of this guard and its ledger, drawn at the first use\n')
        file.flush()
        os.fsync(file.fileno())


def _ledger_id(path: Path) -> str | None:
    """The id in a ledger's first line, not verified (opening the ledger verifies the line); None without one."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline(_LARGEST_HEADER))
        return str(header["holder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; other processes wait."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(ImportError):  # advisory locks exist on POSIX only
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
