"""A local rate that sets itself: what its votes cost, that they tell nothing else, and that interrupted runs go on."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dpfedexp import (
    Execution,
    Federation,
    InputError,
    Poisson,
    Sgd,
    cdp_fedexp,
    dp_fedavg,
    dp_scaffold,
    fedavg,
    ldp_fedexp,
    train,
)
from dpfedexp.accounting import Ledger
from dpfedexp.algorithms.participation import Full
from dpfedexp.algorithms.probe import asked
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local_rate import RATES
from dpfedexp.data import synthetic_regression
from dpfedexp.engine import rounds as rounds_module
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.rounds import HELPED_SO_FAR, RATE, probed
from dpfedexp.mechanisms.binned_vote import BinnedVote
from dpfedexp.models import linear_regression
from tests.optimisers import AdamW, HeavyBall

AUTO = Sgd(lr="auto", steps=3, max_examples=8)
D = 5


def regression(clients, seed=0, spread=0.0):
    """Clients whose squared losses have curvature about 1: a rate of 0.1 to 1 is right, and 10 diverges."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(D, generator=generator)
    rows = []
    for _ in range(clients):
        x = torch.randn(8, D, generator=generator)
        own = truth + spread * torch.randn(D, generator=generator)
        rows.append((x, x @ own + 0.3 * torch.randn(8, generator=generator)))
    return Federation.from_clients(rows)


def run(clients, algorithm=None, *, local=AUTO, rounds=4, **options):
    given = algorithm or cdp_fedexp(clip="adaptive", target_epsilon=8.0)
    return train(linear_regression(D), clients, given, local=local, rounds=rounds, progress=False, **options)


@pytest.fixture(scope="module")
def clients():
    return regression(400)


CASES = {
    "everybody": ({}, {}),
    "poisson": ({}, {"participation": Poisson(0.3)}),
    "add-remove": ({"adjacency": "add-remove"}, {"population": 120, "participation": Poisson(0.5)}),
    "secure": ({}, {"secure": True}),
    "strict": ({}, {"secure": "strict"}),
    "two-party": ({}, {"aggregation": "two-party"}),
    "two-party, poisson": ({}, {"aggregation": "two-party", "participation": Poisson(0.5)}),
    "two-party, strict": ({}, {"aggregation": "two-party", "secure": "strict"}),
    "one-sided": ({}, {"aggregation": "two-party-one-sided"}),
}


@pytest.mark.parametrize("name", CASES)
def test_both_votes_are_charged_before_the_first_round_and_the_target_holds_with_them(name):
    settings, options = CASES[name]
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0, **settings)
    made = run(regression(24 if "secure" in options else 120), algorithm, rounds=2, **options)
    first = [(entry.round, [query.name for query in entry.event.queries]) for entry in made.ledger.entries][:2]
    assert first == [(0, ["local rate"]), (0, ["first clip"])]
    assert [entry.round for entry in made.ledger.entries][2:] == [1, 2]
    # The calibration is exact up to 1e-9, and never above its target.
    assert 7.9 < made.privacy.epsilon_total <= 8.0
    assert made.privacy.rounds == 2
    two = "aggregation" in options
    assert {entry.event.setting for entry in made.ledger.entries} == {"two-party" if two else "central"}
    assert made.privacy.votes == ("local rate", "first clip", "within clip", "helped")


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 8.0, 16.0])
def test_rate_clip_and_their_probe_together_cost_a_cohort_of_1000_at_most_one_per_cent_more_noise(epsilon):
    sampling = Full().sampling(1000)
    adaptive, fixed = (cdp_fedexp(clip=clip, target_epsilon=epsilon) for clip in ("adaptive", 1.0))
    votes, beside = asked(adaptive, AUTO, 50, sampling, False)
    everything = adaptive.bind(100, 1000.0, sampling, 50, votes=votes, beside=beside)
    nothing = fixed.bind(100, 1000.0, sampling, 50)
    assert 1.0 < everything.noise_multiplier / nothing.noise_multiplier <= 1.01


def test_the_probe_leaves_the_model_as_it_is_and_happens_once(clients):
    simulation, _ = prepare(
        linear_regression(D), clients, cdp_fedexp(clip="adaptive", target_epsilon=8.0), local=AUTO, rounds=2
    )
    ledger, start = Ledger.in_memory(), simulation.begin()
    state = probed(simulation, start, ledger, None)
    assert torch.equal(state.w, start.w)
    assert RATES[0] <= float(state.memory[RATE]) <= RATES[-1]
    assert probed(simulation, state, ledger, None) is state
    assert len(ledger) == 2


@pytest.mark.parametrize("secure", [False, True])
def test_a_run_that_is_interrupted_after_the_votes_or_later_ends_as_if_it_had_not_been(
    clients, tmp_path, monkeypatch, secure
):
    """A secure run draws anew, so that only its charges are compared: the votes are paid for once."""
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "private"))
    few = regression(16)
    whole = run(few, secure=secure)
    step = rounds_module.Simulation.step
    for last in (0, 2):
        folder = tmp_path / f"after {last}"

        def crash(self, state, *given, last=last):
            if state.round == last:
                raise KeyboardInterrupt
            return step(self, state, *given)

        with monkeypatch.context() as patch:
            patch.setattr(rounds_module.Simulation, "step", crash)
            with pytest.raises(KeyboardInterrupt):
                run(few, checkpoint=folder, secure=secure)
        again = run(few, checkpoint=folder, resume=True, secure=secure)
        assert [entry.round for entry in again.ledger.entries] == [0, 0, 1, 2, 3, 4]
        assert again.privacy.epsilon_total == whole.privacy.epsilon_total
        if not secure:
            assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
            assert [r["local_rate"] for r in again.history] == [r["local_rate"] for r in whole.history]


