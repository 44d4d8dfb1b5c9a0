"""A round of any algorithm, in simulation and deployment: participation, the public number of clients, and the steps after the
release (step size, server step, next clip).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from dpfedexp.accounting.events import Adjacency, Sampling
from dpfedexp.algorithms import Algorithm
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.noise import ChaChaNoise, KeyedNoise
from dpfedexp.core.step_size import Memory, next_step
from dpfedexp.errors import InputError, checked, is_count, is_number, require
from dpfedexp.mechanisms import Release

Draws = KeyedNoise | ChaChaNoise
"""The source of randomness of a cohort: the seed of the run, or the operating system."""


class Participation(Protocol):
    """How a cohort is drawn. `clients` is the public population in `sampling` and `expected`, the actual number in `cohort`."""

    def sampling(self, clients: int) -> Sampling:
        """Return the sampling for the accountant."""

    def expected(self, clients: int) -> float:
        """Return the public cohort size by which sums are divided."""

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        """Draw the clients of one round, sorted."""


def public_population(adjacency: Adjacency, participation: Participation, present: int) -> int:
    """Return the public number of clients, from which denominators, sampling rates and accounting are computed.

    Formal guarantee: the number is the same for all neighbors. Under replace-one neighbors have equally many clients, so it is the
    actual number. Under add-remove the guarantee hides the actual number: a divisor counted from the data would change the whole
    mean when one client is added or removed. So `participation` declares it, and the federation may have more or fewer clients.
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
    # With one more client than `count`, a client is left out, which is not the full participation that is charged.
    require(
        not isinstance(participation, FixedSize) or participation.count < population,
        f"participation is a fixed cohort of {getattr(participation, 'count', 0)} of {population} clients under add-remove "
        "adjacency; it must be smaller than the population; or use Full().",
    )
    return int(population)


@checked
@dataclass(frozen=True)
class Full:
    """Full participation: every client in every round.

    Args:
        population: the public number of clients, by which sums are divided. It must be declared under add-remove adjacency, where
            the actual number is private and may differ. Under replace-one it is the actual number.

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
    """Poisson sampling: each client independently with probability `rate`; sums are divided by rate·M, as the count is private.

    Rate 1 is the same as `Full`, at the same cost.

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
        # Draws are multiples of 2⁻⁵³: the rate is rounded down to a multiple, so that it is never above the rate that is charged.
        rate = math.floor(self.rate * 2.0**53) / 2.0**53
        return torch.from_numpy(noise.generator(0).random(clients) < rate).nonzero().flatten()


@checked
@dataclass(frozen=True)
class FixedSize:
    """Fixed-size sampling: `count` clients uniformly without replacement, or all clients if there are fewer.

    Under add-remove an added client replaces another one in the cohort: two contributions differ, and no amplification is claimed.
    Sums are always divided by `count`.

    Args:
        count: the number of clients in a round.
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

    Sampling rate, denominator, noise and guarantee are those of the deployment. The simulated clients are not
    protected.

    Args:
        simulated: the participation of the simulated clients.
        noise_cohort: the number of clients in a round of the deployment.
        population: the number of clients of the deployment. By default the sampling rate is that of the simulation.
        stand_ins: the expected number of simulated clients in a round. The run sets it; do not pass it.

    A deployment that draws 1000 of its 20,000 clients in each round:

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
        """The number of deployment clients for which each simulated client stands."""
        return self.noise_cohort / self.stand_ins

    def sampling(self, clients: int) -> Sampling:
        """Return the sampling of the deployment, of the same kind as that of the simulation."""
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
    """Return the participation with `stand_ins` set, and the public population of the deployment."""
    given.simulated.sampling(present)
    larger = replace(given, stand_ins=given.simulated.expected(present))
    declared = round(present * larger.factor) if given.population is None else given.population
    require(is_count(declared), f"population is {declared!r}; it must be a positive whole number.")
    larger.sampling(int(declared))
    return larger, int(declared)


SHORT = 2**17
"""Up to this size the CPU is faster than a kernel launch."""


def server_device(dimension: int, device: torch.device) -> torch.device:
    """Return where the server keeps its vectors: on `device` for large models, else on the CPU."""
    return device if dimension > SHORT else torch.device("cpu")


@dataclass(frozen=True)
class State:
    """The state of a run between rounds. Vectors are float64 on the server's device.

    Attributes:
        round: the number of complete rounds.
        w: the parameters of the model.
        recent: the last iterates that the reported model averages, newest last.
        radius: the present clip C.
        server: the state of the server optimizer.
        control: SCAFFOLD's server control variate c; None without SCAFFOLD.
        client_controls: the clients' own c_i, one row each; None without SCAFFOLD.
        memory: state of the step-size rule and other rules with memory, by name.
        candidate: the number of the candidate in a tournament; 0 without a tournament.
        rivals: the states of the other candidates that are still compared, by number; empty without a tournament and after it.
    """

    round: int
    w: Tensor
    recent: tuple[Tensor, ...]
    radius: float
    server: Memory
    control: Tensor | None = None
    client_controls: Tensor | None = None
    memory: Memory = field(default_factory=dict)
    candidate: int = 0
    rivals: Mapping[int, Self] = field(default_factory=dict)

    @property
    def players(self) -> dict[int, Self]:
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
    """Return the next state and η_g. This is the only function that changes the model: w ← w + η_g·direction.

    SCAFFOLD needs two more public numbers: `share`, the expected share of clients in a round, and `tau_eta_l` = τη_l, the length of
    a client's update per unit of gradient.
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
