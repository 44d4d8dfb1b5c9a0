import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import dpfedexp as dp
from dpfedexp.accounting import Ledger
from dpfedexp.core.noise import Streams
from dpfedexp.core.step_size import Extrapolate
from dpfedexp.data import synthetic_regression
from dpfedexp.engine import engine, simulated
from dpfedexp.engine.engine import PrefetchedNoise
from dpfedexp.engine.prepare import prepare
from dpfedexp.mechanisms import PrivUnit
from dpfedexp.models import linear_regression
from tests.engine.plain import cases, plain_update
from tests.engine.small import random_rows, regression_run, weights
from tests.optimizers import Adagrad

M, D = 30, 12
PROBLEM = synthetic_regression(M, D, seed=1)
CLIENTS = [PROBLEM.federation.client(i) for i in range(M)]
LOCAL = dp.Sgd(lr=0.02, steps=3)
ALGORITHMS = {
    "cdp_fedexp": dp.cdp_fedexp(clip="adaptive", noise_multiplier=1.0),
    "cdp_fedexp paper": dp.cdp_fedexp(clip=0.3, noise_multiplier=1.0, numerator="paper"),
    "ldp_fedexp": dp.ldp_fedexp(clip=0.3, noise_multiplier=0.7),
    "naive": dp.ldp_fedexp(clip=0.3, noise_multiplier=0.7, numerator="naive", step="paper"),
    "privunit": dp.ldp_fedexp(clip=0.3, mechanism="privunit"),
    "momentum": dp.dp_fedavg(clip=0.3, noise_multiplier=1.0, server_momentum=0.9, server_rate=0.5),
    "dp_fedadam": dp.dp_fedadam(clip=0.3, noise_multiplier=1.0),
    "dp_scaffold": dp.dp_scaffold(clip=0.3, noise_multiplier=0.7, mechanism="local-gaussian"),
    "fedexp": dp.fedexp(),
}


SCAFFOLD = dp.dp_scaffold(clip=1.0, noise_multiplier=1.0)
EMPTY = replace(PROBLEM, federation=dp.Federation.from_arrays(torch.zeros(1, D), torch.zeros(1), [[], []]))


def run(algorithm, **options):
    return regression_run(PROBLEM, algorithm, **({"rounds": 4} | options))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_its_seeds_whatever_the_chunk_size(name):
    algorithm = ALGORITHMS[name]
    small, again, whole, other = (
        weights(run(algorithm, seed=seed, execution=dp.Execution(chunk_size=size)))
        for seed, size in ((5, 7), (5, 7), (5, M), (6, M))
    )
    assert torch.equal(small, again)
    assert torch.allclose(small, whole, rtol=1e-4, atol=1e-5)
    assert torch.equal(whole, other) == (not algorithm.private)


def test_fedavg_is_the_mean_of_the_plain_updates_whatever_the_sizes():
    model, sampler = cases()["mlp"]
    generator = torch.Generator().manual_seed(0)
    clients = dp.Federation.from_clients([sampler(n, generator) for n in (1, 7, 3, 4)])
    result = dp.train(model, clients, dp.fedavg(), local=dp.Sgd(lr=0.1, steps=4), rounds=1)
    deltas = [plain_update(model, *clients.client(i), lr=0.1, steps=4) for i in range(4)]
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.allclose(weights(result), start + torch.stack(deltas).mean(0), atol=1e-6)


def test_clients_of_a_chunk_differ_in_size_by_a_factor_of_two_at_most():
    sizes = [5, 0, 1, 40, 2, 3, 0, 9, 4, 33]
    clients = dp.Federation.from_clients(random_rows(sizes, D))
    made, _ = prepare(linear_regression(D), clients, dp.fedavg(), local=LOCAL, rounds=1)
    chunks = replace(made.cohort, chunk_size=2).chunks(torch.arange(10))
    expected = [[0, 0], [1], [2], [3, 4], [5], [9], [33, 40]]
    assert [[sizes[client] for client in chunk] for chunk in chunks] == expected


