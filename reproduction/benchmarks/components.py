"""Two parts of a round on their own: PrivUnit beside a rejection sampler, and the accountant beside dp-accounting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import dp_accounting
import torch
from dp_accounting.pld import PLDAccountant
from torch import Tensor

from dpfedexp.accounting import GaussianEvent, Ledger, Query
from dpfedexp.core.clipping import Clipped
from dpfedexp.core.noise import Streams
from dpfedexp.mechanisms.privunit import PrivUnit


def privunit(dimension: int = 10**6, clients: int = 4, epsilon: float = 8.0) -> dict[str, Any]:
    """Milliseconds per vector at ε₀ = ε₁ = ε/2: drawing the Gaussian vector alone, ours, and drawing until one lies in the cap.

    The first two are of `clients` vectors, four at a time; that of a try is of one, times the tries that are expected.
    """
    mechanism = PrivUnit(clip=1.0, dimension=dimension, epsilon0=epsilon / 2, epsilon1=epsilon / 2)
    constants = mechanism.direction
    ids = torch.arange(4)
    noise = Streams(0).at("bench", 1)
    cpu = torch.device("cpu")
    rows = torch.nn.functional.normalize(noise.normal(ids + clients, dimension, cpu, torch.float32))
    delta = Clipped(rows, torch.ones(len(ids), dtype=torch.bool))
    turns = range(0, clients, len(ids))
    gaussian = ours = 0.0
    for first in turns:
        # In turn, so that a machine that becomes busier slows both.
        repeats = 5 if len(turns) == 1 else 1
        gaussian += _milliseconds(partial(noise.normal, ids + first, dimension, cpu, torch.float32), repeats)
        ours += _milliseconds(partial(mechanism.randomize, delta, ids + first, noise), repeats)
    gaussian, ours = (total / (len(turns) * len(ids)) for total in (gaussian, ours))

    def once(number: int) -> None:
        drawn = Streams(1).at("bench", number).normal(ids[:1], dimension, cpu, torch.float32)
        _reject(rows[:1], drawn, constants.gamma)

    one_try = _milliseconds(lambda: once(1))
    inside, outside = constants.p / constants.q, (1 - constants.p) / (1 - constants.q)
    return {
        "dimension": dimension,
        "clients": clients,
        "epsilon": epsilon,
        "gaussian_ms": gaussian,
        "privunit_ms": ours,
        "rejection_ms": one_try * (inside + outside),
        "rejection_tries": inside + outside,
        "times_gaussian": ours / gaussian,
        "times_faster_than_rejection": one_try * (inside + outside) / ours,
    }


def _reject(unit: Tensor, drawn: Tensor, gamma: float) -> bool:
    """One try of the textbook's sampler: a uniform direction, kept if it lies in the cap."""
    direction = drawn / drawn.norm()
    return bool((direction * unit).sum() >= gamma)


def accounting(rounds: int = 50) -> dict[str, Any]:
    """Milliseconds for ε of `rounds` central Gaussian rounds: ours, exact, and dp-accounting's privacy loss distributions."""
    event = GaussianEvent("central", "replace-one", (Query("update", 1.0, 2.0, 5.0),))
    ledger = Ledger.in_memory()
    for number in range(1, rounds + 1):
        ledger.charge(number, event)

    def theirs() -> float:
        accountant = PLDAccountant()
        accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.5), rounds))
        return float(accountant.get_epsilon(1e-5))

    exact = ledger.guarantee(1e-5).epsilon
    found = theirs()
    if not math.isclose(exact, found, rel_tol=0.01):
        raise RuntimeError(f"epsilon is {exact:.6g} here and {found:.6g} by dp-accounting; they must agree within 1 %.")
    return {
        "rounds": rounds,
        "ours_ms": _milliseconds(lambda: ledger.guarantee(1e-5)),
        "dp_accounting_ms": _milliseconds(theirs, repeats=3),
        "epsilon_ours": exact,
        "epsilon_dp_accounting": found,
    }


def _milliseconds(call: Callable[[], object], repeats: int = 5) -> float:
    """The best of several, in processor time, which other programs disturb least."""
    best = math.inf
    for _ in range(repeats):
        began = time.process_time()
        call()
        best = min(best, time.process_time() - began)
    return 1000 * best
