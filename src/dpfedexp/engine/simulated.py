"""Clients simulated on this machine: local updates → clip → randomize → `Sums`, a chunk of clients at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpfedexp.accounting import Sampling
from dpfedexp.algorithms.probe import BINS, CANDIDATE, CLIP, SCALE, UPDATE, bin_answers
from dpfedexp.algorithms.round import Participation
from dpfedexp.core.client_metrics import EVALUATION, WIDTH
from dpfedexp.core.clipping import clip, row_norms
from dpfedexp.core.local_optimizer import LocalOptimizer, Schedule, schedule, size_class
from dpfedexp.core.local_rate import SCALES, best_rates, best_scale, moves, nearest_radii
from dpfedexp.core.noise import Streams, SystemStreams
from dpfedexp.core.sums import Sums, client_votes
from dpfedexp.engine.engine import ANCHOR, BEFORE, Answer, Cohort, OneGroup, Request
from dpfedexp.errors import InputError, RoundFailed
from dpfedexp.machine import zero_rows
from dpfedexp.trainers.client_losses import ClientLosses, ClientScores, all_rows
from dpfedexp.trainers.isolation import padded, train_isolated
from dpfedexp.trainers.task import Task, Trainer


@dataclass(frozen=True)
class Simulation(Cohort):
    """The simulated clients of a run.

    Attributes:
        task: model, loss, local optimizer and clients' data.
        trainer: how local updates are computed.
        participation: who takes part in a round.
        streams: every draw of a simulation, keyed by purpose, round and client.
        chunk_size: clients that are trained together.
        scaffold: whether SCAFFOLD's control variates use the clipped "update" or the noisy "report"; None without SCAFFOLD.
        diagnostics: whether to compute values that are not private.
        system: the operating system's randomness for noise and sampling in a secure run; None for the seed.
        unit: clients per batch shape in an isolated run (`trainers.isolation`); None for a run without isolation.
        scores: computes the metrics that clients measure; None without such metrics.
        candidates: the simulation of each candidate of a tournament, over the same clients; empty without one.
        sampling: how clients are sampled, from the public number of clients; only tournaments need it.
    """

    task: Task
    trainer: Trainer
    participation: Participation
    streams: Streams
    chunk_size: int
    scaffold: str | None = None
    diagnostics: bool = False
    system: SystemStreams | None = None
    unit: int | None = None
    scores: ClientScores | None = None
    candidates: tuple[Simulation, ...] = ()
    sampling: Sampling | None = None
    _groups: OneGroup = field(default_factory=OneGroup)

    @property
    def noise(self) -> Streams | SystemStreams:
        """The noise source. An observer who can repeat its draws can subtract the noise."""
        return self.system or self.streams

    @property
    def present(self) -> int:
        """The number of clients in the data. It is private under add-remove adjacency: only for sampling and memory."""
        return len(self.task.clients)

    @property
    def cpu_is_idle(self) -> bool:  # type: ignore[override]
        return self.task.device.type == "cuda"

    def control_variates(self, dimension: int) -> Tensor | None:
        return zero_rows(self.present, dimension)

    def of_candidates(self, cohorts: Sequence[Any]) -> Simulation:
        return replace(self, candidates=tuple(cohorts))

    def answer(self, request: Request) -> Answer:
        return self.collect(request, self.drawn(request))

    def drawn(self, request: Request) -> Tensor:
        """Draw the cohort. Every vote draws its own cohort, because amplification by sampling needs independent draws."""
        name = "participation" if request.purpose == UPDATE else f"participation, {request.purpose}"
        if request.purpose != UPDATE and request.state.candidate:
            name += f", candidate {request.state.candidate}"
        cohort = self.participation.cohort(self.present, self.noise.at(name, request.round))
        if request.group is None:
            return cohort
        place, groups = request.group
        cohort = cohort[self.groups(request, groups)[cohort] == place]
        self._groups.take(request.round, place, cohort, self.present)
        return cohort

    def groups(self, request: Request, groups: int) -> Tensor:
        """The group of each client in this round of a tournament, [present], which depends on no client's data.

        Where the number of clients is public, groups have equal sizes. Otherwise each client draws its group independently.
        """
        draws = self.streams.at("groups", request.round).uniform(torch.arange(self.present), 1).flatten()
        if self.sampling is not None and request.mechanism.counts_are_public(self.sampling):
            draws = draws.argsort().argsort().double() / self.present
        return (draws * groups).long()

    def collect(self, request: Request, cohort: Tensor) -> Answer:
        """Compute the reports of these clients and add them up."""
        if self.candidates and request.purpose != CANDIDATE:
            return self.candidates[request.state.candidate].collect(request, cohort)
        mechanism, state = request.mechanism, request.state
        noise = self.noise.at("local noise", request.round)
        w = state.w.float().to(self.task.device)
        sums: Sums | None = None
        controls: list[tuple[Tensor, Tensor]] = []
        true_squares = 0.0
        check_state = None
        check_model = None if self.task.synthetic is None else _check_unchanged(w)
        chunks = list(self.chunks(cohort))
        for clients in chunks:
            updates = self.rows(request, w, clients)
            ballots = self.improved(clients, updates) if client_votes(mechanism.votes) else None
            if check_model is not None:
                check_model()
            elif clients is chunks[-1]:
                # The check is started here and read below, so that it does not make the CPU wait for the GPU.
                check_state = self.task.look()
            # An isolated run clips and randomizes batches of one size; the last batch may have padding rows.
            unit, first = self.unit or len(clients), 0
            for part, rows in zip(clients.split(unit), updates.split(unit), strict=True):
                own_votes = {} if ballots is None else {"ballots": ballots[first : first + len(rows)]}
                first += len(rows)
                clipped = clip(rows, mechanism.clip, reuse=True)
                numbers = torch.cat([part, part[-1:].expand(len(rows) - len(part))])
                report = mechanism.randomize(clipped, numbers, noise, **own_votes).first(len(part))
                if state.control is not None and state.client_controls is not None:
                    own = clipped.vectors[: len(part)] if self.scaffold == "update" else mechanism.estimate(report)
                    controls.append(self._control(state.control, state.client_controls, part, own))
                added = mechanism.collect(report)
                sums = added if sums is None else sums + added
                if self.diagnostics:
                    true_squares += float(row_norms(clipped.vectors[: len(part)]).square().sum())
        if check_state is not None:
            check_state()
        if check_model is not None:
            check_model(last=True)
        width = BINS.get(request.purpose) or mechanism.width(len(w))
        zero = Sums.zero(width, self.task.device, len(mechanism.votes))
        return Answer(sums or zero, {}, controls, true_squares)

    def improved(self, clients: Tensor, updates: Tensor) -> Tensor | None:
        """The votes on an automatic local rate, one row for each update; None for a given rate.

        1 for a client whose loss improved; 0 for a zero update, which means no improvement. Clients without rows and padding rows
        abstain (NaN).
        """
        if not self.task.local.automatic:
            return None
        holds = pad(self.task.clients.sizes[clients] > 0, (0, len(updates) - len(clients)))
        improved = (updates != 0).any(1).double()
        return torch.where(holds.to(improved.device), improved, math.nan)[:, None]

    def chunks(self, cohort: Tensor) -> Iterator[Tensor]:
        """Yield chunks of clients of one `size_class`, to save padding; clients without rows have chunks of their own.

        In an isolated run, clients of a class stay in the order of their numbers, because sizes are private. On a GPU, where every
        shape needs its own CUDA graph, there is one class.
        """
        if len(cohort) == 0:
            return
        sizes = self.task.clients.sizes[cohort]
        if self.unit is None:
            sizes, order = torch.sort(sizes, stable=True)
            cohort = cohort[order]
        on_cpu = self.task.device.type == "cpu"
        classes = size_class(sizes, self.task.local.max_examples) if on_cpu else (sizes > 0).long()
        if self.unit is not None and not self._by_class:
            classes = torch.zeros_like(classes)
        for one in classes.unique().tolist():
            yield from cohort[classes == one].split(self.chunk_size)

    def rows(self, request: Request, w: Tensor, clients: Tensor) -> Tensor:
        """The answers of a chunk of clients before clipping, one row for each client."""
        compute = {EVALUATION: self.measurements, CANDIDATE: self.best_candidates, UPDATE: self.updates}
        return compute.get(request.purpose, self.places)(request, w, clients)

    def best_candidates(self, request: Request, w: Tensor, clients: Tensor) -> Tensor:
        """Answers to a vote on candidates: ½ in the bin of the released model with the lowest loss on the client's rows."""
        losses = torch.full((len(clients), BINS[CANDIDATE]), math.inf, device=w.device)
        for number, player in request.state.players.items():
            own, model = self.candidates[number], player.reported.float().to(w.device)

            def loss(who: Tensor, own: Simulation = own, model: Tensor = model) -> Tensor:
                return own.loss_after(model, model.new_zeros(len(who), len(model)), who, request.round)[:, None]

            losses[:, number] = own._of_holders(loss, clients, 1, w.device, fill=math.inf)[: len(clients), 0]
        holds = (self.task.clients.sizes[clients] > 0).to(losses.device) & losses.isfinite().any(1)
        rows = bin_answers(torch.where(holds, losses.argmin(1) + 1, 0), BINS[CANDIDATE])
        return pad(rows, (0, 0, 0, -len(rows) % self.unit)) if self.unit else rows

    def measurements(self, request: Request, w: Tensor, clients: Tensor) -> Tensor:
        """The metrics that clients measure, [n, WIDTH]; zeros for a client without rows, or on whose rows the evaluation fails."""
        scores = self.scores
        if scores is None:
            raise InputError(
                "the server asks the clients to evaluate the model, but these clients were not set up for it."
            )
        if self.unit is None:
            return scores.of_clients(w, clients, request.round)
        like = torch.zeros(WIDTH, device=w.device)
        rows = train_isolated(lambda who: scores.of_clients(w, who, request.round), clients, 1, like=like, public=True)
        return pad(rows, (0, 0, 0, -len(rows) % self.unit))

    def updates(self, request: Request, w: Tensor, clients: Tensor) -> Tensor:
        """One row for each client of a chunk, zero for a client without rows; an isolated run may append padding rows."""
        state, number, rate = request.state, request.round, request.local_rate

        def train(who: Tensor) -> Tensor:
            correction = None
            if state.control is not None and state.client_controls is not None:
                correction = state.control.float().to(w.device) - state.client_controls[who].to(w.device)
            if rate is None:
                return self.trainer(w, who, self.plan(who, number), number, correction)
            rates = w.new_full((len(who),), rate)
            rows = self.trainer(w, who, self.plan(who, number), number, correction, rates)
            improved = self.loss_after(w, rows, who, number) < self.loss_after(w, torch.zeros_like(rows), who, number)
            return torch.where(improved[:, None], rows, torch.zeros_like(rows))

        return self._of_holders(train, clients, len(w), w.device)

    def places(self, request: Request, w: Tensor, clients: Tensor) -> Tensor:
        """Answers to a vote, [n, bins]: ½ in the bin of the client's best rate, best scale of the rate, or update norm.

        In an isolated run, a client on whose data the model or the loss fails abstains and does not stop other clients.
        """
        rate = request.local_rate or 0.0

        def trained(who: Tensor, rates: Tensor) -> Tensor:
            return self.trainer(w, who, self.plan(who, BEFORE), BEFORE, None, rates)

        def loss_around_anchor(who: Tensor, scale: float) -> Tensor:
            anchor = request.state.memory[ANCHOR].float().to(w.device)
            ways = (way.expand(len(who), -1).contiguous() for way in moves(anchor, w, request.shake, scale))
            return sum((self.loss_after(anchor, way, who, request.round) for way in ways), w.new_zeros(len(who)))

        def answers(who: Tensor) -> Tensor:
            if request.purpose == SCALE:
                found = best_scale(torch.stack([loss_around_anchor(who, scale) for scale in SCALES]))
            elif request.purpose == CLIP:
                found = nearest_radii(row_norms(trained(who, w.new_full((len(who),), rate))))
            else:
                loss_before = self.loss_after(w, w.new_zeros(len(who), len(w)), who, BEFORE)
                sizes = self.task.clients.sizes[who].to(w.device)
                found = best_rates(
                    loss_before, sizes, lambda rates: self.loss_after(w, trained(who, rates), who, BEFORE)
                )
            return bin_answers(found.to(w.device), BINS[request.purpose])

        return self._of_holders(answers, clients, BINS[request.purpose], w.device)

    def _of_holders(
        self,
        rows_of: Callable[[Tensor], Tensor],
        clients: Tensor,
        width: int,
        device: torch.device,
        *,
        fill: float = 0.0,
    ) -> Tensor:
        """Return the rows of clients that hold data, and zeros for clients without data; `fill` where an isolated client fails.

        In an isolated run, where no client's data may change another client's row, the clients are padded to a multiple
        of `unit`, so that every tensor has the same shape. The rows of the padding are zero.
        """
        sizes = self.task.clients.sizes
        if self.unit is None:
            empty = int(sizes[clients[0]]) == 0
            return torch.zeros(len(clients), width, device=device) if empty else rows_of(clients)
        filled, real = padded(clients, sizes, self.unit)
        like = torch.zeros(width, device=device)
        rows = train_isolated(rows_of, filled, self.unit, like=like, public=not self._by_class, fill=fill)
        return rows if bool(real.all()) else torch.where(real.to(device)[:, None], rows, torch.zeros_like(rows))

    @property
    def _by_class(self) -> bool:
        return self.unit is not None and self.task.shapes_by_class

    def plan(self, clients: Tensor, number: int) -> Schedule:
        """The schedule of batches that the clients train on in a round."""
        return self._schedule(self.task.local, "batches", clients, number)

    def _schedule(self, local: LocalOptimizer, purpose: str, clients: Tensor, number: int) -> Schedule:
        draws, numbers = self.streams.at(purpose, number).generators(), clients.tolist()
        sizes, public, by_class = self.task.clients.sizes[clients], self.unit is not None, self._by_class
        return schedule(local, sizes, lambda row: draws(numbers[row]), public=public, by_class=by_class)

    @cached_property
    def _losses(self) -> ClientLosses:
        return ClientLosses(self.task, self.trainer, self.streams, unit=self.unit)

    def loss_after(self, w: Tensor, rows: Tensor, clients: Tensor, number: int) -> Tensor:
        """Each client's loss in round `number` at the parameters w + rows[i], [n], on up to `MOST_ROWS` of its own examples."""
        plan = self._schedule(all_rows(self.task.local.max_examples), "losses", clients, number)
        return self._losses(w, rows, clients, plan, number)

    def _control(
        self, control: Tensor, client_controls: Tensor, clients: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute SCAFFOLD's new control variates c_i − c − Δ_i/(τη_l) of the clients that hold rows; the others keep theirs.

        Δ_i is the client's clipped update or its noisy report. Control variates from clipped updates must stay private.
        """
        holding = torch.nonzero(self.task.clients.sizes[clients] > 0).flatten()
        clients, delta = clients[holding], delta[holding.to(delta.device)]
        # The same for all clients (`prepare` requires it), and no number of clients reaches a custom optimizer.
        steps = self.task.local.step_count(torch.ones(1, dtype=torch.int64))
        tau_eta_l = self.task.local.tau_eta_l(steps.to(delta.device).float())[:, None]
        old = client_controls[clients].to(delta.device)
        return clients, (old - control.float().to(delta.device) - delta / tau_eta_l).cpu()


def _check_unchanged(w: Tensor) -> Callable[..., None]:
    """Return a function that compares `w` with its present value; called with `last=True`, it raises if any call saw a change."""
    before, same = w.clone(), torch.ones((), dtype=torch.bool, device=w.device)

    def check(*, last: bool = False) -> None:
        # Released parameters are never NaN, so == finds every change. Only the last check waits for the GPU.
        nonlocal same
        same = same & (w == before).all()
        if last and not bool(same):
            raise RoundFailed(
                "the released model changed while clients trained on it, so that one client could reach another; nothing of this "
                "round was charged or released."
            )

    return check
