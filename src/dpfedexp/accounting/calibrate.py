"""Calibration: from a target ε to noise, rounds, or the ε of one report. Results never exceed the target.

`epsilon`, `noise` and `rounds` use the accountant without a run. The noise multiplier z is the standard deviation of the noise on
the sum of clipped updates, divided by the clip, as in Opacus, pfl and TensorFlow Privacy. Their ε is for adjacency "add-remove".
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import ADJACENCIES, Adjacency, Event, GaussianEvent, Sampling, central_gaussian
from dpfedexp.errors import checked, is_count, is_number, require

SamplingKind = Literal["poisson", "fixed"]

_LEAST_NOISE, _MOST_NOISE = 1e-9, 1e12
_MOST_ROUNDS = 2**40


@checked
def calibrate_noise(
    make_event: Callable[[float], Event],
    *,
    target_epsilon: float,
    delta: float,
    rounds: int,
    one_time: Callable[[float], Sequence[Event]] | None = None,
) -> float:
    """Find the smallest noise multiplier z for which the run costs at most `target_epsilon` at `delta`.

    Args:
        make_event: function from z to the event of one round.
        target_epsilon: the largest ε of the whole run.
        delta: δ of `target_epsilon`.
        rounds: the number of rounds.
        one_time: function from z to the events that the run releases once, beside its rounds; None for none.
    """
    _check(target_epsilon, delta, rounds)
    require(delta > 0.0, f"delta is {delta}; Gaussian noise needs a delta above 0.")

    def epsilon(z: float) -> float:
        once = () if one_time is None else Counter(one_time(z)).items()
        return compose([(make_event(z), rounds), *once], delta).epsilon

    asked = f"target_epsilon is {target_epsilon:g} over {rounds} rounds at delta {delta:g}"
    low = high = 1.0
    while epsilon(high) > target_epsilon:
        low, high = high, high * 4.0
        require(
            high <= _MOST_NOISE, f"{asked}; no noise multiplier up to {_MOST_NOISE:g} reaches it. Raise target_epsilon."
        )
    while low == high or epsilon(low) <= target_epsilon:
        low, high = low / 4.0, low
        require(
            low >= _LEAST_NOISE,
            f"{asked}; even a noise multiplier of {_LEAST_NOISE:g} costs less. Lower target_epsilon.",
        )
    return math.exp(_root(lambda x: epsilon(math.exp(x)), target_epsilon, math.log(low), math.log(high)))


@checked
def affordable_rounds(event: Event, target_epsilon: float, delta: float) -> int:
    """Find the largest number of rounds of `event` that costs at most `target_epsilon` at `delta`; 0 if one round costs more."""
    _check(target_epsilon, delta, 1)

    def fits(rounds: int) -> bool:
        return compose([(event, rounds)], delta).epsilon <= target_epsilon

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, high * 2
        require(
            high <= _MOST_ROUNDS, f"target_epsilon is {target_epsilon:g}; more than {low} rounds fit in it. Lower it."
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@checked
def calibrate_privunit(
    make_event: Callable[[float], Event], *, target_epsilon: float, delta: float = 0.0, rounds: int = 1
) -> float:
    """Find the largest ε of one report for which `rounds` reports, each charged as `make_event(ε)`, cost at most the target.

    By default the target is the pure ε of one round; with `rounds` and `delta` it is the ε of all rounds, tightly composed.
    """
    _check(target_epsilon, delta, rounds)

    def epsilon(one: float) -> float:
        return compose([(make_event(one), rounds)], delta).epsilon

    low = target_epsilon / rounds
    while low > 1e-9 and epsilon(low) > target_epsilon:
        low /= 2.0
    require(
        epsilon(low) <= target_epsilon,
        f"target_epsilon is {target_epsilon:g} over {rounds} rounds; no report is private enough for it. Raise it.",
    )
    high = 1.5 * low
    while epsilon(high) <= target_epsilon:
        low, high = high, 1.5 * high
        require(
            high < 1e6,
            f"target_epsilon is {target_epsilon:g}; even a report of ε = 10⁶ is not too costly for it. Lower it.",
        )
    return -_root(lambda x: epsilon(-x), target_epsilon, -high, -low)


def _root(epsilon: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Find the smallest x in [low, high] with epsilon(x) ≤ target, to 1e-9, for a decreasing `epsilon`; never below the exact x."""
    from scipy.optimize import brentq

    def excess(x: float) -> float:
        return math.log(max(epsilon(x), 1e-300)) - math.log(target)

    step = 1e-9 / 4.0
    x = float(brentq(excess, low, high, xtol=step, rtol=1e-14))
    while epsilon(x) > target:
        x, step = min(high, x + step), 2.0 * step
    return x


