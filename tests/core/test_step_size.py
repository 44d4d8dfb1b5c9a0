"""The server's step: the rules and their equations, the safe step on a quadratic c = −A(w − w*) + n, and the server optimizers."""

import dataclasses
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dpfedexp.algorithms import cdp_fedexp, dp_fedavg, fedexp, ldp_fedexp
from dpfedexp.algorithms.algorithm import resolve_algorithm
from dpfedexp.algorithms.probe import bind
from dpfedexp.algorithms.round import Full, State, advance
from dpfedexp.core import step_size
from dpfedexp.core.local_optimizer import Sgd
from dpfedexp.core.step_size import Adam, FixedRate, Momentum
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Release
from tests.sizes import sized

DOUBLE = torch.float64
NOISE = {"clip": 1.0, "noise_multiplier": 2.0}
C_BAR = torch.tensor([0.3, 0.4], dtype=torch.float64)  # ‖c̄‖² = 0.25


def released(numerator, c_bar=C_BAR, clip=1.0, sigma=0.0):
    return Release(c_bar, numerator, {}, clip, sigma=sigma)


def test_every_rule_is_its_equation():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert step_size.fedexp(released(1.0, rows.mean(0))) == pytest.approx(2.0)
    assert step_size.naive(released(5.0)) == pytest.approx(20.0)
    assert step_size.target(0.1, C_BAR) == pytest.approx(0.4)
    # Less the energy of the noise in both coordinates.
    assert step_size.ldp_gaussian(released(1.0 + 2 * 0.7**2, sigma=0.7)) == pytest.approx(4.0)
    assert step_size.ldp_privunit(released(0.5)) == step_size.cdp(released(0.5)) == pytest.approx(2.0)
    # From the last coordinate, (C² − mean square)/C.
    assert step_size.free(released((0.8**2 - 0.5) / 0.8, clip=0.8)) == pytest.approx(0.5 / 0.25)


def test_private_rules_never_go_below_one():
    assert step_size.ldp_gaussian(released(0.0, sigma=1.0)) == 1.0
    assert step_size.ldp_privunit(released(-3.0)) == step_size.cdp(released(-3.0)) == 1.0
    assert step_size.free(released(9.0, clip=0.3)) == 1.0


@pytest.mark.parametrize(
    ("square", "mean"),
    [(1e300, 1e-10), (math.inf, 1.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf), (1.0, 0.0)],
)
def test_a_ratio_that_is_not_a_number_is_one(square, mean):
    c_bar = torch.full((2,), mean, dtype=torch.float64)
    assert step_size.target(square, c_bar) == 1.0
    assert step_size.fedexp(released(square, c_bar)) == step_size.naive(released(square, c_bar)) == 1.0


def test_a_ratio_that_is_a_number_is_itself_down_to_the_smallest_mean():
    assert step_size.target(6.0, torch.tensor([1.0, 1.0])) == 3.0
    assert step_size.target(0.5, torch.tensor([1.0, 0.0])) == 0.5
    assert step_size.target(1e-300, torch.tensor([1e-150], dtype=torch.float64)) == pytest.approx(1.0, rel=1e-12)


def vector(*numbers):
    return torch.tensor(numbers, dtype=DOUBLE)


def steps(means, rule, variance=0.0):
    """η_g of the safe step over a sequence of released means."""
    rule = step_size.Safe(rule)
    memory, taken = step_size.initial_memory(rule, means[0]), []
    for mean in means:
        eta_g, memory = step_size.next_step(rule, Release(mean, None, None, 1.0, variance=variance), memory)
        taken.append(eta_g)
    return taken


def quadratic(curvature, noise, rule, rounds, *, start, seed):
    """η_g of every round on a quadratic with these eigenvalues: c = −a·x + n, x ← x + η_g·c."""
    generator = torch.Generator().manual_seed(seed)
    rule = step_size.Safe(rule)
    x, taken = start.clone(), []
    memory = step_size.initial_memory(rule, x)
    for _ in range(rounds):
        mean = -curvature * x + noise * torch.randn(len(x), generator=generator, dtype=DOUBLE)
        eta_g, memory = step_size.next_step(rule, Release(mean, None, None, 1.0, variance=noise**2), memory)
        x = x + eta_g * mean
        taken.append(eta_g)
    return taken


