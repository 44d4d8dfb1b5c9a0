"""The mechanism audit: two worst-case neighbouring inputs, many releases of each, and the best test between them.

The attacker sees everything that a release shows (or, in the local setting, that a client and its neighbours send) and knows every
other client. A linear discriminant, fitted on one half of the samples, finds the best direction also where noises are not what they
should be, such as equal in two coordinates; the other half proves the bound. A report that is ε-DP by itself is attacked with the
likelihood ratio that its mechanism claims, and with one that is learnt from a histogram.

The cases are every mechanism with every step-size rule, plain and secure. All claim about μ = 1 a round, where some ten thousand
samples have the power to tell. Vectors have eight coordinates, so that noise repeated after a few of them is in the covariance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpfedexp.accounting import Event, GaussianEvent, NonPrivateEvent, Sampling, compose
from dpfedexp.accounting.charges import GammaRule
from dpfedexp.accounting.gdp import FREE_THRESHOLD
from dpfedexp.audit.bounds import Distinguisher, Floats, Score, epsilon_score, mu_score, power_of_shift, power_of_tests
from dpfedexp.audit.result import Curve, Result
from dpfedexp.core.clipping import Clipped, clip
from dpfedexp.core.noise.chacha import SystemStreams
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.sums import Sums
from dpfedexp.core.votes import Vote, further, within_clip
from dpfedexp.errors import checked, require
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, Mechanism, PrivUnit, Release, Report
from dpfedexp.mechanisms.base import Numerator
from dpfedexp.mechanisms.binned_vote import BinnedVote

DIMENSION = 8
GAMMAS: tuple[GammaRule, ...] = ("exact", "paper", "optimal")
RULES: dict[Numerator | None, str] = {
    None: "",
    "free": ", free rule",
    "paper": ", paper's rule",
    "naive": ", naive rule",
}
_HOSTILE = 8.0
"""Clients of the central setting send reports this many times too long: the server must not trust their clipping."""


@checked
@dataclass(frozen=True)
class Case:
    """A mechanism, and two neighbouring inputs that differ in the last client.

    For central mechanisms these are the rows that the clients send, for local ones a client's own update. `votes` holds what the
    last client sends for every vote in both; the others send ½, and an absent client nothing. `denominator` is public.
    """

    name: str
    mechanism: Mechanism
    here: Tensor
    there: Tensor
    denominator: float = 3.0
    votes: tuple[float, float] = (0.5, 0.5)

    @property
    def secure(self) -> bool:
        return "secure" in self.name


def standard_cases() -> list[Case]:
    """Every mechanism with every rule that it knows, plain and secure."""
    c, z = 0.5, 2.0
    plain = _central_cases(c, z)
    plain += [Case(f"local Gaussian{named}", LocalGaussian(c, z, r), _row(c), _row(-c)) for r, named in RULES.items()]
    # A client at the clip beside one with hardly any update and the opposite direction: both halves of a report differ most.
    for gamma in GAMMAS:
        mechanism = PrivUnit(c, DIMENSION, 1.0, 1.0, 1.0, gamma=gamma)
        plain.append(Case(f"PrivUnit, {gamma} γ", mechanism, _row(c), _row(-1e-7 * c)))
    secure = [
        Case(f"{c.name}, secure", c.mechanism.secure(), c.here, c.there, c.denominator, c.votes)
        for c in plain
        if not c.name.endswith(("coordinate", "naive rule", "paper γ", "optimal γ"))
    ]
    return plain + secure


def _central_cases(c: float, z: float) -> list[Case]:
    ahead = _row(c * _HOSTILE)
    lifted = torch.cat([ahead, torch.zeros(1, 1)], dim=1)
    # The free rule's own coordinate, which a hostile client may fill with anything.
    pole = lifted.flip(1)
    free = CentralGaussian(c, z, numerator="free")
    counted = CentralGaussian(c, 2.8, numerator="free", votes=(within_clip(1.4),))
    leaving = CentralGaussian(c, 1.4, "add-remove", votes=(within_clip(0.7),))
    votes = (within_clip(2.4), Vote("loss", 0.0, 10.0, noise=2.0), Vote("loss fell", noise=3.0))
    asking = CentralGaussian(c, 3.0, numerator="free", votes=votes)
    asked_apart = CentralGaussian(c, 1.5, "add-remove", votes=tuple(replace(v, noise=v.noise / 2) for v in votes))
    return [
        Case("central Gaussian", CentralGaussian(c, z), *_neighbours(ahead, -ahead)),
        Case("central Gaussian, free rule", free, *_neighbours(lifted, -lifted)),
        Case("central Gaussian, free rule's coordinate", free, *_neighbours(pole, -pole)),
        Case("central Gaussian, paper's rule", *_paper(c, z)),
        Case("central Gaussian, adaptive clip", counted, *_neighbours(lifted, -lifted), votes=(0.5, -0.5)),
        Case("central Gaussian, add-remove", CentralGaussian(c, 1.0, "add-remove"), *_absent(ahead)),
        Case("central Gaussian, adaptive clip, add-remove", leaving, *_absent(ahead)),
        Case("central Gaussian, votes", asking, *_neighbours(lifted, -lifted), votes=(_HOSTILE, -_HOSTILE)),
        Case("central Gaussian, votes, add-remove", asked_apart, *_absent(ahead), votes=(_HOSTILE, _HOSTILE)),
    ]


def _row(value: float) -> Tensor:
    row = torch.zeros(1, DIMENSION)
    row[0, 0] = value
    return row


def _neighbours(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two clients that everybody knows, and the one that is replaced."""
    known = torch.zeros(2, one.shape[1])
    known[:, -1] = 0.1
    return torch.cat([known, one]), torch.cat([known, other])


