"""The server's folder: ledger, checkpoint, model and statement (`dpfedexp.engine.outlets` says what each file is).

Outside the folder, an anchor (`$DPFEDEXP_PRIVATE/ledgers`, see `dpfedexp.engine`) remembers how far the ledger had come. Every
charge moves it, on disk, before the round that it pays for is released.

Formal guarantee: a run never goes on, and no new one begins, over a ledger that lacks a charge of a round that the folder's
checkpoint holds, or one that the anchor has seen: the whole folder put back to an earlier moment is refused. A ledger may be ahead
of its checkpoint and its anchor, as a crash between them leaves it; then the round is charged again. Of two copies of a folder one
goes on: the other is refused before its nodes are asked.

A checkpoint is the last completed round: tensors in safetensors, the rest in JSON. The JSON names the tensor files and their hashes
and is written last, atomically: it is what makes a round completed. Everything in it was released already or is public. The tensors
are those of a simulation's checkpoint. An earlier iterate that the reported model averages is the `w` of an earlier round's file,
which stays while it is needed: every round writes its parameters once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from dpfedexp.accounting import Ledger, PrivacyStatement
from dpfedexp.accounting.ledger import Mark, head_path
from dpfedexp.algorithms.round import State
from dpfedexp.core.layout import Params
from dpfedexp.engine.checkpoint import digest, earlier, state_from, state_tensors
from dpfedexp.engine.outlets import ADVICE, LEDGER, MODEL, SERVER_CHECKPOINT, SERVER_TENSORS, recorded, server_tensors
from dpfedexp.engine.plan import Advice
from dpfedexp.engine.private_folder import VARIABLE, OneWriter, SharedAnchor, root
from dpfedexp.engine.run import write_statement
from dpfedexp.errors import InputError, LedgerError, require
from dpfedexp.files import replace_tensors, replace_text

_log = logging.getLogger("flwr")

FORMAT = "dpfedexp-flower-checkpoint"
HASH = "blake2b"
"""How hashlib calls what the tensors are hashed with, and its field. Few processors have instructions for SHA-256."""
VERSION = 6


def open_folder(
    folder: Path, config: dict[str, Any], header: dict[str, Any], *, resume: bool
) -> tuple[Ledger, str, Checkpoint | None]:
    """The run's ledger, its name in it, and its last completed round. A run that is not resumed never touches another's files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None
    path = folder / LEDGER
    traces = [p.name for p in (folder / SERVER_CHECKPOINT, head_path(path)) if p.exists()]
    if traces and not path.exists():
        raise LedgerError(
            f"{path} is missing beside {' and '.join(traces)}: what was released is not paid for anywhere; restore it from a "
            "back-up, or begin another run in a new folder."
        )
    settings = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    require(
        not root().resolve().is_relative_to(folder.resolve()),
        f"the private folder {str(root())!r} lies in the run's own folder {str(folder)!r}, with which it would be put back; set "
        f"{VARIABLE} to one outside.",
    )
    if not (resume and path.exists()):
        run = secrets.token_hex(16)
        return _anchored(Ledger.create(path, config_hash=settings, run=run, **header), path), run, None
    ledger = Ledger.open(path, repair=True)
    try:
        last = load_checkpoint(folder)
        if last is None:  # killed before its first round was complete, it goes on under its own name
            name = ledger.header.get("run")
            if not isinstance(name, str) or ledger.header.get("config") != settings:
                raise LedgerError(
                    f"{path} is of a run with other settings, and no checkpoint is beside it; resume with the settings of that run"
                    ", or begin another one in a new folder."
                )
            return _anchored(ledger, path), name, None
        for name in {**config, **last.config}:
            before, value = last.config.get(name), config.get(name)
            require(
                before == value,
                f"the run in {str(folder)!r} has {name} {before!r}, but this one has {value!r}; resume with the same settings.",
            )
        _check_paid(ledger, path, last)
    except BaseException:
        ledger.close()
        raise
    return _anchored(ledger, path), last.run, last


