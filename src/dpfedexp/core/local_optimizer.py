"""Algorithm 3, the local update: a client's batches, the interface of a local optimizer, the optimizers and their rate schedules.

A client takes τ steps w ← w − η_l·direction. A `Schedule` says which rows each step uses, for a whole chunk of clients. An
optimizer computes the direction, on tensors with a leading client dimension. The rest is common to all optimizers and is in
`trainers/steps.py`: proximal term and SCAFFOLD's correction are added to the gradient, and finished clients no longer move.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfedexp.core.modules import Params
from dpfedexp.errors import InputError, checked, is_count, is_number, require


@dataclass(frozen=True)
class Schedule:
    """Which rows each client of a chunk uses in each step.

    Attributes:
        positions: [n, s, b] row positions within the client; s = 1 when every step uses the same batch.
        weights: [n, s, b] 1/|batch| on real rows, 0 on padding, so that a weighted sum of losses is the client's own mean loss.
        steps: [n] how many steps each client takes.
        most: the number of steps that the chunk computes, a public bound on `steps`; None for the largest of `steps`.
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
        """Whether clients may finish at different steps."""
        return self.most is not None or bool((self.steps != self.steps[0]).any())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        at = 0 if self.positions.shape[1] == 1 else step
        return self.positions[:, at], self.weights[:, at]

    def part(self, at: slice) -> Schedule:
        return Schedule(self.positions[at], self.weights[at], self.steps[at], self.most)


def size_class(sizes: Tensor, most: int | None = None) -> Tensor:
    """The number of rows to which clients of these sizes may be padded: the next power of two, and at most `most`."""
    rounded = (2.0 ** sizes.clamp_min(1).double().log2().ceil()).long() * (sizes > 0)
    return rounded if most is None else rounded.clamp_max(most)


def schedule(
    local: LocalOptimizer,
    sizes: Tensor,
    generator_of: Callable[[int], np.random.Generator],
    *,
    public: bool = False,
    by_class: bool = False,
) -> Schedule:
    """Draw the batches of a chunk of non-empty clients that hold `sizes` rows.

    Padding repeats a row of the client: it has weight 0, and its loss is finite whenever the client's own is. A client's shuffles
    are drawn from its own generator, `generator_of(index)`, one client after the other.

    Args:
        public: whether shapes follow from `local` alone, so that nothing about one client's batches depends on how many rows
            other clients hold.
        by_class: whether they follow from `local` and the clients' `size_class`, which must be the same for all of them.
    """
    steps, used = local.step_count(sizes), local.used(sizes)
    largest = local.max_examples if public else int(used.max())
    if public and by_class and largest is not None:
        largest, *others = size_class(used, largest).unique().tolist()
        require(not others, "clients of different size classes can't be in one chunk of an isolated run.")
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
        # Rows that fit into one batch keep their order, as in the branch above: a client's batches must not depend on which of the
        # two branches the sizes of other clients select.
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
    """The local rate over rounds, as a share of `lr`: a linear warm-up of `warm_up` rounds, then constant.

    >>> [RateSchedule(warm_up=2).share(round) for round in (1, 2, 3)]
    [0.5, 1.0, 1.0]

    Attributes:
        warm_up: rounds until the rate is `lr`; 0 for no warm-up.
    """

    warm_up: int = 0

    def __post_init__(self) -> None:
        known = is_count(self.warm_up) or self.warm_up == 0
        require(known, f"schedule warm_up is {self.warm_up!r}; it must be a whole number of rounds, or 0.")

    def share(self, round: int) -> float:
        """The factor on `lr` in a round; rounds are counted from 1."""
        return round / self.warm_up if round <= self.warm_up else self.after(round - self.warm_up)

    def after(self, round: int) -> float:
        """The factor on `lr` in a round after the warm-up; the first one is round 1."""
        return 1.0


@checked
@dataclass(frozen=True)
class CosineRate(RateSchedule):
    """Cosine decay from `lr` in the first round to `final_share`·lr, which is reached after `rounds` rounds.

    >>> [round(CosineRate(rounds=4).share(number), 3) for number in (1, 3, 5, 9)]
    [1.0, 0.5, 0.0, 0.0]

    Attributes:
        warm_up: rounds before the decay in which the rate rises to `lr`.
        rounds: how many rounds the decay takes; usually the run's rounds minus the warm-up.
        final_share: the share of `lr` at the end.
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
    """Step decay: the rate is multiplied by `factor` after every `every` rounds.

    >>> [StepRate(every=2, factor=0.5).share(round) for round in (1, 2, 3, 5)]
    [1.0, 1.0, 0.5, 0.25]

    Attributes:
        warm_up: rounds before the decay in which the rate rises to `lr`.
        every: rounds with the same rate.
        factor: from each rate to the next.
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
"""An optimizer's state of one parameter, by name, kept from step to step; each tensor has the parameter's shape, [n, …]."""
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
    """The position of a chunk's clients within their round, on their device. Optimizers read it; only the trainer changes it.

    Attributes:
        step: how many steps were taken before this one: a float64 scalar tensor, so that it can be part of a CUDA graph and does
            not change the type of a tensor that is multiplied with it.
        steps: τ of every client, [n].
    """

    step: Tensor
    steps: Tensor


