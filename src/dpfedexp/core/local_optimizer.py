"""Algorithm 3, the local update: a client's batches, the protocol of a local optimizer, the optimizers, schedules of their rate.

A client takes τ steps w ← w − η_l·direction. A `Schedule` says on which of its rows, for a whole chunk of clients. An optimizer
says the direction, over tensors with a leading client dimension. The rest is the same for all: the proximal pull and SCAFFOLD's
correction are added to the gradient before, and a client that has taken all its steps stands still (`trainers/steps.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dpfedexp.core.modules import Params
from dpfedexp.errors import InputError, checked, is_count, is_number, require


@dataclass(frozen=True)
class Schedule:
    """Which rows each client of a chunk uses in each step.

    Attributes:
        positions: [n, s, b] row positions within the client; s = 1 when every step uses the same batch.
        weights: [n, s, b] 1/|batch| on real rows, 0 on padding, so that a weighted sum of losses is the client's own mean loss.
        steps: [n] how many steps each client takes.
        most: a public bound on `steps`; None where the clients' own numbers may decide how long the chunk takes.
    """

    positions: Tensor
    weights: Tensor
    steps: Tensor
    most: int | None = None

    @property
    def longest(self) -> int:
        return int(self.steps.max()) if self.most is None else self.most

    @property
    def uneven(self) -> bool:
        """Whether some clients may finish before others."""
        return self.most is not None or bool((self.steps != self.steps[0]).any())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        at = 0 if self.positions.shape[1] == 1 else step
        return self.positions[:, at], self.weights[:, at]

    def part(self, at: slice) -> Schedule:
        return Schedule(self.positions[at], self.weights[at], self.steps[at], self.most)

    def in_own_shape(self) -> Schedule:
        """The same for one client, with batches as long as the power of two that holds its rows: few shapes, and its own."""
        real = int((self.weights > 0).sum(-1).max())
        room = 1 << max(real - 1, 0).bit_length()
        more = max(0, room - self.positions.shape[-1])
        positions, weights = pad(self.positions, (0, more)), pad(self.weights, (0, more))
        return Schedule(positions[..., :room], weights[..., :room], self.steps, self.most)


def schedule(
    local: LocalOptimizer, sizes: Tensor, generator_of: Callable[[int], np.random.Generator], *, public: bool = False
) -> Schedule:
    """The batches of a chunk of non-empty clients that hold `sizes` rows.

    Padding repeats a row of the client: it has weight 0, and its loss is finite whenever the client's own is. A client's shuffles
    are drawn from its own generator; clients are asked for one after the other. With `public`, shapes follow from `local` alone, so
    that nothing about one client's batches depends on how much the others hold.
    """
    steps, used = local.step_count(sizes), local.used(sizes)
    largest = local.max_examples if public else int(used.max())
    if local.batch_size is None or (largest is not None and local.batch_size >= largest):
        if largest is None:
            raise InputError("a public shape needs local.max_examples, or both local.steps and local.batch_size.")
        index = torch.arange(largest)
        real = index[None, :] < used[:, None]
        positions = real * index
        for row in torch.nonzero(sizes > used).flatten().tolist():
            positions[row] = torch.from_numpy(generator_of(row).permutation(int(sizes[row]))[:largest])
        weights = real.float() / used[:, None]
        return Schedule(positions[:, None], weights[:, None], steps)
    most = None
    if public and local.steps is None:
        if largest is None:
            raise InputError("a public number of steps needs local.steps or local.max_examples.")
        most = int(local.step_count(torch.tensor([largest])))
    tau, b = most or int(steps.max()), local.batch_size
    rows = np.zeros((len(sizes), tau, b), dtype=np.int64)
    shares = np.zeros((len(sizes), tau, b), dtype=np.float32)
    for row, (size, keep, count) in enumerate(zip(sizes.tolist(), used.tolist(), steps.tolist(), strict=True)):
        generator = generator_of(row)
        # Rows that fit into one batch are taken in their order, as above: what a client computes must not depend on which of the
        # two ways its neighbors ask for.
        whole = keep == size and keep <= b
        order = np.arange(size) if whole else generator.permutation(size)[:keep]
        held = order if keep < size else np.arange(size)
        own, own_shares = rows[row].reshape(-1), shares[row].reshape(-1)
        for at in range(0, count * b, -(-keep // b) * b):
            if at and not whole:
                order = held[generator.permutation(keep)]
            end = min(at + keep, count * b)
            last = at + (end - at) // b * b
            own[at:end] = order[: end - at]
            own_shares[at:last] = 1.0 / b
            own_shares[last:end] = 1.0 / max(end - last, 1)
    return Schedule(torch.from_numpy(rows), torch.from_numpy(shares), steps, most)


def _check(field: str, value: object, right: Callable[[float], bool], what: str) -> None:
    require(is_number(value) and right(value), f"{field} is {value!r}; it must be {what}.")  # type: ignore[arg-type]


@checked
@dataclass(frozen=True)
class RateSchedule:
    """The local rate over rounds, as a share of `lr`: all of it, after `warm_up` rounds of a straight rise to it.

    >>> [RateSchedule(warm_up=2).share(round) for round in (1, 2, 3)]
    [0.5, 1.0, 1.0]

    Attributes:
        warm_up: rounds until the rate is `lr`; 0 for none.
    """

    warm_up: int = 0

    def __post_init__(self) -> None:
        require(
            is_count(self.warm_up) or self.warm_up == 0,
            f"schedule warm_up is {self.warm_up!r}; it must be a whole number of rounds, or 0.",
        )

    def share(self, round: int) -> float:
        """What `lr` is multiplied with in a round, which are counted from 1."""
        return round / self.warm_up if round <= self.warm_up else self.after(round - self.warm_up)

    def after(self, round: int) -> float:
        """The same, by the number of the round after the warm-up."""
        return 1.0


@checked
@dataclass(frozen=True)
class CosineRate(RateSchedule):
    """Falls along half a cosine from `lr` in the first round towards `final_share`·lr, which it has after `rounds` rounds.

    >>> [round(CosineRate(rounds=4).share(number), 3) for number in (1, 3, 5, 9)]
    [1.0, 0.5, 0.0, 0.0]

    Attributes:
        warm_up: rounds before it in which the rate rises to `lr`.
        rounds: how many rounds the fall takes; usually the run's less the warm-up.
        final_share: the share of `lr` that stays.
    """

    rounds: int = 0
    final_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_count(self.rounds), f"schedule rounds is {self.rounds!r}; it must be a positive whole number.")
        _check("schedule final_share", self.final_share, lambda x: 0 <= x <= 1, "a number in [0, 1]")

    def after(self, round: int) -> float:
        way = min(round - 1, self.rounds) / self.rounds
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * way))


@checked
@dataclass(frozen=True)
class StepRate(RateSchedule):
    """Multiplied by `factor` after every `every` rounds.

    >>> [StepRate(every=2, factor=0.5).share(round) for round in (1, 2, 3, 5)]
    [1.0, 1.0, 0.5, 0.25]

    Attributes:
        warm_up: rounds before it in which the rate rises to `lr`.
        every: rounds at one rate.
        factor: from one rate to the next.
    """

    every: int = 0
    factor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_count(self.every), f"schedule every is {self.every!r}; it must be a positive whole number.")
        _check("schedule factor", self.factor, lambda x: 0 < x <= 1, "a number in (0, 1]")

    def after(self, round: int) -> float:
        return float(self.factor ** ((round - 1) // self.every))


SCHEDULES: dict[str, type[RateSchedule]] = {"constant": RateSchedule, "cosine": CosineRate, "step": StepRate}
"""The schedules by the names that configuration files use."""


Moments = dict[str, Tensor]
"""What an optimizer remembers of a parameter from step to step, by name; each is shaped like the parameter, [n, …]."""
Count = TypeVar("Count", float, Tensor)
OPTIMIZER_HINTS = {
    "learning_rate": "lr=0.1",
    "params": "nothing for it: the optimizer gets every client's own parameters",
    "betas": "beta1=0.9, beta2=0.999",
    "lr_scheduler": "schedule=CosineRate(rounds=50)",
    "max_grad_norm": "clip_gradient=1.0",
}
"""Hints for arguments of torch.optim that have another name here."""


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
class LocalOptimizer:
    """A local optimizer: the number of local steps, their batches, and the direction of a step.

    A new optimizer is one frozen dataclass that inherits from this one and says `direction`. All trainers and the Flower clients
    then take it; a line in `OPTIMIZERS` gives it a name in configuration files.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class HeavyBall(LocalOptimizer):
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
        if self.lr != "auto":
            _check("local lr", self.lr, lambda x: 0 < x < math.inf, "a positive number or 'auto'")
        require(
            (self.steps is None) != (self.epochs is None),
            f"local steps is {self.steps} and epochs is {self.epochs}; pass exactly one of them.",
        )
        for name in ("steps", "epochs", "batch_size", "max_examples"):
            value = getattr(self, name)
            require(value is None or is_count(value), f"local {name} is {value!r}; it must be a positive whole number.")
        _check("local proximal", self.proximal, lambda x: x >= 0, "a non-negative number")
        if (bound := self.clip_gradient) is not None:
            _check("local clip_gradient", bound, lambda x: 0 < x < math.inf, "a positive number, or None for no bound")
        require(
            self.schedule is None or isinstance(self.schedule, RateSchedule),
            f"local schedule is a {type(self.schedule).__name__}; it must be a schedule such as CosineRate(rounds=50).",
        )
        require(
            self.schedule is None or not self.automatic,
            "local lr is 'auto' with a schedule; use either a number for lr or no schedule.",
        )

    def used(self, sizes: Tensor) -> Tensor:
        """How many examples clients of these sizes train on in a round."""
        return sizes if self.max_examples is None else sizes.clamp_max(self.max_examples)

    def step_count(self, sizes: Tensor) -> Tensor:
        """τ for clients of these sizes."""
        if self.epochs is None:
            return torch.full_like(sizes, self.steps or 0)
        used = self.used(sizes)
        batches = torch.ones_like(used) if self.batch_size is None else -(-used // self.batch_size)
        return self.epochs * batches

    @property
    def shape_is_public(self) -> bool:
        """Whether the shape of a client's batches depends on these settings alone, and not on the clients' data."""
        return self.max_examples is not None or (self.steps is not None and self.batch_size is not None)

    @property
    def automatic(self) -> bool:
        return self.lr == "auto"

    @property
    def rate(self) -> float:
        """η_l as a number."""
        if isinstance(self.lr, str):
            raise InputError("local lr is 'auto', which only a run can choose; give a number here, such as lr=0.1.")
        return self.lr

    def at(self, rate: float) -> Self:
        return replace(self, lr=rate)

    def in_round(self, round: int) -> Self:
        """The same optimizer at the rate of a round, which are counted from 1, without a schedule."""
        if self.schedule is None:
            return self
        # A schedule may end at zero, which is no rate of an optimizer: the smallest number stands for it.
        rate = max(self.rate * self.schedule.share(round), torch.finfo(torch.float32).tiny)
        return replace(self, lr=rate, schedule=None)

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The moments of every parameter that `direction` gets: zero at the start of every round."""
        return ()

    @property
    def follows_gradient(self) -> bool:
        """Whether `direction` is the gradient itself, so that a step needs no memory for it."""
        return False

    @property
    def needs_all_gradients(self) -> bool:
        """Whether `combine_gradients` needs the gradients of all parameters before any of them moves."""
        return self.clip_gradient is not None

    def combine_gradients(self, gradients: Params) -> Params:
        """The gradients that `direction` gets, by name, from those of all parameters, which are not to be changed in place.

        Asked only of an optimizer that `needs_all_gradients`.
        """
        if self.clip_gradient is None:
            return gradients
        norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients.values()]
        # torch.nn.utils.clip_grad_norm_ adds the same millionth.
        factor = (self.clip_gradient / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp_max(1.0)
        return {name: gradient * as_rows(factor, gradient) for name, gradient in gradients.items()}

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        """The direction of a step. The trainer then computes w ← w − η_l·direction.

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
            f"the local optimizer {type(self).__name__} has no method direction(w, gradient, moments, clock); define it, or use "
            "Sgd."
        )

    def tau_eta_l(self, tau: Count) -> Count:
        """τη_l: how far τ steps take a client along a gradient that stays the same, per unit of that gradient.

        DP-SCAFFOLD divides an update by it to get the client's mean gradient, and refuses an optimizer that has no such number.
        `tau` is a number of steps or a tensor of them.
        """
        raise InputError(
            f"dp_scaffold divides updates by the local rate times the local steps, which {type(self).__name__} does not have; "
            "use Sgd."
        )


@checked(hints=OPTIMIZER_HINTS)
@dataclass(frozen=True)
class Sgd(LocalOptimizer):
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
        _check("local momentum", self.momentum, lambda x: 0 <= x < 1, "a number in [0, 1)")
        require(
            not self.nesterov or self.momentum > 0,
            "local nesterov is True without momentum; give momentum too, such as momentum=0.9.",
        )
        _check("local weight_decay", self.weight_decay, lambda x: 0 <= x < math.inf, "a non-negative number")

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


@checked(hints=OPTIMIZER_HINTS)
@dataclass(frozen=True)
class AdamW(LocalOptimizer):
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
            _check(f"local {name}", getattr(self, name), lambda x: 0 <= x < 1, "a number in [0, 1)")
        _check("local eps", self.eps, lambda x: x > 0, "a positive number")
        _check("local weight_decay", self.weight_decay, lambda x: 0 <= x < math.inf, "a non-negative number")

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


OPTIMIZERS: dict[str, type[LocalOptimizer]] = {"sgd": Sgd, "adamw": AdamW}
"""The local optimizers by the names that configuration files use."""