def _anchored(ledger: Ledger, path: Path) -> Ledger:
    """The ledger, once its anchor has seen no more than it holds; from here on this is its only writer (`OneWriter`)."""

    def refusal(ledger: Ledger, known: Mark, anchor: Path) -> LedgerError:
        return LedgerError(
            f"{path} holds {len(ledger)} charges, and its anchor {str(anchor)!r} has seen {known.count}: the folder was put back "
            "to an earlier moment, the ledger was replaced, or another copy of the folder went on; restore the newest copy of the "
            "folder, or begin another run in a new one."
        )

    try:
        anchor = SharedAnchor.of(ledger.first_hash)
        writer = OneWriter(anchor, refusal)
        ledger.witnesses.append(writer)
        if anchor.mark() is None and len(ledger):
            raise LedgerError(
                f"the anchor {str(anchor.path)!r} of {path} is missing, so an older copy of the folder would go unnoticed; copy it "
                f"from where the run was begun, or set {VARIABLE} to the folder that holds it."
            )
        writer.move(ledger)
    except OSError as error:
        ledger.close()
        raise LedgerError(
            f"the anchor {str(root())!r} of {path} can't be written: {error.strerror}; set {VARIABLE} to a folder outside the "
            "run's own where it can, and move the anchor there."
        ) from None
    except BaseException:
        ledger.close()
        raise
    return ledger


def _check_paid(ledger: Ledger, path: Path, last: Checkpoint) -> None:
    """The ledger is the one that the checkpoint was written beside, as far as it was then, and pays for every round."""
    remedy = f"restore the newest {LEDGER} with its head from a back-up, or begin another run in a new folder."
    if ledger.header.get("run") != last.run:
        raise LedgerError(f"{path} is of another run than the checkpoint beside it; {remedy}")
    if len(ledger) < last.mark.count:
        raise LedgerError(
            f"{path} is older than the checkpoint beside it: it holds {len(ledger)} charges, and there were {last.mark.count} when "
            f"round {last.state.round} was complete; {remedy}"
        )
    if not ledger.holds(last.mark):
        raise LedgerError(f"{path} and the checkpoint beside it are not of the same history; {remedy}")
    paid = {entry.round for entry in ledger.entries[: last.mark.count] if entry.run == last.run}
    missing = [number for number in range(1, last.state.round + 1) if number not in paid]
    if missing:
        raise LedgerError(f"{path} holds no charge for round {missing[0]} of the checkpoint beside it; {remedy}")


def write_results(folder: Path, model: Params, statement: PrivacyStatement, advice: Iterable[Advice] = ()) -> None:
    replace_tensors(folder / MODEL, {name: value.float().contiguous() for name, value in model.items()})
    write_statement(folder, statement)
    lines = (json.dumps(recorded(ADVICE, one.to_json(), secure=True)) + "\n" for one in advice)
    replace_text(folder / ADVICE, "".join(lines))


@dataclass(frozen=True)
class Checkpoint:
    """The last completed round, and what it rests on.

    Attributes:
        state: the state after it.
        config: what must not change when a run is resumed.
        history: the metrics of the rounds so far.
        run: the name under which the rounds were charged.
        mark: where the ledger stood: the rounds so far are paid for in it.
        nodes: ids of the nodes that have the run's places (none under add-remove adjacency, which hides who takes part).
    """

    state: State
    config: dict[str, Any]
    history: list[dict[str, Any]]
    run: str
    mark: Mark
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kept:
    """A file of a completed round: the parameters in it, its name, and the hash of its tensors."""

    w: Tensor
    name: str
    hash: str

    def fields(self) -> dict[str, str]:
        return {"tensors": self.name, HASH: self.hash}