def _absent(row: Tensor) -> tuple[Tensor, Tensor]:
    """The client takes part, or does not; the others all point the other way, which shows a denominator that counts them."""
    known = -row.expand(4, -1)
    return torch.cat([known, row]), known


def _paper(c: float, z: float) -> tuple[Mechanism, Tensor, Tensor]:
    """The pair of `joint_mu` where the scalar counts: antiparallel, with norms C and bC."""
    scalar = 1.0
    rho = (z / scalar) ** 2
    require(
        rho > FREE_THRESHOLD,
        f"z is {z:g}; the scalar of the paper's rule counts only where z is above {FREE_THRESHOLD**0.5:.4g}, so raise it.",
    )
    b = 1.0 / (rho * (1.0 + np.sqrt(1.0 - 2.0 / rho)))
    mechanism = CentralGaussian(c, z, numerator="paper", scalar_multiplier=scalar)
    return mechanism, *_neighbours(_row(c * _HOSTILE), _row(-float(b) * c))


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
        return _local(case.mechanism, rows, count, _streams(case.secure, seed + there))
    votes = torch.full((len(rows), len(case.mechanism.votes)), 0.5, dtype=torch.float64)
    if len(case.here) == len(case.there) or not there:
        votes[-1] = case.votes[int(there)]
    sums = case.mechanism.collect(Report(rows, votes=votes if case.mechanism.votes else None))
    return _central(case, sums, count, seed + there)


def _streams(secure: bool, seed: int) -> Streams | SystemStreams:
    return SystemStreams() if secure else Streams(seed)


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


