"""Gradient steps, with momentum and weight decay where they are asked for, and with FedProx's pull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dpfedexp.core.local.optimiser import TORCH, Clock, Count, LocalOptimiser, Moments, check_decay
from dpfedexp.errors import checked, is_number, require


@checked(instead=TORCH)
@dataclass(frozen=True)
class Sgd(LocalOptimiser):
    """Gradient steps: `steps` of them, or `epochs` passes; full batch unless `batch_size` says otherwise.

    With the fields below it takes the steps of `torch.optim.SGD`. What it remembers of earlier steps does not outlive the round.

    >>> Sgd(lr=0.1, steps=10, momentum=0.9).momentum
    0.9

    Attributes:
        momentum: the share of the last step's direction that stays in the next; 0 for none.
        nesterov: whether the gradient counts once more beside the momentum, as Nesterov's.
        weight_decay: of every step, λ·w beside the gradient.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            is_number(self.momentum) and 0 <= self.momentum < 1,
            f"local momentum is {self.momentum!r}; it must be a number from 0 and below 1.",
        )
        require(
            not self.nesterov or self.momentum > 0,
            "local nesterov is True without momentum; give momentum too, such as momentum=0.9.",
        )
        check_decay(self.weight_decay)

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("v",) if self.momentum else ()

    @property
    def follows_gradient(self) -> bool:
        return not self.momentum and not self.weight_decay and type(self).direction is Sgd.direction

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * w
        if not self.momentum:
            return gradient
        v = moments["v"].mul_(self.momentum).add_(gradient)
        return gradient + self.momentum * v if self.nesterov else v

    def tau_eta_l(self, tau: Count) -> Count:
        for name in ("momentum", "weight_decay", "clip_gradient", "schedule"):
            require(
                not getattr(self, name),
                f"dp_scaffold divides updates by the local rate times the local steps, which Sgd with {name} does not have; leave "
                f"{name} out.",
            )
        return tau * self.rate


@checked
def FedProx(
    lr: float | Literal["auto"],
    mu: float,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    max_examples: int | None = None,
) -> Sgd:
    """Gradient steps with the proximal pull μ(w − w⁽ᵗ⁾); the other arguments are those of `Sgd`.

    >>> FedProx(lr=0.1, mu=0.01, steps=5).proximal
    0.01
    """
    return Sgd(lr=lr, steps=steps, epochs=epochs, batch_size=batch_size, proximal=mu, max_examples=max_examples)
