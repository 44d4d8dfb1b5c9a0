"""Random programs of secure runs: each is refused, or keeps every client's row from all others, bit for bit.

A seed decides a module, a loss, a transform, an optimizer, clients and a trainer, composed from parts that remember, write, draw,
branch and hook in. The program runs twice, the second time with one client replaced by a hostile one. Both runs must be refused
with the same sentence; or the rows of all other clients must be equal over two rounds, and the clipped sum may move by 2C.
`tests/trainers/test_programs.py` runs them.
"""

import random
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dpfedexp import Execution, InputError, dp_fedavg
from dpfedexp.algorithms.probe import UPDATE
from dpfedexp.core.clipping import clip
from dpfedexp.engine.engine import LOCAL_RATE, Request
from dpfedexp.engine.prepare import prepare
from tests.fuzz.program_parts import COUNT, Chance, clients_of, forget, local_of, loss_of, model_of, transform_of

CLIP, SECONDS = 1.0, 1200
PRIVATE = dp_fedavg(clip=CLIP, noise_multiplier=2.0)
TOGETHER = ("auto", "auto", "loop", "loop", "tiled-loop", "vectorized", "tiled-vectorized")
ALONE = ("auto", "auto", "loop", "loop", "tiled-loop")


@dataclass(frozen=True)
class Result:
    """What became of a program: "refused", "isolated" or "failed", and why."""

    seed: int
    verdict: str
    why: str = ""
    features: tuple[str, ...] = ()
    learned: bool = True

    def __str__(self) -> str:
        return f"seed {self.seed} {self.verdict}: {self.why}\n    {'; '.join(self.features)}"


@dataclass(frozen=True)
class Run:
    """One run of a program: what it decided before the first round, and the rows of all clients in two rounds."""

    decided: tuple[Any, ...]
    rows: Tensor
    hostile: int


def check(seed: int) -> Result:
    """Runs the program of a seed with both federations and compares them."""
    features: tuple[str, ...] = ()
    found: list[Run | str] = []
    try:
        with _time_limit():
            for hostile in (False, True):
                chance = Chance(seed)
                try:
                    found.append(_run(chance, hostile))
                except InputError as reason:
                    found.append(str(reason))
                finally:
                    features = tuple(chance.features)
    except Exception as error:
        return Result(seed, "failed", f"{type(error).__name__}: {str(error)[:300]}", features)
    verdict, why = _compared(*found)
    learned = isinstance(found[0], Run) and bool((_others(found[0]) != 0).any())
    return Result(seed, verdict, why, features, learned)


def _compared(one: Run | str, other: Run | str) -> tuple[str, str]:
    if isinstance(one, str) or isinstance(other, str):
        if one == other:
            return "refused", str(one)
        said = [run if isinstance(run, str) else "accepted" for run in (one, other)]
        return "failed", f"refused for one federation: {said[0]!r} and {said[1]!r}"
    if one.decided != other.decided:
        return "failed", f"decided otherwise: {one.decided} and {other.decided}"
    mine, theirs = _others(one), _others(other)
    if not torch.equal(mine.view(torch.int32), theirs.view(torch.int32)):
        return "failed", f"other clients' rows move by {float((mine - theirs).abs().max()):g}"
    moved = max(float((a - b).norm()) for a, b in zip(_sums(one), _sums(other), strict=True))
    if moved > 2 * CLIP * (1 + 1e-6):
        return "failed", f"the clipped sum moves by {moved / CLIP:g} C"
    return "isolated", ""


def _others(run: Run) -> Tensor:
    return run.rows[torch.arange(len(run.rows)) % COUNT != run.hostile]


def _sums(run: Run) -> list[Tensor]:
    return [clip(part.clone(), CLIP).vectors.double().sum(0) for part in run.rows.split(COUNT)]


def _run(chance: Chance, hostile: bool) -> Run:
    """One run, from a state of this process that is the same every time."""
    forget()
    torch.manual_seed(chance.seed)
    np.random.seed(chance.seed % 2**32)
    random.seed(chance.seed)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(chance.pick("threads", 1, 1, 1, 2))
        kind = chance.pick("inputs", "numbers", "numbers", "words", "both", "sequence", "image")
        model, loss, local = model_of(chance, kind), loss_of(chance), local_of(chance)
        clients, place = clients_of(chance, kind, transform_of(chance, kind), hostile)
        trainers = (TOGETHER if local.shape_is_public else ALONE) + ("fast",) * ("module: plain" in chance.features)
        trainer, chunk = chance.pick("trainer", *trainers), chance.pick("chunk", 1, 2, 3, 5)
        execution = Execution(trainer=trainer, chunk_size=chunk, device="cpu")
        # A secure run draws its streams anew; here two runs are compared bit for bit.
        entropy = mock.patch("dpfedexp.engine.prepare.secrets.randbits", return_value=12345)
        with entropy, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {"local": local, "loss": loss, "rounds": 2, "secure": True, "execution": execution}
            simulation, _ = prepare(model, clients, PRIVATE, **given)
            state = simulation.begin()
            if LOCAL_RATE in state.memory:
                rate = torch.full_like(state.memory[LOCAL_RATE], 0.3)
                state = replace(state, memory={**state.memory, LOCAL_RATE: rate})
            rows = []
            for number in (1, 2):
                judge = simulation.cohort.task.look()
                for chunk in torch.arange(COUNT).split(simulation.cohort.chunk_size):
                    request = Request(UPDATE, number, state, simulation.mechanism)
                    rows.append(simulation.cohort.updates(request, state.w.float(), chunk)[: len(chunk)].clone())
                judge()
    finally:
        torch.set_num_threads(threads)
    cohort = simulation.cohort
    return Run((cohort.trainer.name, cohort.chunk_size, cohort.unit), torch.cat(rows), place)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Turns a program that hangs into a failure."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hung(*_: object) -> None:
        raise TimeoutError(f"no answer within {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
