"""The last completed round on disk: tensors in safetensors, the rest in JSON, replaced as one.

The JSON names the tensor file and its hash and is written last, atomically: it is what makes a round completed. Everything in it
was released already or is public, so the folder holds nothing private.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from dpfedexp.accounting.ledger import Mark
from dpfedexp.errors import InputError, require
from dpfedexp.round import State

FORMAT = "dpfedexp-flower-checkpoint"
VERSION = 2
"""Version 1 knew neither its run nor its ledger, so an older ledger under it went unnoticed."""


@dataclass(frozen=True)
class Checkpoint:
    """The last completed round, and what it rests on.

    config   what must not change when a run is resumed
    history  the metrics of the rounds so far
    run      the name under which the rounds were charged
    mark     where the ledger stood: the rounds so far are paid for in it
    nodes    ids of the nodes that have the run's places (none under add-remove adjacency, which hides who takes part)
    """

    state: State
    config: dict[str, Any]
    history: list[dict[str, Any]]
    run: str
    mark: Mark
    nodes: tuple[int, ...] = ()


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Returns when the checkpoint is on disk; killed at any instant, the previous one stays whole."""
    state = checkpoint.state
    data = save({name: value.contiguous() for name, value in _tensors(state).items()})
    name = f"round-{state.round}.safetensors"
    write_atomically(folder / name, data)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "run": checkpoint.run,
        "ledger": {"count": checkpoint.mark.count, "hash": checkpoint.mark.hash},
        "nodes": list(checkpoint.nodes),
        "round": state.round,
        "radius": None if math.isinf(state.radius) else state.radius,
        "tensors": name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "config": checkpoint.config,
        "history": checkpoint.history,
    }
    write_atomically(folder / "checkpoint.json", (json.dumps(content, indent=1) + "\n").encode())
    for old in folder.glob("round-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The last completed round, None if there is none yet."""
    path = folder / "checkpoint.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        require(content["format"] == FORMAT, "it is of another program")
        version = content.get("version", 1)
        data = (folder / Path(content["tensors"]).name).read_bytes()
        require(hashlib.sha256(data).hexdigest() == content["sha256"], "its tensors were changed")
        tensors = load(data)
        radius = math.inf if content["radius"] is None else float(content["radius"])
        state = _state(int(content["round"]), radius, tensors)
        if version == VERSION:
            return Checkpoint(
                state,
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
        f"the checkpoint {str(path)!r} has version {version!r}, and this library resumes version {VERSION}; finish the run with "
        "the version that began it, or begin another one in a new folder."
    )


def write_atomically(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    if os.name != "nt":
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _tensors(state: State) -> dict[str, Tensor]:
    named = {"w": state.w.clone()}
    named |= {f"recent.{i}": value.clone() for i, value in enumerate(state.recent)}
    named |= {f"server.{name}": value.clone() for name, value in state.server.items()}
    if state.control is not None:
        named["control"] = state.control.clone()
    return named


def _state(round: int, radius: float, tensors: dict[str, Tensor]) -> State:
    recent = sorted((name for name in tensors if name.startswith("recent.")), key=lambda n: int(n.split(".")[1]))
    server = {name.removeprefix("server."): value for name, value in tensors.items() if name.startswith("server.")}
    return State(round, tensors["w"], tuple(tensors[name] for name in recent), radius, server, tensors.get("control"))
