"""Algorithm 3, the local update: τ steps of gradient descent on the client's own mean loss, for many clients at once.

What a step does is here, written once over tensors with a leading client dimension; how gradients are computed (one tensor program
for a chunk of clients, or a plain loop) is the simulator's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfedexp.errors import require

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Sgd:
    """Plain gradient steps: `steps` of them, or `epochs` passes; full batch unless `batch_size` says otherwise.

    `proximal` > 0 adds the FedProx pull μ(w − w⁽ᵗ⁾) towards the global model (Li et al. 2020).

    >>> Sgd(lr=0.1, steps=10)
    Sgd(lr=0.1, steps=10, epochs=None, batch_size=None, proximal=0.0)
    """

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    proximal: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.lr < float("inf"), f"local lr is {self.lr}; it must be a positive number.")
        require(
            (self.steps is None) != (self.epochs is None),
            f"local steps is {self.steps} and epochs is {self.epochs}; give exactly one of them.",
        )
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            require(
                value is None or (isinstance(value, int) and value > 0),
                f"local {name} is {value}; it must be a positive whole number.",
            )
        require(self.proximal >= 0, f"local proximal is {self.proximal}; it must not be negative.")

    def step_count(self, sizes: Tensor) -> Tensor:
        """τ for clients of these sizes."""
        if self.steps is not None:
            return torch.full_like(sizes, self.steps)
        assert self.epochs is not None
        batches = torch.ones_like(sizes) if self.batch_size is None else -(-sizes // self.batch_size)
        return self.epochs * batches


def FedProx(lr: float, mu: float, **kwargs) -> Sgd:
    """Gradient steps with the proximal pull μ(w − w⁽ᵗ⁾).

    >>> FedProx(lr=0.1, mu=0.01, steps=5).proximal
    0.01
    """
    return Sgd(lr=lr, proximal=mu, **kwargs)


@dataclass(frozen=True)
class Schedule:
    """Which rows each client of a chunk uses in each step.

    positions  [n, s, b] row positions within the client; s = 1 when every step uses the same batch
    weights    [n, s, b] 1/|batch| on real rows, 0 on padding, so that a weighted sum of losses is the client's own mean loss
    steps      [n] how many steps each client takes
    """

    positions: Tensor
    weights: Tensor
    steps: Tensor

    @property
    def longest(self) -> int:
        return int(self.steps.max())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        at = 0 if self.positions.shape[1] == 1 else step
        return self.positions[:, at], self.weights[:, at]


def schedule(local: Sgd, sizes: Tensor, generator_of: Callable[[int], np.random.Generator]) -> Schedule:
    """The batches of a chunk of non-empty clients; `generator_of(row)` draws the row's own shuffles.

    Padding repeats a client's row 0: it has weight 0, and its loss is finite whenever the client's own is.
    """
    steps = local.step_count(sizes)
    largest = int(sizes.max())
    if local.batch_size is None or local.batch_size >= largest:
        index = torch.arange(largest)
        real = index[None, :] < sizes[:, None]
        positions = torch.where(real, index[None, :], 0)
        weights = real.float() / sizes[:, None]
        return Schedule(positions[:, None], weights[:, None], steps)
    tau, b = int(steps.max()), local.batch_size
    rows = np.zeros((len(sizes), tau, b), dtype=np.int64)
    shares = np.zeros((len(sizes), tau, b), dtype=np.float32)
    for row, (size, count) in enumerate(zip(sizes.tolist(), steps.tolist(), strict=True)):
        generator = generator_of(row)
        order, at = generator.permutation(size), 0
        for step in range(count):
            if at >= size:
                order, at = generator.permutation(size), 0
            batch = order[at : at + b]
            rows[row, step, : len(batch)] = batch
            shares[row, step, : len(batch)] = 1.0 / len(batch)
            at += b
    return Schedule(torch.from_numpy(rows), torch.from_numpy(shares), steps)


def descend(
    local: Sgd,
    start: Params,
    gradient: Callable[[Params, int], Params],
    steps: Tensor,
    correction: Params | None = None,
) -> Params:
    """w⁽ᵗ'τ⁾ from w⁽ᵗ'⁰⁾ for a chunk: `start` and the gradients are stacked [n, …]; `correction` is SCAFFOLD's c − c_i.

    A client that takes fewer steps than the longest of its chunk stands still afterwards.
    """
    w = start
    uneven = bool((steps != steps[0]).any())
    for step in range(int(steps.max())):
        grad = gradient(w, step)
        moved = {}
        for name, value in w.items():
            direction = grad[name]
            if local.proximal:
                direction = direction + local.proximal * (value - start[name])
            if correction is not None:
                direction = direction + correction[name]
            if uneven:
                going = (step < steps).to(value.device).view(-1, *[1] * (value.dim() - 1))
                direction = torch.where(going, direction, torch.zeros_like(direction))
            moved[name] = torch.sub(value, direction, alpha=local.lr)
        w = moved
    return w