def as_rows(values: Tensor, like: Tensor) -> Tensor:
    """View one value per client, [n], in a shape that broadcasts with `like`, [n, …]."""
    return values.view(-1, *[1] * (like.dim() - 1))


@checked
@dataclass(frozen=True)
class LocalOptimizer:
    """A local optimizer: the number of local steps, their batches, and the direction of a step.

    A new optimizer is one frozen dataclass that inherits from this class and defines `direction`. All trainers and the Flower
    clients accept it; an entry in `OPTIMIZERS` gives it a name in configuration files.

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
        lr: η_l, the local rate; "auto" lets the clients' votes choose it (central DP, or simulations without privacy).
        steps: local steps of a round; pass this or `epochs`.
        epochs: passes over the client's rows; pass this or `steps`.
        batch_size: rows of one step; None for all of them.
        proximal: μ of FedProx (Li et al. 2020), whose proximal term μ(w − w⁽ᵗ⁾) is added to every gradient.
        max_examples: a public bound on the rows of a client: a client that holds more trains each round on a sample of that many,
            drawn from its own stream. The number of rows is private, so a secure run can put many clients into one tensor program
            only with this bound; without it, and without `steps` and `batch_size`, it takes 512.
        clip_gradient: a bound on the norm of a client's gradient in every step, over all parameters together, proximal term and
            correction included; None for no bound. The privacy guarantee does not use it; its clip is the algorithm's.
        schedule: how the rate changes over rounds, such as `CosineRate(rounds=50)`; None for a constant rate.
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
        """Raise `InputError` if a setting is out of range; a subclass with more fields calls this method and checks its own."""
        if self.lr != "auto":
            _check("local lr", self.lr, lambda x: 0 < x < math.inf, "a positive number or 'auto'")
        lengths = f"local steps is {self.steps} and epochs is {self.epochs}"
        require((self.steps is None) != (self.epochs is None), f"{lengths}; pass exactly one of them.")
        for name in ("steps", "epochs", "batch_size", "max_examples"):
            value = getattr(self, name)
            require(value is None or is_count(value), f"local {name} is {value!r}; it must be a positive whole number.")
        _check("local proximal", self.proximal, lambda x: x >= 0, "a non-negative number")
        if (bound := self.clip_gradient) is not None:
            _check("local clip_gradient", bound, lambda x: 0 < x < math.inf, "a positive number, or None for no bound")
        kind = type(self.schedule).__name__
        known = self.schedule is None or isinstance(self.schedule, RateSchedule)
        require(known, f"local schedule is a {kind}; it must be a schedule such as CosineRate(rounds=50).")
        clash = self.automatic and self.schedule is not None
        require(not clash, "local lr is 'auto' with a schedule; give a number for lr, or no schedule.")

    def used(self, sizes: Tensor) -> Tensor:
        """The number of examples that clients of these sizes train on in a round."""
        return sizes if self.max_examples is None else sizes.clamp_max(self.max_examples)

    def step_count(self, sizes: Tensor) -> Tensor:
        """τ, the number of local steps, for clients of these sizes."""
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
        """η_l as a number; raises `InputError` where it is "auto"."""
        if isinstance(self.lr, str):
            raise InputError("local lr is 'auto', which only a run can choose; give a number here, such as lr=0.1.")
        return self.lr

    def at(self, rate: float) -> Self:
        return replace(self, lr=rate)

    def in_round(self, round: int) -> Self:
        """The same optimizer with the rate of a round and without a schedule; rounds are counted from 1."""
        if self.schedule is None:
            return self
        # A schedule may end at zero, which is not a valid rate: the smallest positive number replaces it.
        rate = max(self.rate * self.schedule.share(round), torch.finfo(torch.float32).tiny)
        return replace(self, lr=rate, schedule=None)

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The names of the moments that `direction` gets for every parameter; all are zero at the start of every round."""
        return ()

    @property
    def needs_all_gradients(self) -> bool:
        """Whether `combine_gradients` needs the gradients of all parameters before any of them moves."""
        return self.clip_gradient is not None

    def combine_gradients(self, gradients: Params) -> Params:
        """Return the gradients of all parameters as `direction` gets them; the arguments must not be changed in place.

        Called only if `needs_all_gradients`.
        """
        if self.clip_gradient is None:
            return gradients
        norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients.values()]
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
        factor = (self.clip_gradient / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp_max(1.0)
        return {name: gradient * as_rows(factor, gradient) for name, gradient in gradients.items()}

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        """Compute the direction of a step. The trainer then computes w ← w − η_l·direction.

        A client's row may depend on its own rows of the arguments only. No shape and no branch may depend on a tensor's values,
        because on a GPU the operations are recorded once and replayed.

        Args:
            w: one parameter of n clients, [n, …].
            gradient: of the client's loss on this step's batch, with proximal term and correction, [n, …]; not to be changed in
                place. It has w's type where moments are kept; otherwise it may be bf16 in a bf16 run.
            moments: of this parameter, by `moment_names`; to be changed in place.
            clock: the position of the clients within the round.

        Returns:
            The direction, [n, …]; it may be one of the arguments.
        """
        name = type(self).__name__
        raise InputError(f"the local optimizer {name} has no method direction(w, gradient, moments, clock); define it.")

    def tau_eta_l(self, tau: Count) -> Count:
        """τη_l: how far τ steps move a client along a constant gradient, per unit of that gradient.

        DP-SCAFFOLD divides an update by it to get the client's mean gradient, and refuses an optimizer that has no such number.
        `tau` is a number of steps or a tensor of them.
        """
        raise InputError(_no_tau_eta_l(type(self).__name__) + "use Sgd.")


def _no_tau_eta_l(what: str) -> str:
    return f"dp_scaffold divides updates by the local rate times the local steps, which {what} does not have; "


@checked(hints=OPTIMIZER_HINTS)
@dataclass(frozen=True)
class Sgd(LocalOptimizer):
    """Gradient steps: `steps` of them, or `epochs` passes; full batch unless `batch_size` says otherwise.

    With the fields below it takes the steps of `torch.optim.SGD`. Momentum is reset at the start of every round.

    >>> Sgd(lr=0.1, steps=10, momentum=0.9).momentum
    0.9

    Attributes:
        momentum: the factor on the last step's direction in the next direction; 0 for no momentum.
        nesterov: whether to use Nesterov momentum.
        weight_decay: λ; λ·w is added to the gradient of every step.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("local momentum", self.momentum, lambda x: 0 <= x < 1, "a number in [0, 1)")
        lacks = self.nesterov and not self.momentum
        require(not lacks, "local nesterov is True without momentum; give momentum too, such as momentum=0.9.")
        _check("local weight_decay", self.weight_decay, lambda x: 0 <= x < math.inf, "a non-negative number")

    @property
    def moment_names(self) -> tuple[str, ...]:
        return ("v",) if self.momentum else ()

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * w
        if not self.momentum:
            return gradient
        v = moments["v"].mul_(self.momentum).add_(gradient)
        return gradient + self.momentum * v if self.nesterov else v

    def tau_eta_l(self, tau: Count) -> Count:
        for name in ("momentum", "weight_decay", "clip_gradient", "schedule"):
            require(not getattr(self, name), _no_tau_eta_l(f"Sgd with {name}") + f"leave {name} out.")
        return tau * self.rate


@checked(hints=OPTIMIZER_HINTS)
@dataclass(frozen=True)
class AdamW(LocalOptimizer):
    """The steps of `torch.optim.AdamW`, with decoupled weight decay. Its moments are reset at the start of every round.

    >>> AdamW(lr=0.001, steps=10).weight_decay
    0.01

    Attributes:
        beta1: the decay of the mean of gradients.
        beta2: the decay of the mean of squared gradients.
        eps: added to the denominator, the root of the mean of squared gradients.
        weight_decay: λ; λ·w is added to the direction of every step.
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
        # clock.step is a float64 scalar tensor, so the moments keep their own type.
        one, two = (1 - beta ** (clock.step + 1) for beta in (self.beta1, self.beta2))
        way = (m / one) / ((v / two).sqrt() + self.eps)
        return way + self.weight_decay * w if self.weight_decay else way


OPTIMIZERS: dict[str, type[LocalOptimizer]] = {"sgd": Sgd, "adamw": AdamW}
"""The local optimizers by the names that configuration files use."""
