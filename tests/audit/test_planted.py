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
from dpfedexp.mechanisms import PrivUnit, privunit
from dpfedexp.mechanisms.base import make_sums

SAMPLES, FEW, CONFIDENCE = 4000, 400, 1 - 1e-6
"""Few decide where a bug tells the two inputs apart in every release; each release of a secure mechanism takes its time."""
CASES = {case.name: case for case in standard_cases()}
CENTRAL, FREE, PAPER, LOCAL = "central Gaussian", ", free rule", ", paper's rule", "local Gaussian"
VOTES, COUNT = "central Gaussian, votes", "central Gaussian, adaptive clip, add-remove"
BINS = "central Gaussian, question in bins"


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


def scaled(**factors):
    """The honest method of a mechanism whose fields are these multiples of its own."""

    def bug(honest, self, *given):
        return honest(replace(self, **{name: by * getattr(self, name) for name, by in factors.items()}), *given)

    return bug


def drawn(change, place=2):
    """The honest method with other draws: of the argument in this place, 2 the vector's noise and 3 that of scalars."""

    def bug(honest, self, *given):
        return honest(self, *(Changed(one, change) if at == place else one for at, one in enumerate(given)))

    return bug


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


def central_sums(self, report, total):
    return make_sums(total, None, sum_shares(report.votes, self.votes), len(report.vector))


def clipping_after_averaging(honest, self, report):
    """One long update moves the sum as far as it likes."""
    total = report.vector.sum(0, dtype=torch.float64)
    return central_sums(self, report, clip(total[None], len(report.vector) * self.clip).vectors[0])


def weights_by_examples(honest, self, report):
    """The last client holds twice as many examples as the others."""
    rows = clip(report.vector, self.clip).vectors
    return central_sums(self, report, rows.sum(0, dtype=torch.float64) + rows[-1])


def rounding_out_of_the_ball(honest, self, report):
    """A grid so coarse, and rounding so wrong, that vectors leave the ball."""
    rows = clip(report.vector, self.clip).vectors
    coarse = rows.sign() * (rows.abs() / self.clip / 0.75).ceil() * 0.75 * self.clip
    return central_sums(self, report, coarse.sum(0, dtype=torch.float64))


def bound_in_every_bin(honest, self, report):
    """The bound is enforced in every bin instead of on all of a client's bins together."""
    rows = report.vector.clamp(-self.clip, self.clip)
    return replace(honest(self, report), vector=rows.double().sum(0) * 2)


def count_that_is_not_centered(honest, self, sums, *given):
    """A client that leaves moves each sum by one, and not by a half."""
    return honest(self, replace(sums, votes=sums.votes + 0.5 * sums.count), *given)


def count_without_noise(honest, self, sums, denominator, *noises):
    true = 0.5 + float(sums.votes[0]) / denominator
    return replace(honest(self, sums, denominator, *noises), votes={WITHIN_CLIP: true})


def quarter_of_the_noise_on_one_vote(honest, self, *given):
    first, second, third = self.votes
    return honest(replace(self, votes=(first, replace(second, noise=second.noise / 4), third)), *given)


HALF, REPEATED = scaled(noise_multiplier=0.5), drawn(every_fourth)
BUGS = {
    "half of the noise": (HALF, "release", [CENTRAL, CENTRAL + FREE, CENTRAL + ", adaptive clip", BINS], SAMPLES),
    "half of the noise on the grid": (HALF, "release", [CENTRAL + ", secure"], 1500),
    "half of a client's noise": (HALF, "randomize", [LOCAL], SAMPLES),
    # μ = 1.11 where 1 is claimed: 100,000 samples prove μ to about 0.05.
    "nine tenths of the noise": (scaled(noise_multiplier=0.9), "release", [CENTRAL], 100_000),
    "half of the noise of squared norms": (scaled(scalar_multiplier=0.5), "release", [CENTRAL + PAPER], SAMPLES),
    # The noise of the scalar is the first coordinate's once more, so it can be subtracted out.
    "seed reused": (
        lambda honest, self, *given: honest(self, *given[:3], given[2]),
        "release",
        [CENTRAL + PAPER],
        SAMPLES,
    ),
    "draws reused": (draws_reused, "release", [CENTRAL + PAPER + ", secure"], FEW),
    "one noise for all coordinates": (drawn(one_draw), "release", [CENTRAL], SAMPLES),
    "noise repeated": (REPEATED, "release", [CENTRAL, CENTRAL + FREE, CENTRAL + ", secure"], FEW),
    "a client's noise repeated": (REPEATED, "randomize", [LOCAL, LOCAL + ", secure"], FEW),
    "noise shared by a chunk": (drawn(first_client), "randomize", [LOCAL, LOCAL + FREE, LOCAL + ", secure"], SAMPLES),
    "clipping after averaging": (clipping_after_averaging, "collect", [CENTRAL, CENTRAL + FREE], SAMPLES),
    "weights by examples": (weights_by_examples, "collect", [CENTRAL], SAMPLES),
    "rounding out of the ball": (rounding_out_of_the_ball, "collect", [CENTRAL], SAMPLES),
    "a bound in every bin": (bound_in_every_bin, "collect", [BINS], SAMPLES),
    "denominators by survivors": (
        lambda honest, self, sums, denominator, *noises: honest(self, sums, float(sums.count), *noises),
        *("release", [CENTRAL + ", add-remove"], SAMPLES),
    ),
    "a count that is not centered": (count_that_is_not_centered, "release", [COUNT, VOTES + ", add-remove"], SAMPLES),
    "a count without noise": (count_without_noise, "release", [COUNT + ", secure"], FEW),
    "votes that are trusted": (
        lambda honest, self, report: replace(honest(self, report), votes=report.votes.sum(0)),
        *("collect", [VOTES, VOTES + ", add-remove", VOTES + ", secure"], FEW),
    ),
    "little noise on one vote": (quarter_of_the_noise_on_one_vote, "release", [VOTES, VOTES + ", add-remove"], SAMPLES),
    # Two votes with the same draw tell their difference without noise.
    "one draw for all votes": (drawn(one_draw, place=3), "release", [VOTES, VOTES + ", add-remove"], SAMPLES),
}


@pytest.mark.parametrize(("bug", "name"), [(bug, name) for bug, (*_, names, _) in BUGS.items() for name in names])
def test_a_planted_bug_is_caught(bug, name):
    planted, method, _, samples = BUGS[bug]
    assert "BROKEN" in outcomes(name, method, planted, samples)


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
