"""A round of any algorithm, in a simulator and a deployment alike: who takes part, how many clients the public is told there are,
and what follows the release: the step size, the server's move, the next clip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from dpfedexp.accounting.events import Adjacency, Sampling
from dpfedexp.algorithms import Algorithm
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.noise import ChaChaNoise, KeyedNoise
from dpfedexp.core.step_size import Memory, Moments, next_step
from dpfedexp.errors import InputError, checked, is_count, is_number, require
from dpfedexp.mechanisms import Release

Draws = KeyedNoise | ChaChaNoise
"""Where the choice comes from: the run's seed, or the operating system."""


class Participation(Protocol):
    """`sampling` and `expected` are asked with the public population, `cohort` with the number of clients that are there."""

    def sampling(self, clients: int) -> Sampling:
        """What the accountant is told."""
        ...

    def expected(self, clients: int) -> float:
        """The public cohort size that sums are divided by."""
        ...

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        """The clients of one round, sorted."""
        ...


def public_population(adjacency: Adjacency, participation: Participation, present: int) -> int:
    """The number of clients that denominators, sampling rates and accounting are made from.

    Formal guarantee: it is the same for all neighbors. Under replace-one they have equally many clients, so it is the number of
    those present. Under add-remove that number is what the guarantee hides: a divisor counted from the data would move the whole
    mean when one client comes or goes. There `participation` declares it, and the federation may hold more or fewer.
    """
    population = getattr(participation, "population", None)
    if population is not None:
        require(is_count(population), f"population is {population!r}; it must be a positive whole number.")
    if adjacency == "replace-one":
        require(
            population is None or population == present,
            f"population is {population}, but the federation has {present} clients; under replace-one adjacency it must be "
            "that number, or be left out.",
        )
        return present
    if population is None:
        raise InputError(
            "population is missing: under add-remove adjacency the number of clients is private, so sums are divided by a number "
            "that is declared and not counted; write participation=Full(population=1000), say, or population = 1000 under "
            "[participation]."
        )
    # With one more client, another would be left out, which is not the full round that is charged.
    require(
        not isinstance(participation, FixedSize) or participation.count < population,
        f"participation is a fixed cohort of {getattr(participation, 'count', 0)} of {population} clients under add-remove "
        "adjacency; it must be smaller than the population; or use Full().",
    )
    return int(population)


@checked
@dataclass(frozen=True)
class Full:
    """Every client in every round.

    Args:
        population: the public number of clients. Under add-remove adjacency how many there are is private, so it must be declared:
            sums are divided by it, and the federation may hold more or fewer. Under replace-one it is the federation's own.

    >>> Full().expected(1000)
    1000.0
    """

    population: int | None = None

    def sampling(self, clients: int) -> Sampling:
        return Sampling()

    def expected(self, clients: int) -> float:
        return float(clients)

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        return torch.arange(clients)


@checked
@dataclass(frozen=True)
class Poisson:
    """Every client independently with probability `rate`; how many came is private, so sums are divided by rate·M.

    With rate 1 it is `Full`, and costs what that costs.

    Args:
        rate: the probability, above 0 and at most 1.
        population: as for `Full`.

    >>> Poisson(0.1).expected(1000)
    100.0
    """

    rate: float
    population: int | None = None

    def __post_init__(self) -> None:
        require(
            is_number(self.rate) and 0 < self.rate <= 1,
            f"participation rate is {self.rate!r}; it must be above 0 and at most 1.",
        )

    def sampling(self, clients: int) -> Sampling:
        return Sampling("poisson", self.rate) if self.rate < 1 else Sampling()

    def expected(self, clients: int) -> float:
        return self.rate * clients

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        # Draws are multiples of 2⁻⁵³: rounded down to one, the rate that is drawn is never above the one that is charged.
        rate = math.floor(self.rate * 2.0**53) / 2.0**53
        return torch.from_numpy(noise.generator(0).random(clients) < rate).nonzero().flatten()


@checked
@dataclass(frozen=True)
class FixedSize:
    """A uniformly random set of `count` clients, without replacement; all of them where fewer are there.

    Under add-remove one client more pushes another one out, so two contributions differ and no amplification is claimed. Sums are
    divided by `count` in any case.

    Args:
        count: clients of a round.
        population: as for `Full`.

    >>> FixedSize(100).expected(1000)
    100.0
    """

    count: int
    population: int | None = None

    def __post_init__(self) -> None:
        require(is_count(self.count), f"cohort is {self.count!r}; it must be a positive whole number.")

    def sampling(self, clients: int) -> Sampling:
        require(
            self.count <= clients,
            f"cohort is {self.count}, but the federation has {clients} clients; it must be at most {clients}.",
        )
        return Sampling("fixed", int(self.count) / clients) if self.count < clients else Sampling()

    def expected(self, clients: int) -> float:
        return float(self.count)

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        count = min(int(self.count), clients)
        return torch.from_numpy(noise.generator(0).choice(clients, count, replace=False)).sort().values


