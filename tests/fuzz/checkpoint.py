"""Checkpoints: raw bytes, and files whose hashes fit but whose content is anything."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path

from safetensors.torch import load

from tests.fuzz.harness import fuzz, instrumented

with instrumented():
    from dpfedexp import Execution, Sgd, dp_scaffold
    from dpfedexp.accounting import Ledger
    from dpfedexp.data import synthetic_regression
    from dpfedexp.engine import checkpoint
    from dpfedexp.engine.checkpoint import digest
    from dpfedexp.engine.open_run import settings_of
    from dpfedexp.engine.outlets import CHECKPOINT
    from dpfedexp.engine.prepare import prepare
    from dpfedexp.errors import InputError, LedgerError
    from dpfedexp.models import linear_regression

FOLDER = Path(tempfile.mkdtemp())
PATH = FOLDER / CHECKPOINT
PROBLEM = synthetic_regression(4, 3, seed=0)
SIMULATION, _ = prepare(
    linear_regression(3),
    PROBLEM.federation,
    dp_scaffold(clip=0.3, noise_multiplier=1.0),
    local=Sgd(lr=0.1, steps=1),
    rounds=3,
    execution=Execution(device="cpu", trainer="loop"),
)
SETTINGS = settings_of(SIMULATION, rounds=3)


def _seed() -> bytes:
    book = Ledger.in_memory()
    state, _ = SIMULATION.step(SIMULATION.begin(), book)
    progress = checkpoint.Progress(
        1, state.radius, SETTINGS, SIMULATION.run, book.mark(), [{"round": 1}], True, 4, "loop"
    )
    checkpoint.save(FOLDER, state, progress)
    return PATH.read_bytes()


WHOLE = _seed()
_HEADER = json.loads(WHOLE[8 : 8 + int.from_bytes(WHOLE[:8], "little")])
_TENSORS = WHOLE[8 + int.from_bytes(WHOLE[:8], "little") :]
SEEDS = [
    b"R" + WHOLE,
    b"S" + _HEADER["__metadata__"]["content"].encode() + b"\0" + json.dumps(_HEADER).encode() + b"\0" + _TENSORS,
]
BOOK = Ledger.in_memory()
BOOK.charge(1, SIMULATION.event, run=SIMULATION.run)


def one(data: bytes) -> None:
    """First byte S: JSON text, header and tensors that get their hashes here. Otherwise: the file."""
    PATH.write_bytes(_sealed(data[1:]) if data[:1] == b"S" else data[1:])
    with contextlib.suppress(InputError):
        checkpoint.read_progress(FOLDER)
    with contextlib.suppress(InputError, LedgerError):
        found = checkpoint.load(FOLDER)
        assert found is not None
        checkpoint.check_same(found, SETTINGS, FOLDER)
        checkpoint.check_charged(found, BOOK, FOLDER)
        state = checkpoint.resume(found, SIMULATION.begin(), FOLDER)
        assert state.w.shape == (3,)
        assert state.reported.shape == (3,)


def _sealed(data: bytes) -> bytes:
    text, _, rest = data.partition(b"\0")
    header, _, tensors = rest.partition(b"\0")
    try:
        tree = json.loads(header)
        content = json.loads(text)
        tree["__metadata__"]["content"] = ""
    except (ValueError, TypeError, KeyError, RecursionError):
        return data
    if isinstance(content, dict):
        try:
            found = load(_file(tree, tensors))
            content["tensors"] = digest(found)
        except Exception:
            content["tensors"] = ""
    said = json.dumps(content)
    tree["__metadata__"] = {"content": said, "sha256": hashlib.sha256(said.encode()).hexdigest()}
    return _file(tree, tensors)


def _file(tree: dict, tensors: bytes) -> bytes:
    header = json.dumps(tree).encode()
    return len(header).to_bytes(8, "little") + header + tensors


if __name__ == "__main__":
    fuzz(one, SEEDS)
