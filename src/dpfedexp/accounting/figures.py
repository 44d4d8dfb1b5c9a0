"""The accountant on its own, for rounds of Gaussian noise from whatever framework.

The noise multiplier z is the standard deviation of the noise on the sum of clipped updates over the clip, as in Opacus, pfl and
TensorFlow Privacy. Their figures are those for adjacency "add-remove"; replacing a client, which is the default here, moves the sum
by twice as much.
"""

from __future__ import annotations

from typing import Literal

from dpfedexp.accounting.calibrate import affordable_rounds, calibrate_noise
from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import GaussianEvent, Sampling
from dpfedexp.accounting.events.charges import central_gaussian
from dpfedexp.accounting.events.gaussian import Adjacency
from dpfedexp.errors import checked, is_count, is_number, require

Drawn = Literal["poisson", "fixed"]


@checked
def epsilon(
    noise_multiplier: float,
    rounds: int,
    delta: float,
    *,
    sampling_rate: float = 1.0,
    sampling: Drawn = "poisson",
    adjacency: Adjacency = "replace-one",
) -> float:
    """What so many rounds cost together.

    Formal guarantee: the ε at `delta` of Gaussian sums, each chosen after the ones before; exact where everybody takes part, and an
    upper bound where clients are drawn.

    Args:
        noise_multiplier: z.
        rounds: how many sums are released.
        delta: δ.
        sampling_rate: the share of the clients that takes part in a round, drawn anew.
        sampling: how they are drawn: each by itself ("poisson"), or a fixed number.
        adjacency: "replace-one" hides what a client holds, "add-remove" that it takes part at all.

    Example:
        >>> from dpfedexp.accounting import epsilon
        >>> round(epsilon(5.0, rounds=50, delta=1e-5), 2)
        15.46
    """
    return compose([(_event(noise_multiplier, sampling_rate, sampling, adjacency), _count(rounds))], delta).epsilon


@checked
def noise(
    epsilon: float,
    rounds: int,
    delta: float,
    *,
    sampling_rate: float = 1.0,
    sampling: Drawn = "poisson",
    adjacency: Adjacency = "replace-one",
) -> float:
    """The least noise multiplier with which so many rounds cost at most ε.

    Formal guarantee: by the accountant's own figure the rounds cost no more than `epsilon`.

    Args:
        epsilon: what all rounds together may cost.
        rounds: how many sums are released.
        delta: δ.
        sampling_rate: the share of the clients that takes part in a round, drawn anew.
        sampling: how they are drawn: each by itself ("poisson"), or a fixed number.
        adjacency: "replace-one" hides what a client holds, "add-remove" that it takes part at all.

    Example:
        >>> from dpfedexp.accounting import noise
        >>> round(noise(8.0, rounds=50, delta=1e-5), 2)
        8.49
    """
    return calibrate_noise(
        lambda z: _event(z, sampling_rate, sampling, adjacency), target_epsilon=epsilon, delta=delta, rounds=rounds
    )


@checked
def rounds(
    epsilon: float,
    noise_multiplier: float,
    delta: float,
    *,
    sampling_rate: float = 1.0,
    sampling: Drawn = "poisson",
    adjacency: Adjacency = "replace-one",
) -> int:
    """How many rounds cost at most ε; 0 where one is too many.

    Formal guarantee: by the accountant's own figure so many rounds cost no more than `epsilon`, and one more would.

    Args:
        epsilon: what all rounds together may cost.
        noise_multiplier: z.
        delta: δ.
        sampling_rate: the share of the clients that takes part in a round, drawn anew.
        sampling: how they are drawn: each by itself ("poisson"), or a fixed number.
        adjacency: "replace-one" hides what a client holds, "add-remove" that it takes part at all.

    Example:
        >>> from dpfedexp.accounting import rounds
        >>> rounds(8.0, noise_multiplier=5.0, delta=1e-5)
        17
    """
    return affordable_rounds(_event(noise_multiplier, sampling_rate, sampling, adjacency), epsilon, delta)


def _event(noise_multiplier: float, rate: float, sampling: Drawn, adjacency: Adjacency) -> GaussianEvent:
    require(
        is_number(noise_multiplier) and 0 < noise_multiplier < float("inf"),
        f"noise_multiplier is {noise_multiplier!r}; it must be a positive number.",
    )
    require(
        adjacency in ("replace-one", "add-remove"),
        f"adjacency is {adjacency!r}; it must be 'replace-one' or 'add-remove'.",
    )
    require(is_number(rate) and 0 < rate <= 1, f"sampling_rate is {rate!r}; it must be above 0 and at most 1.")
    return central_gaussian(noise_multiplier, adjacency, Sampling() if rate == 1 else Sampling(sampling, rate))


def _count(rounds: int) -> int:
    require(is_count(rounds), f"rounds is {rounds!r}; it must be a positive whole number.")
    return rounds
