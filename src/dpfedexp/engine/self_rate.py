"""A run whose local rate sets itself: who answers its votes, and the probe before the first round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpfedexp.accounting import Budget, Ledger, Sampling
from dpfedexp.algorithms import probe
from dpfedexp.algorithms.probe import Probe, probe_of
from dpfedexp.algorithms.round import State
from dpfedexp.core.clipping import AdaptiveClip, row_norms
from dpfedexp.core.local_rate import chosen, located, nearest, preferred, slowed
from dpfedexp.engine.rounds import RATE, Simulation
from dpfedexp.errors import LedgerError
from dpfedexp.mechanisms import Mechanism, Secure
from dpfedexp.trainers.isolation import learnt_apart, padded
from dpfedexp.trainers.task import Task

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
    noise = None if simulation.system is not None else f"seed {simulation.streams.seed}, {name}"
    event, private = vote.vote(name).event(simulation.sampling), simulation.mechanism.is_private
    if private and budget is not None:
        ledger.check(budget, event, round=BEFORE, run=simulation.run, noise=noise)

    def pay() -> None:
        simulation.task.look()()
        try:
            if private:
                ledger.charge(BEFORE, event, run=simulation.run, noise=noise)
        except OSError as error:
            raise LedgerError(
                f"the vote {name!r} can't be charged: {error.strerror}. Nothing of it was released."
            ) from None

    # Each vote has a cohort of its own: sampling hides a client in both only if it is drawn for them independently.
    draws = simulation.noise.at(f"participation, {name}", BEFORE)
    cohort = simulation.participation.cohort(simulation.present, draws)
    return vote.answers(
        name,
        _chunks(simulation, cohort),
        _of_holders(simulation, places),
        simulation.participation.expected(simulation.population),
        simulation.noise.at(f"probe noise, {name}", BEFORE),
        pay,
    )


def _chunks(simulation: Simulation, cohort: Tensor) -> Iterator[Tensor]:
    size = simulation.chunk_size
    return iter(cohort.split(size)) if len(cohort) else iter(())


def _of_holders(simulation: Simulation, places: probe.Places) -> probe.Places:
    """Where clients that hold data stand; the others have nothing to say. In an isolated run every shape is full.

    There, a client on whose data the model or the loss fails says nothing, and stops nobody.
    """
    sizes, public, unit = simulation.task.clients.sizes, simulation.task.local.shape_is_public, simulation.unit

    def learn(who: Tensor) -> Tensor:
        return places(who)[:, None].float()

    def standing(clients: Tensor) -> Tensor:
        out = torch.zeros(len(clients), dtype=torch.int64)
        if unit is None:
            real = torch.nonzero(sizes[clients] > 0).flatten()
            if len(real):
                out[real] = places(clients[real]).cpu()
            return out
        filled, real = padded(clients, sizes, unit)
        parts = [learnt_apart(learn, part, unit, like=torch.zeros(1), public=public) for part in filled.split(unit)]
        return torch.where(real[: len(clients)], torch.cat(parts)[: len(clients), 0].long().cpu(), out)

    return standing
