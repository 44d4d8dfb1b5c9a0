"""The mechanism audit: two worst-case neighboring inputs, many releases of each, and the best test between them.

The attacker sees everything that a release contains (in the local setting, what a client and its neighbors send) and knows every
other client. A linear discriminant, fitted on one half of the samples, finds the best direction even if the noises are not what
they should be; the other half proves the bound. A report that is ε-DP by itself is attacked with the likelihood ratio that its
mechanism claims, and with one learned from a histogram; PrivUnit also by integrating its densities, and by its sampler's law.

A guarantee needs noise that is new for every coordinate, client, purpose, round, run and process, and that has the stated law:
`audit_noise` tests the seeded streams and the system's ChaCha20 for that.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import betainc, gammaln, ndtr, ndtri
from scipy.stats import chi2
from torch import Tensor

from dpfedexp.accounting import Event, GaussianEvent, NonPrivateEvent, Sampling, compose
from dpfedexp.accounting.events import GammaRule
from dpfedexp.audit import bounds
from dpfedexp.audit.bounds import Floats, Power, Result, Score, epsilon_score, mu_score
from dpfedexp.core.clipping import Clipped, clip
from dpfedexp.core.noise import ChaChaNoise, Noise, Streams, SystemStreams
from dpfedexp.core.sums import Sums, Vote, client_votes, within_clip_vote
from dpfedexp.errors import checked
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, Mechanism, PrivUnit, Release, Report
from dpfedexp.mechanisms.base import Numerator

DIMENSION = 8
"""Enough coordinates for the covariance to show noise that repeats after a few coordinates."""
GAMMAS: tuple[GammaRule, ...] = ("exact", "paper", "optimal")
RULES: dict[Numerator | None, str] = {
    None: "",
    "free": ", free rule",
    "paper": ", paper's rule",
    "naive": ", naive rule",
}
_HOSTILE = 8.0
"""Clients in the central setting send reports this many times too long: the server must not rely on their clipping."""


@checked
@dataclass(frozen=True)
class Case:
    """A mechanism, and two neighboring inputs that differ in the last client.

    `here` and `there` are the two inputs: the rows of all clients for a central mechanism, one client's update for a local one.
    `votes` is what the last client sends for every vote, first in `here`, then in `there`; the other clients send ½, an absent one
    nothing. `denominator` is the public number by which sums are divided.
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
    """Every mechanism with every rule, plain and secure. All claim about μ = 1 per round, which ten thousand samples can test."""
    c, z = 0.5, 2.0
    plain = _central_cases(c, z)
    plain += [Case(f"local Gaussian{named}", LocalGaussian(c, z, r), _row(c), _row(-c)) for r, named in RULES.items()]
    # A client at the clip against one with nearly no update in the opposite direction: both parts of a report differ most.
    units = {gamma: PrivUnit(c, DIMENSION, 1.0, 1.0, 1.0, gamma=gamma) for gamma in GAMMAS}
    plain += [Case(f"PrivUnit, {gamma} γ", unit, _row(c), _row(-1e-7 * c)) for gamma, unit in units.items()]
    secure = [
        Case(f"{c.name}, secure", c.mechanism.secure(), c.here, c.there, c.denominator, c.votes)
        for c in plain
        if not c.name.endswith(("coordinate", "naive rule", "paper γ", "optimal γ"))
    ]
    return plain + secure


