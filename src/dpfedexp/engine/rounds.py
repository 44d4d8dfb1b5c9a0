"""Rounds: w → local updates → clip → randomize → Sums → release → step size → w'.

The same functions serve a deployment; only who computes the local updates and where noise comes from differ.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpfedexp.accounting import Budget, Event, Ledger, Sampling
from dpfedexp.algorithms import Algorithm, probe
from dpfedexp.algorithms.participation import LargerCohort, Participation
from dpfedexp.algorithms.probe import Probe, probe_of
from dpfedexp.algorithms.round import State, advance, server_device
from dpfedexp.core import step_size
from dpfedexp.core.batches import Plans, Schedule, schedule
from dpfedexp.core.clipping import AdaptiveClip, clip, row_norms
from dpfedexp.core.local_rate import HELPED, chosen, located, nearest, preferred, slowed, watched
from dpfedexp.core.noise import Noise
from dpfedexp.core.noise.chacha import SystemStreams
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.step_size import initial_memory
from dpfedexp.core.sums import Sums
from dpfedexp.core.votes import further
from dpfedexp.errors import InputError, LedgerError, RoundFailed, require
from dpfedexp.machine import zero_rows
from dpfedexp.mechanisms import Mechanism, Release, Secure
from dpfedexp.trainers.client_losses import AllRows, ClientLosses
from dpfedexp.trainers.isolation import learnt_apart, padded
from dpfedexp.trainers.task import Task, Trainer

RATE, HELPED_SO_FAR = "rate.local", "rate.helped"
"""What a `State` remembers of a local rate that sets itself."""


@dataclass(frozen=True)
class Round:
    """What one round shows: nothing here is private unless its name starts with `nonprivate_`."""

    round: int
    eta_g: float
    clip: float
    update_norm: float
    seconds: float
    extra: dict[str, float] = field(default_factory=dict)


Part = tuple[Sums, list[tuple[Tensor, Tensor]], float]
"""The sums of some clients, what they will remember once the round is complete, and Σ‖Δ_i‖² for diagnostics."""


Ballots = Callable[[State, Tensor, Tensor, int], Tensor]
"""From the state, some clients' numbers, their updates before clipping and the round to the clients' values of the votes that the
run asks, [n, k']. A client's row must depend on nothing of another client's. The updates may have rows behind the clients'."""


class Team(Protocol):
    """Processes that share a cohort (`ranks.Team`)."""

    def cohort_part(
        self, simulation: Simulation, state: State, mechanism: Mechanism, cohort: Tensor, number: int
    ) -> Part: ...


@dataclass(frozen=True)
class Simulation:
    """A run without its state: the parts, bound together.

    Attributes:
        task: what every client does.
        trainer: how local updates are computed.
        mechanism: the algorithm's, with every constant in place.
        participation: who takes part in a round.
        streams: every draw of a simulation, keyed by purpose, round and client.
        chunk_size: clients that are trained together.
        diagnostics: whether to record values that are not private.
        system: where noise and sampling come from in a secure run: the operating system instead of the seed.
        unit: how many clients make a shape in an isolated run (`trainers.isolation`), None where clients may share what suits them.
        team: the other processes that the cohort is shared with.
        run: the name that the ledger knows the run by, new for every run.
        declared: the public number of clients where it is not the number of those who are there (`public_population`).
        ballots: who answers the mechanism's votes other than "within clip"; None where there are none.
        probe: what chooses the local rate and the first clip before the first round; None where the rate is given.
    """

    task: Task
    trainer: Trainer
    algorithm: Algorithm
    mechanism: Mechanism
    participation: Participation
    streams: Streams
    chunk_size: int
    diagnostics: bool = False
    system: SystemStreams | None = None
    unit: int | None = None
    team: Team | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    declared: int | None = None
    ballots: Ballots | None = None
    probe: Probe | None = None

    @property
    def noise(self) -> Streams | SystemStreams:
        """What the guarantee rests on: whoever can repeat these draws can take the noise away."""
        return self.system or self.streams

    @property
    def population(self) -> int:
        """The public number of clients: of denominators, of sampling rates and of whatever is written."""
        return len(self.task.clients) if self.declared is None else self.declared

    @property
    def present(self) -> int:
        """How many clients there are, which is private under add-remove adjacency: only for choosing and holding them."""
        return len(self.task.clients)

    @property
    def larger(self) -> LargerCohort | None:
        """The deployment that the clients stand for, where they do."""
        return self.participation if isinstance(self.participation, LargerCohort) else None

    @property
    def stands_for(self) -> dict[str, Any]:
        """The same as the ledger's header and the statement say it."""
        larger = self.larger
        return {} if larger is None else {"noise_cohort": larger.noise_cohort, "stand_ins": larger.stand_ins}

    @property
    def sampling(self) -> Sampling:
        return self.participation.sampling(self.population)

    @property
    def server_device(self) -> torch.device:
        return server_device(self.task.layout.dimension, self.task.device)

    @property
    def event(self) -> Event:
        return self.mechanism.event(self.sampling)

    def begin(self) -> State:
        w = self.task.layout.read(self.task.model).to(self.server_device)
        if not bool(torch.isfinite(w).all()):
            raise InputError("the model's initial parameters contain NaN or infinity; they must all be finite.")
        scaffold = self.algorithm.scaffold is not None
        memory = dict(initial_memory(self.algorithm.rule, w))
        if self.task.local.automatic:
            # Before the probe there is no rate yet, and nobody was harmed.
            memory |= {RATE: w.new_zeros((), dtype=torch.float64), HELPED_SO_FAR: w.new_ones((), dtype=torch.float64)}
        return State(
            round=0,
            w=w,
            recent=(w,),
            radius=self.mechanism.clip,
            server=self.algorithm.server.init(w),
            control=torch.zeros_like(w) if scaffold else None,
            client_controls=zero_rows(self.present, len(w)) if scaffold else None,
            memory=memory,
        )

    def step(self, state: State, ledger: Ledger, budget: Budget | None = None) -> tuple[State, Round]:
        """One round. It is charged to the ledger after the clients are done and before anything is released.

        Seeded noise is the same when a crash makes a round be computed again, so it is paid for once; system noise is not.
        """
        began = time.perf_counter()
        number = state.round + 1
        mechanism = self.mechanism.at_radius(state.radius)
        event = mechanism.event(self.sampling)
        charge = self._charge(ledger, budget, number, event, f"round {number}")
        cohort = self.participation.cohort(self.present, self.noise.at("participation", number))
        central: Noise = self.noise.at("central noise", number)
        if self.system is None and mechanism.is_private and not mechanism.is_local:
            central = drawn_ahead(central, mechanism.width(len(state.w)), self.task.device, self.server_device)
        part_of = self.cohort_part if self.team is None else partial(self.team.cohort_part, self)
        sums, controls, true_squares = part_of(state, mechanism, cohort, number)
        sums = sums.to(self.server_device)
        charge()
        release = mechanism.release(
            sums if self.larger is None else sums.times(self.larger.factor),
            self.participation.expected(self.population),
            central,
            self.noise.at("central scalar noise", number),
        )
        new, eta_g = self._advance(state, release)
        if new.client_controls is not None:
            for clients, rows in controls:
                new.client_controls[clients] = rows
        extra = {vote.field: release.votes[vote.name] for vote in mechanism.votes}
        if RATE in state.memory:
            extra["local_rate"] = float(state.memory[RATE])
        if self.diagnostics:
            extra["nonprivate_eta_target"] = step_size.target(true_squares / max(sums.count, 1), release.c_bar)
        return new, Round(number, eta_g, state.radius, release.norm, time.perf_counter() - began, extra)

    def _charge(
        self, ledger: Ledger, budget: Budget | None, number: int, event: Event, what: str, vote: str = ""
    ) -> Callable[[], None]:
        """Checks that the budget allows the charge; returns what makes it."""
        noise = None if self.system is not None else f"seed {self.streams.seed}{vote}"
        if budget is not None:
            ledger.check(budget, event, round=number, run=self.run, noise=noise)

        def charge() -> None:
            try:
                ledger.charge(number, event, run=self.run, noise=noise)
            except OSError as error:
                raise LedgerError(f"{what} can't be charged: {error.strerror}. Nothing of it was released.") from None

        return charge

    def cohort_part(self, state: State, mechanism: Mechanism, cohort: Tensor, number: int) -> Part:
        """The cohort's sums, what its clients will remember once the round is complete, and Σ‖Δ_i‖² for diagnostics."""
        noise = self.noise.at("local noise", number)
        w = state.w.float().to(self.task.device)
        sums: Sums | None = None
        controls: list[tuple[Tensor, Tensor]] = []
        true_squares = 0.0
        judge = None
        unchanged = None if self.task.synthetic is None else _unchanged(w)
        chunks = list(self._chunks(cohort))
        for clients in chunks:
            updates = self.updates(state, w, clients, number)
            ballots = self._ballots(state, mechanism, clients, updates, number)
            if unchanged is not None:
                unchanged()
            elif clients is chunks[-1]:
                # Asked now, judged below: a GPU that still trains need not wait for the processor.
                judge = self.task.look()
            # In an isolated run rows are clipped and randomised in shapes of one size, the last of which may have rows to spare.
            unit, first = self.unit or len(clients), 0
            for part, rows in zip(clients.split(unit), updates.split(unit), strict=True):
                own_votes = {} if ballots is None else {"ballots": ballots[first : first + len(rows)]}
                first += len(rows)
                clipped = clip(rows, mechanism.clip, reuse=True)
                numbers = torch.cat([part, part[-1:].expand(len(rows) - len(part))])
                report = mechanism.randomize(clipped, numbers, noise, **own_votes).first(len(part))
                if state.control is not None and state.client_controls is not None:
                    own = (
                        clipped.vectors[: len(part)]
                        if self.algorithm.scaffold == "update"
                        else mechanism.estimate(report)
                    )
                    controls.append(self._control(state.control, state.client_controls, part, own))
                added = mechanism.collect(report)
                sums = added if sums is None else sums + added
                if self.diagnostics:
                    true_squares += float(row_norms(clipped.vectors[: len(part)]).square().sum())
        if judge is not None:
            judge()
        if unchanged is not None:
            unchanged(judged=True)
        nobody = Sums.zero(mechanism.width(len(w)), self.task.device, len(mechanism.votes))
        return sums or nobody, controls, true_squares

    def _ballots(
        self, state: State, mechanism: Mechanism, clients: Tensor, updates: Tensor, number: int
    ) -> Tensor | None:
        """What the clients of a chunk answer to the votes that are theirs to answer, a row for each update; None without any."""
        asked = further(mechanism.votes)
        if not asked:
            return None
        if self.ballots is None:
            raise InputError(
                f"the vote {asked[0].name!r} is asked for, and nobody answers it; give the run its ballots."
            )
        values = self.ballots(state, clients, updates, number)
        right = (len(clients), len(asked))
        require(tuple(values.shape) == right, f"ballots have shape {tuple(values.shape)}; they must have {right}.")
        # Rows that only fill a shape answer nothing.
        return pad(values.double(), (0, 0, 0, len(updates) - len(values)), value=math.nan)

    @cached_property
    def alike(self) -> bool:
        """Whether all clients hold the same number of examples, and some."""
        sizes = self.task.clients.sizes
        return len(sizes) > 0 and int(sizes.min()) == int(sizes.max()) > 0

    def _chunks(self, cohort: Tensor) -> Iterator[Tensor]:
        """Clients of like size together, so that little is padded; the empty ones, which send a zero update, come first.

        In an isolated run they stay in the order of their numbers, because sizes are private.
        """
        if len(cohort) == 0:
            return
        if self.unit is not None or self.alike:
            yield from cohort.split(self.chunk_size)
            return
        sizes = self.task.clients.sizes[cohort]
        order = torch.argsort(sizes, stable=True)
        empty = int((sizes == 0).sum())
        for part in (order[:empty], order[empty:]):
            for chunk in part.split(self.chunk_size) if len(part) else ():
                yield cohort[chunk]

    def updates(self, state: State, w: Tensor, clients: Tensor, number: int) -> Tensor:
        """One row for each client of a chunk, zero for an empty one; more where an isolated run's last shape is not full."""
        sizes = self.task.clients.sizes
        if self.unit is not None:
            trained, real = padded(clients, sizes, self.unit)
        elif int(sizes[clients[0]]) == 0:
            return torch.zeros(len(clients), len(w), device=w.device)
        else:
            trained, real = clients, None
        public = self._shapes_are_public

        def learn(who: Tensor) -> Tensor:
            correction = None
            if state.control is not None and state.client_controls is not None:
                correction = state.control.float().to(w.device) - state.client_controls[who].to(w.device)
            if RATE not in state.memory:
                return self.trainer(w, who, self.plan(who, number), number, correction)
            rates = state.memory[RATE].float().to(w.device).expand(len(who))
            rows = self.trainer(w, who, self.plan(who, number), number, correction, rates)
            helped = self.loss_after(w, rows, who, number) < self.loss_after(w, torch.zeros_like(rows), who, number)
            return torch.where(helped[:, None], rows, torch.zeros_like(rows))

        rows = learn(trained) if self.unit is None else learnt_apart(learn, trained, self.unit, like=w, public=public)
        if real is None or bool(real.all()):
            return rows
        return torch.where(real.to(w.device)[:, None], rows, torch.zeros_like(rows))

    @property
    def _shapes_are_public(self) -> bool:
        return self.unit is not None and self.task.local.shape_is_public

    def plan(self, clients: Tensor, number: int) -> Schedule:
        """What the clients train on in a round."""
        shuffles, numbers = self.streams.at("batches", number).generators(), clients.tolist()
        sizes = self.task.clients.sizes[clients]
        return self._plans(self.task.local, sizes, lambda row: shuffles(numbers[row]), public=self._shapes_are_public)

    @cached_property
    def _plans(self) -> Plans:
        return Plans()

    @cached_property
    def _losses(self) -> ClientLosses:
        return ClientLosses(self.task, self.trainer, self.streams, unit=self.unit)

    def loss_after(self, w: Tensor, rows: Tensor, clients: Tensor, number: int) -> Tensor:
        """The clients' own losses after they went as far as their rows, [n]."""
        draws, numbers = self.streams.at("losses", number).generators(), clients.tolist()
        sizes, public = self.task.clients.sizes[clients], self._shapes_are_public
        plan = schedule(AllRows.of(self.task.local), sizes, lambda row: draws(numbers[row]), public=public)
        return self._losses(w, rows, clients, plan, number)

    def _control(
        self, control: Tensor, client_controls: Tensor, clients: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """c_i − c − Δ_i/(τη_l) with the client's own clipped update, which never leaves it, or with what it sent.

        A client that holds nothing has learnt nothing, and keeps what it had.
        """
        holding = torch.nonzero(self.task.clients.sizes[clients] > 0).flatten()
        clients, delta = clients[holding], delta[holding.to(delta.device)]
        steps = self.task.local.step_count(self.task.clients.sizes[clients])
        tau_eta_l = self.task.local.tau_eta_l(steps.to(delta.device).float())[:, None]
        old = client_controls[clients].to(delta.device)
        return clients, (old - control.float().to(delta.device) - delta / tau_eta_l).cpu()

    def _advance(self, state: State, release: Release) -> tuple[State, float]:
        share = self.participation.expected(self.population) / self.population
        tau_eta_l = None
        if self.algorithm.scaffold:
            tau_eta_l = self.task.local.tau_eta_l(int(self.task.local.step_count(torch.ones(1, dtype=torch.int64))))
        new, eta_g = advance(self.algorithm, release, state, share=share, tau_eta_l=tau_eta_l)
        if RATE not in state.memory:
            return new, eta_g
        rate, helped = (float(state.memory[name]) for name in (RATE, HELPED_SO_FAR))
        (noise,) = (vote.noise for vote in self.mechanism.votes if vote.name == HELPED.name)
        cohort = self.participation.expected(self.population)
        rate, helped = watched(rate, helped, release.votes[HELPED.name], noise / cohort)
        known = {RATE: rate, HELPED_SO_FAR: helped}
        memory = {**new.memory, **{name: torch.full_like(new.memory[name], value) for name, value in known.items()}}
        return replace(new, memory=memory), eta_g


def _unchanged(w: Tensor) -> Callable[..., None]:
    """Compares the released model's bits with what they were: after every chunk, and `judged` before the round is charged."""
    before, same = w.clone(), torch.ones((), dtype=torch.bool, device=w.device)

    def compare(*, judged: bool = False) -> None:
        # NaN is no parameter that is released, so equal bits are equal numbers. A GPU is waited for at the end alone.
        nonlocal same
        same = same & (w == before).all()
        if judged and not bool(same):
            raise RoundFailed(
                "the released model changed while clients trained on it, so that one client could reach another; nothing of this "
                "round was charged or released."
            )

    return compare


def describe(round: Round, epsilon: float, metrics: dict[str, float]) -> dict[str, Any]:
    """One line of the history."""
    return {
        "round": round.round,
        **metrics,
        "eta_g": round.eta_g,
        "clip": round.clip,
        "update_norm": round.update_norm,
        "epsilon_total": epsilon,
        "seconds": round.seconds,
        **round.extra,
    }


BEFORE = 0
"""The number that the ledger knows the probe by: it comes before the first round."""


def answering(task: Task, mechanism: Mechanism, rounds: int, sampling: Sampling, secure: Secure) -> dict[str, Any]:
    """The simulation's own part in it: who answers the votes, and the probe."""
    if not task.local.automatic:
        return {}
    sizes = task.clients.sizes

    def ballots(state: State, clients: Tensor, updates: Tensor, number: int) -> Tensor:
        """A client that was not helped has sent nothing; one without data has nothing to say."""
        helped = (updates[: len(clients)] != 0).any(1).double()
        holds = (sizes[clients] > 0).to(helped.device)
        return torch.where(holds, helped, math.nan)[:, None]

    return {"ballots": ballots, "probe": probe_of(mechanism, rounds, sampling, secure)}


def probed(simulation: Simulation, state: State, ledger: Ledger, budget: Budget | None) -> State:
    """The state with the rate, and with an adaptive clip the first radius, that the clients' votes choose.

    Nothing happens where the rate is known. Both votes are charged before anything of them is released. The model is not touched.
    """
    vote = simulation.probe
    if vote is None or float(state.memory[RATE]) > 0:
        return state
    w = state.w.float().to(simulation.task.device)

    def best(clients: Tensor) -> Tensor:
        still = simulation.loss_after(w, w.new_zeros(len(clients), len(w)), clients, BEFORE)

        def after(rates: Tensor) -> Tensor:
            return simulation.loss_after(w, _rows(simulation, w, clients, rates), clients, BEFORE)

        return preferred(still, after)

    cohort = simulation.participation.expected(simulation.population)
    noise = simulation.mechanism.noise_share(len(w), cohort) or 0.0
    rate = slowed(chosen(*_asked(simulation, vote, probe.RATE, best, ledger, budget)), noise)
    memory = {**state.memory, RATE: torch.full_like(state.memory[RATE], rate)}
    if not isinstance(simulation.algorithm.clip, AdaptiveClip):
        return replace(state, memory=memory)

    def length(clients: Tensor) -> Tensor:
        return nearest(row_norms(_rows(simulation, w, clients, torch.full((len(clients),), rate, device=w.device))))

    radius = located(*_asked(simulation, vote, probe.CLIP, length, ledger, budget))
    return replace(state, memory=memory, radius=radius)


def _rows(simulation: Simulation, w: Tensor, clients: Tensor, rates: Tensor) -> Tensor:
    return simulation.trainer(w, clients, simulation.plan(clients, BEFORE), BEFORE, None, rates)


def _asked(
    simulation: Simulation, vote: Probe, name: str, places: probe.Places, ledger: Ledger, budget: Budget | None
) -> tuple[Tensor, float]:
    """Charges one of the two votes and releases it."""
    charge = None
    if simulation.mechanism.is_private:
        event = vote.vote(name).event(simulation.sampling)
        charge = simulation._charge(ledger, budget, BEFORE, event, f"the vote {name!r}", f", {name}")

    def pay() -> None:
        simulation.task.look()()
        if charge is not None:
            charge()

    # Each vote has a cohort of its own: sampling hides a client in both only if it is drawn for them independently.
    draws = simulation.noise.at(f"participation, {name}", BEFORE)
    cohort = simulation.participation.cohort(simulation.present, draws)
    return vote.answers(
        name,
        iter(cohort.split(simulation.chunk_size) if len(cohort) else ()),
        _of_holders(simulation, places),
        simulation.participation.expected(simulation.population),
        simulation.noise.at(f"probe noise, {name}", BEFORE),
        pay,
    )


def _of_holders(simulation: Simulation, places: probe.Places) -> probe.Places:
    """Where clients that hold data stand; the others have nothing to say. In an isolated run every shape is full.

    There, a client on whose data the model or the loss fails says nothing, and stops nobody.
    """
    sizes, public, unit = simulation.task.clients.sizes, simulation.task.local.shape_is_public, simulation.unit

    def standing(clients: Tensor) -> Tensor:
        out = torch.zeros(len(clients), dtype=torch.int64)
        if unit is None:
            real = torch.nonzero(sizes[clients] > 0).flatten()
            if len(real):
                out[real] = places(clients[real]).cpu()
            return out
        filled, real = padded(clients, sizes, unit)
        parts = [
            learnt_apart(lambda who: places(who)[:, None].float(), part, unit, like=torch.zeros(1), public=public)
            for part in filled.split(unit)
        ]
        return torch.where(real[: len(clients)], torch.cat(parts)[: len(clients), 0].long().cpu(), out)

    return standing


CPU = torch.device("cpu")
LONG = 2**13
"""Numbers that are worth a thread."""


class Ahead:
    """A source of noise whose draw for the server is under way: the same numbers, sooner, and handed out once.

    Nothing of it waits for what the clients do: the draws depend on the source alone. The thread leaves the GPU
    alone, because whatever it asked of it would end a recording; memory that a GPU reads by itself is there before it starts.
    """

    def __init__(self, noise: Noise, width: int, wanted: torch.device) -> None:
        self.noise, self.width = noise, width
        room = torch.empty(1, width, dtype=torch.float64, pin_memory=wanted.type == "cuda")
        server = torch.zeros(1, dtype=torch.int64)
        thread = ThreadPoolExecutor(1, "noise")
        self.drawn: Future[Tensor] | None = thread.submit(
            lambda: room.copy_(noise.normal(server, width, CPU, torch.float64))
        )
        thread.shutdown(wait=False)

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        drawn = self.drawn
        if drawn is not None and clients.tolist() == [0] and (width, dtype) == (self.width, torch.float64):
            # A second time it would not be noise any more.
            self.drawn = None
            return drawn.result().to(device, non_blocking=True)
        return self.noise.normal(clients, width, device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        return self.noise.uniform(clients, width)


def drawn_ahead(noise: Noise, width: int, busy: torch.device, wanted: torch.device) -> Noise:
    """The source itself, or while a GPU is busy one that is at work already, for numbers that are wanted on a device."""
    return Ahead(noise, width, wanted) if busy.type == "cuda" and width >= LONG else noise
