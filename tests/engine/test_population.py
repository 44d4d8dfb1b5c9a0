"""The number of clients under add-remove adjacency: declared, never counted, and without effect on the guarantee."""

import dataclasses

import pytest
import torch

import dpfedexp as dp
from dpfedexp.accounting import Ledger, compose, gdp
from dpfedexp.algorithms.probe import UPDATE
from dpfedexp.algorithms.round import Full, public_population
from dpfedexp.config import parse
from dpfedexp.core.noise import ChaChaNoise, KeyedNoise
from dpfedexp.engine.engine import Request
from dpfedexp.engine.prepare import prepare
from dpfedexp.models import linear_regression
from tests.arguments import arguments

CLIP, D, M = 0.3, 3, 29
ROUNDING = 1e-9
"""Sums of double precision; on the grid of secure noise they are exact."""


def pulled(direction):
    """A client whose update is the whole clip along `direction`."""
    x = torch.tensor([direction], dtype=torch.float32)
    return x, torch.tensor([1e6])


OTHERS = [pulled((1.0, 0.0, 0.0))] * M
AVERAGE = dp.dp_fedavg(clip=CLIP, noise_multiplier=1.0, adjacency="add-remove")
NEWCOMERS = {"opposite": pulled((-1.0, 0.0, 0.0)), "across": pulled((0.0, 1.0, 0.0)), "alike": OTHERS[0]}


GIVEN = {"local": dp.Sgd(lr=0.1, steps=1), "rounds": 1, "execution": dp.Execution(device="cpu", trainer="loop")}


def run(clients, algorithm, **options):
    return dp.train(linear_regression(D), dp.Federation.from_clients(clients), algorithm, **arguments(GIVEN | options))


def release(clients, algorithm, **options):
    """The release of the first round."""
    federation = dp.Federation.from_clients(clients)
    engine, _ = prepare(linear_regression(D), federation, algorithm, **arguments(GIVEN | options))
    return engine.ask(Request(UPDATE, 1, engine.begin(), engine.mechanism), Ledger.in_memory())[0]


def moved(algorithm, newcomer="opposite", others=OTHERS, **options):
    """How far one client more moves the released mean, and both releases."""
    both = [release(clients, algorithm, **options) for clients in (others, [*others, NEWCOMERS[newcomer]])]
    return float((both[1].c_bar - both[0].c_bar).norm()), *both


def quiet(monkeypatch, value=0.0):
    """All normal noise replaced by a constant."""

    def normal(self, clients, width, device, dtype):
        return torch.full((len(clients), width), value, dtype=dtype, device=device)

    monkeypatch.setattr(KeyedNoise, "normal", normal)
    monkeypatch.setattr(ChaChaNoise, "normal", normal)


@pytest.mark.parametrize(
    ("newcomer", "numerator", "secure"),
    [("opposite", None, False), ("across", "free", False), ("alike", "paper", False), ("opposite", "free", True)],
)
def test_a_client_more_moves_the_released_sums_by_no_more_than_the_clip(monkeypatch, newcomer, numerator, secure):
    """With the noise patched to zero, so the movement itself is seen; with a counted divisor it was twice the clip."""
    quiet(monkeypatch)
    clip = dataclasses.replace(dp.cdp_fedexp(clip="adaptive", noise_multiplier=1.0).clip, initial=CLIP)
    given = {"clip": clip, "noise_multiplier": 1.0, "adjacency": "add-remove"}
    algorithm = dp.dp_fedavg(**given) if numerator is None else dp.cdp_fedexp(numerator=numerator, **given)
    distance, without, added = moved(algorithm, newcomer, population=M, secure=secure)
    extra = M * (added.statistic - without.statistic) if numerator == "free" else 0.0
    assert (M * distance) ** 2 + extra**2 <= CLIP**2 * (1 + ROUNDING)
    assert M * distance > 0.99 * CLIP
    assert M * abs(added.within - without.within) <= 0.5 * (1 + ROUNDING)
    if numerator == "paper":
        assert 0.9 * CLIP**2 < M * abs(added.statistic - without.statistic) <= CLIP**2 * (1 + ROUNDING)


