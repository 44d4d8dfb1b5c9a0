"""The last completed round on disk, from which a run goes on as if it had never stopped.

One safetensors file, `checkpoint.safetensors`: the state's tensors, and a JSON text in its metadata with everything else. It is
replaced as a whole after every round, so there is always exactly one, and it is complete. It holds no random state, because every
draw of a simulation is a function of seed, purpose, round and client.

With SCAFFOLD it holds the clients' own control variates, which are not private: it is readable by its owner only, and the one
of the last round leaves them out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpfedexp.accounting import Ledger
from dpfedexp.errors import InputError, LedgerError, require
from dpfedexp.round import State
from dpfedexp.simulation.durable import replace_file
from dpfedexp.simulation.engine import Simulation
from dpfedexp.simulation.identity import Settings, differences

NAME = "checkpoint.safetensors"
FORMAT, VERSION = "dpfedexp-checkpoint", 1
_LARGEST_TEXT = 2**26
_ONE_OF_STATE = ("w", "control", "client_controls")


@dataclass(frozen=True)
class Progress:
    """What a run knows beside its tensors.

    settings    what the run is (`identity.settings_of`)
    charged     how many charges the ledger held
    chunk_size  clients per tensor program, which decides how sums round
    history     the records of the completed rounds
    trainer     how local updates were computed, which decides how they round
    """

    round: int
    radius: float
    settings: Settings
    charged: int
    chunk_size: int
    history: list[dict[str, Any]]
    trainer: str = "auto"


@dataclass(frozen=True)
class Checkpoint:
    progress: Progress
    tensors: dict[str, Tensor]


def save(folder: Path, state: State, progress: Progress, *, last: bool = False) -> None:
    """Returns when the checkpoint is on disk. Whatever goes wrong, the previous one stays as it was.

    `last` says that no round follows, so the clients' control variates are not needed any more.
    """
    tensors = _tensors(replace(state, client_controls=None) if last else state)
    text = json.dumps({"format": FORMAT, "version": VERSION, "tensors": _digest(tensors), **vars(progress)})
    metadata = {"content": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    try:
        replace_file(folder / NAME, lambda temporary: save_file(tensors, temporary, metadata), mode=0o600)
    except OSError as error:
        raise InputError(
            f"the checkpoint of round {state.round} can't be written to {str(folder)!r}: {error.strerror}. "
            "The one before it is kept; make room or mend the folder, then resume."
        ) from None


def exists(folder: Path) -> bool:
    return (folder / NAME).exists()


def read_progress(folder: Path) -> Progress | None:
    """Everything but the tensors; None where there is no checkpoint."""
    found = _read(folder, tensors=False)
    return None if found is None else found.progress


def load(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder, checked against its hashes; None where there is none."""
    return _read(folder, tensors=True)


def check_same(found: Checkpoint, settings: Settings, folder: Path) -> None:
    """Refuses the checkpoint of another run and says what differs."""
    changed = differences(settings, found.progress.settings)
    require(
        not changed,
        f"the checkpoint in {str(folder)!r} is of another run: {changed}. Resume with that run's settings, or name another folder.",
    )


def resume(found: Checkpoint, simulation: Simulation, ledger: Ledger, folder: Path) -> State:
    """The state to go on from. Refuses a checkpoint whose rounds the ledger has not charged."""
    progress = found.progress
    rounds = {entry.round for entry in ledger.entries}
    uncharged = [number for number in range(1, progress.round + 1) if number not in rounds]
    if uncharged or len(ledger) < progress.charged:
        raise LedgerError(
            f"the checkpoint in {str(folder)!r} is of round {progress.round} and {progress.charged} charges, but the ledger holds "
            f"{len(ledger)}: charges were removed, so the run can't go on from here."
        )
    start = simulation.begin()
    given = found.tensors
    state = State(
        round=progress.round,
        w=given["w"].to(start.w.device),
        recent=(*(given[name].to(start.w.device) for name in _numbered(given)), given["w"].to(start.w.device)),
        radius=progress.radius,
        server={name: given[f"server.{name}"].to(start.w.device) for name in start.server if f"server.{name}" in given},
        control=None if start.control is None else given.get("control", start.control).to(start.w.device),
        client_controls=None if start.client_controls is None else given.get("client_controls", start.client_controls),
    )
    for name, tensor, like in _pairs(state, start):
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise _damaged(folder, f"its {name} does not fit the model")
    require(set(state.server) == set(start.server), f"the checkpoint in {str(folder)!r} lacks the server's own state.")
    return state


