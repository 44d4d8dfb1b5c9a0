"""Clients whose rows a function makes when they are asked for: the interface of clients without a `Federation`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Maker = Callable[[Any], tuple[Tensor, Tensor]]


class GeneratedClients:
    """`count` clients with `size` rows each; `make(numbers)` gives inputs and targets [n, size, …] of clients by their numbers."""

    def __init__(self, count: int, size: int, make: Maker, *, transform: Callable[[Any], Any] | None = None) -> None:
        self.sizes, self.make, self.transform = torch.tensor([size]).expand(count), make, transform

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(self, clients: Tensor, positions: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        made = self.make(clients.cpu().numpy())
        at = torch.arange(len(clients))[:, None], positions.cpu()
        return made[0][at].to(device), made[1][at].to(device)