def test_fedexp_extrapolates_by_its_equation_and_averages_the_last_two_iterates():
    model = linear_regression(D)
    deltas = torch.stack([plain_update(model, *CLIENTS[i], lr=0.02, steps=3) for i in range(M)])
    eta = float(deltas.square().sum(1).mean() / deltas.mean(0).square().sum())
    result = run(dp.fedexp(), rounds=1)
    assert result.history[0]["eta_g"] == pytest.approx(eta, rel=1e-4)
    assert torch.allclose(weights(result), 0.5 * eta * deltas.mean(0), rtol=1e-3, atol=1e-6)


def test_scaffold_can_follow_the_reports_instead(monkeypatch):
    """The second round by hand, from the reports of the first."""
    clip, lr, steps = 0.1, 0.02, 3
    algorithm, rounds = dp.dp_scaffold(clip=clip, mechanism="privunit", control="report"), []

    def randomize(self, clipped, clients, noise, original=PrivUnit.randomize):
        report = original(self, clipped, clients, noise)
        rounds.append((clipped.vectors, self.reconstruct(report)[1]))
        return report

    monkeypatch.setattr(PrivUnit, "randomize", randomize)
    run(algorithm, rounds=2, local=dp.Sgd(lr=lr, steps=steps))
    (_, sent), (second, _) = rounds
    c, controls = -sent.mean(0) / (steps * lr), -sent / (steps * lr)
    model = linear_regression(D)
    with torch.no_grad():
        next(model.parameters()).copy_(sent.mean(0)[None])
    raw = torch.stack(
        [plain_update(model, *CLIENTS[i], lr=lr, steps=steps, correction=c - controls[i]) for i in range(M)]
    )
    assert torch.allclose(second, raw * (clip / raw.norm(dim=1, keepdim=True)).clamp(max=1.0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "numerators"), [(dp.cdp_fedexp, ("free", "paper")), (dp.ldp_fedexp, ("free", "paper", "naive"))]
)
def test_the_rules_move_alike_where_noise_vanishes(make, numerators):
    first, *others = (weights(run(make(clip=0.3, noise_multiplier=1e-9, numerator=n))) for n in numerators)
    assert all(torch.allclose(first, other, rtol=1e-4, atol=1e-5) for other in others)


def test_a_poisson_round_without_any_client_releases_noise_and_goes_on():
    algorithm = dp.cdp_fedexp(clip=0.3, noise_multiplier=1.0, adjacency="add-remove")
    given = {"local": LOCAL, "rounds": 2, "participation": dp.Poisson(1e-6, population=M)}
    simulation, _ = prepare(linear_regression(D), PROBLEM.federation, algorithm, **given)
    state = simulation.begin()
    for _ in range(2):
        state, _ = simulation.step(state, Ledger.in_memory())
    assert float(state.w.norm()) > 0


def test_one_bad_client_does_not_spoil_a_round():
    x, y = torch.randn(20, 4, D), torch.randn(20, 4)
    x[3] = math.nan
    clients = dp.Federation.from_clients([(x[i], y[i]) for i in range(20)], finite=False)
    for algorithm in (dp.cdp_fedexp(clip=0.3, noise_multiplier=1.0), dp.fedavg()):
        result = dp.train(linear_regression(D), clients, algorithm, local=LOCAL, rounds=2)
        assert bool(torch.isfinite(weights(result)).all())


def test_empty_clients_send_a_zero_update_and_count():
    data = random_rows([3] * 4, D)
    empty = (torch.zeros(0, D), torch.zeros(0))
    with_empty = dp.Federation.from_clients([data[0], empty, *data[1:], empty])
    options = {"local": LOCAL, "rounds": 1}
    full = dp.train(linear_regression(D), dp.Federation.from_clients(data), dp.fedavg(), **options)
    thin = dp.train(linear_regression(D), with_empty, dp.fedavg(), **options)
    assert torch.allclose(weights(thin) * 6, weights(full) * 4, atol=1e-6)
    for algorithm in (dp.ldp_fedexp(clip=0.3, mechanism="privunit"), dp.dp_scaffold(clip=0.3, noise_multiplier=1.0)):
        assert len(dp.train(linear_regression(D), with_empty, algorithm, **options).history) == 1


