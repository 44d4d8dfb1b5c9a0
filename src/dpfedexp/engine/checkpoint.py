"""Checkpoints: the last completed round on disk, from which a resumed run continues exactly.

A checkpoint is one safetensors file: the state's tensors (`state_tensors`), and a JSON text in the metadata with everything else.
The file is replaced as a whole after every round, so it is always complete. It holds released and public values (`outlets`) and
the ledger's length and last hash, but no random state: every draw of a simulation is a function of seed, purpose, round and
client.

The JSON text names everything that the result depends on, so that only the same run can resume. Device, trainer, chunk size and
budget are left out: they change only rounding or where a run stops. The clients' data are left out because their hash would
confirm a guessed value; `data_tag` and its key stay in the run's private folder.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpfedexp.accounting.ledger import Ledger, LedgerMark
from dpfedexp.algorithms.round import State
from dpfedexp.core.modules import Layout
from dpfedexp.engine import outlets
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.engine.private_folder import is_run_id
from dpfedexp.errors import InputError, LedgerError, require
from dpfedexp.files import replace_tensors, writing

NamedValues = dict[str, Any]
FORMAT, VERSION = "dpfedexp-checkpoint", 4
_LARGEST_TEXT = 2**25
"""Characters of the JSON text. A safetensors header holds 100 MB, in which a text may take up twice its length."""


@dataclass(frozen=True)
class Progress:
    """The state of a run other than its tensors, after the last completed round.

    `controls`: whether the clients' control variates of this round are in the private folder. `chunk_size` and `trainer` change
    rounding; a secure run does not record them.
    """

    round: int
    radius: float
    settings: NamedValues
    run: str
    ledger: LedgerMark
    history: list[dict[str, Any]]
    controls: bool = False
    chunk_size: int | None = None
    trainer: str | None = None
    cohort: dict[str, Any] = field(default_factory=dict)
    stop_source: str = ""


@dataclass(frozen=True)
class Checkpoint:
    progress: Progress
    tensors: dict[str, Tensor]


def save(folder: Path, state: State, progress: Progress) -> None:
    """Write the checkpoint and sync it. If writing fails, the previous checkpoint is unchanged."""
    tensors = state_tensors(state)
    known = {name: value for name, value in vars(progress).items() if value is not None}
    content = {"format": FORMAT, "version": VERSION, "tensors": digest(tensors), **known}
    content["ledger"] = vars(progress.ledger)
    # Raises `LookupError` for a field that `outlets` does not list.
    outlets.recorded(CHECKPOINT, {**content, **tensors}, secure=False)
    text = json.dumps(content)
    require(
        len(text) <= _LARGEST_TEXT,
        f"the checkpoint of round {state.round} can't be written: its history takes {len(text) / 2**20:.0f} MiB of text, and at "
        f"most {_LARGEST_TEXT / 2**20:.0f} can be read again. The one before it is kept; begin a new run that has fewer rounds or "
        "fewer metrics.",
    )
    metadata = {"content": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    remedy = ". The one before it is kept; free disk space or fix the folder, then resume."
    with writing(f"the checkpoint of round {state.round}", f" to {str(folder)!r}", remedy):
        replace_tensors(folder / CHECKPOINT, tensors, metadata, mode=0o600)


def read_progress(folder: Path) -> Progress | None:
    """Load a checkpoint without its tensors; None where the folder has none."""
    checkpoint = load(folder, tensors=False)
    return None if checkpoint is None else checkpoint.progress


def check_same(checkpoint: Checkpoint, settings: NamedValues, folder: Path) -> None:
    """Raise `InputError` with the differences if the checkpoint belongs to another run; initial parameters may differ."""
    here, there = (
        {name: value for name, value in one.items() if not name.endswith("model.start")}
        for one in (settings, checkpoint.progress.settings)
    )
    require(
        here.get("frozen") == there.get("frozen"),
        "the model's frozen parameters or buffers are not those that the run began with, and a checkpoint holds only what is "
        "trained: build the model as it was, with the same pretrained weights or the same torch.manual_seed.",
    )
    changed = differences(here, there)
    require(
        not changed,
        f"the checkpoint in {str(folder)!r} is of another run: {changed}. Resume with that run's settings, or use another "
        "folder.",
    )


def check_charged(checkpoint: Checkpoint, ledger: Ledger, folder: Path) -> None:
    progress, where = checkpoint.progress, f"the checkpoint in {str(folder)!r}"
    if not ledger.holds(progress.ledger):
        raise LedgerError(
            f"the run can't be resumed: the ledger, with {len(ledger)} charges, is not the one that belongs to {where}, which was "
            f"written after {progress.ledger.count}. Restore the newest ledger of this run with its .head file, or start a new run "
            "in a new folder."
        )
    rounds = {entry.round for entry in ledger.entries if entry.run == progress.run}
    uncharged = [number for number in range(1, progress.round + 1) if number not in rounds]
    if uncharged:
        raise LedgerError(
            f"the run can't be resumed: {where} is of round {progress.round}, but round {uncharged[0]} of this run was never "
            "charged. Restore the checkpoint and the ledger of the same run, or start a new run in a new folder."
        )


def resume(checkpoint: Checkpoint, start: State, folder: Path, controls: Tensor | None = None) -> State:
    """The state to resume from. Its tensors must have the names and shapes of `start`. `controls` are SCAFFOLD's client control
    variates; None for zeros."""
    progress, device = checkpoint.progress, start.w.device
    given = {name: value.to(device) for name, value in checkpoint.tensors.items()}
    try:
        state = replace(
            state_from(given, progress.round, progress.radius),
            control=None if start.control is None else given.get("control", start.control),
            client_controls=start.client_controls if controls is None else controls,
        )
        check_fits(state, start)
    except InputError as error:
        raise _damaged(folder, str(error)) from None
    return state


def reported(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The model that the run reports after the last completed round: parameter name → tensor."""
    progress = checkpoint.progress
    state = state_from(checkpoint.tensors, progress.round, progress.radius)
    prefix = f"{candidate_prefix(state.candidate)}model.parameters."
    shapes = {name.removeprefix(prefix): s for name, s in progress.settings.items() if name.startswith(prefix)}
    layout = Layout(tuple(shapes), tuple(torch.Size(shape) for shape in shapes.values()))
    return {name: value.clone() for name, value in layout.unflatten(state.reported.float()).items()}


