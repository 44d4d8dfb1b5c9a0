"""How many clients go into one tensor program: as many as a byte budget allows."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfedexp.errors import InputError
from dpfedexp.inputs import Inputs, call, each, leaves
from dpfedexp.machine import available_memory, total_memory
from dpfedexp.trainers.task import Task

CPU_BUDGET = 512 * 2**20
UPDATE_COPIES = 6
"""Of a client's update, from training to the sum: as trained, clipped, lifted or randomised, clipped again, in double precision."""
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}{b}": (1000 if b == "B" else 1024) ** e for e, p in enumerate("KMGT", 1) for b in ("B", "iB")},
}


def parse_memory(memory: str | int | None) -> int | None:
    """Bytes from a number or from text such as "4GB" or "512MiB".

    >>> parse_memory("4GB")
    4000000000
    """
    if memory is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(memory))
    unit = next((size for name, size in _UNITS.items() if match and name.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) * unit < 1 or isinstance(memory, bool):
        raise InputError(f"memory is {memory!r}; it must be a number of bytes, or text such as '4GB' or '512MiB'.")
    return int(float(match[1]) * unit)


@dataclass(frozen=True)
class Footprint:
    """What one client of the largest size takes: numbers, not bytes.

    Attributes:
        rows: examples in a batch.
        inputs: of one example.
        activations: that the layers put out for one example.
        dimension: parameters.
        moments: what the optimiser keeps of each parameter beside it.
    """

    rows: int
    inputs: int
    activations: int
    dimension: int
    moments: int = 0

    @property
    def batch_bytes(self) -> int:
        """Inputs and activations, those kept for the backward pass and their gradients."""
        return 4 * self.rows * (self.inputs + 4 * self.activations)

    @property
    def bytes(self) -> int:
        """With a handful of copies of the parameters."""
        return 4 * (8 + self.moments) * self.dimension + self.batch_bytes

    def tile(self, budget: int) -> int:
        """Clients whose parameters and activations together take about this many bytes."""
        return max(1, budget // (4 * (3 + self.moments) * self.dimension + self.batch_bytes))


def automatic_chunk(
    task: Task, budget: int | None = None, in_flight: int | None = None, *, isolated: bool = False
) -> int:
    """A chunk whose parameters, gradients and activations fit the budget: half a GiB or more on a CPU, half of what a GPU has free.

    `in_flight` is how many clients train at a time where the chunk is trained in tiles: only they have activations. An isolated
    run asks for synthetic clients of the public size, so that its chunks do not tell what a client holds; it goes by the machine's
    memory and not by what is free, because the clients' data take of that.
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
        fit = max(in_flight * size.bytes, budget - in_flight * size.bytes) // (
            4 * UPDATE_COPIES * task.layout.dimension
        )
        # A multiple of the clients that train at a time, so that no thread waits for the last client of a chunk.
        fit = max(fit, 2 * in_flight if automatic else 0)
        fit -= fit % in_flight if fit > in_flight else 0
    return int(max(1, min(len(task.clients), fit)))


def footprint(task: Task) -> Footprint:
    sizes = task.clients.sizes
    rows = int(sizes.max())
    if task.local.batch_size is not None:
        rows = min(rows, task.local.batch_size)
    holder = torch.nonzero(sizes > 0).flatten()[:1]
    x, _ = task.gather(holder, torch.zeros((1, 2), dtype=torch.int64))
    moments = len(task.local.moment_names) + task.local.needs_all_gradients
    inputs = sum(part[0, 0].numel() for part in leaves(x))
    activations = _activations(task.model, each(lambda value: value[0], x))
    return Footprint(rows, inputs, activations, task.layout.dimension, moments)


def _activations(model: nn.Module, two: Inputs) -> int:
    """How many numbers the module's layers put out for one example; seen on two, because some layers take no batch of one."""
    probe = copy.deepcopy(model).eval()
    total = 0

    def count(module: nn.Module, args: object, output: object) -> None:
        nonlocal total
        if isinstance(output, Tensor) and not list(module.children()):
            total += output.numel()

    hooks = [module.register_forward_hook(count) for module in probe.modules()]
    with torch.no_grad():
        call(probe, two)
    for hook in hooks:
        hook.remove()
    return total // 2