def _central(case: Case, sums: Sums, count: int, seed: int) -> Floats:
    """What `release` shows, round after round, for the same sums.

    A plain release is an affine function of its draws. Where that is seen in a thousand releases, the function is read off from one
    release per draw and the other samples are computed from it; where it is not, as on a grid, every sample is a release.
    """

    def one_by_one() -> Floats:
        at = _streams(case.secure, seed).at
        draws = ((at("central noise", n), at("central scalar noise", n)) for n in range(affordable(count)))
        return np.array([_shown(case.mechanism.release(sums, case.denominator, *drawn)) for drawn in draws])

    if case.secure:
        return one_by_one()
    widths = (len(sums.vector) + 2, 2 + len(further(case.mechanism.votes)))
    noise, scalar = Given(), Given()

    def release(draws: Tensor) -> list[float]:
        noise.row, scalar.row = draws.split(widths)
        return _shown(case.mechanism.release(sums, case.denominator, noise, scalar))

    draws = _draws(Streams(seed), count, widths)
    try:
        base = np.array(release(torch.zeros(sum(widths), dtype=torch.float64)))
    except _Uniforms:
        return one_by_one()
    slopes = np.array([release(unit) for unit in torch.eye(sum(widths), dtype=torch.float64)]) - base
    seen: Floats = base + draws.numpy() @ slopes
    real = np.array([release(row) for row in draws[:CHECKED]])
    if np.allclose(real, seen[:CHECKED], rtol=1e-9, atol=1e-9 * float(np.abs(slopes).max())):
        return seen
    return np.array([*real.tolist(), *(release(row) for row in draws[CHECKED : affordable(count)])])