def _pairs(state: State, start: State):
    yield "parameters", state.w, start.w
    for old in state.recent:
        yield "earlier parameters", old, start.w
    for name, value in state.server.items():
        yield "server state", value, start.server[name]
    if state.control is not None and start.control is not None:
        yield "control variate", state.control, start.control
    if state.client_controls is not None and start.client_controls is not None:
        yield "clients' control variates", state.client_controls, start.client_controls


def _tensors(state: State) -> dict[str, Tensor]:
    """The newest of `recent` is w itself, so it is not written twice."""
    named = {"w": state.w}
    named |= {f"recent.{number}": value for number, value in enumerate(state.recent[:-1])}
    named |= {f"server.{name}": value for name, value in state.server.items()}
    if state.control is not None:
        named["control"] = state.control
    if state.client_controls is not None:
        named["client_controls"] = state.client_controls
    return {name: value.detach().cpu().contiguous() for name, value in named.items()}


def _numbered(tensors: dict[str, Tensor]) -> list[str]:
    return [f"recent.{number}" for number in range(sum(name.startswith("recent.") for name in tensors))]


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(value.numpy().data.cast("B") if value.numel() else b"")
    return digest.hexdigest()


def _read(folder: Path, *, tensors: bool) -> Checkpoint | None:
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get("content", "")
            if len(text) > _LARGEST_TEXT or hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
                raise _damaged(folder, "its text does not match its hash")
            # A copy, because the file under a mapped tensor may be replaced.
            names = list(file.keys()) if tensors else []
            found = {name: file.get_tensor(name).clone() for name in names}
        content = json.loads(text)
        progress = _progress(folder, content)
    except (SafetensorError, OSError, ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise _damaged(folder, str(error) or type(error).__name__) from None
    if tensors and _digest(found) != content.get("tensors"):
        raise _damaged(folder, "its tensors do not match their hash")
    names = [*_ONE_OF_STATE, *_numbered(found)]
    if tensors and ("w" not in found or any(n not in names and not n.startswith("server.") for n in found)):
        raise _damaged(folder, "it holds other tensors than a state")
    return Checkpoint(progress, found)


def _progress(folder: Path, content: Any) -> Progress:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _damaged(folder, "it was written by another program")
    if content.get("version") != VERSION:
        raise InputError(
            f"the checkpoint in {str(folder)!r} has version {content.get('version')!r}; this library reads {VERSION}."
        )
    counts = [content.get(name) for name in ("round", "charged", "chunk_size")]
    history, radius, settings = content.get("history"), content.get("radius"), content.get("settings")
    if (
        not all(type(count) is int and count >= 0 for count in counts)
        or content["chunk_size"] < 1
        or not isinstance(radius, float)
        or not radius > 0
        or not isinstance(settings, dict)
        or not isinstance(history, list)
        or not all(isinstance(line, dict) for line in history)
        or len(history) != content["round"]
        or not isinstance(content.get("trainer"), str)
    ):
        raise _damaged(folder, "its text is not that of a checkpoint")
    counted = (content["charged"], content["chunk_size"])
    return Progress(content["round"], radius, settings, *counted, history, content["trainer"])


def _damaged(folder: Path, how: str) -> InputError:
    return InputError(
        f"the checkpoint {str(folder / NAME)!r} is damaged ({how}). Restore it from a copy, or delete it to start the run again; "
        "a seeded run does not pay twice for a round."
    )
