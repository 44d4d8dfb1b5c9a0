"""Execution settings: how a run is computed on this machine."""

from dataclasses import dataclass, fields
from typing import get_args

import torch

from dpfedexp.errors import InputError, checked, is_count, require
from dpfedexp.trainers.chunk_size import parse_memory
from dpfedexp.trainers.select import check_trainer
from dpfedexp.trainers.task import Precision


@checked
@dataclass(frozen=True)
class Execution:
    """Execution settings: device, seed, chunk size, trainer and precision.

    Except for `seed` and `precision`, the settings change results only by rounding. They never change a privacy statement.

    Args:
        device: a torch device such as "cpu" or "cuda:1"; by default the GPU if there is one.
        seed: the seed of all random draws of a simulation. A secure run draws from the operating system.
        chunk_size: clients per tensor program; automatic by default.
        trainer: "auto" takes the fastest of "fast" (networks of known layers), "vectorized" (if vmap can trace it) and "loop".
        precision: of local training: "fp32", or on a GPU "tf32" or "bf16" (docs/scale.md says what they change).
        memory: bytes that the clients of a chunk may take, such as "4GB"; automatic by default.
        progress: show a progress bar in a terminal or a notebook.

    Example:
        >>> from dpfedexp import Execution
        >>> Execution(device="cpu", chunk_size=64).trainer
        'auto'
    """

    device: str | torch.device | None = None
    seed: int = 0
    chunk_size: int | None = None
    trainer: str = "auto"
    precision: Precision = "fp32"
    memory: str | int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        known = self.chunk_size is None or is_count(self.chunk_size)
        require(known, f"chunk_size is {self.chunk_size!r}; it must be a positive whole number.")
        check_trainer(self.trainer)
        known = self.precision in get_args(Precision)
        require(known, f"precision is {self.precision!r}; it must be 'fp32', 'tf32' or 'bf16'.")
        parse_memory(self.memory)

    @property
    def place(self) -> torch.device:
        """The torch device; raises `InputError` if this machine does not have it."""
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            place = torch.device(self.device)
        except (RuntimeError, TypeError):
            raise InputError(f"device is {self.device!r}; it must be a torch device such as 'cpu' or 'cuda'.") from None
        if place.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"device is {str(self.device)!r}, but torch sees no CUDA device here; use 'cpu'.")
        return place


def as_execution(execution: Execution | str | torch.device | None) -> Execution:
    """Return the execution settings; a device alone stands for the default settings on that device."""
    if execution is None or isinstance(execution, str | torch.device):
        return Execution(device=execution)
    if not isinstance(execution, Execution):
        kind = type(execution).__name__
        raise InputError(f"execution is a {kind}; give a device such as 'cuda', or Execution(device='cuda', seed=1).")
    return execution


EXECUTION_HINTS = {field.name: f"execution=Execution({field.name}=…)" for field in fields(Execution)}
"""Hints for arguments of `train` that belong to `Execution`."""