def noises(rounds, d, seed):
    return torch.randn(rounds, d, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).unbind()


def test_turn_is_a_cosine_and_drift_counts_standard_deviations_of_the_noise():
    a, b, c, d = vector(3.0, 4.0), vector(0.0, 2.0), vector(1.0, 0.0), vector(-1.0, 1.0)
    assert step_size.turn(a, b) == pytest.approx(0.8)
    # (3, 6)·(0, 1) = 6. A coordinate of each sum has variance 2v, so the product of two independent ones has √(2·2·2)·v.
    assert step_size.drift(a, (b, c, d), 5.0) == pytest.approx(6 / (5 * math.sqrt(8)))
    assert step_size.drift(-a, (-b, c, d), 5.0) == pytest.approx(-6 / (5 * math.sqrt(8)))
    # The first rounds compare what there is.
    assert step_size.drift(a, (b,), 5.0) == pytest.approx(8 / (5 * math.sqrt(2)))
    assert step_size.drift(a, (b, c), 5.0) == pytest.approx(3 / (5 * math.sqrt(4)))
    # One round counts for three deviations at most, and without noise only the sign is left.
    assert step_size.drift(a, (b,), 1e-9) == step_size.drift(a, (b,), 0.0) == 3.0
    assert step_size.drift(a, (-b,), 1e-9) == step_size.drift(a, (-b,), 0.0) == -3.0


def test_a_zero_or_infinite_mean_has_no_direction():
    zero, one, lost = vector(0.0, 0.0), vector(1.0, 1.0), vector(math.inf, 1.0)
    assert step_size.turn(zero, one) == step_size.turn(one, zero) == 0.0
    assert step_size.drift(zero, (one,), 0.0) == step_size.drift(one, (zero,), 1.0) == 0.0
    assert step_size.drift(lost, (one,), 1.0) == 0.0
    assert steps([zero] * 8, FixedRate(20.0)) == [4.0] * 8, "what says nothing changes nothing"
    assert steps([one, lost, one], FixedRate(20.0))[1:] == [2.0, 1.0]


def test_under_noise_alone_drift_has_variance_one_and_evidence_seven_fifths_and_a_drift_that_stays_makes_more():
    """Neighboring drifts share one of their four products, so their correlation is ¼, and 1 + 2·λ·¼ = 1.4."""
    total = step_size.PRIOR_EVIDENCE
    assert step_size.evidence(total, 0.0)[1] == pytest.approx(0.8 * 2.0), "the prior is two deviations"
    for _ in range(60):
        total, evidence = step_size.evidence(total, 0.5)
    assert (total, evidence) == pytest.approx((0.5 / 0.2, 1.5), rel=1e-4), "three times as much"
    means, total, drifts, kept = noises(20_000, 50, 6), 0.0, [], []
    for t in range(3, len(means)):
        drifts.append(step_size.drift(means[t], (means[t - 1], means[t - 2], means[t - 3]), 1.0))
        total, evidence = step_size.evidence(total, drifts[-1])
        kept.append(evidence)
    drift, evidence = torch.tensor(drifts), torch.tensor(kept)
    # A variance over n independent values has the relative deviation √(2/n). There are 20,000 drifts; five rounds of evidence are
    # worth about one, so 4,000 of those: 0.01 and 0.022. Six of these, and 0.005 for the cut at ±3.
    assert float(drift.var()) == pytest.approx(1.0, abs=0.065)
    assert float((drift[1:] * drift[:-1]).mean()) == pytest.approx(0.25, abs=0.065)
    assert float(evidence.var()) == pytest.approx(1.4, rel=0.135)
    # A share p deviates by √(p/n): six of them again, around 1/22 and 1/44.
    assert float((evidence > step_size.EVIDENCE_TO_GROW).double().mean()) == pytest.approx(1 / 22, abs=0.02)
    assert float((drift < step_size.FAILED_DRIFT).double().mean()) == pytest.approx(1 / 44, abs=0.0065)