def _check(target_epsilon: float, delta: float, rounds: int) -> None:
    require(0.0 < target_epsilon < math.inf, f"target_epsilon is {target_epsilon}; it must be a finite number above 0.")
    require(0.0 <= delta < 1.0, f"delta is {delta}; it must be at least 0 and below 1.")
    require(rounds >= 1, f"rounds is {rounds}; it must be 1 or more.")


@checked
def epsilon(
    noise_multiplier: float,
    rounds: int,
    delta: float,
    *,
    sampling_rate: float = 1.0,
    sampling: SamplingKind = "poisson",
    adjacency: Adjacency = "replace-one",
) -> float:
    """Compute the total ε of `rounds` rounds of Gaussian noise.

    Formal guarantee: the ε at `delta` of Gaussian sums under adaptive composition; exact with full participation, an upper bound
    with sampling.

    Args:
        noise_multiplier: z.
        rounds: the number of sums that are released.
        delta: δ of the returned ε.
        sampling_rate: the expected share of the clients in a round.
        sampling: "poisson" (every client independently) or "fixed" (a fixed number of clients).
        adjacency: "replace-one" hides the data of a client, "add-remove" whether it takes part.

    Example:
        >>> from dpfedexp.accounting import epsilon
        >>> round(epsilon(5.0, rounds=50, delta=1e-5), 2)
        15.46
    """
    event = _event(noise_multiplier, sampling_rate, sampling, adjacency)
    require(is_count(rounds), f"rounds is {rounds!r}; it must be a positive whole number.")
    return compose([(event, rounds)], delta).epsilon


@checked
def noise(
    epsilon: float,
    rounds: int,
    delta: float,
    *,
    sampling_rate: float = 1.0,
    sampling: SamplingKind = "poisson",
    adjacency: Adjacency = "replace-one",
) -> float:
    """Compute the smallest noise multiplier with which the rounds cost at most ε.

    Formal guarantee: by the accountant's own figure the rounds cost no more than `epsilon`.

    Args:
        epsilon: the largest ε of all rounds together. The other arguments are those of the function `epsilon`.

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
    sampling: SamplingKind = "poisson",
    adjacency: Adjacency = "replace-one",
) -> int:
    """Compute how many rounds cost at most ε; 0 if one round is too expensive.

    Formal guarantee: by the accountant, this number of rounds costs at most `epsilon`, and one more costs more.

    Args:
        epsilon: the largest ε of all rounds together. The other arguments are those of the function `epsilon`.

    Example:
        >>> from dpfedexp.accounting import rounds
        >>> rounds(8.0, noise_multiplier=5.0, delta=1e-5)
        17
    """
    return affordable_rounds(_event(noise_multiplier, sampling_rate, sampling, adjacency), epsilon, delta)


def _event(noise_multiplier: float, rate: float, sampling: SamplingKind, adjacency: Adjacency) -> GaussianEvent:
    require(
        is_number(noise_multiplier) and 0 < noise_multiplier < math.inf,
        f"noise_multiplier is {noise_multiplier!r}; it must be a positive number.",
    )
    require(adjacency in ADJACENCIES, f"adjacency is {adjacency!r}; it must be 'replace-one' or 'add-remove'.")
    require(is_number(rate) and 0 < rate <= 1, f"sampling_rate is {rate!r}; it must be above 0 and at most 1.")
    return central_gaussian(noise_multiplier, adjacency, Sampling() if rate == 1 else Sampling(sampling, rate))