def load(folder: Path, *, tensors: bool = True) -> Checkpoint | None:
    """Load the checkpoint of a folder and check its hashes; None where the folder has none. `tensors=False` skips the tensors."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get("content", "")
            if len(text) > _LARGEST_TEXT or hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
                raise _damaged(folder, "its text does not match its hash")
            # Clone, because the memory-mapped file may be replaced.
            names = list(file.keys()) if tensors else []
            stored = {name: file.get_tensor(name).clone() for name in names}
        content = json.loads(text)
        progress = _progress(folder, content)
    except InputError:
        raise
    except (SafetensorError, OSError, ValueError, RecursionError, OverflowError) as error:
        raise _damaged(folder, str(error) or type(error).__name__) from None
    if tensors and digest(stored) != content.get("tensors"):
        raise _damaged(folder, "its tensors do not match their hash")
    return Checkpoint(progress, stored)


def _progress(folder: Path, content: Any) -> Progress:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _damaged(folder, "it was written by another program")
    if content.get("version") != VERSION:
        raise InputError(
            f"the checkpoint in {str(folder)!r} has version {content.get('version')!r}, and this library reads version "
            f"{VERSION}; finish the run with the version of dpfedexp that wrote it, or start a new run in a new folder."
        )
    known = {field.name: content[field.name] for field in fields(Progress) if field.name in content}
    try:
        progress = Progress(**{**known, "ledger": LedgerMark(**known["ledger"])})
        counts = (progress.round, progress.ledger.count, 0 if progress.chunk_size is None else progress.chunk_size - 1)
        valid = (
            all(type(count) is int and count >= 0 for count in counts)
            and all(
                isinstance(text, str) for text in (progress.ledger.hash, progress.trainer or "", progress.stop_source)
            )
            and all(isinstance(value, dict) for value in (progress.settings, progress.cohort, *progress.history))
            and isinstance(progress.history, list)
            and len(progress.history) == progress.round
            and isinstance(progress.radius, float)
            and progress.radius > 0
            and is_run_id(progress.run)
            and isinstance(progress.controls, bool)
        )
    except (KeyError, TypeError):
        valid = False
    if not valid:
        raise _damaged(folder, "its text is not that of a checkpoint")
    return progress


def _damaged(folder: Path, how: str) -> InputError:
    return InputError(
        f"the checkpoint {str(folder / CHECKPOINT)!r} is damaged ({how}). Restore it from a copy, or start a new run in a new "
        "folder; a seeded run may also start again without it, and does not pay twice for a round."
    )


_SHOWN = 6
DERIVED = ("mechanism", "algorithm.clip.")
"""Prefixes of settings that follow from other settings."""


def settings_hash(settings: NamedValues) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(here: NamedValues, there: NamedValues) -> str:
    """Describe the differences of two sets of settings: 'local.lr is 0.1 here and 0.2 there; …'. Empty where they agree."""
    changed = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    changed = [name for name in changed if not name.startswith(DERIVED)] or changed
    # By default `evaluate_every` follows from `rounds`.
    changed = [name for name in changed if name != "evaluate_every" or "rounds" not in changed]
    shown = [f"{name} is {here.get(name)!r} here and {there.get(name)!r} there" for name in changed[:_SHOWN]]
    if len(changed) > _SHOWN:
        shown.append(f"{len(changed) - _SHOWN} more differ")
    return "; ".join(shown)


def flatten(value: Any, prefix: str = "") -> NamedValues:
    """Flatten any value to dotted names with JSON values: {"local": Sgd(lr=0.1)} to {"local": "Sgd", "local.lr": 0.1, …}.

    A dataclass becomes its class name, followed by its fields. A function becomes its qualified name. A function of this library
    gets the prefix `dpfedexp.`, so that no other function has the same name.
    """
    if is_dataclass(value) and not isinstance(value, type):
        nested = {field.name: getattr(value, field.name) for field in fields(value)}
        return {prefix: type(value).__name__} | flatten(nested, prefix)
    if isinstance(value, Mapping):
        parts = [flatten(one, f"{prefix}.{name}" if prefix else str(name)) for name, one in value.items()]
        return {name: one for part in parts for name, one in part.items()}
    if callable(value):
        library = str(getattr(value, "__module__", "")).partition(".")[0]
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return {prefix: f"dpfedexp.{name}" if library == "dpfedexp" else name}
    if isinstance(value, list | tuple):
        return {prefix: [_plain(item) for item in value]}
    return {prefix: _plain(value)}


def _plain(value: Any) -> Any:
    """Convert a number of any library to a Python number; infinity and NaN to text, because JSON has neither."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)


