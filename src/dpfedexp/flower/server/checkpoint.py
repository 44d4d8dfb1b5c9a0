"""The last completed round of a deployment on disk: tensors in safetensors, the rest in JSON, replaced as one.

The JSON names the tensor files and their hashes and is written last, atomically: it is what makes a round completed. Everything in
it was released already or is public, so the folder holds nothing private. The tensors are those of a simulation's checkpoint
(`engine.checkpoint`). An earlier iterate that the reported model averages is the `w` of an earlier round's file, which stays while
it is needed: every round writes its parameters once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from dpfedexp.accounting.ledger import Mark
from dpfedexp.algorithms.round import State
from dpfedexp.engine.checkpoint import digest, earlier, state_from, state_tensors
from dpfedexp.engine.outlets import SERVER_CHECKPOINT, SERVER_TENSORS, recorded, server_tensors
from dpfedexp.errors import InputError, require
from dpfedexp.files import replace_tensors, replace_text

FORMAT = "dpfedexp-flower-checkpoint"
HASH = "blake2b"
"""How hashlib calls what the tensors are hashed with, and its field. Few processors have instructions for SHA-256."""
VERSION = 6


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

    Args:
        folder: of the run.
        checkpoint: the round that is complete.
        kept: what the save before returned, so that iterates that lie in its files are not written again.

    Returns:
        The files that the checkpoint names.
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
        "ledger": {"count": checkpoint.mark.count, "hash": checkpoint.mark.hash},
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
            for name, file in content["earlier"].items():
                tensors[name] = _tensors(folder, file)["w"]
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
