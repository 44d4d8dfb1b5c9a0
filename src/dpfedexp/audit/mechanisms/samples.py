"""Many releases of the same input: what an observer of each mechanism sees, one row per sample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpfedexp.audit.bounds import Floats
from dpfedexp.audit.mechanisms.cases import Case
from dpfedexp.core.clipping import Clipped, clip
from dpfedexp.core.noise.chacha import SystemStreams
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.sums import Sums
from dpfedexp.core.votes import further
from dpfedexp.mechanisms import Mechanism, Release, Report

CHECKED = 1000
"""Releases that must be the affine function of their draws that was read off, before the others are computed from it."""

FEW_RELEASES = 5000
NEIGHBOURS = 2
"""Other clients of a local sample's chunk: the attacker knows their updates, and so sees their noise."""


def affordable(count: int) -> int:
    """How many samples are taken where each is a release of its own, which takes some thousand times as long."""
    return min(count, FEW_RELEASES + count // 25)


def samples_of(case: Case, count: int, seed: int, there: bool) -> Floats:
    """What is seen in so many rounds of one of the two inputs; fewer where a release can only be had one at a time."""
    rows = case.there if there else case.here
    if case.mechanism.is_local:
        return _local(case.mechanism, rows, count, _streams(case, seed + there))
    last = None if len(case.here) != len(case.there) and there else case.votes[int(there)]
    return _central(case, case.mechanism, _sums(case.mechanism, rows, last), count, seed + there)


def _streams(case: Case, seed: int) -> Streams | SystemStreams:
    return SystemStreams() if case.secure else Streams(seed)


def _sums(mechanism: Mechanism, rows: Tensor, last: float | None) -> Sums:
    votes = torch.full((len(rows), len(mechanism.votes)), 0.5, dtype=torch.float64)
    if last is not None:
        votes[-1] = last
    return mechanism.collect(Report(rows, votes=votes if mechanism.votes else None))


class Given:
    """One round's draws of one purpose; like a keyed stream, it gives the same draws when asked twice."""

    def __init__(self) -> None:
        self.row = torch.zeros(0)

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.row[None, :width].to(dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        raise _Uniforms


class _Uniforms(Exception):
    """A release draws uniforms, so it is no affine function of normal draws."""


def _central(case: Case, mechanism: Mechanism, sums: Sums, count: int, seed: int) -> Floats:
    """What `release` shows, round after round, for the same sums.

    A plain release is an affine function of its draws. Where that is seen in a thousand releases, the function is read off from one
    release per draw and the other samples are computed from it; where it is not, as on a grid, every sample is a release.
    """
    if case.secure:
        system = SystemStreams()
        return np.array([_shown(_release(case, mechanism, sums, system, n)) for n in range(affordable(count))])
    widths = (len(sums.vector) + 2, 2 + len(further(mechanism.votes)))
    noise, scalar = Given(), Given()

    def release(draws: Tensor) -> list[float]:
        noise.row, scalar.row = draws.split(widths)
        return _shown(mechanism.release(sums, case.denominator, noise, scalar))

    draws = _draws(Streams(seed), count, widths)
    try:
        base = np.array(release(torch.zeros(sum(widths), dtype=torch.float64)))
    except _Uniforms:
        streams = Streams(seed)
        return np.array([_shown(_release(case, mechanism, sums, streams, n)) for n in range(affordable(count))])
    slopes = np.array([release(unit) for unit in torch.eye(sum(widths), dtype=torch.float64)]) - base
    seen: Floats = base + draws.numpy() @ slopes
    real = np.array([release(row) for row in draws[:CHECKED]])
    if np.allclose(real, seen[:CHECKED], rtol=1e-9, atol=1e-9 * float(np.abs(slopes).max())):
        return seen
    return np.array([*real.tolist(), *(release(row) for row in draws[CHECKED : affordable(count)])])


def _release(case: Case, mechanism: Mechanism, sums: Sums, streams: Streams | SystemStreams, number: int) -> Release:
    return mechanism.release(
        sums, case.denominator, streams.at("central noise", number), streams.at("central scalar noise", number)
    )


def _draws(streams: Streams, samples: int, widths: tuple[int, int]) -> Tensor:
    one = torch.zeros(1, dtype=torch.int64)
    parts = [
        streams.at(purpose, 1).normal(one, samples * width, torch.device("cpu"), torch.float64).reshape(samples, width)
        for purpose, width in zip(("central noise", "central scalar noise"), widths, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _shown(release: Release) -> list[float]:
    return [
        *release.c_bar.tolist(),
        *([] if release.statistic is None else [release.statistic]),
        *release.votes.values(),
    ]


def _local(mechanism: Mechanism, row: Tensor, count: int, streams: Streams | SystemStreams) -> Floats:
    """What many clients of one chunk send: for every sample one with this update, and its neighbours, whose update is known."""
    if "level" in mechanism.parts:
        clipped = Clipped(row.expand(count, -1), torch.ones(count, dtype=torch.bool))
        report = mechanism.randomize(clipped, torch.arange(count), streams.at("local noise", 1))
        levels = torch.zeros(count) if report.level is None else report.level
        return torch.cat([report.vector.double(), levels.double()[:, None]], dim=1).numpy()
    rows = torch.zeros(count, 1 + NEIGHBOURS, row.shape[1])
    rows[:, 0] = row
    kept = clip(rows.flatten(0, 1), mechanism.clip)
    report = mechanism.randomize(kept, torch.arange(len(kept.vectors)), streams.at("local noise", 1))
    return report.vector.double().reshape(count, -1).numpy()