def _central_cases(c: float, z: float) -> list[Case]:
    ahead = _row(c * _HOSTILE)
    lifted = torch.cat([ahead, torch.zeros(1, 1)], dim=1)
    # The free rule's own coordinate, which a hostile client may set to anything.
    pole = lifted.flip(1)
    free = CentralGaussian(c, z, numerator="free")
    counted = CentralGaussian(c, 2.8, numerator="free", votes=(within_clip_vote(1.4),))
    leaving = CentralGaussian(c, 1.4, "add-remove", votes=(within_clip_vote(0.7),))
    votes = (within_clip_vote(2.4), Vote("loss", 0.0, 10.0, noise=2.0), Vote("loss fell", noise=3.0))
    asking = CentralGaussian(c, 3.0, numerator="free", votes=votes)
    asked_apart = CentralGaussian(c, 1.5, "add-remove", votes=tuple(replace(v, noise=v.noise / 2) for v in votes))
    return [
        Case("central Gaussian", CentralGaussian(c, z), *_neighbors(ahead, -ahead)),
        Case("central Gaussian, free rule", free, *_neighbors(lifted, -lifted)),
        Case("central Gaussian, free rule's coordinate", free, *_neighbors(pole, -pole)),
        Case("central Gaussian, paper's rule", *_paper(c, z)),
        Case("central Gaussian, adaptive clip", counted, *_neighbors(lifted, -lifted), votes=(0.5, -0.5)),
        Case("central Gaussian, add-remove", CentralGaussian(c, 1.0, "add-remove"), *_absent(ahead)),
        Case("central Gaussian, adaptive clip, add-remove", leaving, *_absent(ahead)),
        Case(
            "central Gaussian, question in bins", CentralGaussian(c, z).asking("bin", 1.0), *_neighbors(ahead, -ahead)
        ),
        Case("central Gaussian, question in bins, add-remove", leaving.asking("bin", 0.5), *_absent(ahead)),
        Case("central Gaussian, votes", asking, *_neighbors(lifted, -lifted), votes=(_HOSTILE, -_HOSTILE)),
        Case("central Gaussian, votes, add-remove", asked_apart, *_absent(ahead), votes=(_HOSTILE, _HOSTILE)),
    ]


def _row(value: float) -> Tensor:
    row = torch.zeros(1, DIMENSION)
    row[0, 0] = value
    return row


