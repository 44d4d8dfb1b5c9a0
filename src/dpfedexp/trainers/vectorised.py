"""All clients of a chunk in one tensor program: `vmap(grad(loss))` over stacked parameters."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dpfedexp.core.layout import Params
from dpfedexp.core.noise.streams import Streams
from dpfedexp.inputs import Inputs
from dpfedexp.trainers.checks import first_line
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.steps import ByVmap, Steps
from dpfedexp.trainers.task import Task, Trainer, pair_of_clients

# torch says this once per layer and place, asks for an issue, and is no reason to act: what is slow is measured and not chosen.
warnings.filterwarnings(
    "ignore", message="There is a performance drop because we have not yet implemented the batching rule"
)


class Vectorised(Steps):
    """All clients of a chunk at once: `vmap(grad(loss))` over stacked parameters.

    `record` says whether shapes that come back are recorded for speed. A module that draws needs the run's `streams`.
    """

    def __init__(self, task: Task, record: bool = True, streams: Streams | None = None) -> None:
        def loss(params: Params, x: Inputs, y: Tensor, weights: Tensor, *key: Tensor) -> Tensor:
            return (task.losses(params, x, y, *key) * weights).sum()

        self.gradients = task.program("gradients of clients", vmap(grad(loss)), batched=True, keep=32 if record else 0)
        super().__init__(task, "vectorised", ByVmap(self.gradients), streams=streams)


def _why_not(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch"
    return None


def choose(task: Task, streams: Streams) -> tuple[Trainer, str | None]:
    """The vectorised trainer if `torch.func.vmap` can trace the module, else the loop with the reason; tried on two clients."""
    reason = _why_not(task.model)
    if reason is None:
        trainer = Vectorised(task, streams=streams)
        x, y = pair_of_clients(task)
        w = task.layout.read(task.model).float().to(task.device)
        try:
            weights = torch.full((2, 2), 0.5, device=task.device)
            keys = task.keys(streams, 0, torch.arange(2))
            trainer.gradients.program(
                task.layout.unflatten(w.repeat(2, 1)), x, y, weights, *([] if keys is None else [keys])
            )
            return trainer, None
        except Exception as error:
            reason = first_line(error)
            if "data-dependent control flow" in reason:
                reason = "it looks at values while it runs: .item(), bool() or an `if` on a tensor"
            elif "called random operation" in reason:
                reason = "it draws random numbers within an operation of torch, such as Tensor.uniform_()"
    return Loop(task, streams), reason
