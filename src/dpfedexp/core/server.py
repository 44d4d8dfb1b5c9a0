"""Which way the server goes with a released mean c̄, and the protocol of a server optimiser. Pure functions of a small state.

`round.advance` alone moves the model, w ← w + η_g·direction, so no optimiser can leave the step size out.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dpfedexp.errors import InputError, checked, is_number, require

Moments = dict[str, Tensor]
"""What an optimiser remembers from round to round, by name. A checkpoint holds it, so it must follow from released means alone."""


@runtime_checkable
class ServerOptimiser(Protocol):
    """How a released mean becomes the direction in which the server moves the model.

    A new one is one frozen dataclass with these two methods; its fields are part of what a checkpoint recognises a run by.

    >>> from dataclasses import dataclass, replace
    >>> from dpfedexp import cdp_fedexp
    >>> @dataclass(frozen=True)
    ... class Halved:
    ...     def init(self, w):
    ...         return {}
    ...
    ...     def direction(self, c_bar, moments):
    ...         return 0.5 * c_bar, moments
    >>> replace(cdp_fedexp(clip=0.3, noise_multiplier=5.0), server=Halved()).server
    Halved()
    """

    def init(self, w: Tensor) -> Moments:
        """The moments before the first round, by name, from the initial parameters [d] on the server's device."""
        ...

    def direction(self, c_bar: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """Where to go [d], which is then multiplied with η_g, and the moments by the same names.

        `c_bar` is the released mean of the clients' updates [d]; neither it nor `moments` may be changed in place.
        """
        ...


@checked
@dataclass(frozen=True)
class Extrapolate:
    """c̄ itself: FedEXP with the η_g of its step-size rule, FedAvg with η_g = 1."""

    def init(self, w: Tensor) -> Moments:
        return {}

    def direction(self, c_bar: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        return c_bar, moments


@checked
@dataclass(frozen=True)
class Momentum:
    """v ← βv + c̄, and lr·v is the direction."""

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        _require_positive("server rate", self.lr)
        require(0 <= self.beta < 1, f"server momentum is {self.beta}; it must be at least 0 and below 1.")

    def init(self, w: Tensor) -> Moments:
        return {"v": torch.zeros_like(w)}

    def direction(self, c_bar: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        v = self.beta * moments["v"] + c_bar
        return self.lr * v, {"v": v}


@checked
@dataclass(frozen=True)
class Adam:
    """FedAdam (Reddi et al. 2021): c̄ as a pseudo-gradient, no bias correction, adaptivity floor `eps`."""

    lr: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _require_positive("server rate", self.lr)
        _require_positive("server eps", self.eps)
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"server {name} is {getattr(self, name)}; it must be in [0, 1).")

    def init(self, w: Tensor) -> Moments:
        return {"m": torch.zeros_like(w), "v": torch.full_like(w, self.eps**2)}

    def direction(self, c_bar: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        m = self.beta1 * moments["m"] + (1 - self.beta1) * c_bar
        v = self.beta2 * moments["v"] + (1 - self.beta2) * c_bar.square()
        return self.lr * m / (v.sqrt() + self.eps), {"m": m, "v": v}


def _require_positive(name: str, value: object) -> None:
    good = is_number(value) and 0 < float(value) < math.inf  # type: ignore[arg-type]
    require(good, f"{name} is {value!r}; it must be a positive number.")


def check_server(server: object) -> None:
    """Raises `InputError` for what is no server optimiser, on a mean of zeros: a round must not be paid for before that shows."""
    name = type(server).__name__
    require(
        isinstance(server, ServerOptimiser),
        f"server is a {name}; it must be a server optimiser such as Momentum(lr=1.0), with init() and direction().",
    )
    c_bar = torch.zeros(3, dtype=torch.float64)
    try:
        moments = server.init(c_bar)  # type: ignore[attr-defined]
        direction, after = server.direction(c_bar, moments)  # type: ignore[attr-defined]
        right = direction.shape == c_bar.shape and set(after) == set(moments)
        right = right and all(isinstance(moment, Tensor) for moment in (*moments.values(), *after.values()))
    except Exception as error:
        raise InputError(f"the server optimiser {name} fails on a mean of zeros: {error}.") from error
    require(
        right,
        f"the server optimiser {name} must give a direction of the mean's shape, and moments by the names of init().",
    )