def _draws(streams: Streams, samples: int, widths: tuple[int, int]) -> Tensor:
    one = torch.zeros(1, dtype=torch.int64)
    parts = [
        streams.at(purpose, 1).normal(one, samples * width, torch.device("cpu"), torch.float64).reshape(samples, width)
        for purpose, width in zip(("central noise", "central scalar noise"), widths, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _shown(release: Release) -> list[float]:
    statistic = [] if release.statistic is None else [release.statistic]
    return [*release.c_bar.tolist(), *statistic, *release.votes.values()]


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


DELTA = 0.01
"""Where the assumption-free bound is measured: rates of a few per cent are what a million samples can prove something about."""

DELTAS = (0.001, 0.003, 0.01, 0.03, 0.1)
_FEWEST, _MOST, _PER_BIN = 32, 256, 400
"""Bins, and samples that one more bin needs: the finer they are, the thinner the shells that are found."""


@checked
def audit_mechanism(case: Case, samples: int, seed: int, confidence: float) -> list[Result]:
    """ε at δ = 0.01 without any assumption, and μ where that is what is claimed; PrivUnit at δ = 0."""
    event = case.mechanism.event(Sampling())
    here, there = (samples_of(case, samples, seed, there) for there in (False, True))
    if not isinstance(event, GaussianEvent):
        return _reports(case, event, here, there, confidence)
    return gaussian_results(case.name, event, here, there, confidence)


def gaussian_results(name: str, event: GaussianEvent, here: Floats, there: Floats, confidence: float) -> list[Result]:
    """What the best linear test between two samples of a release proves, beside what its event claims."""
    direction = discriminant(here[::2], there[::2])
    attack = Distinguisher(here @ direction, there @ direction, confidence)
    counts, detail = (len(here), len(there)), f"{len(here)} samples of each input"

    def result(unit: str, score: Score, claim: float, curve: Curve = ()) -> Result:
        power = power_of_shift(event.mu, counts, score, confidence)
        lower = attack.bound(score).value
        return Result("mechanism", name, unit, lower, claim, confidence, detail, curve, power)

    epsilon = compose([(event, 1)], DELTA).epsilon
    first = result(f"ε at δ = {DELTA:g}", epsilon_score(DELTA), epsilon, _curve(attack, event))
    return [first, result("μ", mu_score, event.mu)]


def _curve(attack: Distinguisher, event: Event) -> Curve:
    return tuple((d, attack.bound(epsilon_score(d)).value, compose([(event, 1)], d).epsilon) for d in DELTAS)


def discriminant(here: Floats, there: Floats) -> Floats:
    """Fisher's: Σ⁻¹(m − m'), the likelihood ratio of two Gaussians with any common covariance."""
    shift = here.mean(0) - there.mean(0)
    spread = (np.cov(here, rowvar=False) + np.cov(there, rowvar=False)).reshape(len(shift), len(shift)) / 2
    # Relative to each coordinate's own spread, so that an exact linear dependence stays invertible and visible; and not below a
    # small part of the shift, so that a coordinate without any spread does.
    scale = np.sqrt(np.maximum(np.diag(spread), max(1e-300, 1e-12 * float(shift @ shift))))
    whitened = spread / np.outer(scale, scale) + 1e-12 * np.eye(len(shift))
    return np.linalg.solve(whitened, shift / scale) / scale


def _reports(case: Case, event: Event, here: Floats, there: Floats, confidence: float) -> list[Result]:
    """A report that is ε-DP by itself, at δ = 0: the likelihood ratio that its mechanism claims, where it says one, and a learnt
    one, which also sees what no formula says."""
    score = epsilon_score(0.0)
    claim, detail = compose([(event, 1)], 0.0).epsilon, f"{len(here)} reports of each input"
    claimed = [case.mechanism.log_ratio(seen, case.here, case.there) for seen in (here, there)]
    views = {", learnt": learnt_ratio(here, there, levels="level" in case.mechanism.parts)}
    if claimed[0] is not None and claimed[1] is not None:
        views = {"": (claimed[0], claimed[1]), **views}
    found = []
    for name, pair in views.items():
        attack = Distinguisher(*pair, confidence)
        power = power_of_tests(*_rates(event), (len(pair[0]), len(pair[1])), score, confidence)
        curve = _curve(attack, event) if not name else ()
        lower = attack.bound(score).value
        found.append(
            Result("mechanism", case.name + name, "ε at δ = 0", lower, claim, confidence, detail, curve, power)
        )
    return found


def _rates(event: Event) -> tuple[Floats, Floats]:
    """Of the test "every part of the loss is at its largest", the best there is at δ = 0, under both inputs."""
    losses = [] if isinstance(event, GaussianEvent | NonPrivateEvent) else event.losses()
    here = math.prod(part.up for part in losses)
    return np.array([here]), np.array([here * math.exp(-math.fsum(part.step for part in losses))])


def learnt_ratio(here: Floats, there: Floats, *, levels: bool) -> tuple[Floats, Floats]:
    """Of the second half of the samples, the log ratio of the bin that each falls into, learnt on the first half.

    It needs no formula of the mechanism, so it also finds what the formula does not know, such as a shell that no report of one
    client ever falls into. The half that is scored is divided again: one part chooses the test and one proves. The first column
    has bins of like mass; with `levels` the last one is a level, which is taken as it is.
    """
    half = min(len(here), len(there)) // 2
    pooled = np.concatenate([here[:half, 0], there[:half, 0]])
    bins = min(_MOST, max(_FEWEST, len(here) // _PER_BIN))
    edges = np.quantile(pooled, np.linspace(0.0, 1.0, bins + 1)[1:-1])
    first, second = _bin(here, edges, levels), _bin(there, edges, levels)
    size = 1 + max(int(first.max()), int(second.max()))
    counts = [np.bincount(cells[:half], minlength=size) + 0.5 for cells in (first, second)]
    ratio = np.log(counts[0] / counts[1]) - np.log(counts[0].sum() / counts[1].sum())
    return ratio[first[half:]], ratio[second[half:]]


def _bin(seen: Floats, edges: Floats, levels: bool) -> np.ndarray:
    cells = np.searchsorted(edges, seen[:, 0])
    return cells + (len(edges) + 1) * seen[:, -1].astype(np.int64) if levels else cells


_VOTERS = 7


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
    here, there = (_bins(mechanism, affordable(samples), seed + other, bool(other)) for other in (0, 1))
    return gaussian_results(name, mechanism.event(Sampling()), here, there, confidence)


def _bins(mechanism: BinnedVote, count: int, seed: int, there: bool) -> Floats:
    """The bins of so many releases; the client is in the first."""
    leaves = mechanism.adjacency == "add-remove" and there
    values = torch.full((_VOTERS,), 5.0, dtype=torch.float64)
    values[-1] = -1e9 if there else 1e9
    present, streams = slice(0, _VOTERS - leaves), _streams(bool(mechanism.secure), seed)
    sums = mechanism.collect(values[present], (torch.arange(_VOTERS).flip(0) % mechanism.bins)[present])
    rows = [mechanism.release(sums, _VOTERS, streams.at("central noise", n)) * _VOTERS for n in range(count)]
    return torch.stack(rows).numpy()
