"""Known bugs of other implementations, planted here one by one: the audit catches every one of them.

A bug is a function that stands in a mechanism's method: it gets the honest method, the mechanism and what the method is given. The
mechanism keeps its fields, and so its claim.
"""

from dataclasses import replace

import pytest
import torch

from dpfedexp.audit import audit_density, audit_mechanism, standard_cases
from dpfedexp.core.clipping import clip
from dpfedexp.core.sums import WITHIN_CLIP, sum_shares
from dpfedexp.mechanisms import CentralGaussian, PrivUnit, privunit
from dpfedexp.mechanisms.base import make_sums

SAMPLES, FEW, CONFIDENCE = 4000, 400, 1 - 1e-6
"""Few decide where a bug tells the two inputs apart in every release; each release of a secure mechanism takes its time."""
CASES = {case.name: case for case in standard_cases()}
CENTRAL, FREE, PAPER, LOCAL = "central Gaussian", ", free rule", ", paper's rule", "local Gaussian"
VOTES, COUNT = "central Gaussian, votes", "central Gaussian, adaptive clip, add-remove"


def broken(mechanism, method, bug):
    kind = type(mechanism)
    honest = getattr(kind, method)
    planted = type("Planted", (kind,), {method: lambda self, *given: bug(honest, self, *given)})
    return planted(**{field: getattr(mechanism, field) for field in mechanism.__dataclass_fields__})


def outcomes(name, method, bug, samples=SAMPLES):
    case = replace(CASES[name], mechanism=broken(CASES[name].mechanism, method, bug))
    return {result.outcome for result in audit_mechanism(case, samples, 11, CONFIDENCE)}


class Changed:
    """A noise source whose normal draws are changed: `change(draw, clients, width)` with `draw` the honest one."""

    def __init__(self, noise, change):
        self.noise, self.change = noise, change

    def normal(self, clients, width, device, dtype):
        return self.change(lambda who, size: self.noise.normal(who, size, device, dtype), clients, width)


def half_the_noise(honest, self, *given):
    return honest(replace(self, noise_multiplier=self.noise_multiplier / 2), *given)


def nine_tenths_of_the_noise(honest, self, *given):
    """μ = 1.11 where 1 is claimed: 100,000 samples prove μ to about 0.05."""
    return honest(replace(self, noise_multiplier=0.9 * self.noise_multiplier), *given)


def half_the_noise_of_squared_norms(honest, self, *given):
    return honest(replace(self, scalar_multiplier=self.scalar_multiplier / 2), *given)


def seed_reused(honest, self, sums, denominator, noise, scalar_noise):
    """The noise of the scalar is the first coordinate's once more, so it can be subtracted out."""
    return honest(self, sums, denominator, noise, noise)


def draws_reused(honest, self, sums, denominator, noise, scalar_noise):
    tape = []

    def first(draw, clients, width):
        tape.append(draw(clients, width))
        return tape[0][:, :width]

    return honest(self, sums, denominator, Changed(noise, first), Changed(noise, first))


def one_draw(draw, clients, width):
    return draw(clients, 1).expand(1, width)


