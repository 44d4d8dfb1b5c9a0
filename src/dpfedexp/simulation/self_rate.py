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
from dpfedexp.clipping import AdaptiveClip, row_norms
from dpfedexp.errors import LedgerError
from dpfedexp.local_rate import BELOW, RADII, RATES, chosen, located, slowed, wants_more
from dpfedexp.mechanisms import Mechanism, Secure
from dpfedexp.round import State
from dpfedexp.simulation.rounds import RATE, Simulation
from dpfedexp.trainers.checks.isolation import learnt_apart, padded
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
    w = state.w.float()

    def wants(clients: Tensor, bins: Tensor) -> Tensor:
        rates = torch.tensor(RATES, device=w.device)[bins.to(w.device)]

        def loss(factor: float) -> Tensor:
            return simulation.loss_after(w, _rows(simulation, w, clients, rates * factor), clients, BEFORE)

        still = simulation.loss_after(w, w.new_zeros(len(clients), len(w)), clients, BEFORE)
        return wants_more(still, loss(1.0), torch.minimum(*(loss(factor) for factor in BELOW))).double()

    cohort = simulation.participation.expected(simulation.population)
    noise = simulation.mechanism.noise_share(len(w), cohort) or 0.0
    rate = slowed(chosen(*_asked(simulation, vote, probe.RATE, wants, ledger, budget)), noise)
    memory = {**state.memory, RATE: torch.full_like(state.memory[RATE], rate)}
    if not isinstance(simulation.algorithm.clip, AdaptiveClip):
        return replace(state, memory=memory)

    def longer(clients: Tensor, bins: Tensor) -> Tensor:
        rows = _rows(simulation, w, clients, torch.full((len(clients),), rate, device=w.device))
        radii = torch.tensor(RADII, dtype=torch.float64, device=w.device)[bins.to(w.device)]
        return (row_norms(torch.nan_to_num(rows, 0.0, 0.0, 0.0)) > radii).double()

    radius = located(*_asked(simulation, vote, probe.CLIP, longer, ledger, budget))
    return replace(state, memory=memory, radius=radius)


def _rows(simulation: Simulation, w: Tensor, clients: Tensor, rates: Tensor) -> Tensor:
    return simulation.trainer(w, clients, simulation.plan(clients, BEFORE), BEFORE, None, rates)


def _asked(
    simulation: Simulation, vote: Probe, name: str, values: probe.Values, ledger: Ledger, budget: Budget | None
) -> tuple[Tensor, Tensor]:
    """Charges one of the two votes and releases it."""
    share = simulation.participation.expected(simulation.population) / simulation.population
    noise = None if simulation.system is not None else f"seed {simulation.streams.seed}, {name}"
    event, private = vote.vote(name).event(simulation.sampling), simulation.mechanism.is_private
    if private and budget is not None:
        ledger.check(budget, event, round=BEFORE, run=simulation.run, noise=noise)

    def pay() -> None:
        simulation.task.check_state()
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
        _of_holders(simulation, values),
        simulation.population,
        share,
        simulation.noise.at(f"probe noise, {name}", BEFORE),
        simulation.noise.at(f"probe bins, {name}", BEFORE),
        pay,
    )


def _chunks(simulation: Simulation, cohort: Tensor) -> Iterator[Tensor]:
    size = simulation.chunk_size
    return iter(cohort.split(size)) if len(cohort) else iter(())


def _of_holders(simulation: Simulation, values: probe.Values) -> probe.Values:
    """The answers of clients that hold data; the others have nothing to say. In an isolated run every shape is full."""
    sizes, public = simulation.task.clients.sizes, simulation.task.local.shape_is_public

    def answer(clients: Tensor, bins: Tensor) -> Tensor:
        out = torch.full((len(clients),), math.nan, dtype=torch.float64)
        unit = simulation.unit
        if unit is None:
            real = torch.nonzero(sizes[clients] > 0).flatten()
            if len(real):
                out[real] = values(clients[real], bins[real]).cpu()
            return out
        filled, real = padded(clients, sizes, unit)
        more = torch.cat([bins, bins[-1:].expand(len(filled) - len(bins))])
        parts = zip(filled.split(unit), more.split(unit), strict=True)
        found = torch.cat([_apart(values, part, own, public=public) for part, own in parts])
        return torch.where(real[: len(clients)], found[: len(clients)].cpu(), out)

    return answer


def _apart(values: probe.Values, part: Tensor, bins: Tensor, *, public: bool) -> Tensor:
    """The answers of one full shape, where a client on whose data the model or the loss fails says no and stops nobody."""

    def learn(who: Tensor) -> Tensor:
        own = bins if torch.equal(who, part) else bins[(part == who[0]).nonzero()[0]].expand(len(who))
        return values(who, own)[:, None]

    return learnt_apart(learn, part, len(part), like=torch.zeros(1), public=public)[:, 0].double()
