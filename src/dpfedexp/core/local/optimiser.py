"""The protocol of a local optimiser."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor

from dpfedexp.core.batches import Batching
from dpfedexp.core.layout import Params
from dpfedexp.core.local.rates import RateSchedule
from dpfedexp.errors import InputError, checked, is_number, require

Moments = dict[str, Tensor]
"""What an optimiser remembers of a parameter from step to step, by name; each is shaped like the parameter, [n, …]."""
Count = TypeVar("Count", float, Tensor)
TORCH = {
    "learning_rate": "lr=0.1",
    "params": "nothing for it: the optimiser gets every client's own parameters",
    "betas": "beta1=0.9, beta2=0.999",
    "lr_scheduler": "schedule=CosineRate(rounds=50)",
    "max_grad_norm": "clip_gradient=1.0",
}
"""What people know from elsewhere, and how it is written here."""


@dataclass(frozen=True)
class Clock:
    """Where in their round the clients of a chunk are, on their device. Read it; only the trainer moves it.

    Attributes:
        step: how many steps were taken before this one: a float64 tensor without dimensions, so that it can be part of a recording
            and does not change the type of what it is multiplied with.
        steps: τ of every client, [n].
    """

    step: Tensor
    steps: Tensor


def as_rows(values: Tensor, like: Tensor) -> Tensor:
    """One value per client [n] in a shape that goes with `like` [n, …]."""
    return values.view(-1, *[1] * (like.dim() - 1))


@checked
@dataclass(frozen=True)
class LocalOptimiser(Batching):
    """What a client does in a round: how many steps on which batches, and which way a step goes.

    A new optimiser is one frozen dataclass that inherits from this one and says `direction`. All trainers and the Flower clients
    then take it; a line in `OPTIMISERS` gives it a name in configuration files.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class HeavyBall(LocalOptimiser):
    ...     momentum: float = 0.9
    ...
    ...     @property
    ...     def moment_names(self):
    ...         return ("v",)
    ...
    ...     def direction(self, w, gradient, moments, clock):
    ...         return moments["v"].mul_(self.momentum).add_(gradient)
    >>> HeavyBall(lr=0.1, steps=10).momentum
    0.9

    Attributes:
        lr: η_l, the local rate; "auto" lets the clients' votes choose it (central privacy and simulations without any).
        steps: local steps of a round; give this or `epochs`.
        epochs: passes over the client's rows; give this or `steps`.
        batch_size: rows of one step; None for all of them.
        proximal: μ of the FedProx pull μ(w − w⁽ᵗ⁾) towards the global model (Li et al. 2020), part of every gradient.
        max_examples: a public bound on the rows of a client: one that holds more trains each round on a sample of that many, drawn
            from its own stream. How much a client holds is private, so a secure run can put many clients into one tensor program
            only under such a bound.
        clip_gradient: a bound on the norm of a client's gradient in every step, over all parameters together, pull and correction
            included; None for no bound. It is no part of the privacy, whose clip is the algorithm's.
        schedule: how the rate changes over rounds, such as `CosineRate(rounds=50)`; None for a rate that stays.
    """

    lr: float | Literal["auto"]
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    proximal: float = 0.0
    max_examples: int | None = None
    clip_gradient: float | None = None
    schedule: RateSchedule | None = None

    def __post_init__(self) -> None:
        """Raises `InputError` where a setting is out of range; a subclass with fields of its own calls it and checks those."""
        require(
            self.lr == "auto" or (is_number(self.lr) and 0 < float(self.lr) < float("inf")),
            f"local lr is {self.lr!r}; it must be a positive number or 'auto'.",
        )
        self.check_batching()
        require(
            is_number(self.proximal) and self.proximal >= 0,
            f"local proximal is {self.proximal!r}; it must be a number that is not negative.",
        )
        require(
            self.clip_gradient is None or (is_number(self.clip_gradient) and 0 < self.clip_gradient < math.inf),
            f"local clip_gradient is {self.clip_gradient!r}; it must be a positive number, or None for no bound.",
        )
        require(
            self.schedule is None or isinstance(self.schedule, RateSchedule),
            f"local schedule is a {type(self.schedule).__name__}; it must be a schedule such as CosineRate(rounds=50).",
        )
        require(
            self.schedule is None or not self.automatic,
            "local lr is 'auto' beside a schedule; a rate that sets itself has none: give lr a number, or leave schedule out.",
        )

    @property
    def automatic(self) -> bool:
        """Whether the rate sets itself (`local_rate`)."""
        return self.lr == "auto"

    @property
    def rate(self) -> float:
        """η_l as a number."""
        if isinstance(self.lr, str):
            raise InputError("local lr is 'auto', which only a run can choose; give a number here, such as lr=0.1.")
        return self.lr

    def at(self, rate: float) -> Self:
        """The same optimiser at a rate."""
        return replace(self, lr=rate)

    def in_round(self, round: int) -> Self:
        """The same optimiser at the rate of a round, which are counted from 1, without a schedule."""
        if self.schedule is None:
            return self
        # A schedule may end at zero, which is no rate of an optimiser: the smallest number stands for it.
        rate = max(self.rate * self.schedule.share(round), torch.finfo(torch.float32).tiny)
        return replace(self, lr=rate, schedule=None)

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The moments that the optimiser keeps of every parameter: zero when a round begins, gone when it ends."""
        return ()

    @property
    def follows_gradient(self) -> bool:
        """Whether `direction` is the gradient itself, so that a step needs no memory for it."""
        return False

    @property
    def needs_all_gradients(self) -> bool:
        """Whether `joined` wants to see the gradients of all parameters before any parameter moves.

        Where not, a parameter moves as soon as its gradient is known, and the memory of the gradient is free again.
        """
        return self.clip_gradient is not None

    def joined(self, gradients: Params) -> Params:
        """The gradients after something that looks at all of them, such as a bound on a client's whole gradient.

        Asked before `direction`, and only of an optimiser that `needs_all_gradients`.

        Args:
            gradients: of all parameters by name, [n, …] each; not to be changed in place.

        Returns:
            The gradients that `direction` gets instead, by the same names.
        """
        if self.clip_gradient is None:
            return gradients
        norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients.values()]
        # torch.nn.utils.clip_grad_norm_ adds the same millionth.
        factor = (self.clip_gradient / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp_max(1.0)
        return {name: gradient * as_rows(factor, gradient) for name, gradient in gradients.items()}

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        """Which way the clients go: the trainer alone then does w ← w − η_l·direction.

        A client's row may depend on its own rows of the arguments only. No shape and no branch may depend on a tensor's values,
        because on a GPU the operations are recorded once and replayed.

        Args:
            w: one parameter of n clients, [n, …].
            gradient: of the client's loss on this step's batch, pull and correction included, [n, …]; not to be changed in place.
                Of w's type where moments are kept; otherwise it may be bf16 in a bf16 run.
            moments: of this parameter, by `moment_names`; to be changed in place.
            clock: where in the round the clients are.

        Returns:
            The direction, [n, …]; it may be one of the arguments.
        """
        raise InputError(
            f"the local optimiser {type(self).__name__} does not say which way a step goes; give it a method "
            "direction(w, gradient, moments, clock), or use Sgd."
        )

    def tau_eta_l(self, tau: Count) -> Count:
        """τη_l: how far τ steps take a client along a gradient that stays the same, per unit of that gradient.

        DP-SCAFFOLD divides an update by it to get the client's mean gradient. An optimiser for which there is no such number
        leaves this as it is, and is refused by DP-SCAFFOLD.

        Args:
            tau: a number of steps, or a tensor of them.

        Returns:
            τη_l of the same kind.
        """
        raise InputError(
            f"dp_scaffold divides updates by the local rate times the local steps, which {type(self).__name__} does not have; "
            "use Sgd."
        )


def check_decay(value: object) -> None:
    require(
        is_number(value) and 0 <= value < math.inf,  # type: ignore[operator]
        f"local weight_decay is {value!r}; it must be a number that is not negative.",
    )
