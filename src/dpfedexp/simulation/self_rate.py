"""A run whose local rate sets itself: what it asks of the clients, who answers, and the probe before the first round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpfedexp.accounting import Budget, Event, Ledger, Sampling
from dpfedexp.algorithms import Algorithm
from dpfedexp.clipping import AdaptiveClip, row_norms
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.local import LocalOptimiser
from dpfedexp.local_rate import (
    CLIP_SHARE,
    HELPED,
    NEXT_BELOW,
    RADII,
    RATE_SHARE,
    RATES,
    chosen,
    located,
    probe_noise,
    wants_more,
)
from dpfedexp.mechanisms import Mechanism, Secure, mechanism_class
from dpfedexp.mechanisms.base import Beside
from dpfedexp.round import State
from dpfedexp.simulation import probe
from dpfedexp.simulation.probe import Probe
from dpfedexp.simulation.rounds import RATE, Simulation
from dpfedexp.trainers.checks.isolation import padded
from dpfedexp.trainers.task import Task
from dpfedexp.votes import Ask

BEFORE = 0
"""The number that the ledger knows the probe by: it comes before the first round."""


def asked(
    algorithm: Algorithm, local: LocalOptimiser, rounds: int, sampling: Sampling, secure: Secure
) -> tuple[tuple[Ask, ...], Beside | None]:
    """The votes of every round, and what the probe costs beside the rounds: nothing where the rate is given."""
    if not local.automatic:
        return (), None
    kind = mechanism_class(algorithm.mechanism)
    if kind.is_local:
        raise InputError(
            "local lr is 'auto' in a local setting: clients would have to vote, and one vote drowns in its own noise. Choose the "
            "rate on public data, or in a simulation without privacy, and give it: Sgd(lr=0.1, …)."
        )
    if not kind.is_private:
        return (HELPED,), None

    def beside(mechanism: Mechanism) -> list[Event]:
        return _probe(mechanism, rounds, sampling, secure).events(sampling)

    return (HELPED,), beside


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

    return {"ballots": ballots, "probe": _probe(mechanism, rounds, sampling, secure)}


def _probe(mechanism: Mechanism, rounds: int, sampling: Sampling, secure: Secure) -> Probe:
    if not mechanism.is_private:
        return Probe(0.0, 0.0, "replace-one")
    event: Any = mechanism.event(sampling)
    if not hasattr(event, "mu"):
        raise InputError(
            f"local lr is 'auto' with mechanism {mechanism.kind!r}, whose noise is not Gaussian; give a number, such as lr=0.1."
        )
    rate_noise, clip_noise = (probe_noise(event.mu, rounds, share) for share in (RATE_SHARE, CLIP_SHARE))
    return Probe(rate_noise, clip_noise, event.adjacency, secure)


def probed(simulation: Simulation, state: State, ledger: Ledger, budget: Budget | None) -> State:
    """The state with the rate, and with an adaptive clip the first radius, that the clients' votes choose.

    Nothing happens where the rate is known. Both votes are charged before anything of them is released. The model is not touched.
    """
    vote = simulation.probe
    if vote is None or float(state.memory[RATE]) > 0:
        return state
    if simulation.team is not None:
        raise InputError(
            "local lr is 'auto' in a run on several ranks; choose the rate on one, and give it as a number."
        )
    w = state.w.float()

    def wants(clients: Tensor, bins: Tensor) -> Tensor:
        rates = torch.tensor(RATES, device=w.device)[bins.to(w.device)]
        rows, smaller = (_rows(simulation, w, clients, rates * factor) for factor in (1.0, NEXT_BELOW))
        still = simulation.loss_after(w, torch.zeros_like(rows), clients, BEFORE)
        after, below = (simulation.loss_after(w, found, clients, BEFORE) for found in (rows, smaller))
        return wants_more(still, after, below).double()

    rate = chosen(*_asked(simulation, vote, probe.RATE, wants, ledger, budget))
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
    event = vote.vote(name).event(simulation.sampling)
    if simulation.mechanism.is_private:
        if budget is not None:
            ledger.check(budget, event, round=BEFORE, run=simulation.run, noise=noise)
        try:
            ledger.charge(BEFORE, event, run=simulation.run, noise=noise)
        except OSError as error:
            raise LedgerError(
                f"the vote {name!r} can't be charged: {error.strerror}. Nothing of it was released."
            ) from None
    cohort = simulation.participation.cohort(simulation.present, simulation.noise.at("participation", BEFORE))
    return vote.answers(
        name,
        _chunks(simulation, cohort),
        _of_holders(simulation, values),
        simulation.population,
        share,
        simulation.noise.at(f"probe noise, {name}", BEFORE),
        simulation.noise.at(f"probe bins, {name}", BEFORE),
    )


def _chunks(simulation: Simulation, cohort: Tensor) -> Iterator[Tensor]:
    size = simulation.chunk_size
    return iter(cohort.split(size)) if len(cohort) else iter(())


def _of_holders(simulation: Simulation, values: probe.Values) -> probe.Values:
    """The answers of clients that hold data; the others have nothing to say. In an isolated run every shape is full."""
    sizes = simulation.task.clients.sizes

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
        found = torch.cat([values(part, own) for part, own in zip(filled.split(unit), more.split(unit), strict=True)])
        return torch.where(real[: len(clients)], found[: len(clients)].cpu(), out)

    return answer