def test_epsilon_so_far_grows_to_the_total_and_per_round_is_below():
    result = run(dp.cdp_fedexp(clip=0.3, noise_multiplier=5.0), rounds=10, diagnostics=True)
    assert "nonprivate_" in result.privacy.text
    series = [record["epsilon_total"] for record in result.history]
    assert series == sorted(series)
    assert series[-1] == result.privacy.epsilon_total
    assert result.privacy.epsilon_round == pytest.approx(series[0])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: dp.cdp_fedexp(clip=1.0, noise_multiplier=-1.0), "noise_multiplier is -1"),
        (lambda: dp.cdp_fedexp(clip="adaptiv", noise_multiplier=1.0), "adaptiv"),
        (lambda: dp.cdp_fedexp(clip=1.0, noise_multiplier=1.0, numerator="fre"), "Did you mean 'free'"),
        (lambda: dp.dp_fedavg(clip=1.0, noise_multiplier=1.0, adjacency="add"), "adjacency"),
        (lambda: dp.ldp_fedexp(clip="adaptive", noise_multiplier=1.0), "central-gaussian"),
        (lambda: dp.ldp_fedexp(clip=1.0, noise_multiplier=1.0, adjacency="add-remove"), "replace-one"),
        (lambda: dp.ldp_fedexp(clip=1.0, mechanism="privunit", numerator="free"), "at no cost"),
        (lambda: dp.Sgd(lr=0.0, steps=1), "lr is 0"),
        (lambda: dp.Sgd(lr="fast", steps=1), "lr is 'fast'"),
        (lambda: dp.Sgd(lr=0.1, steps=0), "steps is 0"),
        (lambda: dp.Sgd(lr=0.1, steps=1, max_examples="64"), "max_examples is '64'"),
        (lambda: dp.Sgd(lr=0.1, steps=1, proximal="a"), "proximal is 'a'"),
        (lambda: dp.Poisson(0.0), "rate is 0"),
        (lambda: dp.FixedSize(0), "cohort is 0"),
        (lambda: run(dp.fedavg(), execution=dp.Execution(chunk_size=True)), "chunk_size is True"),
        (lambda: run(dp.fedavg(), budget="8"), "budget is '8'"),
        (lambda: run(dp.fedavg(), evaluate=dp.Evaluation("clients", every="2")), "every is '2'"),
        (lambda: run(dp.fedavg(), local={"lr": 0.1}), r"local is a dict; it must be what a client does, such as Sgd\("),
        (lambda: run(dp.fedavg(), secure=True, diagnostics=True), "diagnostics is True in a secure run"),
        (lambda: dp.dp_scaffold(clip=0.3, noise_multiplier=1.0, control="report"), "only in a local setting"),
        (lambda: dp.dp_scaffold(clip=0.3, noise_multiplier=1.0, control="reports"), "'update' or 'report'"),
        (lambda: regression_run(EMPTY, dp.fedavg()), "empty"),
        (lambda: run(dp.fedavg(), seed=-1), "seed is -1"),
        (lambda: run(SCAFFOLD, local=dp.Sgd(lr=0.1, epochs=1, batch_size=2)), "steps"),
    ],
)
def test_wrong_input_is_one_sentence_that_names_the_field(make, named):
    with pytest.raises(dp.InputError, match=named):
        make()


def test_frozen_parameters_and_the_users_own_model_stay_as_they_were():
    model = nn.Sequential(nn.Linear(D, 4), nn.Linear(4, 1), nn.Flatten(0))
    model[0].requires_grad_(False)
    start = [parameter.clone() for parameter in model.parameters()]
    given = {"local": LOCAL, "rounds": 1}
    result = dp.train(model, PROBLEM.federation, dp.cdp_fedexp(clip=1.0, noise_multiplier=1.0), **given)
    assert torch.equal(result.model[0].weight, model[0].weight)
    assert all(torch.equal(now, before) for now, before in zip(model.parameters(), start, strict=True))
    assert not torch.equal(result.model[1].weight, model[1].weight)


