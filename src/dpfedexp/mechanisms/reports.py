"""What a chunk of clients sends, how it adds up, and what leaves a mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpfedexp.arguments import checked
from dpfedexp.core.clipping import BLOCK
from dpfedexp.core.sums import Sums
from dpfedexp.memory import has_triton
from dpfedexp.threads import spread

Part = Literal["level", "votes"]
"""What a report may carry beside its vector."""


@checked
@dataclass(frozen=True)
class Report:
    """What a chunk of clients sends, one row per client.

    Args:
        vector: the update, the update with the free rule's coordinate, or PrivUnit's unit vector V.
        level: PrivUnit's randomised level Ĵ, else None.
        votes: the shares of the mechanism's votes, each within ±½, [n, k]; None where it asks for none.
    """

    vector: Tensor
    level: Tensor | None = None
    votes: Tensor | None = None

    def first(self, count: int) -> Report:
        """The reports of the first clients; rows behind them only filled up a shape."""
        if count == len(self.vector):
            return self
        level, votes = (None if part is None else part[:count] for part in (self.level, self.votes))
        return Report(self.vector[:count], level, votes)


def total(rows: Tensor) -> Tensor:
    """Σ of the rows in double precision."""
    if rows.is_cuda and has_triton():
        from dpfedexp.core import double_sums

        if double_sums.suits(rows):
            return double_sums.column_sums(rows)
    if rows.shape[1] <= BLOCK or rows.device.type != "cpu" or len(rows) == 0:
        return rows.sum(0, dtype=torch.float64)
    out = torch.empty(rows.shape[1], dtype=torch.float64)

    def add(first: int) -> None:
        part, block = (x[..., first : first + BLOCK] for x in (out, rows))
        part.copy_(block[0])
        for row in block[1:]:
            part.add_(row)

    spread(add, range(0, len(out), BLOCK), torch.get_num_threads())
    return out


def make_sums(vector: Tensor, squares: Tensor | None, votes: Tensor | None, count: int) -> Sums:
    """Sums of a chunk, with zeros for what the mechanism does not ask for."""
    nothing = torch.zeros((), dtype=torch.float64, device=vector.device)
    return Sums(
        vector,
        nothing if squares is None else squares,
        nothing.new_zeros(0) if votes is None else votes.to(vector.device),
        count,
    )
