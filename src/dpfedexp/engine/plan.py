"""Plans: the noise of a run compared with the largest possible signal, from public numbers alone.

The clients' mean update is at most as long as the clip C, when all of them send the same update. Its noise has norm zC√d/(qM) in
central DP and zC√d/√(qM) in local DP; the mechanism says which. Over T rounds the updates add up to at most T·C, and independent
noises to √T times one of them. So the largest possible signal over noise is `best_signal` = √T·C/noise. Below 1, the model moves
farther by noise than by the clients' updates. Models tolerate that to a degree, because noise goes in all d directions and a
signal in few. Far below 1, even identical updates of all clients in every round can't be told from noise (`is_detectable`). At one
ε the noise of a round grows like √T, so these numbers depend on ε, d and M and hardly on the number of rounds.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal, Self

from scipy.special import chdtrc

from dpfedexp.accounting import Event, Sampling, compose
from dpfedexp.algorithms import Algorithm, dp_fedavg
from dpfedexp.algorithms.round import Full, Participation, Poisson
from dpfedexp.errors import checked, is_count, require
from dpfedexp.mechanisms import Mechanism, Secure

Level = Literal["note", "warning"]


@checked
@dataclass(frozen=True)
class Advice:
    """A message about a run, with its level and code.

    Formal guarantee: it is computed from public numbers and released values alone, so it may be shown and written anywhere.

    Args:
        level: "warning" where the run is likely to fail or to give little privacy, "note" otherwise.
        code: the identifier of the message in `docs/advice.md`.
        sentence: the finding, and what to do about it.
    """

    level: Level
    code: str
    sentence: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def number(value: float) -> str:
    """Format a number with two digits below 100 and whole above: 1,234 or 12 or 0.034.

    >>> number(1234.5), number(12.34), number(0.0337)
    ('1,234', '12', '0.034')
    """
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.2g}"


def about(value: float) -> str:
    """Round a number to two significant digits.

    >>> about(36_573_198), about(334), about(6.2)
    ('37,000,000', '330', '6.2')
    """
    return f"{float(f'{value:.2g}'):,.0f}" if abs(value) >= 9.95 else f"{value:.2g}"


def log(logger: logging.Logger, advice: Advice) -> None:
    logger.log(logging.WARNING if advice.level == "warning" else logging.INFO, "%s", advice.sentence)


LEVEL = 0.01
"""False positive rate of the tests: noise alone is taken for a signal once in a hundred runs."""
DEVIATIONS = 2.326
"""A standard normal number exceeds this value with probability `LEVEL`."""


def is_longer_than_noise(squares: Sequence[float], variances: Sequence[float], dimension: int) -> bool:
    """Whether updates are longer than noise alone. For noise alone, Σ‖c̄_t‖²/v_t of T rounds is χ² with dT degrees of freedom.

    `squares` are ‖c̄_t‖²; `variances` are v_t, the variance of the noise in one coordinate.

    >>> is_longer_than_noise([100.0, 100.0], [1.0, 1.0], 100), is_longer_than_noise([200.0], [1.0], 100)
    (False, True)
    """
    total = sum(square / variance for square, variance in zip(squares, variances, strict=True))
    return not float(chdtrc(dimension * len(squares), total)) > LEVEL


def alignment(moves: Sequence[float], traveled: float, dimension: int) -> float:
    """How far the moves of T rounds agree in direction, in standard deviations from independent random directions.

    Moves of lengths a_t in independent uniform directions end at a squared distance with mean Σa² and variance 2((Σa²)² − Σa⁴)/d.
    Moves in the same direction end farther away, moves that undo each other nearer. A constant signal adds up over rounds
    while noise averages out, so this test finds signals that no single round shows. It does not need the noise variance.

    >>> alignment([1.0] * 9, 3.0, 50)
    0.0
    >>> alignment([1.0] * 9, 9.0, 50) > 30
    True
    """
    squares = [move**2 for move in moves]
    total = sum(squares)
    spread = math.sqrt(max(2 * (total**2 - sum(square**2 for square in squares)) / dimension, 0.0))
    return (traveled**2 - total) / spread if spread > 0 else 0.0


def is_detectable(signal: float, dimension: int) -> bool:
    """Whether `alignment` would tell a model that moves by the same vector in every round from one that only noise moves.

    Updates of length s and noise of norm n end at the squared distance T²s² + Tn² after T rounds, noise alone at Tn² with a
    deviation of Tn²·√(2/d). So the updates add signal²·√(d/2) deviations, with signal = √T·s/n; `DEVIATIONS` are enough.
    """
    return signal**2 * math.sqrt(dimension / 2) >= DEVIATIONS


EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
ROUNDS = (20, 50, 100, 200)
RATES = (0.1, 0.01)
SAMPLED_COHORT = 1000
"""Smallest cohort for which advice and plans suggest sampling: shares of 1000 clients are known to 3%."""

Verdict = Literal["clear", "noisy rounds", "mostly noise", "no signal"]


@checked
def default_delta(population: int) -> float:
    """The default δ of a run: a tenth of 1/M, and at most 10⁻⁵.

    δ must be well below 1/M: a mechanism that publishes the data of one random client has δ = 1/M and ε = 0. M is the public number
    of clients.

    >>> default_delta(1000), default_delta(50_000)
    (1e-05, 2e-06)
    """
    require(is_count(population), f"population is {population!r}; it must be a positive whole number.")
    return min(1e-5, 0.1 / population)


@checked
@dataclass(frozen=True)
class Plan:
    """The plan of a run, from public numbers alone: M clients are declared (`population`), qM are in a round (`cohort`)."""

    algorithm: Algorithm
    mechanism: Mechanism
    sampling: Sampling
    population: int
    cohort: float
    dimension: int
    rounds: int

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        participation: Participation,
        population: int,
        dimension: int,
        rounds: int,
        secure: Secure = False,
        mechanism: Mechanism | None = None,
    ) -> Self:
        """The plan of an algorithm. Without a `mechanism`, calibrating the noise of sampled rounds takes seconds."""
        for name, count in (("population", population), ("dimension", dimension), ("rounds", rounds)):
            require(is_count(count), f"{name} is {count!r}; it must be a positive whole number.")
        sampling, cohort = participation.sampling(population), participation.expected(population)
        mechanism = mechanism or algorithm.bind(dimension, cohort, sampling, rounds, secure)
        return cls(algorithm, mechanism, sampling, population, cohort, dimension, rounds)

    @cached_property
    def noise_share(self) -> float | None:
        """The norm of the noise in a round's mean, divided by the clip; None where the mechanism does not know it."""
        return self.mechanism.noise_share(self.dimension, self.cohort)

    @property
    def best_signal(self) -> float | None:
        """Signal over noise of all rounds together if all clients send the same update at the clip; None where unknown."""
        share = self.noise_share
        return None if share is None else math.sqrt(self.rounds) / share if share > 0 else math.inf

    @property
    def clients_needed(self) -> int | None:
        """The number of clients for a `best_signal` of 1 at this ε, δ, sampling rate and dimension; None where unknown."""
        best = self.best_signal
        if best is None or best == math.inf:
            return None
        # In the mean, noise on the sum shrinks as 1/M, and noise on each report as 1/√M.
        return max(1, math.ceil(self.population / best ** (2 if self.mechanism.is_local else 1)))

    @property
    def noise_multiplier(self) -> float | None:
        return getattr(self.mechanism, "noise_multiplier", None)

    @cached_property
    def epsilon(self) -> float:
        if self.algorithm.target_epsilon is not None and self.algorithm.target_per == "total":
            return self.algorithm.target_epsilon
        return self._epsilon_of(self.mechanism.event(self.sampling))

    def epsilon_for_signal(self) -> float | None:
        """The ε at which `best_signal` would be 1; None for a mechanism without a noise multiplier."""
        z, best = self.noise_multiplier, self.best_signal
        if z is None or best is None:
            return None
        quieter = replace(self.algorithm, noise_multiplier=z * best, target_epsilon=None)
        mechanism = quieter.bind(self.dimension, self.cohort, self.sampling, self.rounds)
        return self._epsilon_of(mechanism.event(self.sampling))

    def _epsilon_of(self, event: Event) -> float:
        return compose([(event, self.rounds)], self.algorithm.delta).epsilon

    @property
    def verdict(self) -> Verdict | None:
        """The plan in two words; None where the mechanism does not know its noise."""
        if self.noise_share is None or self.best_signal is None:
            return None
        if self.best_signal < 1:
            return "mostly noise" if is_detectable(self.best_signal, self.dimension) else "no signal"
        return "noisy rounds" if self.noise_share > 1 else "clear"


@checked
def sampling_rates(population: int) -> list[float]:
    """Sensible sampling rates: 1, and the `RATES` that give at least `SAMPLED_COHORT` clients in a round."""
    return [1.0, *(rate for rate in RATES if rate * population >= SAMPLED_COHORT)]


@checked
def plans(
    population: int,
    dimension: int,
    *,
    delta: float,
    mechanism: str = "central-gaussian",
    epsilons: Sequence[float] = EPSILONS,
    rounds: Sequence[int] = ROUNDS,
    rates: Sequence[float] = (1.0,),
) -> Iterator[Plan]:
    """Yield a plan for each sampling rate, ε of all rounds together and number of rounds, in this order.

    The clip does not matter, because noise and signal are in its units.
    """
    for name, values in (("epsilon", epsilons), ("rounds", rounds), ("rate", rates)):
        require(len(values) > 0, f"{name} is empty; give at least one value.")
    for rate in rates:
        participation: Participation = Full() if rate == 1 else Poisson(rate)
        for epsilon in epsilons:
            algorithm = dp_fedavg(clip=1.0, mechanism=mechanism, target_epsilon=epsilon, delta=delta)
            for count in rounds:
                yield Plan.of(algorithm, participation, population, dimension, count)
