"""The audit of a vote in bins: a client at one end of the range, at the other, or absent, told apart from all the bins at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dpfedexp.accounting import Sampling
from dpfedexp.audit.bounds import Floats
from dpfedexp.audit.mechanisms.release import gaussian_results
from dpfedexp.audit.mechanisms.samples import affordable
from dpfedexp.audit.result import Result
from dpfedexp.core.noise import Noise
from dpfedexp.core.noise.chacha import SystemStreams
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.votes import Vote
from dpfedexp.errors import checked
from dpfedexp.mechanisms.binned_vote import BinnedVote

CLIENTS = 7
_HOSTILE = 1e9


@checked
def bin_cases() -> dict[str, BinnedVote]:
    """Both adjacencies, plain and secure; each claims μ = 1."""
    replaced = BinnedVote(Vote("loss", 0.0, 10.0, noise=1.0), 3)
    absent = BinnedVote(Vote("loss", 0.0, 10.0, noise=0.5), 3, "add-remove")
    plain = {"binned vote": replaced, "binned vote, add-remove": absent}
    return plain | {f"{name}, secure": replace(case, secure=True) for name, case in plain.items()}


@checked
def audit_bins(name: str, mechanism: BinnedVote, samples: int, seed: int, confidence: float) -> list[Result]:
    """ε at δ = 0.01 without any assumption, and μ. Every sample is a release with new noise."""
    here, there = (_seen(mechanism, affordable(samples), seed + other, bool(other)) for other in (0, 1))
    return gaussian_results(name, mechanism.event(Sampling()), here, there, confidence)


def _seen(mechanism: BinnedVote, count: int, seed: int, there: bool) -> Floats:
    """The bins of so many releases; the client is in the first."""
    leaves = mechanism.adjacency == "add-remove" and there
    values = torch.full((CLIENTS,), 5.0, dtype=torch.float64)
    values[-1] = -_HOSTILE if there else _HOSTILE
    present = slice(0, CLIENTS - leaves)
    noises = _noises(mechanism, seed)
    bins = torch.arange(CLIENTS).flip(0) % mechanism.bins
    sums = mechanism.collect(values[present], bins[present])
    rows = [mechanism.release(sums, CLIENTS, noises("central noise", number)) * CLIENTS for number in range(count)]
    return torch.stack(rows).numpy()


def _noises(mechanism: BinnedVote, seed: int) -> Callable[[str, int], Noise]:
    return (SystemStreams() if mechanism.secure else Streams(seed)).at
