"""The engine of every run: send requests to the cohort, charge the ledger, release, update the model.

An `Engine` decides everything about a run and is independent of the transport. A `Cohort` answers a `Request` with sums and public
counts, and decides nothing about privacy. Its clients are simulated (`simulated`), also on several ranks (`ranks`), or on Flower.
"""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpfedexp.accounting import Budget, Event, Ledger, Sampling
from dpfedexp.accounting.events import to_json
from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.algorithm import resolve_algorithm
from dpfedexp.algorithms.probe import CANDIDATE, CLIP, RATE, SCALE, UPDATE, Probe
from dpfedexp.algorithms.round import LargerCohort, Participation, State, advance
from dpfedexp.core import local_rate, step_size
from dpfedexp.core.client_metrics import EVALUATION, ClientMetrics
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.noise import Noise, Streams, SystemStreams
from dpfedexp.core.step_size import initial_memory
from dpfedexp.core.sums import MAX_SHARE, Sums
from dpfedexp.errors import LedgerError, RoundFailed, require
from dpfedexp.mechanisms import Mechanism, Release

LOCAL_RATE, IMPROVED_SO_FAR, PENDING = "rate.local", "rate.improved", "rate.pending"
ANCHOR, RESCALED = "rate.anchor", "rate.rescaled"
"""Keys of the memory of a `State` with an automatic local rate: the rate, the share of clients that improved so far, the number of
votes left before the first round, the parameters at the last rescaling of the rate, and the number of rescalings."""
BEFORE = 0
"""Round number of the votes before the first round."""


@dataclass(frozen=True)
class Request:
    """A request of the engine to the cohort.

    Attributes:
        purpose: `UPDATE`, the name of a vote (`RATE`, `CLIP`), or `EVALUATION`.
        round: the round number; `BEFORE` for votes before the first round.
        state: the model and everything else released so far.
        mechanism: the mechanism at the clip in force, which clips, adds noise and defines the sum.
        group: (g, K) in a tournament: only the clients of the g-th of K disjoint groups answer; None for all clients.
        shake: the standard deviation of the public noise of a vote on the rate's scale.
    """

    purpose: str
    round: int
    state: State
    mechanism: Mechanism
    group: tuple[int, int] | None = None
    shake: float = 0.0

    @property
    def local_rate(self) -> float | None:
        """The automatic local rate of the round; None for a given rate."""
        rate = self.state.memory.get(LOCAL_RATE)
        return None if rate is None else float(rate)


Open = Callable[[float, Noise, Noise], Release]
"""Computes the release from the public denominator and the noise of the vector and of further numbers."""


@dataclass(frozen=True)
class Answer:
    """The answer of a cohort to a request.

    Attributes:
        sums: the sums of the clients' reports.
        counts: public counts of clients for the record; empty where the number of participants is private.
        controls: (clients, new control variates) of SCAFFOLD's simulated clients, stored once the round is complete.
        true_squares: Σ‖Δ_i‖² for diagnostics.
        release: computes the release in two-party aggregation; None to use the mechanism's own `release`.
    """

    sums: Sums
    counts: Mapping[str, int] = field(default_factory=dict)
    controls: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    true_squares: float = 0.0
    release: Open | None = None


class Cohort(ABC):
    """The clients of a run: simulated, on several ranks, or behind Flower."""

    is_remote: ClassVar[bool] = False
    """Whether reports travel to the server. If so, a round of local DP is charged before the request is sent."""
    cpu_is_idle: bool = False
    """Whether the CPU is idle while clients train, so that noise can be drawn meanwhile."""

    @abstractmethod
    def answer(self, request: Request) -> Answer:
        """Draw the participants and add up their reports. Raises `RoundFailed` where too few clients answer."""

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer the requests of a round, which go to disjoint groups of clients (`OneGroup`)."""
        return [self.answer(request) for request in requests]

    def of_candidates(self, cohorts: Sequence[Any]) -> Cohort:
        """The cohort of a tournament, given that of each candidate, over the same clients."""
        return self

    def control_variates(self, dimension: int) -> Tensor | None:
        """The initial control variates of SCAFFOLD's clients; None where the clients keep their own."""
        return None

    def to_checkpoint(self) -> dict[str, Any]:
        """Public facts for the checkpoint that a resumed run needs."""
        return {}

    def from_checkpoint(self, facts: Mapping[str, Any]) -> None:
        """Restore the facts of `to_checkpoint`."""
        return


