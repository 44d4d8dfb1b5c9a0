"""Known bugs of other implementations, planted here one by one: the audit catches every one of them."""

from dataclasses import dataclass, replace

import pytest
import torch

from dpfedexp.audit import Case, audit_density, audit_mechanism, standard_cases
from dpfedexp.core.clipping import clip
from dpfedexp.core.votes import WITHIN, collected
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, PrivUnit
from dpfedexp.mechanisms.base import make_sums
from dpfedexp.mechanisms.privunit import sample_direction

SAMPLES, CONFIDENCE = 4000, 1 - 1e-6
CASES = {case.name: case for case in standard_cases()}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def caught(case: Case, samples: int = SAMPLES) -> bool:
    return any(result.outcome == "BROKEN" for result in audit_mechanism(case, samples, 11, CONFIDENCE))


def planted(name: str, kind: type) -> Case:
    """The case with its mechanism replaced by a broken one with the same fields, and so with the same claim."""
    case = CASES[name]
    broken = kind(**{field: getattr(case.mechanism, field) for field in case.mechanism.__dataclass_fields__})
    return replace(case, mechanism=broken)


@dataclass(frozen=True)
class HalfNoise(CentralGaussian):
    def release(self, sums, denominator, noise, scalar_noise):
        return replace(self, noise_multiplier=self.noise_multiplier / 2)._honest(sums, denominator, noise, scalar_noise)

    def _honest(self, *given):
        return super().release(*given)


@dataclass(frozen=True)
class HalfNoiseOfClients(LocalGaussian):
    def randomize(self, clipped, clients, noise):
        honest = LocalGaussian(self.clip, self.noise_multiplier / 2, self.numerator)
        return honest.randomize(clipped, clients, noise)


@pytest.mark.parametrize("name", ["central Gaussian", "central Gaussian, free rule", "central Gaussian, adaptive clip"])
def test_planted_noise_too_small_by_half_is_caught(name):
    assert caught(planted(name, HalfNoise))


def test_planted_noise_of_clients_too_small_by_half_is_caught():
    assert caught(planted("local Gaussian", HalfNoiseOfClients))


@dataclass(frozen=True)
class NineTenthsOfTheNoise(CentralGaussian):
    def release(self, sums, denominator, noise, scalar_noise):
        return CentralGaussian(self.clip, 0.9 * self.noise_multiplier).release(sums, denominator, noise, scalar_noise)


def test_planted_noise_too_small_by_a_tenth_is_caught():
    """μ = 1.11 where 1 is claimed: 100,000 samples prove μ to about 0.05."""
    assert caught(planted("central Gaussian", NineTenthsOfTheNoise), 100_000)


@dataclass(frozen=True)
class HalfScalarNoise(CentralGaussian):
    def release(self, sums, denominator, noise, scalar_noise):
        honest = CentralGaussian(self.clip, self.noise_multiplier, self.adjacency, "paper", self.scalar_multiplier / 2)
        return honest.release(sums, denominator, noise, scalar_noise)


def test_planted_noise_of_the_squared_norms_too_small_by_half_is_caught():
    assert caught(planted("central Gaussian, paper's rule", HalfScalarNoise))


@dataclass(frozen=True)
class ClipsTheMean(CentralGaussian):
    """Clips after averaging: one long update moves the sum as far as it likes."""

    def collect(self, report):
        total = report.vector.sum(0, dtype=torch.float64)
        inside = clip(total[None], len(report.vector) * self.clip).vectors[0]
        return make_sums(inside, None, collected(report.votes, self.votes), len(report.vector))


@pytest.mark.parametrize("name", ["central Gaussian", "central Gaussian, free rule"])
def test_planted_clipping_after_averaging_is_caught(name):
    assert caught(planted(name, ClipsTheMean))


@dataclass(frozen=True)
class WeighsByExamples(CentralGaussian):
    """The last client holds twice as many examples as the others."""

    def collect(self, report):
        rows = clip(report.vector, self.clip).vectors
        weights = torch.ones(len(rows))
        weights[-1] = 2.0
        return make_sums(
            (rows * weights[:, None]).sum(0, dtype=torch.float64), None, collected(report.votes, self.votes), len(rows)
        )


def test_planted_weights_by_examples_are_caught():
    assert caught(planted("central Gaussian", WeighsByExamples))


@dataclass(frozen=True)
class ReusesItsSeed(CentralGaussian):
    """The noise of the scalar is the first coordinate's once more, so it can be subtracted out."""

    def release(self, sums, denominator, noise, scalar_noise):
        return super().release(sums, denominator, noise, noise)


def test_planted_seed_reused_between_vector_and_scalar_is_caught():
    assert caught(planted("central Gaussian, paper's rule", ReusesItsSeed))


