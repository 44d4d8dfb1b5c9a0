"""The last completed round on disk: tensors in safetensors, the rest in JSON, replaced as one.

The JSON names the tensor file and its hash and is written last, atomically: it is what makes a round completed. Everything in it
was released already, so the folder holds nothing private.
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

from dpfedexp.errors import InputError
from dpfedexp.round import State

FORMAT = "dpfedexp-flower-checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """config: what must not change when a run is resumed; history: the metrics of the rounds so far."""

    state: State
    config: dict[str, Any]
    history: list[dict[str, Any]]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Returns when the checkpoint is on disk; killed at any instant, the previous one stays whole."""
    state = checkpoint.state
    data = save({name: value.contiguous() for name, value in _tensors(state).items()})
    name = f"round-{state.round}.safetensors"
    write_atomically(folder / name, data)
    content = {
        "format": FORMAT,
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
        assert content["format"] == FORMAT
        data = (folder / Path(content["tensors"]).name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == content["sha256"]
        tensors = load(data)
        radius = math.inf if content["radius"] is None else float(content["radius"])
        state = _state(int(content["round"]), radius, tensors)
        return Checkpoint(state, dict(content["config"]), list(content["history"]))
    except Exception:
        raise InputError(
            f"the checkpoint {str(path)!r} is damaged or of another program; it can't be resumed."
        ) from None


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
