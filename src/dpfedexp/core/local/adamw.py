"""Adam with weight decay apart from the gradient (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfedexp.core.local.optimiser import TORCH, Clock, LocalOptimiser, Moments, check_decay
from dpfedexp.errors import checked, is_number, require


@checked(instead=TORCH)
@dataclass(frozen=True)
class AdamW(LocalOptimiser):
    """The steps of `torch.optim.AdamW`, with weight decay apart from the gradient. Its moments do not outlive the round.

    >>> AdamW(lr=0.001, steps=10).weight_decay
    0.01

    Attributes:
        beta1: of the mean of gradients.
        beta2: of the mean of their squares.
        eps: the floor below their root.
        weight_decay: of every step, λ·w beside the direction.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(
                is_number(value) and 0 <= value < 1,
                f"local {name} is {value!r}; it must be a number from 0 and below 1.",
            )
        require(is_number(self.eps) and self.eps > 0, f"local eps is {self.eps!r}; it must be a positive number.")
        check_decay(self.weight_decay)

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("m", "v")

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        m = moments["m"].lerp_(gradient, 1 - self.beta1)
        v = moments["v"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        # The clock is in float64 and without dimensions, so the moments keep their own type.
        one, two = (1 - beta ** (clock.step + 1) for beta in (self.beta1, self.beta2))
        way = (m / one) / ((v / two).sqrt() + self.eps)
        return way + self.weight_decay * w if self.weight_decay else way
