"""The safe step: its equations, and what they do on a quadratic c = −A(w − w*) + n, where everything can be said in advance."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dpfedexp import step_size
from dpfedexp.algorithms import cdp_fedexp, fedexp, ldp_fedexp, naive_ldp_fedexp, rules
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Release
from dpfedexp.round import State, advance

DOUBLE = torch.float64


def vector(*numbers):
    return torch.tensor(numbers, dtype=DOUBLE)


def constant(eta_g):
    return rules.FixedRate(eta_g)


def steps(means, rule):
    """η_g of the safe step over a sequence of released means."""
    rule = rules.Safe(rule)
    memory, taken = rules.initial_memory(rule, means[0]), []
    for mean in means:
        eta_g, memory = rules.next_step(rule, Release(mean, None, None, 1.0), memory)
        taken.append(eta_g)
    return taken


def quadratic(curvature, noise, rule, rounds, *, start, seed):
    """η_g of every round on a quadratic with one eigenvalue: c = −a·x + n, x ← x + η_g·c."""
    generator = torch.Generator().manual_seed(seed)
    rule = rules.Safe(rule)
    x, taken = start.clone(), []
    memory = rules.initial_memory(rule, x)
    for _ in range(rounds):
        mean = -curvature * x + noise * torch.randn(len(x), generator=generator, dtype=DOUBLE)
        eta_g, memory = rules.next_step(rule, Release(mean, None, None, 1.0), memory)
        x = x + eta_g * mean
        taken.append(eta_g)
    return taken


def test_turn_and_drift_are_cosines_of_one_move_and_of_two():
    a, b, c, d = vector(3.0, 4.0), vector(0.0, 2.0), vector(1.0, 0.0), vector(-1.0, 1.0)
    assert step_size.turn(a, b) == pytest.approx(0.8)
    # (3, 6)·(0, 1) / (√45·1)
    assert step_size.drift(a, (b, c, d)) == pytest.approx(6 / math.sqrt(45))


def test_the_first_rounds_compare_what_there_is():
    a, b, c, none = vector(3.0, 4.0), vector(0.0, 2.0), vector(1.0, 0.0), vector(0.0, 0.0)
    assert step_size.drift(a, (none, none, none)) == 0.0
    assert step_size.drift(a, (b, none, none)) == pytest.approx(step_size.turn(a, b))
    assert step_size.drift(a, (b, c, none)) == pytest.approx(3 / math.sqrt(45))


def test_a_zero_mean_has_no_direction_and_counts_as_no_progress():
    zero, one = vector(0.0, 0.0), vector(1.0, 1.0)
    assert step_size.turn(zero, one) == step_size.turn(one, zero) == 0.0
    assert step_size.safe_cap(4.0, 0.0, 0.0) == 2.0


@pytest.mark.parametrize(
    ("turn", "drift", "factor"),
    [
        (0.5, 0.1, 1.5),
        (-0.7, 0.1, 1.5),
        (-0.71, 0.1, 0.5),
        (0.5, -0.1, 0.5),
        (0.5, 0.0, 0.5),
        (math.nan, math.nan, 0.5),
    ],
)
def test_the_cap_grows_only_with_drift_and_without_a_sharp_turn(turn, drift, factor):
    assert step_size.safe_cap(2.0, turn, drift) == 2.0 * factor


def test_the_cap_follows_what_was_taken_and_meets_the_rule_from_below():
    """1, 1.5, 1.5², … until the rule says less; there it starts again from what the rule said."""
    same = [vector(1.0, 2.0)] * 8
    assert steps(same, constant(4.0)) == pytest.approx([1.0, 1.5, 2.25, 3.375, 4.0, 4.0, 4.0, 4.0])
    says = iter([9.0, 9.0, 9.0, 1.2, 9.0, 9.0])
    assert steps(same[:6], lambda release: next(says)) == pytest.approx([1.0, 1.5, 2.25, 1.2, 1.8, 2.7])


def test_the_step_never_leaves_what_is_between_fedavg_and_the_rule():
    generator = torch.Generator().manual_seed(0)
    means = list(torch.randn(300, 3, generator=generator, dtype=DOUBLE).cumsum(0))
    taken = steps(means, constant(5.0))
    assert min(taken) == 1.0
    assert max(taken) == 5.0
    assert all(later <= 1.5 * earlier for earlier, later in pairwise(taken))
    assert set(steps(means, constant(0.5))) == {1.0}, "a rule below 1 is FedAvg"


def test_one_coordinate_is_enough():
    assert steps([vector(0.3)] * 5, constant(3.0)) == pytest.approx([1.0, 1.5, 2.25, 3.0, 3.0])
    assert steps([vector(0.3), vector(-0.3)] * 10, constant(3.0)) == [1.0] * 20


def test_an_oscillation_that_makes_progress_keeps_its_step_and_a_wild_one_loses_it():
    """c = g ± h: the turn is (g² − h²)/(g² + h²), and the sums of two moves agree whatever h is."""
    g, h = vector(1.0, 0.0), vector(0.0, 1.0)
    mild = [g + (-1) ** t * 1.5 * h for t in range(20)]
    wild = [g + (-1) ** t * 3.0 * h for t in range(20)]
    assert step_size.turn(mild[1], mild[0]) == pytest.approx(-1.25 / 3.25)
    # The second round has one before it and sees only the turn, so growth begins in the third.
    assert steps(mild, constant(6.0))[2:7] == pytest.approx([1.5, 2.25, 3.375, 5.0625, 6.0])
    assert steps(wild, constant(6.0)) == [1.0] * 20


@pytest.mark.parametrize("a_eta", [0.2, 0.7, 1.0, 1.5, 1.9])
def test_without_a_signal_turn_and_drift_are_those_of_the_analysis(a_eta):
    """An AR(1) model that noise alone moves: turn = −aη/2, drift = −(aη/2)(2 − aη), negative for every stable step."""
    eta, d, generator = 2.0, 200_000, torch.Generator().manual_seed(1)
    a = a_eta / eta
    # The stationary spread of x under noise of variance 1 is η/(a(2 − aη)).
    x = torch.randn(d, generator=generator, dtype=DOUBLE) * math.sqrt(eta / (a * (2 - a_eta)))
    means = []
    for _ in range(4):
        means.append(-a * x + torch.randn(d, generator=generator, dtype=DOUBLE))
        x = x + eta * means[-1]
    newest, before = means[3], (means[2], means[1], means[0])
    # A cosine over d coordinates has a standard deviation of about 1/√d; six of them.
    assert step_size.turn(newest, before[0]) == pytest.approx(-a_eta / 2, abs=6 / math.sqrt(d))
    assert step_size.drift(newest, before) == pytest.approx(-(a_eta / 2) * (2 - a_eta), abs=6 / math.sqrt(d))


def test_the_expected_product_changes_sign_at_the_step_that_minimises_the_expected_loss():
    """E⟨c_{t+1}, c_t⟩ = ‖s‖² − η(sᵀAs + v tr A): its root is the best step, noise included, so no noise may be subtracted."""
    generator = torch.Generator().manual_seed(2)
    eigenvalues, x, v = vector(2.0, 0.7, 0.1), vector(1.0, -2.0, 3.0), 0.25
    signal = -eigenvalues * x
    best = float(signal.square().sum() / ((eigenvalues * signal.square()).sum() + v * eigenvalues.sum()))
    n = 400_000
    noise = math.sqrt(v) * torch.randn(2, n, 3, generator=generator, dtype=DOUBLE)
    mean = signal + noise[0]

    def product(eta):
        following = -eigenvalues * (x + eta * mean) + noise[1]
        each = (following * mean).sum(1)
        return float(each.mean()), float(each.std()) / math.sqrt(n)

    def loss(eta):
        return float((eigenvalues * (x + eta * mean).square()).sum(1).mean()) / 2

    value, error = product(best)
    assert abs(value) < 6 * error
    assert product(0.9 * best)[0] > 6 * error
    assert product(1.1 * best)[0] < -6 * error
    assert loss(best) < min(loss(0.9 * best), loss(1.1 * best))
    without_noise = float(signal.square().sum() / (eigenvalues * signal.square()).sum())
    assert loss(without_noise) > loss(best), "the step for the signal alone is too long"


def test_where_the_signal_is_gone_the_step_is_that_of_fedavg_in_almost_every_round():
    """a = 0.5, d = 400: the drift at η_g = 1 is −0.375, seven standard deviations below 0."""
    taken = quadratic(0.5, 1.0, constant(300.0), 2000, start=torch.zeros(400, dtype=DOUBLE), seed=3)
    assert sum(eta_g == 1.0 for eta_g in taken) > 0.95 * len(taken)


def test_from_far_away_the_step_is_the_rules_and_falls_to_one_when_the_optimum_is_reached():
    taken = quadratic(0.02, 1e-3, constant(20.0), 20, start=torch.full((400,), 5.0, dtype=DOUBLE), seed=4)
    assert taken[8:18] == [20.0] * 10
    late = quadratic(0.5, 1e-3, constant(20.0), 400, start=torch.full((400,), 5.0, dtype=DOUBLE), seed=4)[100:]
    assert sum(eta_g == 1.0 for eta_g in late) > 0.95 * len(late)


def test_means_that_are_noise_alone_leave_the_step_within_two_in_half_of_the_rounds():
    """Nothing answers to the step here, so every sign is a coin: ln κ falls on average, while the mean factor is 1."""
    generator = torch.Generator().manual_seed(5)
    means = torch.randn(4000, 100, generator=generator, dtype=DOUBLE).unbind()
    taken = torch.tensor(steps(means, constant(300.0)))
    assert float(taken.median()) < 2.0
    assert float((taken > 10).double().mean()) < 0.2


def test_three_means_and_a_number_are_remembered_and_others_memory_is_left_alone():
    algorithm = cdp_fedexp(clip=1.0, noise_multiplier=2.0)
    w = torch.zeros(5, dtype=DOUBLE)
    memory = rules.initial_memory(algorithm.rule, w)
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in memory.items()}
    vectors = {f"step.c_bar.{ago}": (torch.float32, (5,)) for ago in (1, 2, 3)}
    assert shapes == {**vectors, "step.taken": (DOUBLE, ())}
    state = State(0, w, (w,), 1.0, {}, memory={**memory, "local.rate": vector(0.1)})
    means = [torch.full((5,), float(t), dtype=DOUBLE) for t in (1, 2, 3, 4)]
    for mean in means:
        state, eta_g = advance(algorithm, Release(mean, 0.0, None, 1.0), state)
    assert [float(state.memory[f"step.c_bar.{ago}"][0]) for ago in (1, 2, 3)] == [4.0, 3.0, 2.0]
    assert float(state.memory["step.taken"]) == eta_g
    assert float(state.memory["local.rate"]) == 0.1
    assert {name: (value.dtype, tuple(value.shape)) for name, value in state.memory.items() if "step" in name} == shapes


def test_a_function_of_ones_own_is_still_a_rule_and_remembers_nothing():
    algorithm = replace(cdp_fedexp(clip=1.0, noise_multiplier=2.0), rule=lambda release: 3.0)
    w = torch.zeros(2, dtype=DOUBLE)
    assert rules.initial_memory(algorithm.rule, w) == {}
    state, eta_g = advance(algorithm, Release(vector(1.0, 0.0), None, None, 1.0), State(0, w, (w,), 1.0, {}))
    assert (eta_g, state.memory) == (3.0, {})
    assert algorithm.step == "paper"


def test_the_private_algorithms_are_safe_unless_asked_for_the_papers_step():
    noise = {"clip": 1.0, "noise_multiplier": 2.0}
    privunit = {"clip": 1.0, "mechanism": "privunit"}
    assert cdp_fedexp(**noise).rule == rules.Safe(rules.free)
    assert cdp_fedexp(**noise, numerator="paper").rule == rules.Safe(rules.cdp)
    assert ldp_fedexp(**noise).rule == rules.Safe(rules.free)
    assert ldp_fedexp(**privunit).rule == rules.Safe(rules.ldp_privunit)
    assert fedexp(step="safe").rule == rules.Safe(rules.fedexp)
    assert [one.step for one in (fedexp(), naive_ldp_fedexp(**noise), cdp_fedexp(**noise, step="paper"))] == [
        "paper"
    ] * 3
    assert ldp_fedexp(**privunit, step="paper").rule is rules.ldp_privunit
    with pytest.raises(InputError, match=r"step is 'save', which does not exist\. Did you mean 'safe'\?"):
        cdp_fedexp(**noise, step="save")