def candidate_prefix(number: int) -> str:
    """The prefix of the names of a candidate's settings; empty for candidate 0, whose settings are the run's own."""
    return f"candidate {number}." if number else ""


def state_tensors(state: State) -> dict[str, Tensor]:
    """The tensors of a state, on the CPU.

    `w`: the parameters. `recent.<number>`: the earlier iterates that the reported model averages, oldest first. `server.<name>`:
    the server optimizer's state. `memory.<name>`: the memory of the step-size rule and of the local rate. `control`: SCAFFOLD's
    server control variate. `candidate`: the number of a tournament's leader. `rivals.<number>.<name>`: the states of the other
    candidates.
    """
    named = {"w": state.w}
    named |= {f"recent.{number}": value for number, value in enumerate(state.recent[:-1])}
    named |= {f"server.{name}": value for name, value in state.server.items()}
    named |= {f"memory.{name}": value for name, value in state.memory.items()}
    if state.control is not None:
        named["control"] = state.control
    if state.candidate or state.rivals:
        named["candidate"] = torch.tensor(state.candidate)
    for number, rival in state.rivals.items():
        own = {**state_tensors(rival), "radius": torch.tensor(rival.radius, dtype=torch.float64)}
        # Clone, because safetensors refuses tensors that share memory.
        named |= {f"rivals.{number}.{name}": value.clone() for name, value in own.items()}
    return {name: value.detach().cpu().contiguous() for name, value in named.items()}


def state_from(tensors: Mapping[str, Tensor], round: int, radius: float) -> State:
    """Build the state from the tensors of `state_tensors`; `InputError` for other names. `check_fits` compares it with a model."""
    rivals: dict[int, State] = {}
    for number in {name.split(".")[1] for name in tensors if name.startswith("rivals.")}:
        own = _part(tensors, f"rivals.{number}.")
        require(number.isdecimal() and "radius" in own, "it holds other tensors than a state")
        own_radius = float(own.pop("radius"))
        rivals[int(number)] = replace(state_from(own, round, own_radius), candidate=int(number))
    tensors = {name: value for name, value in tensors.items() if not name.startswith("rivals.")}
    count = sum(name.startswith("recent.") for name in tensors)
    recent = [f"recent.{number}" for number in range(count)]
    known = {"w", "control", "candidate", *recent}
    foreign = [name for name in tensors if name not in known and not name.startswith(("server.", "memory."))]
    require("w" in tensors and not foreign, "it holds other tensors than a state")
    w = tensors["w"]
    return State(
        round=round,
        w=w,
        recent=(*(tensors[name] for name in recent), w),
        radius=radius,
        server=_part(tensors, "server."),
        control=tensors.get("control"),
        memory=_part(tensors, "memory."),
        candidate=int(tensors.get("candidate", 0)),
        rivals=dict(sorted(rivals.items())),
    )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check_fits(state: State, start: State) -> None:
    """Raise `InputError` for a state whose tensors have other names, shapes or types than the run's initial state."""
    starts = start.players
    require(state.players.keys() <= starts.keys(), "it holds a candidate that is not among those of the run")
    for number, rival in state.rivals.items():
        check_fits(rival, starts[number])
    own, known = _kinds(state), _kinds(starts[state.candidate])
    for name in sorted(own.keys() | known.keys()):
        require(own.get(name) == known.get(name), f"its {name} does not fit the run")
    earlier = {(value.shape, value.dtype) for value in state.recent}
    require(earlier <= {known["parameters"]}, "one of its earlier parameters does not fit the run")


def _kinds(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name → (shape, type) of the tensors of a state, without earlier iterates and other candidates."""
    parts = {
        "parameters": state.w,
        "control variate": state.control,
        "clients' control variates": state.client_controls,
    }
    parts |= {f"server state {name!r}": value for name, value in state.server.items()}
    parts |= {f"memory {name!r}": value for name, value in state.memory.items()}
    return {name: (value.shape, value.dtype) for name, value in parts.items() if value is not None}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash the names, types, shapes and values of tensors."""
    total = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        head = f"{name}:{value.dtype}:{tuple(value.shape)}".encode()
        # Without the length a name could contain the head and the values of another tensor.
        total.update(len(head).to_bytes(8))
        total.update(head)
        total.update(value.numpy().data.cast("B") if value.numel() else b"")
    return total.hexdigest()