def test_what_cannot_vote_is_refused_with_its_sentence(clients, monkeypatch):
    for algorithm, sentence in (
        (ldp_fedexp(clip=0.5, noise_multiplier=1.0), "one vote drowns in its own noise"),
        (ldp_fedexp(clip=0.5, mechanism="privunit"), "one vote drowns in its own noise"),
        (dp_scaffold(clip=0.5, noise_multiplier=1.0), "only a run can choose; give a number"),
    ):
        with pytest.raises(InputError, match=sentence):
            run(clients, algorithm)
    monkeypatch.setattr("dpfedexp.engine.train.world", lambda: 2)
    with pytest.raises(InputError, match="'auto' in a run on several ranks"):
        run(clients)


def test_a_client_whose_loss_rose_sends_nothing_and_says_so():
    """At rate 10 the steps diverge on every client but the one whose inputs are small."""
    rows = [(torch.ones(4, D), torch.ones(4)) for _ in range(5)] + [(0.1 * torch.ones(4, D), torch.ones(4))]
    simulation, _ = prepare(linear_regression(D), Federation.from_clients(rows), fedavg(), local=AUTO, rounds=1)
    state = simulation.begin()
    state = replace(state, memory={**state.memory, RATE: torch.full_like(state.memory[RATE], 10.0)})
    everybody = torch.arange(6)
    updates = simulation.updates(state, state.w.float(), everybody, 1)
    assert (updates != 0).any(1).tolist() == [False] * 5 + [True]
    assert simulation.ballots(state, everybody, updates, 1).flatten().tolist() == [0.0] * 5 + [1.0]
    new, result = simulation.step(state, Ledger.in_memory())
    assert result.extra["vote_helped"] == pytest.approx(1 / 6, abs=1e-6)
    assert float(new.memory[RATE]) < 10.0
    assert float(new.memory[HELPED_SO_FAR]) == pytest.approx(0.7 + 0.3 / 6)


@pytest.mark.parametrize(
    ("local", "algorithm"),
    [
        (AUTO, dp_fedavg(clip="adaptive", target_epsilon=8.0)),
        (HeavyBall(lr="auto", steps=3), fedavg()),
        (AdamW(lr="auto", steps=3), fedavg()),
    ],
    ids=["sgd", "heavy ball", "adamw"],
)
def test_the_rate_ends_where_the_best_of_a_grid_is(clients, local, algorithm):
    """Nobody starts it anywhere: the loss is within a tenth of the start's of the best of six rates, for any optimiser."""

    def loss(local):
        made = run(clients, algorithm, local=local, rounds=10)
        x, y = (torch.cat(part) for part in zip(*(clients.client(n) for n in range(400)), strict=True))
        return float(nn.functional.mse_loss(made.model(x).detach(), y))

    grid = [loss(local.at(10.0**exponent)) for exponent in (-3, -2, -1, -0.5, 0, 1)]
    start = float(torch.cat([clients.client(n)[1] for n in range(400)]).square().mean())
    best = min(value for value in grid if math.isfinite(value))
    assert loss(local) <= best + 0.1 * (start - best)


@pytest.mark.parametrize("few", [5, 30])
def test_few_clients_do_not_fail_and_fall_back_to_the_usual_rate(few):
    made = run(regression(few), cdp_fedexp(clip="adaptive", target_epsilon=2.0), rounds=3)
    assert 0.02 <= made.history[0]["local_rate"] <= 0.5
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())
    assert RATES[0] <= run(regression(few), fedavg(), rounds=3).history[0]["local_rate"] <= 1.0


def test_one_clients_answers_do_not_change_with_the_others_data_in_a_secure_run(monkeypatch):
    monkeypatch.setattr("dpfedexp.engine.prepare.secrets.randbits", lambda bits: 12345)
    seen = []
    collect = BinnedVote.collect
    monkeypatch.setattr(BinnedVote, "collect", lambda self, v, b: (seen.append(b.clone()), collect(self, v, b))[1])
    algorithm, replaced, found = cdp_fedexp(clip=AdaptiveClip(), target_epsilon=8.0), 7, []
    for other in (1.0, 1e4):
        rows = [regression(24).client(n) for n in range(24)]
        rows[replaced] = (other * rows[replaced][0], rows[replaced][1])
        simulation, _ = prepare(
            linear_regression(D),
            Federation.from_clients(rows),
            algorithm,
            local=AUTO,
            rounds=1,
            secure=True,
            execution=Execution(device="cpu"),
        )
        state = simulation.begin()
        monkeypatch.setattr("dpfedexp.engine.rounds.chosen", lambda means, doubt: 0.1)
        seen.clear()
        state = probed(simulation, state, Ledger.in_memory(), None)
        answers = torch.cat(seen).reshape(2, 24)
        everybody = simulation.cohort_part(state, simulation.mechanism.at_radius(1.0), torch.arange(24), 1)[0]
        alone = simulation.cohort_part(state, simulation.mechanism.at_radius(1.0), torch.tensor([replaced]), 1)[0]
        keep = torch.arange(24) != replaced
        found.append((answers[:, keep], everybody.vector - alone.vector))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert float(found[0][1].abs().max()) > 0


def test_the_synthetic_problem_of_a_new_file_learns_at_the_rate_that_it_chooses():
    problem = synthetic_regression(300, 20, seed=1)
    made = train(
        linear_regression(20),
        problem.federation,
        cdp_fedexp(clip="adaptive", target_epsilon=8.0),
        local=Sgd(lr="auto", steps=10),
        rounds=10,
        progress=False,
    )
    start = problem.distance(torch.zeros(1, 20))
    assert problem.distance(next(iter(made.model.parameters()))) < 0.7 * start
