"""Secure noise: on the lattice, charged for what it costs, and on every number that a release shows."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpfedexp import Execution, Poisson, Sgd, cdp_fedexp, dp_fedavg, fedavg, ldp_fedexp, train
from dpfedexp.accounting import Sampling, gdp
from dpfedexp.core import noise as noise_module
from dpfedexp.core.noise import STRICT_BITS, ChaChaNoise, Streams
from dpfedexp.core.sums import Sums, within_clip_vote
from dpfedexp.data import synthetic_regression
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit
from dpfedexp.models import linear_regression

from .one_round import collected, reports

pytestmark = pytest.mark.usefixtures("untried")
CENTRAL = {
    "plain": CentralGaussian(0.3, 2.0),
    "free": CentralGaussian(0.3, 2.0, numerator="free"),
    "paper": CentralGaussian(0.3, 2.0, numerator="paper", scalar_multiplier=3.0),
    "adaptive": CentralGaussian(0.3, 2.0, numerator="free", votes=(within_clip_vote(4.0),)),
    "add-remove": CentralGaussian(0.3, 2.0, adjacency="add-remove", votes=(within_clip_vote(4.0),)),
}

LOCAL = {name: LocalGaussian(0.3, 0.7, name) for name in (None, "free", "paper", "naive")}

ROWS = torch.randn(40, 9, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CENTRAL)
def test_the_secure_release_is_the_plain_one_to_within_the_grid(name):
    """The same draws; truncation moves each client by less than a step, rounding the noise by half a step."""
    plain, noise, scalar = CENTRAL[name], Streams(3).at("noise", 1), Streams(3).at("scalar", 1)
    ours, theirs = (m.release(collected(m, ROWS), 40.0, noise, scalar) for m in (plain.secure(), plain))
    step = 2.0 * 0.3 * 2.0**-20
    assert float((ours.c_bar - theirs.c_bar).abs().max()) <= 1.5 * step
    if name in ("free", "adaptive"):
        assert abs(ours.statistic - theirs.statistic) <= 1.5 * step
    local = LocalGaussian(0.3, 2.0, plain.numerator)
    ours, theirs = (reports(m, ROWS.double(), noise).vector for m in (local.secure(), local))
    assert float((ours - theirs).abs().max()) <= 1.5 * step


@pytest.mark.parametrize("mechanism", [*CENTRAL.values(), *LOCAL.values()], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling("poisson", 0.3), Sampling("fixed", 0.3)], ids=str)
def test_the_grid_is_charged_for_what_it_costs_and_strict_noise_for_more_in_every_query(mechanism, sampling):
    plain, grid, strict = (m.event(sampling) for m in (mechanism, mechanism.secure(), mechanism.secure(strict=True)))
    squares = 2.0**-19 if mechanism.numerator == "paper" and plain.joint_mu is not None else 0.0
    assert grid.mu == pytest.approx(plain.mu + squares, rel=1e-14)
    assert replace(grid, joint_mu=None) == replace(plain, attained=False, joint_mu=None)
    more = pytest.approx((1.0 + 2.0**-20,) * 2, rel=1e-14)
    for a, b in zip(grid.queries, strict.queries, strict=True):
        assert (b.bound / b.noise * a.noise / a.bound, b.sensitivity / b.noise * a.noise / a.sensitivity) == more
    assert (strict.mu / grid.mu, strict.radius / grid.radius) == more


def test_sums_that_the_grid_can_not_hold_or_that_lack_a_vote_are_not_released():
    """Sums may come from elsewhere, so a release checks again what `collect` has checked."""
    noise = Streams(3).at("noise", 1)
    plain, voted = CENTRAL["plain"].secure(), CENTRAL["adaptive"].secure()
    with pytest.raises(InputError, match="more than 52 bits"):
        plain.release(replace(Sums.zero(9), count=2**40), 40.0, noise, noise)
    with pytest.raises(ValueError, match="shorter than"):
        voted.release(Sums.zero(10), 40.0, noise, noise)


def test_strict_noise_is_within_what_is_charged_for_it():
    """δ of the discrete release is at most e^s·δ_μ(ε − 2s) + ν(1 + e^ε); docs/security.md has the proof of this bound.

    s is the largest log ratio between discrete and rounded Gaussian noise within 20 deviations, for d coordinates and T rounds.
    """
    per_coordinate = 20.0**2 / 24 * 4.0**-STRICT_BITS
    for mu in (0.01, 0.4, 2.0, 10.0):
        for coordinates, rounds in ((10, 1), (5046, 50), (10**6, 1000)):
            s = per_coordinate * coordinates * rounds
            nu = 2 * coordinates * rounds * math.exp(stats.norm.logsf(20.0))
            total, charged = mu * math.sqrt(rounds), mu * (1 + 2.0**-20) * math.sqrt(rounds)
            for delta in (0.1, 1e-3, 1e-5, 1e-9, 1e-12):
                epsilon = gdp.epsilon(total, delta)
                if epsilon > 100:
                    continue
                worst = math.exp(s) * gdp.delta(epsilon - 2 * s, total) + nu * (1 + math.exp(epsilon))
                assert worst <= gdp.delta(epsilon, charged)


def test_the_ratio_of_discrete_to_rounded_noise_is_as_the_proof_says():
    """At a scale small enough to compute both: log ratio between −k²/(24σ⁴) and 1/(24σ²)."""
    scale = 20.0
    k = np.arange(-200, 201)
    discrete = stats.norm.pdf(k / scale)
    discrete /= np.exp(-0.5 * (np.arange(-4000, 4001) / scale) ** 2).sum() / math.sqrt(2 * math.pi)
    rounded = stats.norm.cdf((-abs(k) + 0.5) / scale) - stats.norm.cdf((-abs(k) - 0.5) / scale)
    log_ratio = np.log(rounded / discrete)
    assert (log_ratio <= (k / scale) ** 2 / (24 * scale**2) + 1e-9).all()
    assert (log_ratio >= -1 / (24 * scale**2) - 1e-9).all()


def test_privunit_reports_lie_on_a_grid_and_keep_their_law():
    plain = PrivUnit(0.3, 50)
    ours = plain.secure()
    rows = torch.zeros(20_000, 50)
    rows[:, 7] = 0.2
    report = reports(ours, rows, ChaChaNoise())
    units = report.vector.double() / ours.step
    assert torch.equal(units, units.round())
    assert float((report.vector.norm(dim=1) - 1).abs().max()) < 1e-3
    inside = int((report.vector[:, 7] >= plain.direction.gamma).sum())
    assert stats.binomtest(inside, len(rows), plain.direction.p).pvalue > 1e-6
    assert ours.event(Sampling()) == replace(plain.event(Sampling()), attained=False)


def test_what_can_not_be_secure_is_refused():
    with pytest.raises(InputError, match="PrivUnit"):
        PrivUnit(0.3, 50).secure(strict=True)
    for unprotected in (lambda: NoPrivacy().secure(), lambda: run(fedavg(), secure=True)):
        with pytest.raises(InputError, match="not private"):
            unprotected()


PROBLEM = synthetic_regression(20, 5, seed=1)


def run(algorithm, **options):
    given = {"local": Sgd(lr=0.02, steps=2), "rounds": 3, "execution": Execution(device="cpu", trainer="loop")}
    return train(linear_regression(5), PROBLEM.federation, algorithm, **given, **options)


@pytest.mark.parametrize(
    ("algorithm", "secure"),
    [
        (cdp_fedexp(clip="adaptive", noise_multiplier=2.0), True),
        (ldp_fedexp(clip=0.3, noise_multiplier=0.7, numerator="paper"), "strict"),
    ],
)
def test_a_secure_run_can_not_be_repeated_from_its_seed_and_says_so(algorithm, secure):
    first, second = run(algorithm, secure=secure), run(algorithm, secure=secure)
    assert not torch.equal(next(first.model.parameters()), next(second.model.parameters()))
    assert not first.privacy.simulated
    assert "came from a seed" not in first.privacy.text
    assert first.privacy.epsilon_total == pytest.approx(run(algorithm).privacy.epsilon_total, rel=1e-4)


def test_a_secure_run_draws_who_takes_part_from_the_system_too():
    algorithm = dp_fedavg(clip=0.3, noise_multiplier=2.0, adjacency="add-remove")
    how = {"local": Sgd(lr=0.02, steps=2), "rounds": 1, "participation": Poisson(0.5, population=20), "secure": True}
    seen = set()
    for _ in range(3):
        simulation, _ = prepare(linear_regression(5), PROBLEM.federation, algorithm, **how)
        seen.add(tuple(simulation.participation.cohort(20, simulation.noise.at("participation", 1)).tolist()))
    assert len(seen) > 1


CLIP, Z, SCALAR, COUNT, M = 0.3, 2.0, 3.0, 4.0, 40

EVERYTHING = CentralGaussian(CLIP, Z, numerator="paper", scalar_multiplier=SCALAR, votes=(within_clip_vote(COUNT),))


class Constant:
    """Noise whose every draw is the next of a list: which draw went where can be read off."""

    def __init__(self, *values):
        self.values = list(values)

    def normal(self, clients, width, device, dtype):
        return torch.full((len(clients), width), self.values.pop(0), dtype=dtype)


NO_FLOATS = object()
"""In the place of noise: strict noise must not come from floating-point sampling."""


def test_the_count_and_the_squared_norms_have_noise_of_their_own_in_a_secure_release():
    mechanism = EVERYTHING.secure()
    sums = collected(mechanism, 0.1 * ROWS)
    quiet = mechanism.release(sums, M, Constant(0.0), Constant(0.0, 0.0))
    noisy = mechanism.release(sums, M, Constant(1.0), Constant(1.0, -2.0))
    # A grid has 2²⁰ steps or more to a standard deviation, and noise is rounded by half a step.
    assert M * (noisy.within - quiet.within) == pytest.approx(COUNT, rel=1e-6)
    assert M * (noisy.statistic - quiet.statistic) == pytest.approx(-2.0 * SCALAR * CLIP**2, rel=1e-6)
    assert (M * (noisy.c_bar - quiet.c_bar)).tolist() == pytest.approx([Z * CLIP] * 9, rel=1e-6)


@pytest.fixture
def discrete(monkeypatch):
    """The scales of all discrete noise that is drawn; the draws themselves are three scales, to be recognized."""
    scales = []

    def draw(shape, scale):
        scales.append(scale)
        return torch.full(tuple(shape), round(3.0 * scale), dtype=torch.float64)

    monkeypatch.setattr(noise_module, "discrete_gaussian", draw)
    return scales


def test_all_noises_of_a_strict_release_or_report_are_discrete_and_no_others_are(discrete):
    report = reports(LocalGaussian(CLIP, 0.7).secure(strict=True), torch.zeros(4, 9), NO_FLOATS)
    assert len(discrete) == 1
    assert report.vector.flatten().tolist() == pytest.approx([3 * 0.7 * CLIP] * 36, rel=1e-6)
    discrete.clear()
    EVERYTHING.secure().release(collected(EVERYTHING.secure(), 0.1 * ROWS), M, Constant(1.0), Constant(1.0, 1.0))
    assert discrete == []
    mechanism = EVERYTHING.secure(strict=True)
    sums = collected(mechanism, 0.1 * ROWS)
    released = mechanism.release(sums, M, NO_FLOATS, NO_FLOATS)
    assert len(discrete) == 3
    assert all(2**30 <= scale < 2**31 + 1 for scale in discrete)
    assert (M * released.c_bar - sums.vector).tolist() == pytest.approx([3 * Z * CLIP] * 9, rel=1e-6)
    centered = float(sums.votes[0])
    assert M * (released.within - 0.5) - centered == pytest.approx(3 * COUNT, rel=1e-6)
    assert M * released.statistic - float(sums.squares) == pytest.approx(3 * SCALAR * CLIP**2, rel=1e-6)
