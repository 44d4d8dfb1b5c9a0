"""Clients, runs that are prepared and not trained, and the updates of one round: what the tests of trainers have in common."""

from typing import Any

import torch
from torch import Tensor, nn

from dpfedexp import Execution, Federation, dp_fedavg, fedavg
from dpfedexp.algorithms.probe import UPDATE
from dpfedexp.algorithms.round import State
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.engine.engine import Engine, Request
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.simulated import Simulation
from dpfedexp.trainers.steps import ByVmap, Steps, Vectorized

PRIVATE = dp_fedavg(clip=1.0, noise_multiplier=2.0)


class Made(nn.Module):
    """A module of these parts; `forward(self, x)` is what it computes."""

    def __init__(self, forward, **parts) -> None:
        super().__init__()
        self.act = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.act(self, x)


def sampled(sampler, sizes, seed=7, **options) -> Federation:
    """Clients of these sizes by `sampler(n, generator)`."""
    generator = torch.Generator().manual_seed(seed)
    return Federation.from_clients([sampler(n, generator) for n in sizes], **options)


def labeled(shape, sizes, labels=3, seed=7, **options) -> Federation:
    """Clients with normal inputs and uniform labels."""

    def sampler(n, g):
        return torch.randn(n, *shape, generator=g), torch.randint(0, labels, (n,), generator=g)

    return sampled(sampler, sizes, seed, **options)


def bound(
    model: nn.Module,
    clients: Any,
    local: LocalOptimizer,
    trainer: str = "auto",
    *,
    algorithm: Any = None,
    chunk_size: int | None = None,
    precision: str = "fp32",
    device: str = "cpu",
    rounds: int = 1,
    **options: Any,
) -> Engine:
    """A run that is ready to begin."""
    how = {"trainer": trainer, "chunk_size": chunk_size, "precision": precision, "seed": options.pop("seed", 0)}
    execution = Execution(device=device, **how)
    return prepare(model, clients, algorithm or fedavg(), local=local, rounds=rounds, execution=execution, **options)[0]


def simulated(*given: Any, **options: Any) -> Simulation:
    """Clients that are ready to train."""
    return bound(*given, **options).cohort


def secured(model: nn.Module, clients: Any, local: LocalOptimizer, trainer: str = "auto", **options: Any) -> Simulation:
    return simulated(model, clients, local, trainer, **{"algorithm": PRIVATE, "secure": True, **options})


def updates(
    run: Simulation, trainer: Any = None, round: int = 1, calls: int = 1, *more: Any, who: Tensor | None = None
) -> Tensor:
    """The updates of all clients, or of `who`, by the run's trainer or another one; `more` are corrections and rates."""
    w = run.task.layout.read(run.task.model).float().to(run.task.device)
    who = torch.arange(len(run.task.clients)) if who is None else who
    for _ in range(calls):
        rows = (trainer or run.trainer)(w, who, run.plan(who, round), round, *more)
    return rows


def one_round(run: Simulation, clients: Tensor | None = None, number: int = 1, memory: Any = None) -> Tensor:
    """The clipped updates of a round, chunk by chunk."""
    w = run.task.layout.read(run.task.model)
    state = State(number - 1, w, (w,), 1.0, {}, memory=memory or {})
    request = Request(UPDATE, number, state, None)
    everybody = torch.arange(len(run.task.clients)) if clients is None else clients
    chunks = everybody.split(run.chunk_size)
    return torch.cat([run.updates(request, w.float(), chunk)[: len(chunk)] for chunk in chunks])


def captured(function):
    """What `cuda_graph` does to the memory: it runs the step a few times before it is replayed."""
    function()
    function()
    return function


def recorded(run: Simulation, core: Any = None) -> Steps:
    """Steps over memory that stays, as a CUDA graph replays them."""
    core = core or ByVmap(Vectorized(run.task).gradients.program)
    return Steps(run.task, "recorded", core, record=captured, streams=run.streams)
