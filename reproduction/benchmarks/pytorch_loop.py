"""The plain PyTorch loop: one client after the other, clipped, summed, noise added. Nothing of the simulator is used here."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def plain_round(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    lr: float,
    steps: int,
    clip: float,
    noise: float,
    batch: int | None = None,
) -> Tensor:
    """The mean of the clients' clipped updates with noise, flat; `batch` rows a step, one batch after the other."""
    start = _trained(model)
    total = torch.zeros_like(start)
    local = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=lr)
    size = batch or x.shape[1]
    for inputs, targets in zip(x, y, strict=True):
        local.load_state_dict(model.state_dict())
        for step in range(steps):
            first = step * size % len(inputs)
            optimizer.zero_grad()
            F.cross_entropy(local(inputs[first : first + size]), targets[first : first + size]).backward()
            optimizer.step()
        update = _trained(local) - start
        total += update * min(1.0, clip / float(update.norm()))
    return (total + noise * clip * torch.randn_like(total)) / len(x)


def _trained(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
