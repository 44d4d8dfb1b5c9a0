"""The local rate over rounds: public, because it follows from the number of the round alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfedexp.errors import checked, is_count, is_number, require


@checked
@dataclass(frozen=True)
class RateSchedule:
    """The local rate over rounds, as a share of `lr`: all of it, after `warm_up` rounds of a straight rise to it.

    The rate of a round follows from its number alone, so it is public. `CosineRate` and `StepRate` fall afterwards.

    >>> [RateSchedule(warm_up=2).share(round) for round in (1, 2, 3)]
    [0.5, 1.0, 1.0]

    Attributes:
        warm_up: rounds until the rate is `lr`; 0 for none.
    """

    warm_up: int = 0

    def __post_init__(self) -> None:
        """Raises `InputError` where a field is out of range."""
        require(
            is_count(self.warm_up) or self.warm_up == 0,
            f"schedule warm_up is {self.warm_up!r}; it must be a whole number of rounds, or 0.",
        )

    def share(self, round: int) -> float:
        """What `lr` is multiplied with in a round, which are counted from 1."""
        if round <= self.warm_up:
            return round / self.warm_up
        return self.after(round - self.warm_up)

    def after(self, round: int) -> float:
        """The same, by the number of the round after the warm-up."""
        return 1.0


@checked
@dataclass(frozen=True)
class CosineRate(RateSchedule):
    """Falls along half a cosine from `lr` in the first round towards `floor`·lr, which it has after `rounds` rounds.

    >>> [round(CosineRate(rounds=4).share(number), 3) for number in (1, 3, 5, 9)]
    [1.0, 0.5, 0.0, 0.0]

    Attributes:
        warm_up: rounds before it in which the rate rises to `lr`.
        rounds: how many rounds the fall takes; usually the run's less the warm-up.
        floor: the share of `lr` that stays.
    """

    rounds: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(is_count(self.rounds), f"schedule rounds is {self.rounds!r}; say over how many rounds the rate falls.")
        _check_share("floor", self.floor, zero=True)

    def after(self, round: int) -> float:
        way = min(round - 1, self.rounds) / self.rounds
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * way))


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
        require(is_count(self.every), f"schedule every is {self.every!r}; say for how many rounds the rate stays.")
        _check_share("factor", self.factor)

    def after(self, round: int) -> float:
        return float(self.factor ** ((round - 1) // self.every))


def _check_share(name: str, value: object, *, zero: bool = False) -> None:
    low = "from 0" if zero else "above 0"
    right = is_number(value) and (0 <= value <= 1 if zero else 0 < value <= 1)  # type: ignore[operator]
    require(right, f"schedule {name} is {value!r}; it must be a number {low} and at most 1.")


SCHEDULES: dict[str, type[RateSchedule]] = {"constant": RateSchedule, "cosine": CosineRate, "step": StepRate}
"""The schedules by the names that configuration files use."""