@pytest.mark.parametrize(
    ("turn", "drift", "evidence", "ceiling", "expected"),
    [
        (0.5, 1.0, 2.0, math.inf, (6.0, math.inf)),  # evident
        (0.5, -1.9, 2.0, math.inf, (6.0, math.inf)),  # one round does not weigh more than five
        (0.5, 1.0, 2.0, 5.0, (5.0, 5.0)),  # fast only up to the ceiling
        (0.5, 1.0, 2.0, 4.0, (4.4, 4.0)),  # and slow from there
        (0.5, 1.0, 2.0, 2.1, (4.2, 2.1)),  # up to twice as much
        (0.5, 1.0, 2.0, 1.0, (4.0, 1.0)),  # never down for that
        (-0.1, 1.0, 2.0, math.inf, (4.4, math.inf)),  # too far for its own direction
        (0.5, 1.0, 1.9, math.inf, (4.0, math.inf)),  # neither nor
        (0.5, 1.0, 0.0, math.inf, (4.0, math.inf)),
        (0.5, 1.0, -0.1, math.inf, (2.0, math.inf)),  # against progress
        (-0.5, 1.0, 2.0, math.inf, (4.4, math.inf)),
        (-0.51, 3.0, 9.0, math.inf, (2.0, 2.0)),  # failed: a quarter of the longest of four
        (0.5, -2.1, 9.0, math.inf, (2.0, 2.0)),
        (0.5, -2.1, 9.0, 1.5, (2.0, 1.5)),  # a ceiling only falls
        (math.nan, 3.0, 9.0, math.inf, (2.0, 2.0)),
    ],
)
def test_the_cap_by_what_was_seen(turn, drift, evidence, ceiling, expected):
    taken = (1.0, 8.0, 6.0, 4.0)
    assert step_size.safe_cap(taken, ceiling, turn, drift, evidence) == pytest.approx(expected)


def test_room_grows_with_the_age_of_the_run_from_twice_the_age_of_its_failure_on():
    assert [step_size.room(t, 4) for t in (5, 8, 12, 32)] == [1.0, 1.0, 1.5, 4.0]
    assert step_size.room(9, 0) == 1.0
    taken = (3.0, 3.0, 3.0, 3.0)
    assert step_size.safe_cap(taken, 1.5, 0.1, 0.0, 2.0, 1.05) == pytest.approx((3.15, 1.5))
    assert step_size.safe_cap(taken, 1.5, -0.1, 0.0, 2.0, 1.05) == (3.0, 1.5), "only while no step turns back"


def test_an_early_failure_does_not_bind_the_late_rounds():
    """Four rounds that turn about, then steady progress: the cap is free again long before the end."""
    means = [vector(1.0 if t > 5 or t % 2 else -1.0, 0.0, 0.0) for t in range(1, 51)]
    taken = steps(means, FixedRate(10.0), 0.01)
    assert max(taken[2:12]) <= 3.0
    assert taken[-1] == 10.0


def test_a_ceiling_is_never_below_one_and_the_cap_meets_the_rule_from_below():
    """4, 4·1.5, 4·1.5², … until the rule says less; there it starts again from what the rule said."""
    assert step_size.safe_cap((1.0, 1.0, 2.0), math.inf, -0.9, 0.0, 0.0) == (1.0, 1.0)
    assert step_size.safe_cap((1.0, 2.0), math.inf, -0.9, 0.0, 0.0) == (1.0, math.inf), "two rounds can't tell"
    says = iter([90.0, 90.0, 90.0, 1.2, 90.0, 90.0])
    same = [vector(1.0, 2.0)] * 6
    assert steps(same, lambda release: next(says)) == pytest.approx([4.0, 6.0, 9.0, 1.2, 1.8, 2.7])


@pytest.mark.parametrize("variance", [0.0, 1e6, math.inf])
def test_noise_is_never_taken_to_be_more_than_all_that_is_seen(variance):
    """So a bound that is far too high, or none at all, hides no clear signal: here drift is √2, then 2, then 2√2."""
    same = [vector(1.0, 2.0)] * 8
    assert steps(same, FixedRate(25.0), variance) == pytest.approx([4.0, 6.0, 9.0, 13.5, 20.25, 25.0, 25.0, 25.0])


def test_the_step_never_leaves_what_is_between_fedavg_and_the_rule():
    # A walk that is soon left for noise alone.
    walk = torch.stack(noises(60, 3, 0)).cumsum(0)
    means = [*walk, *noises(240, 3, 1)]
    taken = steps(means, FixedRate(25.0), 1.0)
    assert min(taken) == 1.0
    assert max(taken) == 25.0
    assert all(later <= 1.5 * earlier for earlier, later in pairwise(taken))
    assert set(steps(means, FixedRate(0.5), 1.0)) == {1.0}, "a rule below 1 is FedAvg"