def save_checkpoint(folder: Path, checkpoint: Checkpoint, kept: tuple[Kept, ...] = ()) -> tuple[Kept, ...]:
    """Returns when the checkpoint is on disk; killed at any instant, the previous one stays whole.

    `kept` is what the save before returned, the files that its checkpoint names: iterates that lie in them are not written again.
    """
    state = checkpoint.state
    tensors, name = state_tensors(state), server_tensors(state.round)
    held = {number: file for number, w in enumerate(state.recent[:-1]) for file in kept if file.w is w}
    for number in held:
        del tensors[earlier(number)]
    replace_tensors(folder / name, tensors)
    now = Kept(state.w, name, digest(tensors, HASH))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "run": checkpoint.run,
        "ledger": vars(checkpoint.mark),
        "nodes": list(checkpoint.nodes),
        "round": state.round,
        "radius": None if math.isinf(state.radius) else state.radius,
        **now.fields(),
        "earlier": {earlier(number): file.fields() for number, file in held.items()},
        "config": checkpoint.config,
        "history": checkpoint.history,
    }
    content = recorded(SERVER_CHECKPOINT, content, secure=True)
    replace_text(folder / SERVER_CHECKPOINT, json.dumps(content, indent=1) + "\n")
    named = (*held.values(), now)
    for old in folder.glob(SERVER_TENSORS):
        if old.name not in {file.name for file in named}:
            old.unlink(missing_ok=True)
    return named


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The last completed round, None if there is none yet."""
    path = folder / SERVER_CHECKPOINT
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        require(content["format"] == FORMAT, "it is of another program")
        version = content.get("version")
        if version == VERSION:
            radius = math.inf if content["radius"] is None else float(content["radius"])
            tensors = _tensors(folder, content)
            tensors |= {name: _tensors(folder, file)["w"] for name, file in content["earlier"].items()}
            return Checkpoint(
                state_from(tensors, int(content["round"]), radius),
                dict(content["config"]),
                list(content["history"]),
                str(content["run"]),
                Mark(int(content["ledger"]["count"]), str(content["ledger"]["hash"])),
                tuple(int(node) for node in content["nodes"]),
            )
    except Exception:
        raise InputError(
            f"the checkpoint {str(path)!r} is damaged or of another program; it can't be resumed."
        ) from None
    raise InputError(
        f"the checkpoint {str(path)!r} has version {version!r}, and this library reads version {VERSION}; finish the run with the "
        "version of dpfedexp that wrote it, or begin a new run in a new folder."
    )


def _tensors(folder: Path, file: Mapping[str, str]) -> dict[str, Tensor]:
    """What a file holds, if it has the hash that the checkpoint names beside it."""
    tensors = load((folder / Path(file["tensors"]).name).read_bytes())
    require(digest(tensors, HASH) == file[HASH], "its tensors were changed")
    return tensors


class Saving:
    """Writes one checkpoint after the other on a thread of its own, while nodes already train for the next round.

    Privacy does not rest on it: a round is charged, on disk, before it is released. A crash before its checkpoint is there makes
    the round again, which is charged again.
    `stored` says whether the newest round's checkpoint is on disk, whatever became of the files beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.stored = folder, True
        self._kept: tuple[Kept, ...] = ()
        self._beside = ThreadPoolExecutor(1, "dpfedexp-checkpoint")
        self._under_way: Future[None] | None = None

    def begin(self, checkpoint: Checkpoint, publish: Callable[[], None]) -> None:
        """Begins to write a checkpoint, and after it what `publish` writes; `wait` comes before the next one."""

        def save() -> None:
            try:
                self._kept = save_checkpoint(self.folder, checkpoint, self._kept)
                self.stored = True
                publish()
            except Exception as error:
                _log.error("The files of round %d can't be written: %s", checkpoint.state.round, error)
                raise

        self._under_way = self._beside.submit(save)

    def wait(self) -> None:
        """Returns when all that was begun is on disk, and raises, once, what kept it from getting there."""
        if self._under_way is None:
            return
        try:
            self._under_way.result()
        finally:
            # Interrupting `wait` does not cancel the write.
            if self._under_way.done():
                self._under_way = None

    def end(self) -> BaseException | None:
        """Waits until nothing is being written any more, interrupted or not, and returns what went wrong."""
        found: BaseException | None = None
        while self._under_way is not None:
            try:
                self.wait()
            except BaseException as error:
                found = error
        return found