def _neighbors(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two neighboring inputs: two known clients, and a third that is replaced."""
    known = torch.zeros(2, one.shape[1])
    known[:, -1] = 0.1
    return torch.cat([known, one]), torch.cat([known, other])


def _absent(row: Tensor) -> tuple[Tensor, Tensor]:
    """Two inputs, with and without the last client; the others point the other way, to expose a denominator that counts clients."""
    known = -row.expand(4, -1)
    return torch.cat([known, row]), known


def _paper(c: float, z: float) -> tuple[Mechanism, Tensor, Tensor]:
    """The mechanism and the worst pair of `joint_mu` where the scalar matters: antiparallel, with norms C and bC."""
    # The noise on the scalar is C², so that ρ = z². It counts only where z² is above `FREE_THRESHOLD` of accounting/gdp.py.
    b = 1.0 / (z**2 * (1.0 + np.sqrt(1.0 - 2.0 / z**2)))
    mechanism = CentralGaussian(c, z, numerator="paper", scalar_multiplier=1.0)
    return mechanism, *_neighbors(_row(c * _HOSTILE), _row(-float(b) * c))


CHECKED = 1000
"""How many releases must match the affine function of their draws before the other samples are computed from that function."""

FEW_RELEASES = 5000
NEIGHBORS = 2
"""Other clients in the chunk of a local sample: the attacker knows their updates, and so sees their noise."""


def affordable(count: int) -> int:
    """The number of samples if each needs a release of its own, which takes some thousand times as long."""
    return min(count, FEW_RELEASES + count // 25)


def samples_of(case: Case, count: int, seed: int, there: bool) -> Floats:
    """Draw `count` samples of the release for one of the two inputs; fewer if releases are slow."""
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


class FixedDraws:
    """The draws of one purpose in one round; like a keyed stream, it returns the same draws when called twice."""

    def __init__(self) -> None:
        self.row = torch.zeros(0)

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.row[None, :width].to(dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        raise NotImplementedError("a release that draws uniforms is no affine function of normal draws")


def _central(case: Case, sums: Sums, count: int, seed: int) -> Floats:
    """Samples of what `release` publishes for the same sums.

    A plain release is an affine function of its draws. If a thousand releases confirm that, the function is computed from one
    release per draw and gives the other samples; if they do not, as on a lattice, every sample is a release.
    """

    def one_by_one() -> Floats:
        at = _streams(case.secure, seed).at
        draws = ((at("central noise", n), at("central scalar noise", n)) for n in range(affordable(count)))
        return np.array([_shown(case.mechanism.release(sums, case.denominator, *drawn)) for drawn in draws])

    if case.secure:
        return one_by_one()
    widths = (len(sums.vector) + 2, 2 + len(client_votes(case.mechanism.votes)))
    noise, scalar = FixedDraws(), FixedDraws()

    def release(draws: Tensor) -> list[float]:
        noise.row, scalar.row = draws.split(widths)
        return _shown(case.mechanism.release(sums, case.denominator, noise, scalar))

    one, cpu, streams = torch.zeros(1, dtype=torch.int64), torch.device("cpu"), Streams(seed)
    parts = [
        streams.at(purpose, 1).normal(one, count * width, cpu, torch.float64).reshape(count, width)
        for purpose, width in zip(("central noise", "central scalar noise"), widths, strict=True)
    ]
    draws = torch.cat(parts, dim=1)
    try:
        base = np.array(release(torch.zeros(sum(widths), dtype=torch.float64)))
    except NotImplementedError:
        return one_by_one()
    slopes = np.array([release(unit) for unit in torch.eye(sum(widths), dtype=torch.float64)]) - base
    seen: Floats = base + draws.numpy() @ slopes
    real = np.array([release(row) for row in draws[:CHECKED]])
    if np.allclose(real, seen[:CHECKED], rtol=1e-9, atol=1e-9 * float(np.abs(slopes).max())):
        return seen
    return np.array([*real.tolist(), *(release(row) for row in draws[CHECKED : affordable(count)])])


def _shown(release: Release) -> list[float]:
    statistic = [] if release.statistic is None else [release.statistic]
    return [*release.c_bar.tolist(), *statistic, *release.votes.values()]


def _local(mechanism: Mechanism, row: Tensor, count: int, streams: Streams | SystemStreams) -> Floats:
    """Samples of what clients of one chunk send: each is a client with this update and its neighbors, whose updates are known."""
    if "level" in mechanism.parts:
        clipped = Clipped(row.expand(count, -1), torch.ones(count, dtype=torch.bool))
        report = mechanism.randomize(clipped, torch.arange(count), streams.at("local noise", 1))
        levels = torch.zeros(count) if report.level is None else report.level
        return torch.cat([report.vector.double(), levels.double()[:, None]], dim=1).numpy()
    rows = torch.zeros(count, 1 + NEIGHBORS, row.shape[1])
    rows[:, 0] = row
    kept = clip(rows.flatten(0, 1), mechanism.clip)
    report = mechanism.randomize(kept, torch.arange(len(kept.vectors)), streams.at("local noise", 1))
    return report.vector.double().reshape(count, -1).numpy()


DELTA = 0.01
"""The δ at which the assumption-free bound is measured: a million samples can prove rates of a few percent."""

_FEWEST, _MOST, _PER_BIN = 32, 256, 400
"""The fewest and the most bins, and samples per bin: more bins find thinner shells."""


@checked
def audit_mechanism(case: Case, samples: int, seed: int, confidence: float) -> list[Result]:
    """Bound ε at δ = 0.01 without assumptions, and μ if the mechanism claims μ; PrivUnit at δ = 0."""
    event = case.mechanism.event(Sampling())
    here, there = (samples_of(case, samples, seed, there) for there in (False, True))
    if not isinstance(event, GaussianEvent):
        return _reports(case, event, here, there, confidence)
    direction = discriminant(here[::2], there[::2])
    counts, detail = (len(here), len(there)), f"{len(here)} samples of each input"

    def result(unit: str, score: Score, claim: float) -> Result:
        power = bounds.power_of_shift(event.mu, counts, score, confidence)
        lower = bounds.lower_bound(here @ direction, there @ direction, score, confidence)
        return Result("mechanism", case.name, unit, lower, claim, confidence, detail, power=power)

    epsilon = compose([(event, 1)], DELTA).epsilon
    return [result(f"ε at δ = {DELTA:g}", epsilon_score(DELTA), epsilon), result("μ", mu_score, event.mu)]


def discriminant(here: Floats, there: Floats) -> Floats:
    """Fisher's linear discriminant Σ⁻¹(m − m'): the likelihood ratio of two Gaussians with any common covariance."""
    shift = here.mean(0) - there.mean(0)
    spread = (np.cov(here, rowvar=False) + np.cov(there, rowvar=False)).reshape(len(shift), len(shift)) / 2
    # Relative to each coordinate's own spread, so that an exact linear dependence stays invertible and visible. The floor, a small
    # part of the shift, does the same for a coordinate without any spread.
    scale = np.sqrt(np.maximum(np.diag(spread), max(1e-300, 1e-12 * float(shift @ shift))))
    whitened = spread / np.outer(scale, scale) + 1e-12 * np.eye(len(shift))
    return np.linalg.solve(whitened, shift / scale) / scale


def _reports(case: Case, event: Event, here: Floats, there: Floats, confidence: float) -> list[Result]:
    """The results at δ = 0, by the mechanism's own likelihood ratio, if it has one, and by a learned ratio."""
    score = epsilon_score(0.0)
    claim, detail = compose([(event, 1)], 0.0).epsilon, f"{len(here)} reports of each input"
    claimed = [case.mechanism.log_ratio(seen, case.here, case.there) for seen in (here, there)]
    views = {", learned": learned_ratio(here, there, levels="level" in case.mechanism.parts)}
    if claimed[0] is not None and claimed[1] is not None:
        views = {"": (claimed[0], claimed[1]), **views}
    # The rates, under both inputs, of the test "every part of the loss is at its largest", the best test at δ = 0.
    losses = [] if isinstance(event, GaussianEvent | NonPrivateEvent) else event.losses()
    up = math.prod(part.up for part in losses)
    rates = np.array([up]), np.array([up * math.exp(-math.fsum(part.step for part in losses))])
    found = []
    for name, pair in views.items():
        power = bounds.power_of_tests(*rates, (len(pair[0]), len(pair[1])), score, confidence)
        lower, what = bounds.lower_bound(*pair, score, confidence), case.name + name
        found.append(Result("mechanism", what, "ε at δ = 0", lower, claim, confidence, detail, power=power))
    return found


