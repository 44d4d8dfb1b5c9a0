"""The last completed round of a deployment on disk: tensors in safetensors, the rest in JSON, replaced as one.

The JSON names the tensor file and its hash and is written last, atomically: it is what makes a round completed. Everything in it
was released already or is public, so the folder holds nothing private. The tensors are those of a simulation's checkpoint
(`runs.state_tensors`).
"""

from __future__ import annotations

import hashlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load

from dpfedexp.accounting.ledger import Mark
from dpfedexp.errors import InputError, require
from dpfedexp.files import replace_tensors, replace_text
from dpfedexp.round import State
from dpfedexp.runs.checkpoints.state_tensors import digest, state_from, state_tensors
from dpfedexp.runs.file_names import SERVER_CHECKPOINT, SERVER_TENSORS, server_tensors

FORMAT = "dpfedexp-flower-checkpoint"
HASH = "blake2b"
"""How hashlib calls what the tensors are hashed with, and its field. Few processors have instructions for SHA-256."""
VERSION = 4
"""Version 1 knew neither its run nor its ledger, so an older ledger under it went unnoticed. It is not read."""
NEWEST_TWICE = 2
"""The version that wrote the newest iterate twice. It is read, as is the one after it."""
OF_THE_FILE = (2, 3)
"""The versions that hashed the tensors' file, and not the tensors."""


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


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Returns when the checkpoint is on disk; killed at any instant, the previous one stays whole."""
    state = checkpoint.state
    tensors, name = state_tensors(state), server_tensors(state.round)
    with ThreadPoolExecutor(1) as beside:
        hashed = beside.submit(digest, tensors, HASH)
        replace_tensors(folder / name, tensors)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "run": checkpoint.run,
        "ledger": {"count": checkpoint.mark.count, "hash": checkpoint.mark.hash},
        "nodes": list(checkpoint.nodes),
        "round": state.round,
        "radius": None if math.isinf(state.radius) else state.radius,
        "tensors": name,
        HASH: hashed.result(),
        "config": checkpoint.config,
        "history": checkpoint.history,
    }
    replace_text(folder / SERVER_CHECKPOINT, json.dumps(content, indent=1) + "\n")
    for old in folder.glob(SERVER_TENSORS):
        if old.name != name:
            old.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The last completed round, None if there is none yet."""
    path = folder / SERVER_CHECKPOINT
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        require(content["format"] == FORMAT, "it is of another program")
        version = content.get("version", 1)
        data = (folder / Path(content["tensors"]).name).read_bytes()
        if version in OF_THE_FILE:
            require(hashlib.sha256(data).hexdigest() == content["sha256"], "its tensors were changed")
        else:
            require(digest(load(data), HASH) == content[HASH], "its tensors were changed")
        radius = math.inf if content["radius"] is None else float(content["radius"])
        if version in (VERSION, *OF_THE_FILE):
            return Checkpoint(
                state_from(load(data), int(content["round"]), radius, newest_twice=version == NEWEST_TWICE),
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
        f"the checkpoint {str(path)!r} has version {version!r}, and this library resumes versions {NEWEST_TWICE} to {VERSION}; "
        "finish the run with the version that began it, or begin another one in a new folder."
    )
