"""Optimizers of a user's own, each one class: what a user who adds one would write."""

from dataclasses import dataclass

import torch

import dpfedexp
from dpfedexp import LocalOptimizer
from dpfedexp.core.local_optimizer import as_rows


@dataclass(frozen=True)
class HeavyBall(LocalOptimizer):
    """torch.optim.SGD with momentum, Nesterov's if asked, and weight decay."""

    momentum: float = 0.8
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def moment_names(self):
        return ("v",)

    def direction(self, w, gradient, moments, clock):
        pulled = gradient + self.weight_decay * w
        v = moments["v"].mul_(self.momentum).add_(pulled)
        return pulled + self.momentum * v if self.nesterov else v


@dataclass(frozen=True)
class AdamW(dpfedexp.AdamW):
    """The library's, with a floor eps so large that a gradient's last bit does not decide which way a step goes."""

    beta2: float = 0.99
    eps: float = 1e-3
    weight_decay: float = 0.05


@dataclass(frozen=True)
class Bounded(LocalOptimizer):
    """Plain steps after torch.nn.utils.clip_grad_norm_, which looks at the gradients of all parameters at once."""

    bound: float = 0.2

    @property
    def needs_all_gradients(self):
        return True

    def combine_gradients(self, gradients):
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()])
        factor = (self.bound / (squares.sum(0).sqrt() + 1e-6)).clamp_max(1.0)
        return {name: gradient * as_rows(factor, gradient) for name, gradient in gradients.items()}

    def direction(self, w, gradient, moments, clock):
        return gradient


@dataclass(frozen=True)
class Cosine(LocalOptimizer):
    """Plain steps whose rate falls to zero over each client's own number of steps."""

    def direction(self, w, gradient, moments, clock):
        factor = 0.5 * (1 + torch.cos(torch.pi * clock.step / clock.steps))
        return gradient * as_rows(factor, gradient).to(gradient.dtype)


@dataclass(frozen=True)
class Adagrad:
    """A server optimizer: the mean over the root of all squares so far, and a count of the rounds that nothing else needs."""

    floor: float = 0.1

    def init(self, w):
        return {"squares": torch.full_like(w, self.floor**2), "rounds": torch.zeros_like(w[:1])}

    def direction(self, c_bar, moments):
        squares = moments["squares"] + c_bar.square()
        return c_bar / squares.sqrt(), {"squares": squares, "rounds": moments["rounds"] + 1}