def every_fourth(draw, clients, width):
    return draw(clients, 4).repeat(1, -(-width // 4))[:, :width]


def first_client(draw, clients, width):
    return draw(clients[:1], width).expand(len(clients), width)


def one_noise_for_all_coordinates(honest, self, sums, denominator, noise, scalar_noise):
    return honest(self, sums, denominator, Changed(noise, one_draw), scalar_noise)


def one_draw_for_all_votes(honest, self, sums, denominator, noise, scalar_noise):
    """Two votes with the same draw tell their difference without noise."""
    return honest(self, sums, denominator, noise, Changed(scalar_noise, one_draw))


def noise_repeated_every_four_coordinates(honest, self, *given):
    first, second, noise, *scalar = given
    return honest(self, first, second, Changed(noise, every_fourth), *scalar)


def noise_shared_by_a_chunk(honest, self, clipped, clients, noise):
    return honest(self, clipped, clients, Changed(noise, first_client))


def clipping_after_averaging(honest, self, report):
    """One long update moves the sum as far as it likes."""
    total = report.vector.sum(0, dtype=torch.float64)
    inside = clip(total[None], len(report.vector) * self.clip).vectors[0]
    return make_sums(inside, None, sum_shares(report.votes, self.votes), len(report.vector))


def weights_by_examples(honest, self, report):
    """The last client holds twice as many examples as the others."""
    rows = clip(report.vector, self.clip).vectors
    total = rows.sum(0, dtype=torch.float64) + rows[-1]
    return make_sums(total, None, sum_shares(report.votes, self.votes), len(rows))


def rounding_out_of_the_ball(honest, self, report):
    """A grid so coarse, and rounding so wrong, that vectors leave the ball."""
    rows = clip(report.vector, self.clip).vectors
    coarse = rows.sign() * (rows.abs() / self.clip / 0.75).ceil() * 0.75 * self.clip
    return make_sums(coarse.sum(0, dtype=torch.float64), None, sum_shares(report.votes, self.votes), len(rows))


def denominators_by_survivors(honest, self, sums, denominator, *noises):
    return honest(self, sums, float(sums.count), *noises)


def count_that_is_not_centered(honest, self, sums, *given):
    """A client that leaves moves each sum by one, and not by a half."""
    return honest(self, replace(sums, votes=sums.votes + 0.5 * sums.count), *given)


def count_without_noise(honest, self, sums, denominator, *noises):
    true = 0.5 + float(sums.votes[0]) / denominator
    return replace(honest(self, sums, denominator, *noises), votes={WITHIN_CLIP: true})


def votes_that_are_trusted(honest, self, report):
    return replace(honest(self, report), votes=report.votes.sum(0))


def quarter_of_the_noise_on_one_vote(honest, self, *given):
    first, second, third = self.votes
    return honest(replace(self, votes=(first, replace(second, noise=second.noise / 4), third)), *given)


BUGS = [
    (half_the_noise, "release", [CENTRAL, CENTRAL + FREE, CENTRAL + ", adaptive clip"], SAMPLES),
    (half_the_noise, "release", [CENTRAL + ", secure"], 1500),
    (half_the_noise, "randomize", [LOCAL], SAMPLES),
    (nine_tenths_of_the_noise, "release", [CENTRAL], 100_000),
    (half_the_noise_of_squared_norms, "release", [CENTRAL + PAPER], SAMPLES),
    (seed_reused, "release", [CENTRAL + PAPER], SAMPLES),
    (draws_reused, "release", [CENTRAL + PAPER + ", secure"], FEW),
    (one_noise_for_all_coordinates, "release", [CENTRAL], SAMPLES),
    (noise_repeated_every_four_coordinates, "release", [CENTRAL, CENTRAL + FREE, CENTRAL + ", secure"], FEW),
    (noise_repeated_every_four_coordinates, "randomize", [LOCAL, LOCAL + ", secure"], FEW),
    (noise_shared_by_a_chunk, "randomize", [LOCAL, LOCAL + FREE, LOCAL + ", secure"], SAMPLES),
    (clipping_after_averaging, "collect", [CENTRAL, CENTRAL + FREE], SAMPLES),
    (weights_by_examples, "collect", [CENTRAL], SAMPLES),
    (rounding_out_of_the_ball, "collect", [CENTRAL], SAMPLES),
    (denominators_by_survivors, "release", [CENTRAL + ", add-remove"], SAMPLES),
    (count_that_is_not_centered, "release", [COUNT, VOTES + ", add-remove"], SAMPLES),
    (count_without_noise, "release", [COUNT + ", secure"], FEW),
    (votes_that_are_trusted, "collect", [VOTES, VOTES + ", add-remove", VOTES + ", secure"], FEW),
    (quarter_of_the_noise_on_one_vote, "release", [VOTES, VOTES + ", add-remove"], SAMPLES),
    (one_draw_for_all_votes, "release", [VOTES, VOTES + ", add-remove"], SAMPLES),
]


@pytest.mark.parametrize(
    ("bug", "method", "name", "samples"),
    [(bug, method, name, samples) for bug, method, names, samples in BUGS for name in names],
)
def test_a_planted_bug_is_caught(bug, method, name, samples):
    assert "BROKEN" in outcomes(name, method, bug, samples)


def test_planted_loss_of_the_signal_is_no_tick():
    """Nothing leaks, but nothing is measured either."""

    def only_noise(honest, self, report):
        return honest(self, replace(report, vector=torch.zeros_like(report.vector)))

    assert outcomes(CENTRAL, "collect", only_noise) == {"NO POWER"}


def test_planted_with_probability_gamma_is_caught():
    """The paper's box as it is printed: from the cap "with probability γ" instead of p."""

    def with_probability_gamma(honest, self, clipped, clients, noise):
        unit = clipped.vectors / clipped.vectors.norm(dim=1, keepdim=True)
        gaussian = noise.normal(clients, unit.shape[1], unit.device, unit.dtype)
        constants = replace(self.direction, p=self.direction.gamma)
        vector = privunit.sample_direction(unit, constants, gaussian, noise.uniform(clients, 5)[:, :2])
        return replace(honest(self, clipped, clients, noise), vector=vector)

    found = audit_density(broken(PrivUnit(0.3, 50), "randomize", with_probability_gamma), SAMPLES, 11, CONFIDENCE)
    assert any(result.outcome == "BROKEN" for result in found)


def test_planted_shell_of_zero_density_is_caught_by_its_law_and_by_the_ratio_that_is_learned(monkeypatch):
    """Draws inside the cap from 0.8·q instead of q: no report of a client falls into the shell between, so ε is infinite.

    The ratio that is claimed sees nothing: it only asks for the cap.
    """
    honest = privunit.sample_height

    def from_less(constants, uniform):
        inside = uniform[:, :1] < constants.p
        shrunk = torch.cat([uniform[:, :1], torch.where(inside, 0.8 * uniform[:, 1:2], uniform[:, 1:2])], dim=1)
        return honest(constants, shrunk)

    monkeypatch.setattr(privunit, "sample_height", from_less)
    found = audit_density(PrivUnit(0.3, 50), SAMPLES, 11, CONFIDENCE)
    assert [r.unit for r in found if r.outcome == "BROKEN"] == ["law of the height inside the cap"]
    found = audit_mechanism(CASES["PrivUnit, exact γ"], 200_000, 11, CONFIDENCE)
    assert [r.name for r in found if r.outcome == "BROKEN"] == ["PrivUnit, exact γ, learned"]


def test_planted_cap_probability_above_the_claim_is_caught():
    """A report inside the cap says more than what is charged for."""
    case = CASES["PrivUnit, exact γ"]
    honest = case.mechanism

    class Surer(PrivUnit):
        direction = property(lambda self: replace(honest.direction, p=0.99))

        def event(self, sampling):
            return honest.event(sampling)

    made = Surer(**{name: getattr(honest, name) for name in honest.__dataclass_fields__})
    found = audit_mechanism(replace(case, mechanism=made), SAMPLES, 11, CONFIDENCE)
    assert any(result.outcome == "BROKEN" for result in found)


class HalfNoise(CentralGaussian):
    def release(self, sums, denominator, noise, scalar_noise):
        quiet = CentralGaussian(**{**self.settings(), "noise_multiplier": self.noise_multiplier / 2})
        return quiet.release(sums, denominator, noise, scalar_noise)


class AnswersInEveryBin(CentralGaussian):
    """The bound is enforced in every bin instead of on all of a client's bins together."""

    def collect(self, report):
        rows = report.vector.clamp(-self.clip, self.clip)
        return replace(super().collect(report), vector=rows.double().sum(0) * 2)


@pytest.mark.parametrize("kind", [HalfNoise, AnswersInEveryBin])
def test_planted_bug_of_a_question_in_bins_is_caught(kind):
    (case,) = (case for case in standard_cases() if case.name == "central Gaussian, question in bins")
    made = kind(**case.mechanism.settings())
    assert any(r.outcome == "BROKEN" for r in audit_mechanism(replace(case, mechanism=made), SAMPLES, 11, CONFIDENCE))
    assert all(r.outcome != "BROKEN" for r in audit_mechanism(case, SAMPLES, 11, CONFIDENCE))