def test_one_coordinate_is_enough():
    assert steps([vector(0.3)] * 5, FixedRate(8.0)) == pytest.approx([4.0, 6.0, 8.0, 8.0, 8.0])
    assert steps([vector(0.3), vector(-0.3)] * 10, FixedRate(8.0)) == [4.0, 2.0] + [1.0] * 18


def test_an_oscillation_that_makes_progress_keeps_growing_and_a_wild_one_is_fedavg():
    """c = g ± h: the turn is (g² − h²)/(g² + h²), and the sums of two moves agree whatever h is."""
    g, h = vector(1.0, 0.0), vector(0.0, 1.0)
    mild = [g + (-1) ** t * 1.5 * h for t in range(20)]
    wild = [g + (-1) ** t * 3.0 * h for t in range(20)]
    assert step_size.turn(mild[1], mild[0]) == pytest.approx(-1.25 / 3.25)
    # The second round has one before it and sees only the turn, so the first step counts as failed.
    taken = steps(mild, FixedRate(6.0))
    assert taken[:2] == [4.0, 2.0]
    assert [later / earlier for earlier, later in pairwise(taken[4:12])] == pytest.approx([1.1] * 7)
    assert steps(wild, FixedRate(6.0))[2:] == [1.0] * 18


def test_from_far_away_the_step_is_the_rules_and_falls_to_one_when_the_signal_is_gone():
    """a = 0.5, d = 400: the drift at η_g = 1 is −0.375·√400 = −7.5 standard deviations."""
    taken = quadratic(0.5, 1.0, FixedRate(300.0), 2000, start=torch.zeros(400, dtype=DOUBLE), seed=3)
    assert sum(eta_g == 1.0 for eta_g in taken) > 0.95 * len(taken)
    far = torch.full((400,), 5.0, dtype=DOUBLE)
    taken = quadratic(0.005, 1e-3, FixedRate(20.0), 20, start=far, seed=4)
    assert taken[5:] == [20.0] * 15
    late = quadratic(0.5, 1e-3, FixedRate(20.0), 400, start=far, seed=4)[100:]
    assert sum(eta_g == 1.0 for eta_g in late) > 0.95 * len(late)


@pytest.mark.parametrize(
    ("d", "variance"), sized([(5, 1.0), (100, math.inf)], [(1, 1.0), (5, 1.0), (100, 1.0), (100, math.inf)])
)
def test_means_that_are_noise_alone_leave_the_step_at_one_in_most_rounds(d, variance):
    """Nothing answers to the step here, so noise alone makes the evidence. Known or not, the step is 1 in 76 to 91% of the rounds.

    The share differs between runs by 0.17, so over 120 runs it deviates by 0.016: six of them below 0.764 is 0.67.
    """
    taken = torch.tensor([steps(noises(50, d, seed), FixedRate(300.0), variance)[10:] for seed in range(120)])
    assert float((taken == 1.0).double().mean()) > 0.67
    assert float(taken.median()) == 1.0
    assert float((taken > 2.0).double().mean()) < 0.22


def test_a_step_that_failed_is_tried_again_late_seldom_and_with_care():
    """A valley: walls of a = 0.15, which a step above 2/a = 13.3 climbs, and a floor of a = 0.0001 where progress never ends."""
    curvature = torch.cat([torch.full((50,), 0.15), torch.full((50,), 1e-4)]).to(DOUBLE)
    start = torch.cat([torch.full((50,), 1.0), torch.full((50,), 300.0)]).to(DOUBLE)
    taken = quadratic(curvature, 1e-3, FixedRate(300.0), 200, start=start, seed=8)
    unstable = 2 / 0.15
    failures = [t for t, (step, after) in enumerate(pairwise(taken), 1) if step > unstable and after == step / 2]
    first, *later = failures = [t for t in failures if t - 1 not in failures]
    assert len(later) <= 2
    assert all(after > 3 * earlier for earlier, after in pairwise(failures)), "ever more seldom"
    assert taken[first - 1] > 3 * unstable
    assert all(taken[t - 1] < 1.4 * unstable for t in later), "and by little"
    growth = [after / step for step, after in pairwise(taken[first : 2 * first + 4]) if after > step]
    assert max(growth) > 1.3, "far below it is fast again"
    near = [after / step for step, after in pairwise(taken[first:]) if after > step and step > 0.5 * unstable]
    assert max(near) < 1.11, "near it slow"


