"""The gradient of the weighted loss in the network's outputs, [n, …, s]: where the backward pass starts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfedexp.core.losses import (
    IGNORED,
    Loss,
    binary_cross_entropy,
    cross_entropy,
    half_squared_error,
    mean_squared_error,
    plain,
)
from dpfedexp.trainers.recording import Recorded
from dpfedexp.trainers.synthetic import Synthetic

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


def objective(loss: Loss, synthetic: Synthetic | None = None) -> Objective:
    """(outputs [n, …, s], targets [n, s, …], weights [n, s]) → Σ weight·loss differentiated in the outputs, in float32.

    A loss of the caller's own is recorded on synthetic values where these are given.
    """
    by_hand: dict[Loss, Objective] = {
        cross_entropy: _cross_entropy,
        half_squared_error: _half_squared_error,
        mean_squared_error: _mean_squared_error,
        binary_cross_entropy: _binary_cross_entropy,
    }
    known = by_hand.get(plain(loss))
    anything = _differentiated(loss, synthetic)

    def start(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        outputs = outputs.float()
        if known is None or outputs.dim() > 3:
            return anything(outputs, targets, weights)
        return known(outputs, targets, weights)

    return start


def _cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    p = torch.softmax(outputs, dim=1)
    if targets.is_floating_point():
        total = targets.sum(-1).unsqueeze(1)
        return p.mul_(total).sub_(targets.transpose(1, 2)).mul_(weights.unsqueeze(1))
    counts = targets != IGNORED
    labels = torch.where(counts, targets, 0)
    p.scatter_add_(1, labels.unsqueeze(1), torch.full_like(weights, -1.0).unsqueeze(1))
    return p.mul_((weights * counts).unsqueeze(1))


def _half_squared_error(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (outputs - _placed(targets, outputs)).mul_(_per_output(weights, outputs))


def _mean_squared_error(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    share = 2.0 if outputs.dim() == 2 else 2.0 / outputs.shape[1]
    return (outputs - _placed(targets, outputs)).mul_(_per_output(weights, outputs) * share)


def _binary_cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    p = torch.sigmoid(outputs) - _placed(targets, outputs)
    return p.mul_(weights) if outputs.dim() == 2 else p.mul_(weights.unsqueeze(1) / outputs.shape[1])


def _placed(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets [n, s, …] as the outputs lie, [n, …, s]; one number per example may have a dimension of its own or none."""
    if outputs.dim() == 2:
        return targets.reshape(outputs.shape)
    return targets.reshape(len(targets), targets.shape[1], outputs.shape[1]).transpose(1, 2)


def _per_output(weights: Tensor, outputs: Tensor) -> Tensor:
    return weights if outputs.dim() == 2 else weights.unsqueeze(1)


def _differentiated(loss: Loss, synthetic: Synthetic | None = None) -> Objective:
    """Any loss: each client's own batch goes through it, so that a loss that looks across examples stays right too."""

    def total(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (loss(outputs, targets) * weights).sum()

    per_client: Callable[..., Tensor] = vmap(grad(total))
    if synthetic is not None:
        per_client = Recorded(per_client, synthetic.like, batched=True)
    return lambda o, t, w: per_client(o.movedim(-1, 1), t, w).movedim(1, -1)
