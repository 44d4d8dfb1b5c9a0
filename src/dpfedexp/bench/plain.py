"""The plain PyTorch loop: one client after the other, clipped, summed, noise added. Nothing of the simulator is used here."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def plain_round(model: nn.Module, x: Tensor, y: Tensor, *, lr: float, steps: int, clip: float, noise: float) -> Tensor:
    """The mean of the clients' clipped updates with noise, flat."""
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    total = torch.zeros_like(start)
    local = copy.deepcopy(model)
    optimiser = torch.optim.SGD(local.parameters(), lr=lr)
    for inputs, targets in zip(x, y, strict=True):
        local.load_state_dict(model.state_dict())
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(local(inputs), targets).backward()
            optimiser.step()
        update = torch.cat([p.detach().flatten() for p in local.parameters()]) - start
        total += update * min(1.0, clip / float(update.norm()))
    return (total + noise * clip * torch.randn_like(total)) / len(x)