@pytest.mark.parametrize("participation", [dp.Full(), dp.FixedSize(12), dp.Poisson(0.4)])
def test_scaffold_follows_its_equations_with_the_clipped_update(participation, monkeypatch):
    """The server's control keeps 1 − share of itself, which shows in the model from the third round on."""
    cohorts, clip, lr, steps, kind = [], 0.1, 0.02, 3, type(participation)

    def cohort(*given, original=kind.cohort, **more):
        cohorts.append(original(*given, **more))
        return cohorts[-1]

    monkeypatch.setattr(kind, "cohort", cohort)
    # So little noise that the model is the equations' own to float32 rounding.
    algorithm = dp.dp_scaffold(clip=clip, noise_multiplier=1e-7)
    result = run(algorithm, local=dp.Sgd(lr=lr, steps=steps), participation=participation, rounds=5)
    share = 1.0 if kind is dp.Full else 0.4
    model = linear_regression(D)
    w, c, controls = torch.zeros(D), torch.zeros(D), torch.zeros(M, D)
    assert len(cohorts) == 5
    for members in cohorts:
        with torch.no_grad():
            next(model.parameters()).copy_(w[None])
        deltas = torch.zeros(len(members), D)
        for row, i in enumerate(members.tolist()):
            raw = plain_update(model, *CLIENTS[i], lr=lr, steps=steps, correction=c - controls[i])
            deltas[row] = raw * min(1.0, clip / float(raw.norm()))
        mean = deltas.sum(0) / (share * M)
        controls[members] = controls[members] - c - deltas / (steps * lr)
        w, c = w + mean, (1 - share) * c - share * mean / (steps * lr)
    torch.testing.assert_close(weights(result), w, rtol=1e-3, atol=1e-5)  # float32 local steps in another order
    assert float(w.norm()) > 0.05


def test_draws_ahead_are_the_sources_own():
    source, server = Streams(3).at("central noise", 7), torch.zeros(1, dtype=torch.int64)
    cpu = torch.device("cpu")
    ahead = PrefetchedNoise(source, 1000, cpu)
    for clients, width in ((server, 1000), (server, 1000), (server, 999), (server + 1, 1000)):
        asked = clients, width, cpu, torch.float64
        assert torch.equal(ahead.normal(*asked), source.normal(*asked))
    assert torch.equal(ahead.uniform(server, 5), source.uniform(server, 5))


def test_a_run_that_draws_ahead_is_the_same_run(monkeypatch):
    algorithm, ahead = dp.cdp_fedexp(clip=0.3, noise_multiplier=1.0), Mock(wraps=PrefetchedNoise)
    plain = weights(run(algorithm))
    monkeypatch.setattr(engine, "PrefetchedNoise", ahead)
    assert torch.equal(weights(run(algorithm)), plain)
    assert not ahead.called, "a processor that trains itself draws nothing ahead"
    monkeypatch.setattr(engine, "LONG", 1)
    monkeypatch.setattr(simulated.Simulation, "cpu_is_idle", True)
    assert torch.equal(weights(run(algorithm)), plain)
    assert [call.args[1] for call in ahead.call_args_list] == [D + 1] * 4


def test_the_first_move_is_the_step_size_times_the_direction_of_ones_own():
    """The means are released before the server looks at them, so the move of plain FedEXP says what was released."""
    plain, ours = (run(replace(dp.fedexp(), average_last=1, server=s), rounds=1) for s in (Extrapolate(), Adagrad(0.5)))
    eta_g = plain.history[0]["eta_g"]
    assert eta_g == ours.history[0]["eta_g"] > 1.5
    mean = weights(plain) / eta_g
    torch.testing.assert_close(weights(ours), eta_g * mean / (mean.square() + 0.25).sqrt(), rtol=1e-5, atol=1e-7)
