"""How many clients go into one tensor program: as many as a byte budget allows."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dpfedexp.simulation.vectorise import Task

CPU_BUDGET = 512 * 2**20


def automatic_chunk(task: Task, budget: int | None = None) -> int:
    """A chunk whose parameters, gradients and activations fit the budget (half a GiB on a CPU, half the free memory of a GPU)."""
    if budget is None:
        budget = torch.cuda.mem_get_info(task.device)[0] // 2 if task.device.type == "cuda" else CPU_BUDGET
    return int(max(1, min(len(task.clients), budget // bytes_per_client(task))))


def bytes_per_client(task: Task) -> int:
    """An estimate: a handful of copies of the parameters, and inputs and activations of the client's largest batch, twice over."""
    sizes = task.clients.sizes
    rows = int(sizes.max())
    if task.local.batch_size is not None:
        rows = min(rows, task.local.batch_size)
    holder = torch.nonzero(sizes > 0).flatten()[:1]
    x, _ = task.clients.gather(holder, torch.zeros((1, 1), dtype=torch.int64), task.device)
    return 4 * (8 * task.layout.dimension + rows * (x[0, 0].numel() + 4 * _activations(task.model, x[0])))


def _activations(model: nn.Module, one: Tensor) -> int:
    """How many numbers the module's layers put out for one example."""
    probe = copy.deepcopy(model).eval()
    total = 0

    def count(module: nn.Module, args: object, output: object) -> None:
        nonlocal total
        if isinstance(output, Tensor) and not list(module.children()):
            total += output.numel()

    hooks = [module.register_forward_hook(count) for module in probe.modules()]
    with torch.no_grad():
        probe(one)
    for hook in hooks:
        hook.remove()
    return total
