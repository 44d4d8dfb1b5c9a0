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

from dpfedexp.errors import InputError, is_count, is_number, require
from dpfedexp.layout import Params


@dataclass(frozen=True)
class Sgd:
    """Plain gradient steps: `steps` of them, or `epochs` passes; full batch unless `batch_size` says otherwise.

    `proximal` > 0 adds the FedProx pull μ(w − w⁽ᵗ⁾) towards the global model (Li et al. 2020). `max_examples` is a public bound:
    a client that holds more trains each round on a sample of that many, drawn from its own stream. How much a client holds is
    private, so a secure run can put many clients into one tensor program only under such a bound.

    >>> Sgd(lr=0.1, steps=10)
    Sgd(lr=0.1, steps=10, epochs=None, batch_size=None, proximal=0.0, max_examples=None)
    """

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    proximal: float = 0.0
    max_examples: int | None = None

    def __post_init__(self) -> None:
        require(
            is_number(self.lr) and 0 < self.lr < float("inf"), f"local lr is {self.lr!r}; it must be a positive number."
        )
        require(
            (self.steps is None) != (self.epochs is None),
            f"local steps is {self.steps} and epochs is {self.epochs}; give exactly one of them.",
        )
        for name in ("steps", "epochs", "batch_size", "max_examples"):
            value = getattr(self, name)
            require(
                value is None or is_count(value),
                f"local {name} is {value!r}; it must be a positive whole number.",
            )
        require(
            is_number(self.proximal) and self.proximal >= 0,
            f"local proximal is {self.proximal!r}; it must be a number that is not negative.",
        )

    def used(self, sizes: Tensor) -> Tensor:
        """How many examples clients of these sizes train on in a round."""
        return sizes if self.max_examples is None else sizes.clamp_max(self.max_examples)

    def step_count(self, sizes: Tensor) -> Tensor:
        """τ for clients of these sizes."""
        if self.steps is not None:
            return torch.full_like(sizes, self.steps)
        assert self.epochs is not None
        used = self.used(sizes)
        batches = torch.ones_like(used) if self.batch_size is None else -(-used // self.batch_size)
        return self.epochs * batches

    @property
    def shape_is_public(self) -> bool:
        """Whether the shape of a client's batches follows from these settings alone, whatever the clients hold."""
        return self.max_examples is not None or (self.steps is not None and self.batch_size is not None)


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
    most       a public bound on `steps`; None where the clients' own numbers may decide how long the chunk takes
    """

    positions: Tensor
    weights: Tensor
    steps: Tensor
    most: int | None = None

    @property
    def longest(self) -> int:
        return int(self.steps.max()) if self.most is None else self.most

    @property
    def uneven(self) -> bool:
        """Whether some clients may stand still before the others are done."""
        return self.most is not None or bool((self.steps != self.steps[0]).any())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        at = 0 if self.positions.shape[1] == 1 else step
        return self.positions[:, at], self.weights[:, at]

    def part(self, at: slice) -> Schedule:
        """The same for some of the clients."""
        return Schedule(self.positions[at], self.weights[at], self.steps[at], self.most)


def schedule(
    local: Sgd, sizes: Tensor, generator_of: Callable[[int], np.random.Generator], *, public: bool = False
) -> Schedule:
    """The batches of a chunk of non-empty clients; `generator_of(row)` draws the row's own shuffles.

    Padding repeats a row of the client: it has weight 0, and its loss is finite whenever the client's own is. With `public` the
    shapes follow from `local` alone, so that nothing about one client's batches depends on how much the others hold.
    """
    steps, used = local.step_count(sizes), local.used(sizes)
    largest = local.max_examples if public else int(used.max())
    if local.batch_size is None or (largest is not None and local.batch_size >= largest):
        if largest is None:
            raise InputError("a public shape needs local.max_examples, or both local.steps and local.batch_size.")
        index = torch.arange(largest)
        real = index[None, :] < used[:, None]
        positions = torch.where(real, index[None, :], 0)
        for row in torch.nonzero(sizes > used).flatten().tolist():
            positions[row] = torch.from_numpy(generator_of(row).permutation(int(sizes[row]))[:largest])
        weights = real.float() / used[:, None]
        return Schedule(positions[:, None], weights[:, None], steps)
    most = None
    if public and local.steps is None:
        if largest is None:
            raise InputError("a public number of steps needs local.steps or local.max_examples.")
        most = int(local.step_count(torch.tensor([largest])))
    tau, b = most or int(steps.max()), local.batch_size
    rows = np.zeros((len(sizes), tau, b), dtype=np.int64)
    shares = np.zeros((len(sizes), tau, b), dtype=np.float32)
    for row, (size, keep, count) in enumerate(zip(sizes.tolist(), used.tolist(), steps.tolist(), strict=True)):
        generator = generator_of(row)
        # Rows that fit into one batch are taken in their order, as above: what a client computes must not depend on which of the
        # two ways its neighbours ask for.
        whole = keep == size and keep <= b
        order, at = np.arange(size) if whole else generator.permutation(size)[:keep], 0
        held = order if keep < size else np.arange(size)
        for step in range(count):
            if at >= keep:
                order, at = order if whole else held[generator.permutation(keep)], 0
            batch = order[at : at + b]
            rows[row, step, : len(batch)] = batch
            shares[row, step, : len(batch)] = 1.0 / len(batch)
            at += b
    return Schedule(torch.from_numpy(rows), torch.from_numpy(shares), steps, most)


def descend(
    local: Sgd,
    start: Params,
    gradient: Callable[[Params, int], Params],
    plan: Schedule,
    correction: Params | None = None,
) -> Params:
    """w⁽ᵗ'τ⁾ from w⁽ᵗ'⁰⁾ for a chunk: `start` and the gradients are stacked [n, …]; `correction` is SCAFFOLD's c − c_i.

    A client that takes fewer steps than the longest of its chunk stands still afterwards.
    """
    w = start
    uneven = plan.uneven
    for step in range(plan.longest):
        grad = gradient(w, step)
        moved = {}
        for name, value in w.items():
            direction = grad[name]
            if local.proximal:
                direction = direction + local.proximal * (value - start[name])
            if correction is not None:
                direction = direction + correction[name]
            if uneven:
                going = (step < plan.steps).to(value.device).view(-1, *[1] * (value.dim() - 1))
                direction = torch.where(going, direction, torch.zeros_like(direction))
            moved[name] = torch.sub(value, direction, alpha=local.lr)
        w = moved
    return w
