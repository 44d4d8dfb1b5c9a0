"""The constants that `bind` puts into a mechanism: a target ε is kept by plain noise, on the grid and with discrete noise."""

import itertools

import pytest
import torch

from dpfedexp import AdaptiveClip, Execution, FixedSize, Poisson, Sgd, cdp_fedexp, dp_fedavg, ldp_fedexp, train
from dpfedexp.accounting import compose
from dpfedexp.algorithms.round import Full
from dpfedexp.config import parse
from dpfedexp.data import synthetic_regression
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian
from dpfedexp.mechanisms.central_gaussian import SecureCentralGaussian
from dpfedexp.mechanisms.local_gaussian import SecureLocalGaussian
from dpfedexp.mechanisms.privunit import SecurePrivUnit
from dpfedexp.models import linear_regression
from tests.sizes import long

M, D, ROUNDS = 30, 12, 10

MODES = (False, True, "strict")
SLOW = pytest.param(FixedSize(10), "replace-one", marks=long)

PROBLEM = synthetic_regression(M, D, seed=1)


def bound(algorithm, participation=Full(), secure=False):
    """The mechanism, and the ε of all the rounds with its own events."""
    sampling = participation.sampling(M)
    mechanism = algorithm.bind(D, participation.expected(M), sampling, ROUNDS, secure)
    return mechanism, compose([(mechanism.event(sampling), ROUNDS)], algorithm.delta).epsilon


@pytest.mark.parametrize(
    ("participation", "adjacency"),
    [(Full(), "replace-one"), (Full(), "add-remove"), (Poisson(0.4), "add-remove"), SLOW],
    ids=repr,
)
def test_the_target_is_met_and_never_exceeded_by_the_noise_that_is_drawn(participation, adjacency):
    clips, numerators, modes = (0.3, "adaptive", AdaptiveClip(count_noise=3.0)), (None, "free", "paper"), MODES
    if participation != Full():
        # Their accountants are slow, and neither the grid nor the free rule changes what they are told.
        clips, numerators, modes = clips[2:], ("paper",), ("strict",)
    for clip, numerator, secure in itertools.product(clips, numerators, modes):
        given = {"clip": clip, "target_epsilon": 8.0, "adjacency": adjacency}
        algorithm = dp_fedavg(**given) if numerator is None else cdp_fedexp(numerator=numerator, **given)
        mechanism, epsilon = bound(algorithm, participation, secure)
        assert isinstance(mechanism, SecureCentralGaussian) == bool(secure)
        assert getattr(mechanism, "strict", False) == (secure == "strict")
        assert 8.0 * (1 - 1e-6) < epsilon <= 8.0


@pytest.mark.parametrize("secure", MODES)
def test_the_target_is_kept_by_a_local_run_and_where_the_excess_of_the_grid_is_charged(secure):
    for numerator in ("free", "paper", "naive"):
        mechanism, epsilon = bound(ldp_fedexp(clip=0.3, numerator=numerator, target_epsilon=8.0), secure=secure)
        assert isinstance(mechanism, SecureLocalGaussian) == bool(secure)
        assert 8.0 * (1 - 1e-6) < epsilon <= 8.0
    # What went wrong: z found for plain noise, then charged for discrete noise, costs 8.00001 to 8.00004.
    algorithm = cdp_fedexp(clip=0.3, target_epsilon=8.0, numerator="paper")
    (plain, _), (ours, _) = bound(algorithm), bound(algorithm, secure=secure)
    assert (ours.noise_multiplier > plain.noise_multiplier) == bool(secure)
    assert ours.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-5)


@pytest.mark.parametrize("target", [0.3, 8.0, 111.0])
@pytest.mark.parametrize("per", ["total", "round"])
def test_a_pure_target_is_kept_at_delta_0_by_every_split(target, per):
    """The ε of a report is recomputed from its probabilities, whose rounding shows where p is near to 1."""
    for secure in (False, True):
        algorithm = ldp_fedexp(clip=0.3, mechanism="privunit", target_epsilon=target, target_per=per)
        mechanism = algorithm.bind(D, M, Full().sampling(M), ROUNDS, secure)
        assert isinstance(mechanism, SecurePrivUnit) == secure
        count = ROUNDS if per == "total" else 1
        pure = compose([(mechanism.event(Full().sampling(M)), count)], 0.0).epsilon
        assert 0.9 * target < pure <= target


HALF = {"participation": Poisson(0.4, population=M + 3), "rounds": 3}


