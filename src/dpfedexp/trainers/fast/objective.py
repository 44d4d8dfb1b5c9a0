"""The gradient of the weighted loss in the network's outputs, [n, …, s]: where the backward pass starts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfedexp.losses import Loss, binary_cross_entropy, cross_entropy, half_squared_error

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


def objective(loss: Loss) -> Objective:
    """(outputs [n, …, s], targets [n, s, …], weights [n, s]) → Σ weight·loss differentiated in the outputs, in float32."""
    by_hand: dict[Loss, Objective] = {
        cross_entropy: _cross_entropy,
        half_squared_error: _half_squared_error,
        binary_cross_entropy: _binary_cross_entropy,
    }
    known = by_hand.get(loss)
    anything = _differentiated(loss)

    def start(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        outputs = outputs.float()
        if known is None or outputs.dim() > 3:
            return anything(outputs, targets, weights)
        return known(outputs, targets, weights)

    return start


def _cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    p = torch.softmax(outputs, dim=1)
    p.scatter_add_(1, targets.unsqueeze(1), torch.full_like(weights, -1.0).unsqueeze(1))
    return p.mul_(weights.unsqueeze(1))


def _half_squared_error(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    if outputs.dim() == 2:
        return (outputs - targets).mul_(weights)
    return (outputs - targets.transpose(1, 2)).mul_(weights.unsqueeze(1))


def _binary_cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    p = torch.sigmoid(outputs)
    if outputs.dim() == 2:
        return (p - targets).mul_(weights)
    return (p - targets.transpose(1, 2)).mul_(weights.unsqueeze(1) / outputs.shape[1])


def _differentiated(loss: Loss) -> Objective:
    """Any loss: each client's own batch goes through it, so that a loss that looks across examples stays right too."""

    def total(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (loss(outputs, targets) * weights).sum()

    per_client = vmap(grad(total))
    return lambda o, t, w: per_client(o.movedim(-1, 1), t, w).movedim(1, -1)