def test_planted_draws_reused_between_vector_and_scalar_are_caught_on_the_grid():
    name = "central Gaussian, paper's rule, secure"

    class Tape:
        def __init__(self, noise):
            self.noise, self.first = noise, None

        def normal(self, clients, width, device, dtype):
            if self.first is None:
                self.first = self.noise.normal(clients, width, device, dtype)
            return self.first[:, :width]

    @dataclass(frozen=True)
    class Reuses(type(CASES[name].mechanism)):
        def release(self, sums, denominator, noise, scalar_noise):
            tape = Tape(noise)
            return super().release(sums, denominator, tape, tape)

    assert caught(planted(name, Reuses), 1500)


@dataclass(frozen=True)
class OneNoiseForAllCoordinates(CentralGaussian):
    def release(self, sums, denominator, noise, scalar_noise):
        class Repeated:
            def normal(self, clients, width, device, dtype):
                return noise.normal(clients, 1, device, dtype).expand(1, width)

        return super().release(sums, denominator, Repeated(), scalar_noise)


def test_planted_noise_shared_by_all_coordinates_is_caught():
    assert caught(planted("central Gaussian", OneNoiseForAllCoordinates))


class EveryFourth:
    """Noise of four coordinates, repeated."""

    def __init__(self, noise):
        self.noise = noise

    def normal(self, clients, width, device, dtype):
        four = self.noise.normal(clients, 4, device, dtype)
        return four.repeat(1, -(-width // 4))[:, :width]


def with_repeated_noise(kind):
    @dataclass(frozen=True)
    class Repeats(kind):
        def release(self, sums, denominator, noise, scalar_noise):
            return super().release(sums, denominator, EveryFourth(noise), scalar_noise)

        def randomize(self, clipped, clients, noise):
            return super().randomize(clipped, clients, EveryFourth(noise))

    return Repeats


@pytest.mark.parametrize(
    "name",
    [
        "central Gaussian",
        "central Gaussian, free rule",
        "central Gaussian, secure",
        "local Gaussian",
        "local Gaussian, secure",
    ],
)
def test_planted_noise_repeated_every_four_coordinates_is_caught(name):
    assert caught(planted(name, with_repeated_noise(type(CASES[name].mechanism))), 1500)


def with_shared_noise(kind):
    @dataclass(frozen=True)
    class Shares(kind):
        """All clients of a chunk get the draws of its first one."""

        def randomize(self, clipped, clients, noise):
            class First:
                def normal(self, clients, width, device, dtype):
                    return noise.normal(clients[:1], width, device, dtype).expand(len(clients), width)

            return super().randomize(clipped, clients, First())

    return Shares


@pytest.mark.parametrize("name", ["local Gaussian", "local Gaussian, free rule", "local Gaussian, secure"])
def test_planted_noise_shared_by_the_clients_of_a_chunk_is_caught(name):
    assert caught(planted(name, with_shared_noise(type(CASES[name].mechanism))))


@dataclass(frozen=True)
class SendsNothingButNoise(CentralGaussian):
    """Loses the clients' signal. Nothing leaks, but nothing is measured either."""

    def collect(self, report):
        return super().collect(replace(report, vector=torch.zeros_like(report.vector)))


def test_planted_loss_of_the_signal_is_no_tick():
    found = audit_mechanism(planted("central Gaussian", SendsNothingButNoise), SAMPLES, 11, CONFIDENCE)
    assert {result.outcome for result in found} == {"NO POWER"}


def with_changed_count(change):
    name = "central Gaussian, adaptive clip, add-remove, secure"

    @dataclass(frozen=True)
    class Changed(type(CASES[name].mechanism)):
        def release(self, sums, denominator, noise, scalar_noise):
            return change(super().release, sums, denominator, noise, scalar_noise)

    return planted(name, Changed)


def test_planted_secure_count_that_is_not_centred_is_caught():
    def bare(release, sums, *given):
        return release(replace(sums, votes=sums.votes + 0.5 * sums.count), *given)

    assert caught(with_changed_count(bare))


def test_planted_secure_count_without_noise_is_caught():
    def exact(release, sums, denominator, *noises):
        true = 0.5 + float(sums.votes[0]) / denominator
        return replace(release(sums, denominator, *noises), votes={WITHIN: true})

    assert caught(with_changed_count(exact), 1500)


@dataclass(frozen=True)
class DividesBySurvivors(CentralGaussian):
    def release(self, sums, denominator, noise, scalar_noise):
        return super().release(sums, float(sums.count), noise, scalar_noise)


def test_planted_denominators_by_survivors_are_caught():
    assert caught(planted("central Gaussian, add-remove", DividesBySurvivors))


@dataclass(frozen=True)
class RoundsAwayFromZero(CentralGaussian):
    """A grid so coarse, and rounding so wrong, that vectors leave the ball."""

    def collect(self, report):
        rows = clip(report.vector, self.clip).vectors
        coarse = rows.sign() * (rows.abs() / self.clip / 0.75).ceil() * 0.75 * self.clip
        return make_sums(coarse.sum(0, dtype=torch.float64), None, collected(report.votes, self.votes), len(rows))


def test_planted_rounding_out_of_the_ball_is_caught():
    assert caught(planted("central Gaussian", RoundsAwayFromZero))


@dataclass(frozen=True)
class WithProbabilityGamma(PrivUnit):
    """The paper's box as it is printed: from the cap "with probability γ" instead of p."""

    def randomize(self, clipped, clients, noise):
        report = super().randomize(clipped, clients, noise)
        d = clipped.vectors.shape[1]
        unit = clipped.vectors / clipped.vectors.norm(dim=1, keepdim=True)
        gaussian = noise.normal(clients, d, unit.device, unit.dtype)
        constants = replace(self.direction, p=self.direction.gamma)
        return replace(report, vector=sample_direction(unit, constants, gaussian, noise.uniform(clients, 5)[:, :2]))


def test_planted_with_probability_gamma_is_caught():
    found = audit_density(WithProbabilityGamma(0.3, 50), SAMPLES, 11, CONFIDENCE)
    assert any(result.outcome == "BROKEN" for result in found)


def test_planted_with_probability_gamma_does_not_point_along_the_update():
    """Directly: E⟨V, u⟩·(1/m) must be 1; the standard error of the mean is below 0.03."""
    from dpfedexp.core.noise.streams import Streams

    rows = torch.zeros(20_000, 50)
    rows[:, 3] = 0.3
    means = {}
    for kind in (PrivUnit, WithProbabilityGamma):
        mechanism = kind(0.3, 50)
        report = mechanism.randomize(clip(rows, 0.3), torch.arange(len(rows)), Streams(0).at("noise", 1))
        means[kind] = float(report.vector[:, 3].mean()) / mechanism.direction.m
    assert abs(means[PrivUnit] - 1) < 0.15
    assert means[WithProbabilityGamma] < 0.5


@pytest.fixture
def small_cap(monkeypatch):
    """Draws inside the cap from 0.8·q instead of q: no report of a client falls into the shell between, so ε is infinite."""
    from dpfedexp.mechanisms import privunit

    honest = privunit.sample_height

    def from_less(constants, uniform):
        inside = uniform[:, :1] < constants.p
        shrunk = torch.cat([uniform[:, :1], torch.where(inside, 0.8 * uniform[:, 1:2], uniform[:, 1:2])], dim=1)
        return honest(constants, shrunk)

    monkeypatch.setattr(privunit, "sample_height", from_less)


def test_planted_shell_of_zero_density_is_caught_by_the_law_of_the_height(small_cap):
    broken = [r.unit for r in audit_density(PrivUnit(0.3, 50), SAMPLES, 11, CONFIDENCE) if r.outcome == "BROKEN"]
    assert broken == ["law of the height inside the cap"]


def test_planted_shell_of_zero_density_is_caught_by_the_ratio_that_is_learnt(small_cap):
    """The ratio that is claimed sees nothing: it only asks for the cap."""
    found = audit_mechanism(CASES["PrivUnit, exact γ"], 200_000, 11, CONFIDENCE)
    assert [r.name for r in found if r.outcome == "BROKEN"] == ["PrivUnit, exact γ, learnt"]


@dataclass(frozen=True)
class CapTooSmall(PrivUnit):
    """A cap that is narrower than what is charged for, so that a report inside it says more."""

    @property
    def direction(self):
        honest = super().direction
        return replace(honest, p=0.99)


def test_planted_cap_probability_above_the_claim_is_caught():
    case = CASES["PrivUnit, exact γ"]
    honest = case.mechanism

    @dataclass(frozen=True)
    class Claims(CapTooSmall):
        def event(self, sampling):
            return honest.event(sampling)

    fields = {name: getattr(honest, name) for name in honest.__dataclass_fields__}
    assert caught(replace(case, mechanism=Claims(**fields)))


def test_the_planted_bugs_are_caught_on_the_grid_too():
    case = CASES["central Gaussian, secure"]
    honest = case.mechanism

    @dataclass(frozen=True)
    class Halved(type(honest)):
        def release(self, sums, denominator, noise, scalar_noise):
            return (
                CentralGaussian(self.clip, self.noise_multiplier / 2)
                .secure()
                .release(sums, denominator, noise, scalar_noise)
            )

    fields = {name: getattr(honest, name) for name in honest.__dataclass_fields__}
    assert caught(replace(case, mechanism=Halved(**fields)))
