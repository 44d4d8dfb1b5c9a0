"""The chunk size: how many clients are trained together within a memory budget."""

import copy
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfedexp.core.modules import call, each, leaves
from dpfedexp.errors import InputError
from dpfedexp.machine import available_memory, total_memory
from dpfedexp.trainers.task import Task

CPU_BUDGET = 512 * 2**20
UPDATE_COPIES = 6
"""Copies of a client's update from training to the sum: as trained, clipped, lifted or randomized, clipped again, in float64."""
_UNITS = {"": 1, "b": 1} | {
    f"{p}{b}": base**e for e, p in enumerate("kmgt", 1) for b, base in (("b", 1000), ("ib", 1024))
}


def parse_memory(memory: str | int | None) -> int | None:
    """Parse a number of bytes, or text such as "4GB" or "512MiB"; returns bytes, or None for None.

    >>> parse_memory("4GB")
    4000000000
    """
    if memory is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(memory))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1 or isinstance(memory, bool):
        raise InputError(f"memory is {memory!r}; it must be a number of bytes, or text such as '4GB' or '512MiB'.")
    return int(float(match[1]) * unit)


@dataclass(frozen=True)
class Footprint:
    """The memory of one client of the largest size, in numbers; `inputs` and `activations` are those of one row of a batch."""

    rows: int
    inputs: int
    activations: int
    dimension: int
    moments: int = 0

    @property
    def batch_bytes(self) -> int:
        """Bytes of inputs and activations, with those kept for the backward pass and their gradients."""
        return 4 * self.rows * (self.inputs + 4 * self.activations)

    @property
    def bytes(self) -> int:
        """Bytes of a client in training: its batch and several copies of the parameters."""
        return 4 * (8 + self.moments) * self.dimension + self.batch_bytes

    def tile(self, budget: int) -> int:
        """The number of clients whose parameters and activations together take about `budget` bytes."""
        return max(1, budget // (4 * (3 + self.moments) * self.dimension + self.batch_bytes))


def automatic_chunk(
    task: Task, budget: int | None = None, in_flight: int | None = None, *, isolated: bool = False
) -> int:
    """The largest chunk whose parameters, gradients and activations fit the budget.

    The default budget is half a GiB or more on a CPU, half of the free memory on a GPU. `in_flight` clients train at a time if the
    chunk is trained in tiles. An isolated run uses the total memory, because the free memory depends on the clients' data.
    """
    size = footprint(task)
    automatic = budget is None
    if budget is None and task.device.type == "cuda":
        free, everything = torch.cuda.mem_get_info(task.device)
        budget = everything // 4 if isolated else free // 2
    elif budget is None:
        # Large models get room for two clients per core, if the machine has it.
        room = total_memory() // 8 if isolated else available_memory() // 4
        budget = max(CPU_BUDGET, min(2 * torch.get_num_threads() * size.bytes, room))
    if in_flight is None:
        fit = budget // size.bytes
    else:
        room = max(in_flight * size.bytes, budget - in_flight * size.bytes)
        fit = room // (4 * UPDATE_COPIES * task.layout.dimension)
        # A multiple of the clients that train at a time, so that no thread waits for the last client of a chunk.
        fit = max(fit, 2 * in_flight if automatic else 0)
        fit -= fit % in_flight if fit > in_flight else 0
    return int(max(1, min(len(task.clients), fit)))


def footprint(task: Task) -> Footprint:
    sizes = task.clients.sizes
    rows = min([int(sizes.max()), *filter(None, (task.local.batch_size, task.local.max_examples))])
    holder = torch.nonzero(sizes > 0).flatten()[:1]
    x, _ = task.gather(holder, torch.zeros((1, 2), dtype=torch.int64))
    moments = len(task.local.moment_names) + task.local.needs_all_gradients
    inputs = sum(part[0, 0].numel() for part in leaves(x))
    put_out: list[int] = []

    def count(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and not list(module.children()):
            put_out.append(output.numel())

    probe = copy.deepcopy(task.model).eval()
    for module in probe.modules():
        module.register_forward_hook(count)
    # Measured on two examples, because some layers do not accept a batch of one.
    with torch.no_grad():
        call(probe, each(lambda value: value[0], x))
    return Footprint(rows, inputs, sum(put_out) // 2, task.layout.dimension, moments)
