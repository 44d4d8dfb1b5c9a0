"""The trainers by name, in order of preference. A new trainer is a file with a class that is a `Trainer`, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpfedexp.core.noise.streams import Streams
from dpfedexp.errors import InputError, nearest
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.programs import Programs, by_program
from dpfedexp.trainers.stepped import ByVmap, Steps
from dpfedexp.trainers.stepping import Core
from dpfedexp.trainers.task import Task, Trainer
from dpfedexp.trainers.tiled import Parallel
from dpfedexp.trainers.vectorised import Vectorised

AUTO, LOOP = "auto", "loop"


@dataclass(frozen=True)
class Parts:
    """What a trainer is made from.

    Args:
        task: what every client does.
        streams: the run's random streams, for modules that draw.
        programs: the module's fast programs; asking for one that does not exist is an `InputError`, which leaves the trainer out.
        tile: clients whose activations fit a processor's cache together.
        fixed: whether no shape may depend on how many clients there are, as in an isolated run.
    """

    task: Task
    streams: Streams
    programs: Programs
    tile: int
    fixed: bool

    @property
    def on_cpu(self) -> bool:
        return self.task.device.type == "cpu"


@dataclass(frozen=True)
class TrainerKind:
    """A trainer that takes several clients at once, for modules that `vmap` can trace.

    Args:
        make: the trainer from its parts.
        summary: what it is, for people who choose.
        devices: the types of device that have it.
    """

    make: Callable[[Parts], Trainer]
    summary: str
    devices: tuple[str, ...] = ("cpu", "cuda")


def _fast(parts: Parts) -> Trainer:
    if not parts.on_cpu:
        return _recorded(parts, "fast", by_program(parts.task, parts.programs.gathered))
    return _tiled(parts, "fast", by_program(parts.task, parts.programs.plain))


def _library(parts: Parts) -> Trainer:
    return _tiled(parts, "library", by_program(parts.task, parts.programs.library))


def _fused(parts: Parts) -> Trainer:
    return _recorded(parts, "fused", by_program(parts.task, parts.programs.fused))


def _lean(parts: Parts) -> Trainer:
    return _recorded(parts, "lean", by_program(parts.task, parts.programs.lean))


def _recorded_vectorised(parts: Parts) -> Trainer:
    gradients = Vectorised(parts.task).gradients
    return _recorded(
        parts, "recorded-vectorised", ByVmap(gradients.program if parts.task.synthetic is None else gradients)
    )


def _tiled_vectorised(parts: Parts) -> Trainer:
    # A module draws from its clients' keys or not at all (vmap refuses the rest), so what vmap takes may run on several threads.
    def make() -> Trainer:
        return Vectorised(parts.task.apart(), record=False, streams=parts.streams)

    return Parallel("tiled-vectorised", make, parts.tile, fixed=parts.fixed)


def _tiled_loop(parts: Parts) -> Trainer:
    return Parallel("tiled-loop", lambda: Loop(parts.task.apart(), parts.streams, keyed=True), 1, fixed=parts.fixed)


def _vectorised(parts: Parts) -> Trainer:
    return Vectorised(parts.task, record=not parts.fixed, streams=parts.streams)


def _tiled(parts: Parts, name: str, core: Core) -> Trainer:
    steps = Steps(parts.task, name, core, streams=parts.streams)
    return Parallel(name, lambda: steps, parts.tile, fixed=parts.fixed)


def _recorded(parts: Parts, name: str, core: Core) -> Trainer:
    return Steps(parts.task, name, core, record=True, streams=parts.streams)


TRAINERS: dict[str, TrainerKind] = {
    "fused": TrainerKind(_fused, "a program of known layers with triton's kernels", ("cuda",)),
    "fast": TrainerKind(_fast, "a program of known layers"),
    "library": TrainerKind(_library, "a program of known layers, convolutions by torch's library", ("cpu",)),
    "lean": TrainerKind(_lean, "a program of known layers that keeps no patches", ("cuda",)),
    "recorded-vectorised": TrainerKind(_recorded_vectorised, "vmap, replayed as a CUDA graph", ("cuda",)),
    "tiled-vectorised": TrainerKind(_tiled_vectorised, "vmap over tiles, on several threads", ("cpu",)),
    "tiled-loop": TrainerKind(_tiled_loop, "one client after the other, on several threads", ("cpu",)),
    "vectorised": TrainerKind(_vectorised, "vmap over a whole chunk"),
}


def trainer_names() -> tuple[str, ...]:
    """What a user may ask for: "auto" measures, "loop" is right for any module."""
    return (AUTO, LOOP, *TRAINERS)


def check_trainer(name: object) -> None:
    if not isinstance(name, str) or name not in trainer_names():
        raise InputError(f"trainer is {name!r}, which does not exist.{nearest(str(name), trainer_names())}")


def makers(parts: Parts) -> dict[str, Callable[[], Trainer]]:
    """What the parts' device has to offer, in order of preference."""
    return {
        name: lambda kind=kind: kind.make(parts)  # type: ignore[misc]
        for name, kind in TRAINERS.items()
        if parts.task.device.type in kind.devices
    }


def trainer_again(name: str, device_type: str) -> str:
    """The trainer of an interrupted run, or "auto" where it goes on on a device that has no such trainer."""
    kind = TRAINERS.get(name)
    return name if name == LOOP or (kind is not None and device_type in kind.devices) else AUTO
