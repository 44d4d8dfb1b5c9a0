"""A target ε is kept by the mechanism that runs: plain, on the grid, and with discrete noise."""

import itertools

import pytest
import torch

from dpfedexp import (
    AdaptiveClip,
    Execution,
    FixedSize,
    InputError,
    Poisson,
    Sgd,
    cdp_fedexp,
    dp_fedavg,
    ldp_fedexp,
    train,
)
from dpfedexp.accounting import compose
from dpfedexp.algorithms.participation import Full
from dpfedexp.cli.train import execute
from dpfedexp.config import load, parse
from dpfedexp.data import synthetic_regression
from dpfedexp.engine.run import RunFolder
from dpfedexp.engine.verify import verify_run
from dpfedexp.mechanisms.central_gaussian import SecureCentralGaussian
from dpfedexp.mechanisms.local_gaussian import SecureLocalGaussian
from dpfedexp.mechanisms.privunit import SecurePrivUnit
from dpfedexp.models import linear_regression

M, D, ROUNDS = 30, 12, 10

MODES = (False, True, "strict")

PROBLEM = synthetic_regression(M, D, seed=1)


def bound(algorithm, participation=Full(), secure=False):
    """The mechanism, and the ε of all the rounds with its own events."""
    sampling = participation.sampling(M)
    mechanism = algorithm.bind(D, participation.expected(M), sampling, ROUNDS, secure)
    return mechanism, compose([(mechanism.event(sampling), ROUNDS)], algorithm.delta).epsilon


@pytest.mark.parametrize(
    ("participation", "adjacency"),
    [
        (Full(), "replace-one"),
        (Full(), "add-remove"),
        (Poisson(0.4), "add-remove"),
        (FixedSize(10), "replace-one"),
    ],
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


def test_a_count_that_costs_more_than_the_target_is_one_sentence():
    with pytest.raises(InputError, match=r"count_noise is 0\.1.*target_epsilon of 8"):
        bound(cdp_fedexp(clip=AdaptiveClip(count_noise=0.1), target_epsilon=8.0))


HALF = {"participation": Poisson(0.4), "population": M + 3, "rounds": 3}


@pytest.mark.parametrize(
    ("algorithm", "more", "secure"),
    [
        (cdp_fedexp(clip=0.3, target_epsilon=8.0), {}, False),
        (cdp_fedexp(clip="adaptive", target_epsilon=8.0, numerator="paper"), {}, "strict"),
        (cdp_fedexp(clip="adaptive", target_epsilon=8.0, adjacency="add-remove"), HALF, True),
        (ldp_fedexp(clip=0.3, target_epsilon=8.0), {}, "strict"),
        (ldp_fedexp(clip=0.3, mechanism="privunit", target_epsilon=8.0), {}, True),
    ],
)
def test_a_budget_equal_to_the_target_lets_all_rounds_run(algorithm, more, secure):
    given = {"local": Sgd(lr=0.02, steps=1), "rounds": ROUNDS, "progress": False, "device": "cpu"}
    given |= {"execution": Execution(trainer="loop"), **more}
    done = train(linear_regression(D), PROBLEM.federation, algorithm, budget=8.0, secure=secure, **given)
    assert done.stopped is None
    assert len(done.history) == given["rounds"]
    assert done.privacy.epsilon_total <= 8.0
    assert bool(torch.isfinite(next(done.model.parameters())).all())


def test_a_folder_of_a_secure_run_agrees_with_what_its_configuration_plans(tmp_path):
    settings = parse(
        {
            "data": {"clients": 12, "dimension": 4},
            "algorithm": {"clip": 0.3, "target_epsilon": 8.0, "numerator": "paper", "adjacency": "add-remove"},
            "local": {"steps": 1, "lr": 0.01},
            "participation": {"population": 15},
            "run": {"rounds": 3, "secure": "strict", "device": "cpu"},
        }
    )
    settings.check()
    folder = RunFolder(tmp_path / "run", resume=False)
    done = execute(settings, folder, progress=False)
    written = load(folder.path / "config.toml")
    assert (written.resolved.clients, written.resolved.cohort) == (15, 15.0)
    assert done.privacy.clients == 15
    checks = verify_run(folder.path, written.planned_events()[0])
    assert [check.name for check in checks if not check.passed] == []
    assert "configuration" in [check.name for check in checks]


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