@pytest.mark.parametrize(
    ("square", "energy", "left"),
    [
        *((10.0, 0.0, 10.0), (10.0, 8.0, 6.0), (10.0, 12.0, 6.0), (1.0, 12.0, 1.0), (0.0, 1.0, 0.0)),
        *((10.0, 0.25, 10.0), (10.0, 0.4, 9.85), (0.4, 0.4, 0.25)),
    ],
)
def test_noise_is_subtracted_where_it_hides_a_step_of_4_and_at_most_half_of_it(square, energy, left):
    c_bar = torch.zeros(4, dtype=torch.float64)
    c_bar[0] = math.sqrt(square)
    release = Release(c_bar, None, {}, 1.0, variance=energy / 4)
    assert float(step_size.without_noise(release, 0.5).c_bar.square().sum()) == pytest.approx(left)
    assert step_size.without_noise(release, 0.0) is release
    unknown = Release(c_bar, None, {}, 1.0)
    assert step_size.without_noise(unknown, 0.5) is unknown


def test_only_an_automatic_rate_takes_the_longer_steps():
    """They are the safe step's with half of the noise subtracted; a given rate keeps the rule of the paper's numerator."""
    for lr, subtracted in (("auto", step_size.NOISE_SUBTRACTED), (0.1, 0.0)):
        algorithm, local = cdp_fedexp(clip="adaptive", noise_multiplier=1.0), Sgd(lr=lr, steps=1)
        mechanism, _, _ = bind(algorithm, local, 3, 20, Full(), 3, False)
        made = resolve_algorithm(algorithm, local, mechanism, 3, 20.0)
        assert made.rule == step_size.Safe(step_size.free, subtracted)


def test_a_function_of_ones_own_is_still_a_rule_and_remembers_nothing():
    algorithm = replace(cdp_fedexp(**NOISE), rule=lambda release: 3.0)
    w = torch.zeros(2, dtype=DOUBLE)
    assert step_size.initial_memory(algorithm.rule, w) == {}
    state, eta_g = advance(algorithm, Release(vector(1.0, 0.0), None, None, 1.0), State(0, w, (w,), 1.0, {}))
    assert (eta_g, state.memory) == (3.0, {})
    assert algorithm.step == "paper"


def test_the_private_algorithms_are_safe_unless_asked_for_the_papers_step():
    privunit = {"clip": 1.0, "mechanism": "privunit"}
    assert cdp_fedexp(**NOISE).rule == step_size.Safe(step_size.free)
    assert cdp_fedexp(**NOISE, numerator="paper").rule == step_size.Safe(step_size.cdp)
    assert ldp_fedexp(**NOISE).rule == step_size.Safe(step_size.free)
    assert ldp_fedexp(**privunit).rule == step_size.Safe(step_size.ldp_privunit)
    assert fedexp(step="safe").rule == step_size.Safe(step_size.fedexp)
    papers = (fedexp(), ldp_fedexp(**NOISE, numerator="naive", step="paper"), cdp_fedexp(**NOISE, step="paper"))
    assert {algorithm.step for algorithm in papers} == {"paper"}
    assert ldp_fedexp(**privunit, step="paper").rule is step_size.ldp_privunit
    with pytest.raises(InputError, match=r"step is 'save', which does not exist\. Did you mean 'safe'\?"):
        cdp_fedexp(**NOISE, step="save")


W = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
ROWS = [0.3, -0.2, 0.0], [-0.1, 0.4, 0.5], [0.7, 0.1, -0.6], [0.2, 0.2, 0.2]
MEANS = [torch.tensor(row, dtype=torch.float64) for row in ROWS]


def follow(algorithm, statistics):
    """The iterates and the step sizes of `advance` after each of the means."""
    state, found = State(0, W, (W,), 1.0, algorithm.server.init(W)), []
    for mean, statistic in zip(MEANS, statistics, strict=True):
        state, eta_g = advance(algorithm, Release(mean, statistic, {}, 1.0), state)
        found.append((state.w, eta_g))
    return found


