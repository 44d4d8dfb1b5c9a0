"""w ← w + η_g c̄, and the server optimisers that people compare it with. Pure functions of a small state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpfedexp.errors import require

State = dict[str, Tensor]


class Server(Protocol):
    """How a released mean moves the model."""

    def init(self, w: Tensor) -> State: ...

    def step(self, w: Tensor, c_bar: Tensor, eta_g: float, state: State) -> tuple[Tensor, State]: ...


@dataclass(frozen=True)
class Extrapolate:
    """w + η_g c̄ with the η_g that the step-size rule gives: FedEXP, and FedAvg with η_g = 1."""

    def init(self, w: Tensor) -> State:
        return {}

    def step(self, w: Tensor, c_bar: Tensor, eta_g: float, state: State) -> tuple[Tensor, State]:
        return torch.add(w, c_bar, alpha=eta_g), state


@dataclass(frozen=True)
class Momentum:
    """v ← βv + c̄, w ← w + lr·v."""

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        require(self.lr > 0, f"server rate is {self.lr}; it must be positive.")
        require(0 <= self.beta < 1, f"server momentum is {self.beta}; it must be at least 0 and below 1.")

    def init(self, w: Tensor) -> State:
        return {"v": torch.zeros_like(w)}

    def step(self, w: Tensor, c_bar: Tensor, eta_g: float, state: State) -> tuple[Tensor, State]:
        v = self.beta * state["v"] + c_bar
        return w + self.lr * v, {"v": v}


@dataclass(frozen=True)
class Adam:
    """FedAdam (Reddi et al. 2021): c̄ as a pseudo-gradient, no bias correction, adaptivity floor `eps`."""

    lr: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self) -> None:
        require(self.lr > 0, f"server rate is {self.lr}; it must be positive.")
        require(self.eps > 0, f"server eps is {self.eps}; it must be positive.")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"server {name} is {getattr(self, name)}; it must be in [0, 1).")

    def init(self, w: Tensor) -> State:
        return {"m": torch.zeros_like(w), "v": torch.full_like(w, self.eps**2)}

    def step(self, w: Tensor, c_bar: Tensor, eta_g: float, state: State) -> tuple[Tensor, State]:
        m = self.beta1 * state["m"] + (1 - self.beta1) * c_bar
        v = self.beta2 * state["v"] + (1 - self.beta2) * c_bar.square()
        return w + self.lr * m / (v.sqrt() + self.eps), {"m": m, "v": v}
