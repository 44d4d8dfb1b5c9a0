"""The server's noise, drawn by the processor while a GPU or nodes still train."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dpfedexp.core.noise import Noise

CPU = torch.device("cpu")
LONG = 2**13
"""Numbers that are worth a thread."""


class Ahead:
    """A source of noise whose draw for the server is under way: the same numbers, sooner, and handed out once.

    Nothing of it waits for what the clients do: the draws depend on the source alone. The thread leaves the GPU
    alone, because whatever it asked of it would end a recording; memory that a GPU reads by itself is there before it starts.

    Args:
        noise: the source.
        width: how many numbers will be asked for.
        wanted: where they will be asked for; a GPU reads them from memory that it reaches itself.
    """

    def __init__(self, noise: Noise, width: int, wanted: torch.device) -> None:
        self.noise, self.width = noise, width
        room = torch.empty(1, width, dtype=torch.float64, pin_memory=wanted.type == "cuda")
        server = torch.zeros(1, dtype=torch.int64)
        thread = ThreadPoolExecutor(1, "noise")
        self.drawn: Future[Tensor] | None = thread.submit(
            lambda: room.copy_(noise.normal(server, width, CPU, torch.float64))
        )
        thread.shutdown(wait=False)

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        drawn = self.drawn
        if drawn is not None and clients.tolist() == [0] and (width, dtype) == (self.width, torch.float64):
            # A second time it would not be noise any more.
            self.drawn = None
            return drawn.result().to(device, non_blocking=True)
        return self.noise.normal(clients, width, device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        return self.noise.uniform(clients, width)


def drawn_ahead(noise: Noise, width: int, busy: torch.device, wanted: torch.device) -> Noise:
    """The source itself, or while a GPU is busy one that is at work already, for numbers that are wanted on a device."""
    return Ahead(noise, width, wanted) if busy.type == "cuda" and width >= LONG else noise