def test_the_mean_moves_by_one_standard_deviation_where_mu_is_1(monkeypatch):
    """29 clients that pull one way and one that pulls back, at z = 1: with a counted divisor μ was 2.14, and ε 10.86 where 4.38
    was claimed."""
    means, deviations = [], []
    for clients in (OTHERS, [*OTHERS, NEWCOMERS["opposite"]]):
        heights = []
        for value in (0.0, 1.0):
            quiet(monkeypatch, value)
            done = run(clients, AVERAGE, population=M)
            heights.append(float(next(done.model.parameters()).detach().flatten()[0]))
        means.append(heights[0])
        deviations.append(heights[1] - heights[0])
    # The model is float32, which bounds the precision of a difference of two of its numbers.
    assert deviations[0] == pytest.approx(deviations[1], rel=1e-5)
    mu = abs(means[1] - means[0]) / deviations[0]
    assert mu == pytest.approx(1.0, rel=1e-4)
    assert gdp.epsilon(mu, 1e-5) == pytest.approx(done.privacy.epsilon_total, rel=1e-3)


def test_a_poisson_round_divides_by_the_declared_cohort_whatever_the_draw(monkeypatch):
    """The first 29 draws are the same with one client more, so only that one can move the sum."""
    quiet(monkeypatch)
    options = {"participation": dp.Poisson(0.5), "population": 20}
    distances = [10.0 * moved(AVERAGE, seed=seed, **options)[0] for seed in range(5)]
    assert max(distances) <= CLIP * (1 + ROUNDING)
    assert {distance > 0.5 * CLIP for distance in distances} == {True, False}


@pytest.mark.parametrize("there", [4, 29])
def test_a_fixed_cohort_takes_whom_there_are_and_divides_by_its_own_size(monkeypatch, there):
    """Declared 12 clients and cohorts of 10; there are fewer than a cohort, or more than declared."""
    quiet(monkeypatch)
    released = release(OTHERS[:there], AVERAGE, participation=dp.FixedSize(10), population=12)
    assert 10 * float(released.c_bar.norm()) == pytest.approx(min(there, 10) * CLIP, rel=1e-5)


def test_a_fixed_cohort_is_charged_for_the_client_that_a_newcomer_pushes_out(monkeypatch):
    """10 that pull one way, 1 that pulls back: with the newcomer in the cohort the sum moves by 2C, which is what is charged."""
    quiet(monkeypatch)
    options = {"participation": dp.FixedSize(10), "population": 12}
    distances = [10 * moved(AVERAGE, others=OTHERS[:10], seed=seed, **options)[0] for seed in range(8)]
    assert max(distances) == pytest.approx(2 * CLIP, rel=1e-5)
    charged = run(OTHERS[:10], AVERAGE, **options).ledger.charges()
    assert compose(charged, 1e-5).epsilon == pytest.approx(gdp.epsilon(2.0, 1e-5), rel=1e-9)


def test_what_is_written_names_the_declared_number_and_not_the_counted_one(tmp_path):
    algorithm = dp.cdp_fedexp(clip=CLIP, noise_multiplier=1.0, adjacency="add-remove")
    done = run(OTHERS, algorithm, population=1000, out=tmp_path, secure=True)
    assert done.privacy.clients == 1000
    assert done.ledger.header["clients"] == 1000
    one_more = run([*OTHERS, OTHERS[0]], algorithm, population=1000, secure=True)
    assert one_more.ledger.charges() == done.ledger.charges()


def test_add_remove_without_a_population_is_one_sentence_that_says_what_to_write():
    with pytest.raises(dp.InputError, match=r"population is missing.*declared and not counted.*population=1000"):
        run(OTHERS, AVERAGE)
    settings = parse({"algorithm": {"clip": 0.3, "noise_multiplier": 1.0, "adjacency": "add-remove"}})
    with pytest.raises(dp.InputError, match="population is missing"):
        settings.check()
    parse({**settings.model_dump(exclude_none=True), "participation": {"population": 30}}).check()


def test_under_replace_one_the_population_is_the_number_of_clients():
    algorithm = dp.dp_fedavg(clip=CLIP, noise_multiplier=1.0)
    assert run(OTHERS, algorithm).privacy.clients == run(OTHERS, algorithm, population=M).privacy.clients == M
    with pytest.raises(dp.InputError, match="population is 30, but the federation has 29 clients"):
        run(OTHERS, algorithm, population=30)
    with pytest.raises(dp.InputError, match="population is 30"):
        run(OTHERS, dp.fedavg(), population=30)


@pytest.mark.parametrize("wrong", [0, -3, 2.5, True, "many"])
def test_a_population_is_a_positive_whole_number(wrong):
    with pytest.raises(dp.InputError, match=r"population is .*; it must be a positive whole number"):
        public_population("add-remove", Full(population=wrong), M)


def test_a_fixed_cohort_of_everybody_is_refused_under_add_remove():
    """The declared number may differ from the present one: one client more would push another out at the price of a full round."""
    with pytest.raises(dp.InputError, match=r"cohort of 29 of 29 clients .* Full\(\)"):
        run(OTHERS, AVERAGE, participation=dp.FixedSize(M), population=M)