@pytest.mark.parametrize("eta_g", [1.0, 17.0])
def test_fedadam_follows_its_equations_over_four_rounds(eta_g):
    # Reddi et al. 2021: m ← β₁m + (1−β₁)Δ, v ← β₂v + (1−β₂)Δ², x ← x + ηm/(√v + τ), with v₀ = τ² and no bias correction.
    lr, beta1, beta2, tau = 0.07, 0.8, 0.95, 0.02
    x, m, v = W, torch.zeros_like(W), torch.full_like(W, tau * tau)
    server = Adam(lr=lr, beta1=beta1, beta2=beta2, eps=tau)
    taken = follow(replace(dp_fedavg(**NOISE, server_rate=eta_g), server=server), [None] * 4)
    for mean, (w, _) in zip(MEANS, taken, strict=True):
        m = beta1 * m + (1.0 - beta1) * mean
        v = beta2 * v + (1.0 - beta2) * mean * mean
        x = x + eta_g * (lr * m / (v.sqrt() + tau))
        # The same double-precision operations, but for fused multiplications.
        torch.testing.assert_close(w, x, rtol=1e-13, atol=1e-14)
    assert dataclasses.asdict(Adam()) == {"lr": 0.03, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3}


@pytest.mark.parametrize(
    "algorithm", [dp_fedavg(**NOISE), dp_fedavg(**NOISE, server_rate=17.0), cdp_fedexp(**NOISE, step="paper")]
)
def test_momentum_follows_its_equations_over_four_rounds_with_the_step_size_of_any_rule(algorithm):
    """`replace(cdp_fedexp(…), server=Momentum())`: η_g comes from the release, and the move is η_g·lr·v."""
    statistics = (0.0, -0.5, 0.2, 0.7)
    taken = follow(replace(algorithm, server=Momentum(lr=0.3, beta=0.6)), statistics)
    v, w = torch.zeros_like(W), W
    for mean, statistic, (iterate, eta_g) in zip(MEANS, statistics, taken, strict=True):
        v = 0.6 * v + mean
        w = w + eta_g * 0.3 * v
        torch.testing.assert_close(iterate, w, rtol=1e-13, atol=1e-14)
        assert eta_g == algorithm.rule(Release(mean, statistic, {}, 1.0))
    assert algorithm.name == "dp_fedavg" or max(eta_g for _, eta_g in taken) > 5, "so that leaving it out would show"
    assert dataclasses.asdict(Momentum()) == {"lr": 1.0, "beta": 0.9}


def test_a_setting_outside_its_range_is_one_sentence_and_the_ends_are_inside():
    for kind, field, value, named in (
        (Momentum, "lr", 0.0, "server rate"),
        (Momentum, "beta", 1.0, "server momentum"),
        (Momentum, "beta", -0.1, "server momentum"),
        (Adam, "lr", 0.0, "server rate"),
        (Adam, "eps", 0.0, "server eps"),
        (Adam, "beta1", 1.0, "server beta1"),
        (Adam, "beta2", 1.0, "server beta2"),
        (Adam, "beta2", -0.1, "server beta2"),
    ):
        with pytest.raises(InputError, match=named):
            kind(**{field: value})
    assert Momentum(beta=0.0).beta == 0.0
    assert Adam(beta1=0.0, beta2=0.0).beta1 == 0.0
    assert Momentum(lr=0.5).lr == Adam(lr=0.5, eps=0.5).lr == 0.5


@pytest.mark.parametrize(
    "server",
    [
        3,
        type("NoPair", (), {"init": lambda s, w: {}, "direction": lambda s, c, m: c})(),
        type("Short", (), {"init": lambda s, w: {}, "direction": lambda s, c, m: (c[:1], m)})(),
        type("OtherNames", (), {"init": lambda s, w: {}, "direction": lambda s, c, m: (c, {"v": c})})(),
        type("NoTensor", (), {"init": lambda s, w: {"n": 0}, "direction": lambda s, c, m: (c, m)})(),
    ],
    ids=lambda server: type(server).__name__,
)
def test_what_is_no_server_optimizer_is_refused_when_the_algorithm_is_made(server):
    with pytest.raises(InputError, match="server"):
        replace(dp_fedavg(**NOISE), server=server)
