"""Synthetic clients and values, made from public numbers alone: what a secure run tries and records everything on."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

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
    """Clients of `sizes` rows, of the shapes and types of `like`, from public numbers alone; whole numbers are below `tokens`."""

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

    Very large and very small values, zeros, one row again and again, and each of the `words` that the model and the `labels` that
    the loss knows.
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
    """Values for programs to be recorded on, whole numbers below `tokens`, and the programs of a run, shared by its trainers."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.programs: dict[str, Any] = {}

    def program(self, name: str, make: Callable[[], T]) -> T:
        if name not in self.programs:
            self.programs[name] = make()
        return cast(T, self.programs[name])

    def like(self, values: Any) -> Any:
        """Values of the same shapes, layouts and types: uniform on [0, 1), or whole numbers that are known."""
        generator = torch.Generator().manual_seed(0)

        def one(value: Tensor) -> Tensor:
            if value.is_floating_point():
                return laid_out(torch.rand(value.shape, generator=generator), value)
            return laid_out(torch.randint(0, self.tokens, value.shape, generator=generator), value)

        return tree_map(one, values)
