"""The mechanism audit: two worst-case neighbouring inputs, many releases of each, and the best test between them.

The attacker sees everything that a release shows (or, in the local setting, that a client and its neighbours send) and knows every
other client. A linear discriminant, fitted on one half of the samples, finds the best direction also where noises are not what they
should be, such as equal in two coordinates; the other half proves the bound. A report that is ε-DP by itself is attacked with the
likelihood ratio that its mechanism claims, and with one that is learnt from a histogram.
"""

from __future__ import annotations

import math

import numpy as np

from dpfedexp.accounting import Event, GaussianEvent, NonPrivateEvent, Sampling, compose
from dpfedexp.audit.bounds import Distinguisher, Floats, Score, epsilon_score, mu_score
from dpfedexp.audit.mechanisms.cases import Case
from dpfedexp.audit.mechanisms.samples import samples_of
from dpfedexp.audit.power import power_of_shift, power_of_tests
from dpfedexp.audit.result import Result
from dpfedexp.errors import checked

DELTA = 0.01
"""Where the assumption-free bound is measured: rates of a few per cent are what a million samples can prove something about."""

CURVE = (0.001, 0.003, 0.01, 0.03, 0.1)
_FEWEST, _MOST, _PER_BIN = 32, 256, 400
"""Bins, and samples that one more bin needs: the finer they are, the thinner the shells that are found."""


@checked
def audit_mechanism(case: Case, samples: int, seed: int, confidence: float) -> list[Result]:
    """ε at δ = 0.01 without any assumption, and μ where that is what is claimed; PrivUnit at δ = 0."""
    event = case.mechanism.event(Sampling())
    if not isinstance(event, GaussianEvent):
        return _reports(case, event, samples, seed, confidence)
    return gaussian_results(case.name, event, *_views(case, samples, seed), confidence)


def gaussian_results(name: str, event: GaussianEvent, here: Floats, there: Floats, confidence: float) -> list[Result]:
    """What the best linear test between two samples of a release proves, beside what its event claims."""
    direction = discriminant(here[::2], there[::2])
    attack = Distinguisher(here @ direction, there @ direction, confidence)
    counts, detail = (len(here), len(there)), f"{len(here)} samples of each input"

    def result(unit: str, score: Score, claim: float, curve: tuple[tuple[float, float, float], ...] = ()) -> Result:
        power = power_of_shift(event.mu, counts, score, confidence)
        lower = attack.bound(score).value
        return Result("mechanism", name, unit, lower, claim, confidence, detail, curve, power)

    def claimed(delta: float) -> float:
        return compose([(event, 1)], delta).epsilon

    curve = tuple((d, attack.bound(epsilon_score(d)).value, claimed(d)) for d in CURVE)
    return [result(f"ε at δ = {DELTA:g}", epsilon_score(DELTA), claimed(DELTA), curve), result("μ", mu_score, event.mu)]


def _views(case: Case, samples: int, seed: int) -> tuple[Floats, Floats]:
    return samples_of(case, samples, seed, there=False), samples_of(case, samples, seed, there=True)


def discriminant(here: Floats, there: Floats) -> Floats:
    """Fisher's: Σ⁻¹(m − m'), the likelihood ratio of two Gaussians with any common covariance."""
    shift = here.mean(0) - there.mean(0)
    spread = (np.cov(here, rowvar=False) + np.cov(there, rowvar=False)).reshape(len(shift), len(shift)) / 2
    # Relative to each coordinate's own spread, so that an exact linear dependence stays invertible and visible; and not below a
    # small part of the shift, so that a coordinate without any spread does.
    scale = np.sqrt(np.maximum(np.diag(spread), max(1e-300, 1e-12 * float(shift @ shift))))
    whitened = spread / np.outer(scale, scale) + 1e-12 * np.eye(len(shift))
    return np.linalg.solve(whitened, shift / scale) / scale


def _reports(case: Case, event: Event, samples: int, seed: int, confidence: float) -> list[Result]:
    """A report that is ε-DP by itself, at δ = 0: the likelihood ratio that its mechanism claims, where it says one, and a learnt
    one, which also sees what no formula says."""
    here, there = _views(case, samples, seed)
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
        curve = tuple(
            (d, attack.bound(epsilon_score(d)).value, compose([(event, 1)], d).epsilon) for d in CURVE if not name
        )
        bound = attack.bound(score).value
        unit = "ε at δ = 0"
        found.append(Result("mechanism", case.name + name, unit, bound, claim, confidence, detail, curve, power))
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
