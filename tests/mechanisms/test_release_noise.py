"""Every number that a secure release shows carries its own noise, drawn as promised, and what that costs is charged."""

import math

import pytest
import torch

from dpfedexp.accounting import Sampling, compose
from dpfedexp.core.clipping import Clipped, clip
from dpfedexp.core.noise import lattice as grid_module
from dpfedexp.core.votes import within_clip
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian

CLIP, Z, SCALAR, COUNT, M = 0.3, 2.0, 3.0, 4.0, 40
ROWS = torch.randn(M, 9, generator=torch.Generator().manual_seed(0)) * 0.1
EVERYTHING = CentralGaussian(CLIP, Z, numerator="paper", scalar_multiplier=SCALAR, votes=(within_clip(COUNT),))


class Constant:
    """Noise whose every draw is the next of a list: which draw went where can be read off."""

    def __init__(self, *values):
        self.values = list(values)

    def normal(self, clients, width, device, dtype):
        return torch.full((len(clients), width), self.values.pop(0), dtype=dtype)


class Forbidden:
    """Noise that must not be asked for."""

    def normal(self, clients, width, device, dtype):
        raise AssertionError("strict noise must not come from floating-point sampling")

    uniform = normal


def sums_of(mechanism):
    clipped = clip(ROWS, mechanism.clip)
    return mechanism.collect(mechanism.randomize(clipped, torch.arange(M), Constant()))


def test_the_count_and_the_squared_norms_have_noise_of_their_own_in_a_secure_release():
    mechanism = EVERYTHING.secure()
    sums = sums_of(mechanism)
    quiet = mechanism.release(sums, M, Constant(0.0), Constant(0.0, 0.0))
    noisy = mechanism.release(sums, M, Constant(1.0), Constant(1.0, -2.0))
    # A grid has 2²⁰ steps or more to a standard deviation, and noise is rounded by half a step.
    assert M * (noisy.within - quiet.within) == pytest.approx(COUNT, rel=1e-6)
    assert M * (noisy.statistic - quiet.statistic) == pytest.approx(-2.0 * SCALAR * CLIP**2, rel=1e-6)
    assert (M * (noisy.c_bar - quiet.c_bar)).tolist() == pytest.approx([Z * CLIP] * 9, rel=1e-6)


def test_the_plain_release_has_the_same_three_noises():
    sums = sums_of(EVERYTHING)

    class Pair:
        def normal(self, clients, width, device, dtype):
            assert width == 2
            return torch.tensor([[-2.0, 1.0]], dtype=dtype)

    class Nothing:
        def normal(self, clients, width, device, dtype):
            return torch.zeros(len(clients), width, dtype=dtype)

    quiet, noisy = (
        EVERYTHING.release(sums, M, first, second)
        for first, second in ((Nothing(), Nothing()), (Constant(1.0), Pair()))
    )
    assert M * (noisy.within - quiet.within) == pytest.approx(COUNT, rel=1e-9)
    assert M * (noisy.statistic - quiet.statistic) == pytest.approx(-2.0 * SCALAR * CLIP**2, rel=1e-9)


def test_the_secure_count_is_centred():
    """One client more, within the clip or not, moves the released count by a half, as is charged."""
    mechanism = EVERYTHING.secure()
    base = sums_of(mechanism)
    for bit in (0.0, 1.0):
        more = type(base)(base.vector, base.squares, base.votes + bit - 0.5, base.count + 1)
        released = [mechanism.release(s, M, Constant(0.0), Constant(0.0, 0.0)).within for s in (base, more)]
        assert M * abs(released[1] - released[0]) == pytest.approx(0.5, abs=1e-6)


@pytest.fixture
def discrete(monkeypatch):
    """The scales of all discrete noise that is drawn; the draws themselves are three scales, to be recognised."""
    scales = []

    def draw(shape, scale):
        scales.append(scale)
        return torch.full(tuple(shape), round(3.0 * scale), dtype=torch.float64)

    monkeypatch.setattr(grid_module, "discrete_gaussian", draw)
    return scales


def test_all_three_noises_of_a_strict_release_are_discrete(discrete):
    mechanism = EVERYTHING.secure(strict=True)
    sums = sums_of(mechanism)
    released = mechanism.release(sums, M, Forbidden(), Forbidden())
    assert len(discrete) == 3
    assert all(2**30 <= scale < 2**31 + 1 for scale in discrete)
    assert (M * released.c_bar - sums.vector).tolist() == pytest.approx([3 * Z * CLIP] * 9, rel=1e-6)
    centred = float(sums.votes[0])
    assert M * (released.within - 0.5) - centred == pytest.approx(3 * COUNT, rel=1e-6)
    assert M * released.statistic - float(sums.squares) == pytest.approx(3 * SCALAR * CLIP**2, rel=1e-6)


def test_a_strict_local_report_has_discrete_noise_only(discrete):
    mechanism = LocalGaussian(CLIP, 0.7).secure(strict=True)
    rows = torch.zeros(4, 9)
    report = mechanism.randomize(Clipped(rows, torch.ones(4, dtype=torch.bool)), torch.arange(4), Forbidden())
    assert len(discrete) == 1
    assert report.vector.flatten().tolist() == pytest.approx([3 * 0.7 * CLIP] * 36, rel=1e-6)


def test_plain_secure_noise_is_never_discrete(discrete):
    mechanism = EVERYTHING.secure()
    mechanism.release(sums_of(mechanism), M, Constant(1.0), Constant(1.0, 1.0))
    assert discrete == []


def test_the_grid_of_the_squared_norms_is_charged_on_top_of_the_joint_shift():
    plain, ours = EVERYTHING.event(Sampling()), EVERYTHING.secure().event(Sampling())
    assert ours.joint_mu == pytest.approx(plain.joint_mu + 2.0**-19, rel=1e-14)
    assert compose([(ours, 10)], 1e-5).epsilon > compose([(plain, 10)], 1e-5).epsilon


@pytest.mark.parametrize("sampling", [Sampling(), Sampling("poisson", 0.3), Sampling("fixed", 0.3)], ids=str)
@pytest.mark.parametrize(
    "mechanism",
    [CentralGaussian(CLIP, Z), CentralGaussian(CLIP, Z, "add-remove", votes=(within_clip(COUNT),)), EVERYTHING],
    ids=["update", "count", "everything"],
)
def test_strict_noise_is_charged_more_than_the_gaussian_in_every_query(mechanism, sampling):
    more = 1.0 + 2.0**-20
    grid, ours = mechanism.secure().event(sampling), mechanism.secure(strict=True).event(sampling)
    assert len(grid.queries) == len(ours.queries)
    for a, b in zip(grid.queries, ours.queries, strict=True):
        assert (b.bound / b.noise, b.sensitivity / b.noise) == pytest.approx(
            (more * a.bound / a.noise, more * a.sensitivity / a.noise), rel=1e-14
        )
    assert ours.mu == pytest.approx(more * grid.mu, rel=1e-14)
    assert ours.radius == pytest.approx(more * grid.radius, rel=1e-14)


def test_strict_local_noise_is_charged_more_too():
    plain, ours = (m.event(Sampling()) for m in (LocalGaussian(CLIP, 0.7), LocalGaussian(CLIP, 0.7).secure(True)))
    assert ours.mu == pytest.approx(plain.mu * (1 + 2.0**-20), rel=1e-14)
    assert not math.isclose(ours.mu, plain.mu, rel_tol=1e-9)
