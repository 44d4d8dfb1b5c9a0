"""How many local steps a client takes, and on which of its rows: a schedule for a whole chunk of clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dpfedexp.errors import InputError, is_count, require


class Batching:
    """The settings that a schedule is made from, for settings classes that have these four fields (`LocalOptimiser`)."""

    steps: int | None
    epochs: int | None
    batch_size: int | None
    max_examples: int | None

    def check_batching(self) -> None:
        """Raises `InputError` unless the fields are counts, and exactly one of `steps` and `epochs` is given."""
        require(
            (self.steps is None) != (self.epochs is None),
            f"local steps is {self.steps} and epochs is {self.epochs}; give exactly one of them.",
        )
        for name in ("steps", "epochs", "batch_size", "max_examples"):
            value = getattr(self, name)
            require(value is None or is_count(value), f"local {name} is {value!r}; it must be a positive whole number.")

    def used(self, sizes: Tensor) -> Tensor:
        """How many examples clients of these sizes train on in a round."""
        return sizes if self.max_examples is None else sizes.clamp_max(self.max_examples)

    def step_count(self, sizes: Tensor) -> Tensor:
        """τ for clients of these sizes."""
        if self.epochs is None:
            return torch.full_like(sizes, self.steps or 0)
        used = self.used(sizes)
        batches = torch.ones_like(used) if self.batch_size is None else -(-used // self.batch_size)
        return self.epochs * batches

    @property
    def shape_is_public(self) -> bool:
        """Whether the shape of a client's batches follows from these settings alone, whatever the clients hold."""
        return self.max_examples is not None or (self.steps is not None and self.batch_size is not None)


@dataclass(frozen=True)
class Schedule:
    """Which rows each client of a chunk uses in each step.

    Attributes:
        positions: [n, s, b] row positions within the client; s = 1 when every step uses the same batch.
        weights: [n, s, b] 1/|batch| on real rows, 0 on padding, so that a weighted sum of losses is the client's own mean loss.
        steps: [n] how many steps each client takes.
        most: a public bound on `steps`; None where the clients' own numbers may decide how long the chunk takes.
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
        return Schedule(self.positions[at], self.weights[at], self.steps[at], self.most)

    def in_own_shape(self) -> Schedule:
        """The same for one client, with batches as long as the power of two that holds its rows: few shapes, and its own."""
        real = int((self.weights > 0).sum(-1).max())
        room = 1 << max(real - 1, 0).bit_length()
        more = max(0, room - self.positions.shape[-1])
        positions, weights = pad(self.positions, (0, more)), pad(self.weights, (0, more))
        return Schedule(positions[..., :room], weights[..., :room], self.steps, self.most)


def schedule(
    local: Batching, sizes: Tensor, generator_of: Callable[[int], np.random.Generator], *, public: bool = False
) -> Schedule:
    """The batches of a chunk of non-empty clients.

    Padding repeats a row of the client: it has weight 0, and its loss is finite whenever the client's own is.

    Args:
        local: the clients' optimiser, or anything else that says how many steps and batches.
        sizes: [n] how many rows each client holds.
        generator_of: the row's own generator, from which its shuffles are drawn; rows are asked for one after the other.
        public: whether shapes follow from `local` alone, so that nothing about one client's batches depends on how much the
            others hold.
    """
    steps, used = local.step_count(sizes), local.used(sizes)
    largest = local.max_examples if public else int(used.max())
    if local.batch_size is None or (largest is not None and local.batch_size >= largest):
        if largest is None:
            raise InputError("a public shape needs local.max_examples, or both local.steps and local.batch_size.")
        index = torch.arange(largest)
        real = index[None, :] < used[:, None]
        positions = real * index
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
        order = np.arange(size) if whole else generator.permutation(size)[:keep]
        held = order if keep < size else np.arange(size)
        own, own_shares = rows[row].reshape(-1), shares[row].reshape(-1)
        for at in range(0, count * b, -(-keep // b) * b):
            if at and not whole:
                order = held[generator.permutation(keep)]
            end = min(at + keep, count * b)
            last = at + (end - at) // b * b
            own[at:end] = order[: end - at]
            own_shares[at:last] = 1.0 / b
            own_shares[last:end] = 1.0 / max(end - last, 1)
    return Schedule(torch.from_numpy(rows), torch.from_numpy(shares), steps, most)
