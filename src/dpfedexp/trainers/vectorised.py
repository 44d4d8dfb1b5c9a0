"""All clients of a chunk in one tensor program: `vmap(grad(loss))` over stacked parameters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dpfedexp.batches import Schedule
from dpfedexp.inputs import Inputs, leaves
from dpfedexp.layout import Params
from dpfedexp.noise.streams import Streams
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.precision import arithmetic
from dpfedexp.trainers.stepped import ByVmap
from dpfedexp.trainers.stepping import INPUT, Batch, Stepper
from dpfedexp.trainers.task import Task, Trainer, batches, first_line, pair_of_clients

# torch says this once per layer and place, asks for an issue, and is no reason to act: what is slow is measured and not chosen.
warnings.filterwarnings(
    "ignore", message="There is a performance drop because we have not yet implemented the batching rule"
)


Gradients = Callable[..., Params]
"""From parameters, inputs, targets, weights and, for a module that draws, the keys of the step, [n, …] each, to gradients."""


class Recorded:
    """Records the operations of a `torch.func` program and replays them: the same numbers, less overhead.

    A recording holds for one shape and layout and costs a few calls to make, so only shapes that come back often are recorded.
    """

    def __init__(self, program: Gradients, after: int = 12, keep: int = 32) -> None:
        self.program, self.after, self.keep = program, after, keep
        self.uses: Counter[tuple[object, ...]] = Counter()
        self.recordings: dict[tuple[object, ...], Gradients] = {}

    def __call__(self, params: Params, x: Inputs, y: Tensor, weights: Tensor, *keys: Tensor) -> Params:
        # A recording keeps `view`s that hold for one memory layout only; the first step's parameters are an expanded vector.
        held = [*leaves(x), *params.values()]
        key = (y.shape, *(part.shape for part in held), *(part.stride() for part in held))
        if key in self.recordings:
            return self.recordings[key](params, x, y, weights, *keys)
        self.uses[key] += 1
        if self.uses[key] > self.after and len(self.recordings) < self.keep:
            # Imported here because it takes seconds, which short runs and the command line's help would pay too.
            from torch.fx.experimental.proxy_tensor import make_fx

            self.recordings[key] = make_fx(self.program)(params, x, y, weights, *keys)
        return self.program(params, x, y, weights, *keys)


class Vectorised:
    """All clients of a chunk at once: `vmap(grad(loss))` over stacked parameters.

    `record` must be False where several threads train: recording changes torch for all of them while it lasts. A module that draws
    needs the run's `streams`.
    """

    name = "vectorised"
    unit = None

    def __init__(self, task: Task, record: bool = True, streams: Streams | None = None) -> None:
        self.task, self.streams = task, streams

        def loss(params: Params, x: Inputs, y: Tensor, weights: Tensor, *key: Tensor) -> Tensor:
            return (task.losses(params, x, y, *key) * weights).sum()

        self.gradients = Recorded(vmap(grad(loss)), keep=32 if record else 0)

    def __call__(
        self,
        w: Tensor,
        clients: Tensor,
        schedule: Schedule,
        round: int,
        correction: Tensor | None = None,
        rates: Tensor | None = None,
    ) -> Tensor:
        batch_of = batches(self.task, clients, schedule)
        stepper = Stepper(ByVmap(self.gradients), self.task.layout, self.task.local, in_place=False)
        keys = self.task.keys(self.streams, round, clients)
        rates = self.task.rates(rates, round, len(clients))
        stepper.begin(w, schedule.steps, correction, uneven=schedule.uneven, rates=rates, keys=keys)
        with arithmetic(self.task.precision, self.task.device):
            for step in range(schedule.longest):
                x, y, weights = batch_of(step)
                stepper.step(Batch({INPUT: x}, y, weights))
        return stepper.moved()


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
                task.layout.unflatten(w.expand(2, -1)), x, y, weights, *([] if keys is None else [keys])
            )
            return trainer, None
        except Exception as error:
            reason = first_line(error)
            if "data-dependent control flow" in reason:
                reason = "it looks at values while it runs: .item(), bool() or an `if` on a tensor"
            elif "called random operation" in reason:
                reason = "it draws random numbers within an operation of torch, such as Tensor.uniform_()"
    return Loop(task, streams), reason
