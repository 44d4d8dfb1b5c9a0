"""Algorithm 3, the local update, and the protocol of a local optimiser.

A client takes τ steps w ← w − η_l·direction. The direction is the optimiser's own: it is written once, over tensors with a leading
client dimension, and serves one client or a whole chunk. Everything else about a step is the same for all optimisers and is not
theirs: the proximal pull and SCAFFOLD's correction come to the gradient before the optimiser sees it, and a client that has taken
all its steps stands still (`trainers/stepping.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

from torch import Tensor

from dpfedexp.arguments import checked
from dpfedexp.batches import Batching
from dpfedexp.errors import InputError, is_number, require
from dpfedexp.layout import Params

Moments = dict[str, Tensor]
"""What an optimiser remembers of a parameter from step to step, by name; each is shaped like the parameter, [n, …]."""
Count = TypeVar("Count", float, Tensor)


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
    """

    lr: float | Literal["auto"]
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    proximal: float = 0.0
    max_examples: int | None = None

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

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The moments that the optimiser keeps of every parameter: zero when a round begins, gone when it ends."""
        return ()

    @property
    def needs_all_gradients(self) -> bool:
        """Whether `joined` wants to see the gradients of all parameters before any parameter moves.

        Where not, a parameter moves as soon as its gradient is known, and the memory of the gradient is free again.
        """
        return False

    def joined(self, gradients: Params) -> Params:
        """The gradients after something that looks at all of them, such as a bound on a client's whole gradient.

        Asked before `direction`, and only of an optimiser that `needs_all_gradients`.

        Args:
            gradients: of all parameters by name, [n, …] each; not to be changed in place.

        Returns:
            The gradients that `direction` gets instead, by the same names.
        """
        return gradients

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


@checked
@dataclass(frozen=True)
class Sgd(LocalOptimiser):
    """Plain gradient steps: `steps` of them, or `epochs` passes; full batch unless `batch_size` says otherwise.

    >>> Sgd(lr=0.1, steps=10)
    Sgd(lr=0.1, steps=10, epochs=None, batch_size=None, proximal=0.0, max_examples=None)
    """

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        return gradient

    def tau_eta_l(self, tau: Count) -> Count:
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


OPTIMISERS: dict[str, type[LocalOptimiser]] = {"sgd": Sgd}
"""The local optimisers by the names that configuration files use."""
