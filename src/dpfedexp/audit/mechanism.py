"""The mechanism audit: two worst-case neighbouring inputs, many releases of each, and the best test between them.

The attacker sees everything that a release shows (or, in the local setting, that a client sends) and knows every other client. A
linear discriminant, fitted on one half of the samples, finds the best direction also where noises are not what they should be,
such as equal in two queries; the other half proves the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfedexp.accounting import PrivUnitEvent, Sampling, compose
from dpfedexp.accounting.joint import FREE_THRESHOLD
from dpfedexp.audit.bounds import Distinguisher, Floats, epsilon_score, mu_score
from dpfedexp.audit.result import Result
from dpfedexp.clipping import Clipped, clip
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, Mechanism, PrivUnit, Release, Report
from dpfedexp.mechanisms.gaussian import Numerator
from dpfedexp.mechanisms.privunit import GammaRule
from dpfedexp.secure import secure_mechanism
from dpfedexp.simulation.random import Streams

DELTA = 0.01
"""Where the assumption-free bound is measured: rates of a few per cent are what a million samples can prove something about."""

CURVE = (0.001, 0.003, 0.01, 0.03, 0.1)
GAMMAS: tuple[GammaRule, ...] = ("exact", "paper", "optimal")
RULES: dict[Numerator | None, str] = {
    None: "",
    "free": ", free rule",
    "paper": ", paper's rule",
    "naive": ", naive rule",
}
CHECKED, MOST_RELEASES = 1000, 100_000
_HOSTILE = 8.0
"""Clients of the central setting send reports this many times too long: the server must not trust their clipping."""


@dataclass(frozen=True)
class Case:
    """A mechanism, and two neighbouring inputs that differ in the last client.

    For central mechanisms these are the rows that the clients send, for local ones a client's own update. `denominator` is public.
    """

    name: str
    mechanism: Mechanism
    here: Tensor
    there: Tensor
    denominator: float = 3.0


def standard_cases() -> list[Case]:
    """Every mechanism with every step-size rule, at about μ = 1 a round, where a million samples have the power to tell."""
    c, z = 0.5, 2.0
    ahead, back = _row(c * _HOSTILE), _row(-c * _HOSTILE)
    central, free = CentralGaussian(c, z), CentralGaussian(c, z, numerator="free")
    cases = [
        Case("central Gaussian", central, *_neighbours(ahead, back)),
        Case("central Gaussian, free rule", free, *_neighbours(*_lifted(ahead, back))),
        Case("central Gaussian, free rule's coordinate", free, *_neighbours(*_poles(c))),
        Case("central Gaussian, paper's rule", *_paper(c, z)),
        Case(
            "central Gaussian, adaptive clip",
            CentralGaussian(c, 2.2, numerator="free", count_noise=2.4),
            *_neighbours(*_lifted(ahead, back)),
        ),
        Case("central Gaussian, add-remove", CentralGaussian(c, 1.0, "add-remove"), *_absent(ahead)),
        Case("central Gaussian, secure", secure_mechanism(central), *_neighbours(ahead, back)),
    ]
    one, other = _row(c), _row(-c)
    for rule, named in RULES.items():
        cases.append(Case(f"local Gaussian{named}", LocalGaussian(c, z, rule), one, other))
    cases.append(Case("local Gaussian, secure", secure_mechanism(LocalGaussian(c, z)), one, other))
    wide = torch.zeros(1, 8)
    wide[0, 0] = 1.0
    for gamma in GAMMAS:
        mechanism = PrivUnit(c, 8, 1.0, 1.0, 1.0, gamma=gamma)
        cases.append(Case(f"PrivUnit, {gamma} γ", mechanism, c * wide, -1e-7 * c * wide))
    return cases


def audit_mechanism(case: Case, samples: int, seed: int, confidence: float) -> list[Result]:
    """ε at δ = 0.01 without any assumption, and μ where that is what is claimed; PrivUnit at δ = 0."""
    event = case.mechanism.event(Sampling())
    here, there = _statistics(case, samples, seed)
    attack = Distinguisher(here, there, confidence)

    def measured(delta: float) -> float:
        return attack.bound(epsilon_score(delta)).value

    def claimed(delta: float) -> float:
        return compose([(event, 1)], delta).epsilon

    pure = isinstance(event, PrivUnitEvent)
    delta = 0.0 if pure else DELTA
    curve = tuple((d, measured(d), claimed(d)) for d in CURVE)
    detail = f"{len(here)} samples of each input"
    kind, unit = "mechanism", f"ε at δ = {delta:g}"
    found = [Result(kind, case.name, unit, measured(delta), claimed(delta), confidence, detail, curve)]
    mu = compose([(event, 1)], delta).mu
    if mu is not None:
        found.append(Result(kind, case.name, "μ", attack.bound(mu_score).value, mu, confidence, detail))
    return found


def _statistics(case: Case, samples: int, seed: int) -> tuple[Floats, Floats]:
    mechanism = case.mechanism
    if isinstance(mechanism, PrivUnit):
        first, second = (_privunit(mechanism, row, samples, seed + n) for n, row in enumerate((case.here, case.there)))
        return first, second
    if isinstance(mechanism, CentralGaussian):
        here = _central(mechanism, case.here, case.denominator, samples, seed)
        there = _central(mechanism, case.there, case.denominator, samples, seed + 1)
    else:
        here, there = (_local(mechanism, row, samples, seed + n) for n, row in enumerate((case.here, case.there)))
    direction = discriminant(here[::2], there[::2])
    return here @ direction, there @ direction


def discriminant(here: Floats, there: Floats) -> Floats:
    """Fisher's: Σ⁻¹(m − m'), the likelihood ratio of two Gaussians with any common covariance."""
    shift = here.mean(0) - there.mean(0)
    spread = (np.cov(here, rowvar=False) + np.cov(there, rowvar=False)).reshape(len(shift), len(shift)) / 2
    # Relative to each coordinate's own spread, so that an exact linear dependence stays invertible and visible.
    scale = np.sqrt(np.maximum(np.diag(spread), 1e-300))
    whitened = spread / np.outer(scale, scale) + 1e-12 * np.eye(len(shift))
    return np.linalg.solve(whitened, shift / scale) / scale


class Given:
    """One round's draws of one purpose; like a keyed stream, it gives the same draws when asked twice."""

    def __init__(self) -> None:
        self.row = torch.zeros(0)

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.row[None, :width].to(dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        raise TypeError("a central release draws no uniforms")


def _central(mechanism: CentralGaussian, rows: Tensor, denominator: float, samples: int, seed: int) -> Floats:
    """What `release` shows, round after round, for the same sums.

    A release is an affine function of its draws. Where that is seen in a thousand releases, the function is read off from one
    release per draw and the other samples are computed from it; where it is not, as on a grid, every sample is a release.
    """
    within = torch.ones(len(rows), dtype=torch.bool) if mechanism.count_noise is not None else None
    if within is not None:
        within[-1] = bool(rows[-1, 0] > 0)
    sums = mechanism.collect(Report(rows, within=within))
    widths = (len(sums.vector) + 2, 2)
    noise, scalar = Given(), Given()

    def release(draws: Tensor) -> list[float]:
        noise.row, scalar.row = draws.split(widths)
        return _shown(mechanism.release(sums, denominator, noise, scalar))

    draws = _draws(Streams(seed), samples, widths)
    base = np.array(release(torch.zeros(sum(widths), dtype=torch.float64)))
    slopes = np.array([release(unit) for unit in torch.eye(sum(widths), dtype=torch.float64)]) - base
    seen = base + draws.numpy() @ slopes
    real = np.array([release(row) for row in draws[:CHECKED]])
    if np.allclose(real, seen[:CHECKED], rtol=1e-9, atol=1e-9 * float(np.abs(slopes).max())):
        return seen
    return np.array(
        [*real.tolist(), *(release(row) for row in draws[CHECKED : max(CHECKED, min(samples, MOST_RELEASES))])]
    )


def _draws(streams: Streams, samples: int, widths: tuple[int, int]) -> Tensor:
    one = torch.zeros(1, dtype=torch.int64)
    parts = [
        streams.at(purpose, 1).normal(one, samples * width, torch.device("cpu"), torch.float64).reshape(samples, width)
        for purpose, width in zip(("central noise", "central scalar noise"), widths, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _shown(release: Release) -> list[float]:
    return [*release.c_bar.tolist(), *(v for v in (release.statistic, release.within) if v is not None)]


def _local(mechanism: Mechanism, row: Tensor, samples: int, seed: int) -> Floats:
    """What so many clients with the same update send."""
    kept = clip(row.expand(samples, -1), mechanism.clip)
    report = mechanism.randomize(kept, torch.arange(samples), Streams(seed).at("local noise", 1))
    return report.vector.double().numpy()


def _privunit(mechanism: PrivUnit, row: Tensor, samples: int, seed: int) -> Floats:
    """The log-likelihood ratio of a report: in which of the two caps its direction lies, and which level it has."""
    clipped = Clipped(row.expand(samples, -1), torch.ones(samples, dtype=torch.bool))
    report = mechanism.randomize(clipped, torch.arange(samples), Streams(seed).at("local noise", 1))
    assert report.level is not None
    height = report.vector[:, 0].double().numpy()
    gamma, level = mechanism.direction.gamma, report.level.numpy()
    caps = mechanism.direction.epsilon * ((height >= gamma).astype(float) - (height <= -gamma))
    return caps + mechanism.epsilon2 * ((level == mechanism.scalar.k).astype(float) - (level == 0))


def _row(value: float) -> Tensor:
    return torch.tensor([[value, 0.0]])


def _neighbours(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two clients that everybody knows, and the one that is replaced."""
    known = torch.zeros(2, one.shape[1])
    known[:, -1] = 0.1
    return torch.cat([known, one]), torch.cat([known, other])


def _absent(row: Tensor) -> tuple[Tensor, Tensor]:
    """The client takes part, or does not; the others all point the other way, which shows a denominator that counts them."""
    known = -row.expand(4, -1)
    return torch.cat([known, row]), known


def _lifted(*rows: Tensor) -> list[Tensor]:
    return [torch.cat([row, torch.zeros(1, 1)], dim=1) for row in rows]


def _poles(c: float) -> tuple[Tensor, Tensor]:
    """The two ends of the free rule's own coordinate, which a hostile client may fill with anything."""
    return torch.tensor([[0.0, 0.0, c * _HOSTILE]]), torch.tensor([[0.0, 0.0, -c * _HOSTILE]])


def _paper(c: float, z: float) -> tuple[Mechanism, Tensor, Tensor]:
    """The pair of `joint_mu` where the scalar counts: antiparallel, with norms C and bC."""
    scalar = 1.0
    rho = (z / scalar) ** 2
    assert rho > FREE_THRESHOLD
    b = 1.0 / (rho * (1.0 + np.sqrt(1.0 - 2.0 / rho)))
    mechanism = CentralGaussian(c, z, numerator="paper", scalar_multiplier=scalar)
    return mechanism, *_neighbours(_row(c * _HOSTILE), _row(-float(b) * c))
