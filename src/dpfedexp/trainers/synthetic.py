"""Synthetic clients and values, made from public numbers alone: what a secure run tries and records everything on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpfedexp.inputs import Inputs, each, leaves
from dpfedexp.trainers.recording import laid_out

_MOST_ROWS, _MOST_NUMBERS = 1024, 2**22
"""Of the rows that synthetic clients share: enough for all of them to differ, and not many where one is large."""
_EXTREME = 1e4
T = TypeVar("T")


class SyntheticClients:
    """Clients with rows of the right shape and type from public numbers alone, of the sizes given.

    Args:
        like: one row of inputs and targets, of which only shapes and types are used.
        sizes: rows of each client.
        transform: the federation's.
        tokens: whole numbers are below this, in inputs and targets.
    """

    def __init__(
        self,
        like: tuple[Inputs, Tensor],
        sizes: Tensor,
        transform: Callable[[Any], Any] | None = None,
        seed: int = 0,
        tokens: int = 2,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes, self.transform, self.tokens = sizes, transform, tokens
        self.rows = max(16, min(_MOST_ROWS, _MOST_NUMBERS // max(1, sum(part.numel() for part in leaves(like[0])))))
        self.inputs = each(lambda row: _rows(self.rows, row, generator, tokens, torch.randn), like[0])
        # Targets between 0 and 1 suit every loss for floating-point targets, probabilities included.
        self.targets = _rows(self.rows, like[1], generator, tokens, torch.rand)

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(self, clients: Tensor, positions: Tensor, device: torch.device | None = None) -> tuple[Inputs, Tensor]:
        at = (clients.cpu()[:, None] * 7919 + positions.cpu()) % self.rows
        return each(lambda rows: rows[at].to(device), self.inputs), self.targets[at].to(device)


def _rows(count: int, row: Tensor, generator: torch.Generator, tokens: int, draw: Callable[..., Tensor]) -> Tensor:
    shape = (count, *row.shape)
    if row.is_floating_point():
        return draw(shape, generator=generator).to(row.dtype)
    return torch.randint(0, tokens, shape, generator=generator).to(row.dtype)


def adversarial(x: Inputs, y: Tensor, words: int, labels: int) -> list[tuple[Inputs, Tensor]]:
    """Batches [s, …] of the same shapes that a program might treat differently from ordinary ones.

    Very large and very small values, zeros, one row again and again, and each word and label that the model knows.

    Args:
        x: a batch of inputs.
        y: its targets.
        words: whole numbers that the model takes as inputs.
        labels: whole numbers that the loss takes as targets.
    """

    def whole(value: Tensor, most: int, first: int) -> Tensor:
        return ((torch.arange(value.numel(), device=value.device) + first) % most).view(value.shape).to(value.dtype)

    def sets(value: Tensor, most: int, factor: float) -> Tensor:
        return value * factor if value.is_floating_point() else whole(value, most, int(factor))

    def scaled(by: float) -> tuple[Inputs, Tensor]:
        return each(lambda value: sets(value, words, by), x), y if y.is_floating_point() else whole(y, labels, int(by))

    found = [scaled(by) for by in (_EXTREME, -1 / _EXTREME, 0.0, 3.0)]
    return [*found, (each(lambda value: value[:1].expand_as(value).clone(), x), y[:1].expand_as(y).clone())]


class Synthetic:
    """Values for programs to be recorded on, and the programs of a run by name, shared by all of its trainers.

    Args:
        tokens: whole numbers are below this.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.programs: dict[str, Any] = {}

    def program(self, name: str, make: Callable[[], T]) -> T:
        if name not in self.programs:
            self.programs[name] = make()
        found: T = self.programs[name]
        return found

    def like(self, values: Any) -> Any:
        """Values of the same shapes, layouts and types: uniform on [0, 1), or whole numbers that are known."""
        generator = torch.Generator().manual_seed(0)

        def one(value: Tensor) -> Tensor:
            if value.is_floating_point():
                made = torch.rand(value.shape, generator=generator)
            else:
                made = torch.randint(0, self.tokens, value.shape, generator=generator)
            return laid_out(made, value)

        return tree_map(one, values)