@pytest.mark.parametrize(
    ("algorithm", "more", "secure"),
    [
        (cdp_fedexp(clip="adaptive", target_epsilon=8.0, numerator="paper"), {}, "strict"),
        (ldp_fedexp(clip=0.3, mechanism="privunit", target_epsilon=8.0), {}, True),
        pytest.param(cdp_fedexp(clip="adaptive", target_epsilon=8.0, adjacency="add-remove"), HALF, True, marks=long),
        pytest.param(ldp_fedexp(clip=0.3, target_epsilon=8.0), {}, "strict", marks=long),
    ],
)
def test_a_budget_equal_to_the_target_lets_all_rounds_run(algorithm, more, secure):
    given = {"local": Sgd(lr=0.02, steps=1), "rounds": ROUNDS, "execution": Execution("cpu", trainer="loop"), **more}
    done = train(linear_regression(D), PROBLEM.federation, algorithm, budget=8.0, secure=secure, **given)
    assert done.stopped is None
    assert len(done.history) == given["rounds"]
    assert done.privacy.epsilon_total <= 8.0
    assert bool(torch.isfinite(next(done.model.parameters())).all())


@pytest.mark.parametrize("secure", MODES)
def test_a_configuration_plans_the_event_of_the_noise_that_it_asks_for(secure):
    """With the noise given, so that the excess of grid and strict noise is seen in the plan itself."""
    settings = parse(
        {
            "algorithm": {"clip": 0.3, "noise_multiplier": 2.0, "numerator": "paper"},
            "run": {"rounds": ROUNDS, "secure": secure},
            "resolved": {"parameters": D, "clients": M, "cohort": float(M)},
        }
    )
    mechanism, _ = bound(settings.build_algorithm(), secure=secure)
    assert settings.planned_events()[0] == mechanism.event(Full().sampling(M))
    plain, _ = bound(settings.build_algorithm())
    assert (settings.planned_events()[0].mu > plain.event(Full().sampling(M)).mu) == bool(secure)


@pytest.mark.parametrize("participation", [None, Poisson(0.1)])
def test_the_scalar_noise_of_the_paper_is_d_z2_over_the_cohort(participation):
    """σ_ξ = dσ²/M with σ² = z²C²/M on the mean; on the sum over the cohort, in units of C², that is d·z²/M."""
    cohort = 1000.0 if participation is None else participation.expected(1000)
    sampling = Full().sampling(1000) if participation is None else participation.sampling(1000)
    for clip in (0.3, AdaptiveClip(initial=0.3)):
        bound = cdp_fedexp(clip=clip, noise_multiplier=5.0, numerator="paper").bind(500, cohort, sampling, 50)
        assert bound.scalar_multiplier == pytest.approx(500 * 25.0 / cohort, rel=1e-15)


@pytest.mark.parametrize("secure", [False, True])
def test_the_adaptive_clip_of_a_round_is_the_radius_of_its_mechanism_and_scales_its_noise(monkeypatch, secure):
    """Every round: rows inside the ball of the history's clip, and noise of z times that clip."""
    kind = SecureCentralGaussian if secure else CentralGaussian
    longest, noise, size = {}, {}, 2000

    def collect(self, report, original=kind.collect):
        longest[self.clip] = max(longest.get(self.clip, 0.0), float(report.vector.double().norm(dim=1).max()))
        return original(self, report)

    def release(self, sums, denominator, *streams, original=kind.release):
        done = original(self, sums, denominator, *streams)
        drawn = denominator * done.c_bar - sums.vector[: len(done.c_bar)]
        noise[self.clip] = float(drawn.std()) / self.noise_multiplier
        return done

    monkeypatch.setattr(kind, "collect", collect)
    monkeypatch.setattr(kind, "release", release)
    algorithm = cdp_fedexp(clip=AdaptiveClip(initial=8.0, rate=3.0), noise_multiplier=1.0)
    given = {"local": Sgd(lr=1e-4, steps=1), "rounds": 4, "execution": Execution("cpu", chunk_size=6, trainer="loop")}
    clients = synthetic_regression(6, size, seed=1).federation
    done = train(linear_regression(size), clients, algorithm, secure=secure, **given)
    clips = [record["clip"] for record in done.history]
    assert len(set(clips)) == 4
    assert list(noise) == list(longest) == clips
    assert all(norm <= clip * (1 + 1e-6) for clip, norm in longest.items())
    # The standard error of a standard deviation of 2,000 numbers is 1.6%; 10% is more than six of them.
    assert list(noise.values()) == pytest.approx(clips, rel=0.1)


@pytest.mark.parametrize("target", [0.0, -1.0, float("inf"), float("nan")])
def test_a_target_that_is_no_promise_is_refused_when_the_algorithm_is_made(target):
    with pytest.raises(InputError, match=r"target_epsilon is .*; it must be positive and finite"):
        cdp_fedexp(clip=0.3, target_epsilon=target)