def learned_ratio(here: Floats, there: Floats, *, levels: bool) -> tuple[Floats, Floats]:
    """The log ratio of each sample's bin, learned on the first half of the samples and returned for the second half.

    It uses no formula of the mechanism, so it also finds errors that the formula does not include, such as a shell that no report
    of one client reaches. Bins of the first column have equal mass; with `levels` the last column is a level and is used as it is.
    """
    half = min(len(here), len(there)) // 2
    pooled = np.concatenate([here[:half, 0], there[:half, 0]])
    bins = min(_MOST, max(_FEWEST, len(here) // _PER_BIN))
    edges = np.quantile(pooled, np.linspace(0.0, 1.0, bins + 1)[1:-1])
    first, second = (
        np.searchsorted(edges, seen[:, 0]) + bins * seen[:, -1].astype(np.int64) * levels for seen in (here, there)
    )
    size = 1 + max(int(first.max()), int(second.max()))
    counts = [np.bincount(cells[:half], minlength=size) + 0.5 for cells in (first, second)]
    ratio = np.log(counts[0] / counts[1]) - np.log(counts[0].sum() / counts[1].sum())
    return ratio[first[half:]], ratio[second[half:]]


@checked
def audit_density(mechanism: PrivUnit, samples: int, seed: int, confidence: float) -> list[Result]:
    """Compare the exact ε of the densities with the event's; then the sampler's cap, height and direction with their laws."""
    event = mechanism.event(Sampling())
    p, cap = mechanism.direction.p, cap_mass(mechanism.dimension, mechanism.direction.gamma)
    direction = abs(math.log(p / cap) - math.log((1 - p) / (1 - cap)))
    exact = direction + level_epsilon(mechanism)
    name = f"PrivUnit, {mechanism.gamma} γ, d = {mechanism.dimension}"
    height, across = drawn_heights(mechanism, samples, seed)
    failure = bounds.chance_failure(confidence)
    inside = height >= mechanism.direction.gamma
    low, high = bounds.interval(float(inside.sum()), len(height), failure)
    power, off = Power(event.epsilon, 0.999 * event.epsilon), max(0.0, low - p, p - high)

    def result(unit: str, off: float, limit: float, detail: str, smallest: float) -> Result:
        return Result("density", name, unit, off, limit, 1.0 - failure, detail, detects=f"≥ {smallest:.3f}")

    found = [
        Result("density", name, "ε at δ = 0", exact, event.epsilon, 1.0, "largest ratio", power=power),
        result("cap's rate off p", off, 0.0, f"rate {low:.4f} to {high:.4f}, p {p:.4f}", high - low),
    ]
    half = (mechanism.dimension - 1) / 2
    laws = {
        "height inside the cap": _upper_tail(height[inside], half) / cap,
        "height outside the cap": (1.0 - _upper_tail(height[~inside], half)) / (1 - cap),
    }
    if mechanism.dimension > 2:
        laws["direction across"] = _upper_tail(across, (mechanism.dimension - 2) / 2)
    for what, uniforms in laws.items():
        limit = bounds.distance_limit(len(uniforms), failure)
        found.append(
            result(f"law of the {what}", bounds.distance(uniforms), limit, f"{len(uniforms)} reports", 2 * limit)
        )
    return found


def _upper_tail(height: Floats, half: float) -> Floats:
    """P(T ≥ t) for a coordinate T of a uniform direction: (1 + T)/2 has the law Beta(half, half) with half = (d − 1)/2."""
    tail: Floats = betainc(half, half, np.clip((1.0 - height) / 2, 0.0, 1.0))
    return tail


def cap_mass(dimension: int, gamma: float) -> float:
    """P(⟨V, u⟩ ≥ γ) for uniform V: the integral of the density of a coordinate, B·(1 − t²)^((d−3)/2)."""
    log_constant = gammaln(dimension / 2) - gammaln((dimension - 1) / 2) - 0.5 * math.log(math.pi)
    # As a function of the angle a, with t = sin a, the density is smooth in every dimension.
    mass: float = quad(
        lambda a: math.exp(log_constant + (dimension - 2) * math.log(max(math.cos(a), 1e-300))),
        math.asin(gamma),
        min(math.pi / 2, math.asin(gamma) + 60 / math.sqrt(dimension)),
        epsabs=0.0,
        epsrel=1e-12,
        limit=500,
    )[0]
    return mass


def level_epsilon(mechanism: PrivUnit) -> float:
    """The largest log ratio of a level's probability between two update norms."""
    scalar = mechanism.scalar
    kept = math.exp(scalar.epsilon2) / (math.exp(scalar.epsilon2) + scalar.k)
    other = (1 - kept) / scalar.k
    # Norms in units of a level, in the rows, and the probabilities with which they are rounded to each level, in the columns.
    norms = np.linspace(0.0, scalar.k, 8 * scalar.k + 1)[:, None]
    rounded = np.maximum(0.0, 1.0 - np.abs(norms - np.arange(scalar.k + 1)))
    table = rounded * kept + (1 - rounded) * other
    return float(np.log(table.max(0) / table.min(0)).max())


def drawn_heights(mechanism: PrivUnit, samples: int, seed: int) -> tuple[Floats, Floats]:
    """For many reports V: ⟨V, u⟩, and one coordinate of the part orthogonal to u, as a share of that part's length."""
    u = torch.zeros(1, mechanism.dimension)
    u[0, -1] = mechanism.clip
    clipped = Clipped(u.expand(samples, -1), torch.ones(samples, dtype=torch.bool))
    report = mechanism.randomize(clipped, torch.arange(samples), Streams(seed).at("local noise", 1))
    vectors = report.vector.double().numpy()
    height = vectors[:, -1]
    rest = np.sqrt(np.maximum(1e-300, np.square(vectors[:, :-1]).sum(1)))
    return height, vectors[:, 0] / rest


PURPOSES = ("local noise", "central noise", "central scalar noise")
ROUNDS, CLIENTS, LENGTH = (1, 2, 3), 3, 1024
Source = Callable[[str, int], Noise]


def audit_noise(seed: int, confidence: float, *, instances: int = 4096) -> list[Result]:
    """Test both noise sources: law, independence, repeated values, and equal words in different instances or processes."""
    fresh = [SystemStreams() for _ in range(len(PURPOSES) * len(ROUNDS))]
    return [
        *_independence("seeded streams", Streams(seed).at, confidence),
        *_independence("system noise", SystemStreams().at, confidence),
        *_independence("system noise, a new source each", lambda *_: fresh.pop().source, confidence),
        _instances("seeds", lambda n: _bits(Streams(seed + n).at("central noise", 1)), instances),
        _instances("keys of system noise", lambda _: int(ChaChaNoise().words(1)[0]), instances),
        _processes(),
    ]


def _independence(name: str, source: Source, confidence: float) -> list[Result]:
    clients, cpu = torch.arange(CLIENTS), torch.device("cpu")
    where = [(purpose, number) for purpose in PURPOSES for number in ROUNDS]
    drawn = [source(*place) for place in where]
    normal = np.concatenate([noise.normal(clients, LENGTH, cpu, torch.float64).numpy() for noise in drawn])
    uniform = np.concatenate([noise.uniform(clients, LENGTH).numpy() for noise in drawn])
    scores = ndtri(np.clip(uniform, 1e-16, 1.0 - 1e-16))
    failure = bounds.chance_failure(confidence)
    limit, far = bounds.correlation_limit(len(normal), LENGTH, failure), bounds.distance_limit(normal.size, failure)
    detail = f"{len(normal)} rows of {LENGTH}: {len(PURPOSES)} purposes, {len(ROUNDS)} rounds, {CLIENTS} clients"

    def result(unit: str, value: float, claim: float, detects: str) -> Result:
        return Result("noise", name, unit, value, claim, 1.0 - failure, detail, detects=detects)

    low, high = chi2.ppf([failure / 2, 1 - failure / 2], normal.size) / normal.size
    spread = float(np.square(normal).mean())
    return [
        result("largest correlation at any shift", bounds.largest_correlation(normal), limit, f"≥ {2 * limit:.2f}"),
        result("largest correlation, uniforms", bounds.largest_correlation(scores), limit, f"≥ {2 * limit:.2f}"),
        result("values that come twice", float(_twice(normal) + _twice(uniform)), 2.0, "≥ 3 of them"),
        result("distance from the normal law", bounds.distance(ndtr(normal.ravel())), far, f"≥ {2 * far:.3f}"),
        result("distance from the uniform law", bounds.distance(uniform.ravel()), far, f"≥ {2 * far:.3f}"),
        result("variance off 1", abs(spread - 1.0), max(1.0 - low, high - 1.0), f"≥ {2 * (high - 1.0):.3f}"),
    ]


def _twice(values: Floats) -> int:
    return values.size - len(np.unique(values))


def _bits(noise: Noise) -> int:
    drawn = noise.normal(torch.zeros(1, dtype=torch.int64), 1, torch.device("cpu"), torch.float64)
    return int(drawn.numpy().view(np.uint64)[0, 0])


def _instances(name: str, first: Callable[[int], int], instances: int) -> Result:
    """Count repeated first 64-bit words of many instances. Keys of b bits collide once in about 2^(b/2) instances."""
    again = float(instances - len({first(n) for n in range(instances)}))
    detects, unit = f"keys of ≤ {int(np.log2(instances**2 / 2 / 14))} bits", "first words that come twice"
    return Result("noise", name, unit, again, 0.0, 1 - 1e-9, f"{instances} instances", detects=detects)


def _processes() -> Result:
    """Count common words of a parent and a forked child, which start from the same memory but must draw different words."""
    name, unit = "system noise after a fork", "words in common"
    if not hasattr(os, "fork"):
        return bounds.skip("noise", name, "this system has no fork")
    source = ChaChaNoise()
    source.uniform(torch.arange(1), 8)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, source.uniform(torch.arange(1), 64).numpy().tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(reading, 64 * 8), dtype=np.float64)
    os.close(reading)
    os.close(writing)
    ours = source.uniform(torch.arange(1), 64).numpy().ravel()
    common = float(np.isin(ours, theirs).sum()) if len(theirs) == 64 else 64.0
    return Result("noise", name, unit, common, 0.0, 1 - 1e-9, "64 words of each", detects="≥ 1 of them")