@checked
@dataclass(frozen=True)
class LargerCohort:
    """A small simulated cohort with the noise of a deployment's larger cohort.

    Sampling rate, denominator, noise and guarantee are those of the deployment. The simulated clients are not protected.

    Args:
        simulated: who of the clients that are there takes part.
        noise_cohort: clients of a round of the deployment.
        population: clients of the deployment; by default as many as give the simulation's sampling rate.
        stand_ins: how many simulated clients are expected in a round; a run fills it in.

    >>> LargerCohort(FixedSize(50), noise_cohort=1000).sampling(20000)
    Sampling(kind='fixed', rate=0.05)
    """

    simulated: Participation
    noise_cohort: int
    population: int | None = None
    stand_ins: float = 1.0

    def __post_init__(self) -> None:
        require(
            is_count(self.noise_cohort) and self.noise_cohort >= self.stand_ins,
            f"noise_cohort is {self.noise_cohort!r}; it must be a whole number of clients, at least the {self.stand_ins:g} that a "
            "round simulates.",
        )

    @property
    def factor(self) -> float:
        """For how many clients of the deployment each simulated one stands."""
        return self.noise_cohort / self.stand_ins

    def sampling(self, clients: int) -> Sampling:
        """How the deployment draws its cohort, with the same kind of sampling as the simulation."""
        require(
            self.noise_cohort <= clients,
            f"noise_cohort is {self.noise_cohort}, but the population is {clients}; it must be at most that.",
        )
        if self.noise_cohort == clients:
            return Sampling()
        require(
            not isinstance(self.simulated, Full),
            f"noise_cohort is {self.noise_cohort} with full participation, where it is the whole population, which is {clients}; "
            "leave the population out, or sample clients.",
        )
        return Sampling("fixed" if isinstance(self.simulated, FixedSize) else "poisson", self.noise_cohort / clients)

    def expected(self, clients: int) -> float:
        return float(self.noise_cohort)

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        return self.simulated.cohort(clients, noise)


def larger_cohort(given: LargerCohort, present: int) -> tuple[LargerCohort, int]:
    """The participation of a simulated deployment with its stand-ins, and its public population."""
    given.simulated.sampling(present)
    larger = replace(given, stand_ins=given.simulated.expected(present))
    declared = round(present * larger.factor) if given.population is None else given.population
    require(is_count(declared), f"population is {declared!r}; it must be a positive whole number.")
    larger.sampling(int(declared))
    return larger, int(declared)


SHORT = 2**17
"""Up to this size the CPU is faster than a kernel launch."""


def server_device(dimension: int, device: torch.device) -> torch.device:
    """Where the server of a run on `device` holds its vectors."""
    return device if dimension > SHORT else torch.device("cpu")


@dataclass(frozen=True)
class State:
    """The state of a run between rounds. Vectors are float64 on the server's device.

    Attributes:
        round: how many rounds are complete.
        w: the model's parameters.
        recent: the last iterates that the reported model averages, newest last.
        radius: the clip C in force.
        server: what the server optimizer remembers.
        control: SCAFFOLD's server control variate c; None without SCAFFOLD.
        client_controls: the clients' own c_i, one row each; None without SCAFFOLD.
        memory: state of the step-size rule and other rules with memory, by name.
        candidate: which candidate of a tournament this is the state of; 0 without one.
        rivals: the states of the other candidates that are still compared, by number; empty without a tournament and after it.
    """

    round: int
    w: Tensor
    recent: tuple[Tensor, ...]
    radius: float
    server: Moments
    control: Tensor | None = None
    client_controls: Tensor | None = None
    memory: Memory = field(default_factory=dict)
    candidate: int = 0
    rivals: Mapping[int, State] = field(default_factory=dict)

    @property
    def players(self) -> dict[int, State]:
        """The states of all candidates that are still compared, in the order of their numbers."""
        everyone = {self.candidate: replace(self, rivals={}), **self.rivals}
        return dict(sorted(everyone.items()))

    @cached_property
    def reported(self) -> Tensor:
        """The average of the last iterates: post-processing that damps FedEXP's oscillation."""
        return sum(self.recent[1:], self.recent[0]) / len(self.recent) if len(self.recent) > 1 else self.w


def advance(
    algorithm: Algorithm, release: Release, state: State, *, share: float = 1.0, tau_eta_l: float | None = None
) -> tuple[State, float]:
    """The next state and η_g. The model moves here and nowhere else: w ← w + η_g·direction.

    SCAFFOLD needs two public numbers more: `share`, the expected share of the clients that took part, and τη_l, how far a client
    goes per unit of gradient.
    """
    eta_g, memory = next_step(algorithm.rule, release, state.memory)
    direction, server = algorithm.server.direction(release.c_bar, state.server)
    w = torch.add(state.w, direction, alpha=eta_g)
    radius = state.radius
    if isinstance(algorithm.clip, AdaptiveClip):
        if release.within is None:
            raise InputError("the clip is adaptive, but the release has no vote on the updates within it.")
        radius = algorithm.clip.update(radius, release.within)
    control = state.control
    if control is not None:
        if tau_eta_l is None:
            raise InputError("tau_eta_l is missing; SCAFFOLD's control variate is divided by it.")
        control = (1 - share) * control - share * release.c_bar / tau_eta_l
    recent = (*state.recent, w)[-algorithm.average_last :]
    known = (state.client_controls, memory, state.candidate)
    return State(state.round + 1, w, recent, radius, server, control, *known), eta_g