@dataclass
class OneGroup:
    """Check that in a round of a tournament no client answers for two candidates; the charge of the round depends on that."""

    round: int = 0
    taken: Tensor | None = None

    def take(self, number: int, place: int, cohort: Tensor | list[int], present: int) -> None:
        """Raise `RoundFailed` for a client that has answered for another candidate. A repeated round starts afresh."""
        if self.taken is None or self.round != number or place == 0:
            self.round, self.taken = number, torch.zeros(present, dtype=torch.bool)
        if bool(self.taken[cohort].any()):
            raise RoundFailed(
                f"a client answered for two candidates in round {number}, which would cost twice what is charged; nothing "
                "of this round was charged or released."
            )
        self.taken[cohort] = True


@dataclass(frozen=True)
class ClientEvaluation:
    """Settings for metrics that clients measure on their own rows.

    Attributes:
        mechanism: the mechanism of one evaluation.
        metrics: the metrics to measure.
        every: rounds between evaluations; the last round is always evaluated.
        held_out: the share of a client's rows that are used for evaluation only; 0 to evaluate on the training rows.
    """

    mechanism: Mechanism
    metrics: ClientMetrics
    every: int
    held_out: float = 0.0


@dataclass(frozen=True)
class Tournament:
    """Candidates that train side by side on disjoint groups of clients until votes have chosen one of them.

    Formal guarantee: in a round every client is in one group (`Cohort`), so it changes the sum of one candidate. All sums have the
    same noise multiplier, so a round costs as much as a round with one candidate. Only the votes cost more.

    Attributes:
        engines: one for each candidate, with the same event and the same clients; the first is the run's own.
        names: the names of the candidates in the history and the statement.
        phases: pairs (r, k): after round r the best k candidates stay; the last k is 1.
        vote: the mechanism of a vote on the best candidate.
        follows: i → (j, factor): candidate i takes the rate and the first clip that j's votes chose, times a factor.
    """

    engines: tuple[Engine, ...]
    names: tuple[str, ...]
    phases: tuple[tuple[int, int], ...]
    vote: Mechanism
    follows: Mapping[int, tuple[int, float]] = field(default_factory=dict)


def staying(phases: Sequence[tuple[int, int]], round: int, players: int) -> int:
    """The number of `players` that stay after this round, by the `phases` of a `Tournament`."""
    return min([players, *(stay for last, stay in phases if last <= round)])


