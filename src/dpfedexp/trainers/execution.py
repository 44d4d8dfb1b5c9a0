"""Execution settings: how a run is computed on this machine."""

from dataclasses import dataclass, replace
from typing import get_args

import torch

from dpfedexp.errors import InputError, checked, is_count, require
from dpfedexp.trainers.chunk_size import parse_memory
from dpfedexp.trainers.select import check_trainer
from dpfedexp.trainers.task import Precision


@checked
@dataclass(frozen=True)
class Execution:
    """Execution settings: device, chunk size, trainer and precision.

    Except for `precision`, they change results only by rounding. They never change a privacy statement.

    Args:
        device: a torch device such as "cpu" or "cuda:1"; by default the GPU where there is one.
        chunk_size: clients per tensor program; automatic by default.
        trainer: "auto" takes the fastest of "fast" (networks of known layers), "vectorized" (any that vmap can trace) and "loop".
        precision: of local training: "fp32", or on a GPU "tf32" or "bf16" (docs/scale.md says what they change).
        memory: bytes that the clients of a chunk may take, such as "4GB"; automatic by default.

    Example:
        >>> from dpfedexp import Execution
        >>> Execution(device="cpu", chunk_size=64).trainer
        'auto'
    """

    device: str | torch.device | None = None
    chunk_size: int | None = None
    trainer: str = "auto"
    precision: Precision = "fp32"
    memory: str | int | None = None

    def __post_init__(self) -> None:
        require(
            self.chunk_size is None or is_count(self.chunk_size),
            f"chunk_size is {self.chunk_size!r}; it must be a positive whole number.",
        )
        check_trainer(self.trainer)
        known = self.precision in get_args(Precision)
        require(known, f"precision is {self.precision!r}; it must be 'fp32', 'tf32' or 'bf16'.")
        parse_memory(self.memory)

    @property
    def place(self) -> torch.device:
        """The device itself. `InputError` where this machine has no such device."""
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            place = torch.device(self.device)
        except (RuntimeError, TypeError):
            raise InputError(f"device is {self.device!r}; it must be a torch device such as 'cpu' or 'cuda'.") from None
        if place.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"device is {str(self.device)!r}, but torch sees no CUDA device here; use 'cpu'.")
        return place

    @property
    def memory_bytes(self) -> int | None:
        return parse_memory(self.memory)


def execution_on(device: str | torch.device | None, execution: Execution | None) -> Execution:
    """The execution with the device that was named beside it, where one was."""
    if execution is None:
        return Execution(device=device)
    if not isinstance(execution, Execution):
        raise InputError(
            f"execution is a {type(execution).__name__}; it must be an Execution, such as Execution(chunk_size=64)."
        )
    if device is None:
        return execution
    require(
        execution.device is None or str(execution.device) == str(device),
        f"device is {str(device)!r} and execution.device is {str(execution.device)!r}; pass only one of them.",
    )
    return replace(execution, device=device)


EXECUTION_HINTS = {
    name: f"execution=Execution({name}={example})"
    for name, example in (("chunk_size", "64"), ("trainer", "'fast'"), ("precision", "'bf16'"), ("memory", "'4GB'"))
}
"""Hints for arguments of `train` that belong to `Execution`."""