@dataclass(frozen=True)
class RoundResult:
    """The results of one round. All fields are released or public, except those whose names start with `nonprivate_`."""

    round: int
    eta_g: float
    clip: float
    update_norm: float
    seconds: float
    extra: dict[str, float] = field(default_factory=dict)

    def record(self, epsilon: float, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The record of the round for the history."""
        return {
            "round": self.round,
            **metrics,
            "eta_g": self.eta_g,
            "clip": self.clip,
            "update_norm": self.update_norm,
            "epsilon_total": epsilon,
            "seconds": self.seconds,
            **self.extra,
        }


@dataclass(frozen=True)
class Engine:
    """Everything that stays fixed during a run; what changes is in a `State`, which is passed to the methods.

    Attributes:
        algorithm: the algorithm of the run.
        mechanism: the algorithm's mechanism, with all constants set.
        participation: who takes part in a round.
        population: the public number M of clients; denominators and sampling rates are computed from it.
        cohort: the clients of the run, simulated or behind Flower.
        start: the model's parameters before the first round, [d], on the server's device.
        noise: the source of the server's noise.
        seed: the seed of the noise; None for noise from the operating system, as in every run that protects real data.
        tau_eta_l: local steps times local rate, by which SCAFFOLD divides updates; None for other algorithms.
        evaluation: settings for metrics that clients measure; None for no such metrics.
        probe: the votes that choose the local rate and the first clip before the first round; None where the rate is given.
        tournament: the candidates that the run chooses from; None for a single candidate.
        diagnostics: whether to record values that are not private.
        on_charge: called after every charge to the ledger.
        run: the name of the run in the ledger, new for every run.
    """

    algorithm: Algorithm
    mechanism: Mechanism
    participation: Participation
    population: int
    cohort: Cohort
    start: Tensor
    noise: Streams | SystemStreams
    seed: int | None = None
    tau_eta_l: float | None = None
    probe: Probe | None = None
    evaluation: ClientEvaluation | None = None
    tournament: Tournament | None = None
    diagnostics: bool = False
    on_charge: Callable[[], None] = lambda: None
    run: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def secure(self) -> bool:
        """Whether noise comes from the operating system."""
        return self.seed is None

    @property
    def larger(self) -> LargerCohort | None:
        """The larger deployment that the simulated clients represent (`noise_cohort`); None without one."""
        return self.participation if isinstance(self.participation, LargerCohort) else None

    @property
    def larger_deployment(self) -> dict[str, Any]:
        """The fields of `larger` for the ledger's header and the statement."""
        larger = self.larger
        return {} if larger is None else {"noise_cohort": larger.noise_cohort, "stand_ins": larger.stand_ins}

    @property
    def sampling(self) -> Sampling:
        return self.participation.sampling(self.population)

    @property
    def expected(self) -> float:
        """The public number of clients in a round, by which sums are divided."""
        return self.participation.expected(self.population)

    @property
    def event(self) -> Event:
        return self.mechanism.event(self.sampling)

    def playing(self, candidate: int) -> Engine:
        """The engine of this candidate of a tournament, with this engine's cohort and run name."""
        if self.tournament is None:
            return self
        return replace(
            self.tournament.engines[candidate],
            cohort=self.cohort,
            run=self.run,
            on_charge=self.on_charge,
            tournament=None,
        )

    def mechanism_of(self, purpose: str, radius: float) -> Mechanism:
        """The mechanism of a request for this purpose, at the clip in force."""
        if purpose == CANDIDATE and self.tournament is not None:
            return self.tournament.vote
        if purpose == EVALUATION and self.evaluation is not None:
            return self.evaluation.mechanism
        if purpose in (RATE, CLIP, SCALE) and self.probe is not None:
            return self.probe.mechanisms[purpose]
        return self.mechanism.at_radius(radius)

    def begin(self) -> State:
        """The state before the first round."""
        if self.tournament is not None:
            first, *others = (self.playing(number).begin() for number in range(len(self.tournament.engines)))
            return replace(first, rivals={n: replace(state, candidate=n) for n, state in enumerate(others, start=1)})
        w = self.start
        require(
            bool(torch.isfinite(w).all()),
            "the model's initial parameters contain NaN or infinity; they must all be finite.",
        )
        memory = dict(initial_memory(self.algorithm.rule, w))
        if self.probe is not None:
            zero, one = w.new_zeros((), dtype=torch.float64), w.new_ones((), dtype=torch.float64)
            memory |= {LOCAL_RATE: zero, IMPROVED_SO_FAR: one, PENDING: zero + len(self._votes)}
            memory |= {ANCHOR: w.clone(), RESCALED: zero.clone()}
        scaffold = self.algorithm.scaffold is not None
        return State(
            round=0,
            w=w,
            recent=(w,),
            radius=self.mechanism.clip,
            server=self.algorithm.server.init(w),
            control=torch.zeros_like(w) if scaffold else None,
            client_controls=self.cohort.control_variates(len(w)) if scaffold else None,
            memory=memory,
        )

    def step(self, state: State, ledger: Ledger, budget: Budget | None = None) -> tuple[State, RoundResult]:
        """Run one round, for every remaining candidate of a tournament; return the new state and the leader's result."""
        began = time.perf_counter()
        players, requests = state.players, []
        for place, (number, one) in enumerate(players.items()):
            mechanism = self.playing(number).mechanism.at_radius(one.radius)
            group = (place, len(players)) if len(players) > 1 else None
            requests.append(Request(UPDATE, state.round + 1, one, mechanism, group))
        answered = self._ask(requests, ledger, budget)
        moved = {
            number: self.playing(number)._advance(one, release, len(players))
            for (number, one), (release, _) in zip(players.items(), answered, strict=True)
        }
        place = list(players).index(state.candidate)
        request, (release, answer), (new, eta_g) = requests[place], answered[place], moved.pop(state.candidate)
        if new.client_controls is not None:
            for clients, rows in answer.controls:
                new.client_controls[clients] = rows
        extra: dict[str, float] = {vote.field: release.votes[vote.name] for vote in request.mechanism.votes}
        if (rate := request.local_rate) is not None:
            extra["local_rate"] = rate
        if self.tournament is not None:
            extra |= {"candidate": state.candidate, "candidates": len(players)}
        if self.diagnostics:
            mean = answer.true_squares / max(answer.sums.count, 1)
            extra["nonprivate_eta_target"] = step_size.target(mean, release.c_bar)
        seconds = time.perf_counter() - began
        counts = {name: sum(one.counts[name] for _, one in answered) for name in answer.counts}
        result = RoundResult(request.round, eta_g, state.radius, release.norm, seconds, {**extra, **counts})
        return replace(new, rivals={number: rival for number, (rival, _) in moved.items()}), result

    def evaluate(self, state: State, ledger: Ledger, budget: Budget | None = None) -> dict[str, float] | None:
        """Ask the clients to evaluate the model that the run reports after a round; return metrics with 95% intervals.

        An evaluation is charged once. After a crash between charge and record, a secure run returns None: new noise would have to
        be charged again. A seeded run asks again, because its noise is the same.
        """
        evaluation = self.playing(state.candidate).evaluation
        if evaluation is None or (self.secure and state.round in evaluated(ledger, self.run)):
            return None
        reported = replace(state, w=state.reported, control=None, client_controls=None, rivals={})
        request = Request(EVALUATION, state.round, reported, evaluation.mechanism)
        release, _ = self.ask(request, ledger, budget)
        deviation = math.sqrt(evaluation.mechanism.noise_variance(self.expected, self.expected) or 0.0)
        spread = (1.0 - self.sampling.rate) / self.expected
        return evaluation.metrics.read(release.c_bar, deviation, spread)

    def ask(self, request: Request, ledger: Ledger, budget: Budget | None = None) -> tuple[Release, Answer]:
        """Send a request to the cohort and release the answer. The charge comes after the clients are done and before the release.

        Reports of local DP that leave a client's machine are released when they are sent, so they are charged before. A round that
        is computed again after a crash is charged once with seeded noise, which is the same, and again with system noise.
        """
        (found,) = self._ask([request], ledger, budget)
        return found

    def _ask(
        self, requests: Sequence[Request], ledger: Ledger, budget: Budget | None = None
    ) -> list[tuple[Release, Answer]]:
        """Send requests to disjoint groups of clients for one charge: every client answers one request (`Tournament`)."""
        events = {request.mechanism.event(self.sampling) for request in requests}
        places = [request.group and request.group[0] for request in requests]
        require(
            len(events) == 1 and len(set(places)) == len(requests) and (len(requests) == 1 or None not in places),
            "requests of one round must cost the same and go to different groups of clients.",
        )
        first = requests[0]
        charge = self._charge(first, ledger, budget)
        drawn = [self._noises(request) for request in requests]
        early = first.mechanism.is_local and self.cohort.is_remote
        if early:
            charge()
        answers = self.cohort.answers(requests)
        if not early:
            charge()
        return [
            (self._released(request, answer, *noises), answer)
            for request, answer, noises in zip(requests, answers, drawn, strict=True)
        ]

    def _noises(self, request: Request) -> tuple[Noise, Noise]:
        """The noise sources of a release: for its vector, and for its other numbers (squared norms, votes).

        The noise of a long vector is drawn while the CPU is idle (`PrefetchedNoise`).
        """
        update = request.purpose == UPDATE
        names = ("central noise", "central scalar noise") if update else (f"probe noise, {request.purpose}",) * 2
        whose = f", candidate {request.state.candidate}" if request.state.candidate else ""
        vector, scalar = (self.noise.at(name + whose, request.round) for name in names)
        mechanism, cohort = request.mechanism, self.cohort
        central = mechanism.is_private and not mechanism.is_local and not mechanism.needs_helper
        plain = mechanism.noise_kind is False or (cohort.is_remote and mechanism.noise_kind is True)
        width = mechanism.width(len(self.start))
        if update and central and plain and width >= LONG and cohort.cpu_is_idle:
            return PrefetchedNoise(vector, width, self.start.device), scalar
        return vector, scalar

    def _released(self, request: Request, answer: Answer, central: Noise, scalar: Noise) -> Release:
        expected = self.expected / (request.group[1] if request.group is not None else 1)
        if answer.release is not None:
            return answer.release(expected, central, scalar)
        sums = answer.sums.to(self.start.device)
        sums = sums if self.larger is None else sums.times(self.larger.factor)
        return request.mechanism.release(sums, expected, central, scalar)

    def choose(
        self,
        state: State,
        ledger: Ledger,
        budget: Budget | None = None,
        save: Callable[[State], None] = lambda state: None,
    ) -> State:
        """Hold the votes due before the next round, on local rate, first clip and candidates; return the new state.

        Each vote is charged before its release, and `save` is called after it, so that no vote is held twice.
        """
        tournament, players = self.tournament, state.players
        if tournament is not None and (stay := staying(tournament.phases, state.round, len(players))) < len(players):
            shares, _ = self._vote(CANDIDATE, state, ledger, budget)
            order = sorted(players, key=lambda number: float(shares[number]), reverse=True)[:stay]
            best, *others = (self.playing(number).with_new_steps(players[number]) for number in order)
            state = replace(best, rivals={one.candidate: one for one in sorted(others, key=lambda one: one.candidate)})
            save(state)
        for number, player in state.players.items():
            engine = self.playing(number)
            if (probe := engine.probe) is None:
                continue
            for purpose in engine._pending(probe, player):
                if purpose != SCALE and tournament is not None and number in tournament.follows:
                    leader, factor = tournament.follows[number]
                    player = _following(player, state.players[leader], factor)
                else:
                    player = engine._voted(purpose, probe, player, ledger, budget)
                state = _with(state, player)
                save(state)
        return state

    def with_new_steps(self, state: State) -> State:
        """The state with the step-size rule reset: its memory is from another rate, or from the noise of a smaller group."""
        return replace(state, memory={**state.memory, **initial_memory(self.algorithm.rule, state.w)})

    def _voted(self, purpose: str, probe: Probe, state: State, ledger: Ledger, budget: Budget | None) -> State:
        """Hold one vote; return the state with its result: the local rate, the rate's scale, or the first clip."""
        shake = self._shake(state, probe.rounds) if purpose == SCALE else 0.0
        found = self._vote(purpose, state, ledger, budget, shake)
        if purpose == SCALE:
            return self._scaled(state, local_rate.rescaled(*found))
        memory = {**state.memory, PENDING: state.memory[PENDING] - 1}
        if purpose == RATE:
            rate = local_rate.first_rate(local_rate.rate_from_votes(*found), self._noise_share(state))
            memory[LOCAL_RATE] = torch.full_like(memory[LOCAL_RATE], rate)
        radius = local_rate.clip_from_votes(*found) if purpose == CLIP else state.radius
        return replace(state, memory=memory, radius=radius)

    def _scaled(self, state: State, factor: float) -> State:
        """The state as if rounds since the anchor had moved `factor` times as far; the rate and an adaptive clip are scaled too."""
        anchor, memory = state.memory[ANCHOR], dict(state.memory)
        w = anchor + factor * (state.w - anchor)
        memory[LOCAL_RATE] = (memory[LOCAL_RATE] * factor).clamp(max=local_rate.RATES[-1])
        memory |= {ANCHOR: w.clone(), RESCALED: memory[RESCALED] + 1}
        radius = state.radius * factor if isinstance(self.algorithm.clip, AdaptiveClip) else state.radius
        return self.with_new_steps(replace(state, w=w, recent=(w,), radius=radius, memory=memory))

    def _shake(self, state: State, rounds: int) -> float:
        """The public noise of a vote on the rate's scale; 0 where the mechanism does not know its noise variance."""
        variance = self.mechanism.at_radius(state.radius).noise_variance(self.expected, self.expected) or 0.0
        return local_rate.shake_of(variance, rounds - state.round, self._noise_share(state))

    def _noise_share(self, state: State) -> float:
        return self.mechanism.noise_share(len(state.w), self.expected) or 0.0

    @property
    def _votes(self) -> tuple[str, ...]:
        """The votes before the first round; the first clip is voted on only if it adapts."""
        return (RATE, CLIP) if isinstance(self.algorithm.clip, AdaptiveClip) else (RATE,)

    def _pending(self, probe: Probe, state: State) -> tuple[str, ...]:
        due = sum(number <= state.round for number in probe.scale_rounds) - int(state.memory[RESCALED])
        return (*self._votes[len(self._votes) - int(state.memory[PENDING]) :], *([SCALE] * due))

    def answers_left(self, state: State, rounds: int, ledger: Ledger, run: str = "") -> list[Event]:
        """The events of all votes and evaluations that are left of `rounds` rounds, given the charges of `run` in the ledger."""
        left: list[Event] = []
        follows = {} if self.tournament is None else self.tournament.follows
        for number, player in state.players.items():
            engine = self.playing(number)
            if (probe := engine.probe) is not None and number not in follows:
                before = [purpose for purpose in engine._pending(probe, player) if purpose != SCALE]
                left += [probe.mechanisms[purpose].event(self.sampling) for purpose in before]
        for event, numbers in self.later_votes():
            left += [event] * votes_left(event, numbers, ledger, run or self.run)
        if (evaluation := self.evaluation) is not None:
            due = evaluations_left(evaluation.every, rounds, ledger, run or self.run)
            left += [evaluation.mechanism.event(self.sampling)] * due
        return left

    def later_votes(self) -> list[tuple[Event, tuple[int, ...]]]:
        """The votes after rounds: for each kind its event, and the rounds after which it is held at most."""
        tournament = self.tournament
        engines = (self,) if tournament is None else tournament.engines
        probes = [engine.probe for engine in engines if engine.probe is not None]
        found: list[tuple[Event, tuple[int, ...]]] = []
        if probes:
            phases = () if tournament is None else tournament.phases
            numbers = [[n] * staying(phases, n, len(probes)) for n in probes[0].scale_rounds]
            found.append((probes[0].mechanisms[SCALE].event(self.sampling), tuple(chain(*numbers))))
        if tournament is not None:
            found.append((tournament.vote.event(self.sampling), tuple(number for number, _ in tournament.phases)))
        return found

    def announced(self) -> dict[str, Any]:
        """The evaluations by clients and the `later_votes`, for the ledger's header and `run.json`; without empty fields."""
        votes = [{"event": to_json(event), "rounds": list(numbers)} for event, numbers in self.later_votes()]
        found: dict[str, Any] = {"votes": votes} if votes else {}
        if (evaluation := self.evaluation) is not None:
            event = to_json(evaluation.mechanism.event(self.sampling))
            found = {"evaluation": {"every": evaluation.every, "event": event}, **found}
        return found

    def _vote(
        self, purpose: str, state: State, ledger: Ledger, budget: Budget | None, shake: float = 0.0
    ) -> tuple[Tensor, float]:
        """Hold a vote; return the noisy share of the clients in each bin, [K], and the standard deviation of its noise."""
        mechanism = self.mechanism_of(purpose, state.radius)
        release, _ = self.ask(Request(purpose, state.round, state, mechanism, shake=shake), ledger, budget)
        deviation = math.sqrt(mechanism.noise_variance(self.expected, self.expected) or 0.0)
        return release.c_bar.cpu() / MAX_SHARE, deviation / MAX_SHARE

    def _charge(self, request: Request, ledger: Ledger, budget: Budget | None) -> Callable[[], None]:
        """Check that the budget allows the charge; return a function that makes the charge."""
        update, number = request.purpose == UPDATE, request.round
        event = request.mechanism.event(self.sampling)
        what = f"round {number}" if update else f"{request.purpose!r}"
        noise = None if self.seed is None else f"seed {self.seed}" + ("" if update else f", {request.purpose}")
        if noise is not None and not update and request.state.candidate:
            noise += f", candidate {request.state.candidate}"
        if budget is not None:
            ledger.check(budget, event, round=number, run=self.run, noise=noise)
        checked = len(ledger)

        def charge() -> None:
            try:
                with ledger.lock:
                    # Another run may have charged the ledger while the clients trained.
                    if budget is not None and len(ledger) != checked:
                        ledger.check(budget, event, round=number, run=self.run, noise=noise)
                    ledger.charge(number, event, run=self.run, noise=noise)
            except OSError as error:
                raise LedgerError(f"{what} can't be charged: {error.strerror}. Nothing of it was released.") from None
            self.on_charge()

        return charge

    def _advance(self, state: State, release: Release, groups: int) -> tuple[State, float]:
        """Return the state after the release of one of `groups` groups of the round's clients, and η_g."""
        share, expected = self.expected / self.population, self.expected / groups
        # The noise of a vote is larger in a smaller group.
        algorithm = resolve_algorithm(self.algorithm, None, self.mechanism, len(state.w), expected)
        new, eta_g = advance(algorithm, release, state, share=share, tau_eta_l=self.tau_eta_l)
        if LOCAL_RATE not in state.memory:
            return new, eta_g
        rate, improved = (float(state.memory[name]) for name in (LOCAL_RATE, IMPROVED_SO_FAR))
        name = local_rate.IMPROVED.name
        noise = self.mechanism.vote_noise(name) / expected
        rate, improved = local_rate.next_rate(rate, improved, release.votes[name], noise)
        known = {LOCAL_RATE: rate, IMPROVED_SO_FAR: improved}
        memory = {**new.memory, **{name: torch.full_like(new.memory[name], value) for name, value in known.items()}}
        return replace(new, memory=memory), eta_g


def _with(state: State, player: State) -> State:
    """The state with one of its candidates replaced by `player`."""
    if player.candidate == state.candidate:
        return replace(player, rivals=state.rivals)
    return replace(state, rivals={**state.rivals, player.candidate: player})


def _following(player: State, leader: State, factor: float) -> State:
    """The candidate's state with the rate and the first clip of `leader`, times a factor."""
    memory = {**player.memory, LOCAL_RATE: leader.memory[LOCAL_RATE] * factor}
    memory[PENDING] = player.memory[PENDING] - 1
    return replace(player, memory=memory, radius=leader.radius * factor)


def votes_left(event: Event, numbers: Sequence[int], ledger: Ledger, run: str) -> int:
    """The number of votes after these rounds that are not charged yet. A vote that was charged twice counts once."""
    asked = [entry.round for entry in ledger.entries if (entry.run, entry.event.question) == (run, event.question)]
    return (Counter(numbers) - Counter(asked)).total()


def evaluation_is_due(number: int, every: int, rounds: int) -> bool:
    return number % every == 0 or number == rounds


def evaluated(ledger: Ledger, run: str) -> set[int]:
    """The rounds after which evaluations of the run were charged."""
    return {entry.round for entry in ledger.entries if (entry.run, entry.event.question) == (run, EVALUATION)}


def evaluations_left(every: int, rounds: int, ledger: Ledger, run: str) -> int:
    """The number of evaluations after the last charged round and later ones that are not charged. A failed one is not repeated."""
    charged = [entry.round for entry in ledger.entries if entry.run == run and not entry.event.question]
    due = {number for number in range(max([1, *charged]), rounds + 1) if evaluation_is_due(number, every, rounds)}
    return len(due - evaluated(ledger, run))


LONG = 2**13
"""Smallest number of draws for which a thread is worth its cost."""


class PrefetchedNoise:
    """Noise that a thread draws while clients train: the same numbers as without a thread, used once.

    The draws depend on the noise source alone, not on the clients. The thread makes no CUDA call, because that would end a CUDA
    graph recording; pinned memory is allocated before the thread starts.
    """

    def __init__(self, noise: Noise, width: int, wanted: torch.device) -> None:
        self.noise, self.width = noise, width
        room = torch.empty(1, width, dtype=torch.float64, pin_memory=wanted.type == "cuda")
        server = torch.zeros(1, dtype=torch.int64)
        thread = ThreadPoolExecutor(1, "noise")
        self.drawn: Future[Tensor] | None = thread.submit(
            lambda: room.copy_(noise.normal(server, width, room.device, torch.float64))
        )
        thread.shutdown(wait=False)

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        drawn = self.drawn
        if drawn is not None and clients.tolist() == [0] and (width, dtype) == (self.width, torch.float64):
            # The same noise must not be used twice.
            self.drawn = None
            return drawn.result().to(device, non_blocking=True)
        return self.noise.normal(clients, width, device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        return self.noise.uniform(clients, width)
