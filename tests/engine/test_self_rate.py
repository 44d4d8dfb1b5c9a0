"""A local rate that sets itself: what its votes cost, that they tell nothing else, and that interrupted runs go on."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import dpfedexp as dp
from dpfedexp.accounting import Ledger, compose
from dpfedexp.algorithms.algorithm import with_aggregation
from dpfedexp.algorithms.probe import CLIP, RATE, SCALE, UPDATE, bind, extra_releases, make_probe
from dpfedexp.algorithms.round import Full
from dpfedexp.core.local_rate import RATES
from dpfedexp.engine import checkpoint, verify
from dpfedexp.engine.engine import IMPROVED_SO_FAR, LOCAL_RATE, Engine, Request
from dpfedexp.engine.prepare import prepare
from dpfedexp.models import linear_regression
from tests.arguments import arguments
from tests.engine.small import Crash, crash_in
from tests.optimizers import AdamW
from tests.sizes import sized

AUTO = dp.Sgd(lr="auto", steps=3, max_examples=8)
ADAPTIVE = dp.cdp_fedexp(clip="adaptive", target_epsilon=8.0)
FIXED = dp.cdp_fedexp(clip=0.3, noise_multiplier=2.0)
D = 5


def regression(clients):
    """Clients whose squared losses have curvature about 1: a rate of 0.1 to 1 is right, and 10 diverges."""
    draw = torch.Generator().manual_seed(0)
    truth, x = torch.randn(D, generator=draw), torch.randn(clients, 8, D, generator=draw)
    y = x @ truth + 0.3 * torch.randn(clients, 8, generator=draw)
    return dp.Federation.from_clients(list(zip(x, y, strict=True)))


def at_rate(engine, rate):
    """The state before the first round, with a rate that no vote chose."""
    state = engine.begin()
    return replace(state, memory={**state.memory, LOCAL_RATE: torch.full_like(state.memory[LOCAL_RATE], rate)})


def run(clients, algorithm=ADAPTIVE, *, local=AUTO, rounds=4, **options):
    given = {"local": local, "rounds": rounds} | options
    return dp.train(linear_regression(D), clients, algorithm, **arguments(given))


@pytest.fixture(scope="module")
def clients():
    return regression(400)


CASES = {
    "everybody": (ADAPTIVE, {}),
    "add-remove": (replace(ADAPTIVE, adjacency="add-remove"), {"population": 120}),
    **sized({}, {"poisson": (ADAPTIVE, {"participation": dp.Poisson(0.3)})}),
    "strict": (ADAPTIVE, {"secure": "strict"}),
    "two-party": (with_aggregation(ADAPTIVE, "two-party"), {"secure": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_both_votes_are_charged_before_the_first_round_and_the_target_holds_with_them(name):
    algorithm, options = CASES[name]
    made = run(regression(24 if "secure" in options else 120), algorithm, rounds=2, **options)
    queries = [(entry.round, [query.name for query in entry.event.queries]) for entry in made.ledger.entries]
    assert queries[:3] == [(0, [RATE]), (0, [CLIP]), (1, ["update", "within clip", "improved"])]
    assert {"noisy_mean_within_clip", "noisy_mean_improved"} <= made.history[0].keys()
    later = [(entry.round, entry.event.question) for entry in made.ledger.entries][2:]
    assert later == [(1, ""), (1, SCALE), (2, "")]
    # The calibration is exact up to 1e-9, and never above its target.
    assert 7.9 < made.privacy.epsilon_total <= 8.0
    assert made.privacy.rounds == 2
    two = name == "two-party"
    assert {entry.event.setting for entry in made.ledger.entries} == {"two-party" if two else "central"}
    assert set(made.privacy.votes) == {"local rate", "first clip", "within clip", "improved", "rate scale"}


@pytest.mark.parametrize(("epsilon", "dimension", "most"), [(1.0, 100, 1.02), (16.0, 100, 1.02), (1.0, 10_000, 1.025)])
def test_rate_clip_and_their_votes_together_cost_a_cohort_of_1000_little_noise(epsilon, dimension, most):
    """At most 2%, and 2.5% with large noise, where the rate's scale is voted on once more."""
    adaptive, fixed = (dp.cdp_fedexp(clip=clip, target_epsilon=epsilon) for clip in ("adaptive", 1.0))
    everything, probe, _ = bind(adaptive, AUTO, dimension, 1000, Full(), 50, False)
    nothing = fixed.bind(dimension, 1000.0, Full().sampling(1000), 50)
    assert len(probe.scale_rounds) == (2 if dimension == 100 else 3)
    assert 1.0 < everything.noise_multiplier / nothing.noise_multiplier <= most


def test_with_large_noise_the_scale_is_voted_on_once_more_and_the_target_is_spent(tmp_path):
    algorithm = dp.cdp_fedexp(clip="adaptive", target_epsilon=1.0)
    made = run(regression(24), algorithm, rounds=3, out=tmp_path / "run")
    assert [entry.round for entry in made.ledger.entries if entry.event.question == SCALE] == [1, 2]
    assert made.privacy.epsilon_total == pytest.approx(1.0, rel=1e-6)
    assert verify.outcome(verify.verify_run(tmp_path / "run")) == "holds"


def test_the_probe_leaves_the_model_as_it_is_and_happens_once(clients):
    simulation, _ = prepare(linear_regression(D), clients, ADAPTIVE, local=AUTO, rounds=2)
    ledger, start = Ledger.in_memory(), simulation.begin()
    announced = simulation.answers_left(start, 2, Ledger.in_memory())
    state = simulation.choose(start, ledger)
    assert announced[:2] == [entry.event for entry in ledger.entries]
    assert [event.question for event in announced[2:]] == ["rate scale"]
    assert simulation.answers_left(state, 2, Ledger.in_memory()) == announced[2:]
    assert torch.equal(state.w, start.w)
    assert RATES[0] <= float(state.memory[LOCAL_RATE]) <= RATES[-1]
    assert simulation.choose(state, ledger) is state
    assert len(ledger) == 2


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("secure", [False, True])
def test_a_run_that_is_interrupted_after_the_votes_or_later_ends_as_if_it_had_not_been(tmp_path, monkeypatch, secure):
    """A secure run draws anew, so that only its charges are compared: the votes are paid for once."""
    few = regression(16)
    whole = run(few, secure=secure)
    for number in (1, 3):
        folder = tmp_path / f"in round {number}"
        with monkeypatch.context() as patch:
            crash_in(patch, Engine, "step", number, before=True)
            with pytest.raises(Crash):
                run(few, out=folder, secure=secure)
        assert checkpoint.read_progress(folder).controls is False, "no client remembers anything"
        again = run(few, out=folder, secure=secure)
        assert [entry.round for entry in again.ledger.entries] == [0, 0, 1, 1, 2, 3, 4]
        assert again.privacy.epsilon_total == whole.privacy.epsilon_total
        if not secure:
            assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
            assert [r["local_rate"] for r in again.history] == [r["local_rate"] for r in whole.history]


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (dp.ldp_fedexp(clip=0.5, noise_multiplier=1.0), "the noise on one client.s answer would be larger"),
        (dp.ldp_fedexp(clip=0.5, mechanism="privunit"), "the noise on one client.s answer would be larger"),
        (dp.dp_scaffold(clip=0.5, noise_multiplier=1.0), "only a run can choose; give a number"),
    ],
)
def test_what_cannot_vote_is_refused_with_its_sentence(algorithm, sentence, clients):
    with pytest.raises(dp.InputError, match=sentence):
        run(clients, algorithm)


@pytest.mark.parametrize(
    ("chunk_size", "secure", "trainer"), [(1, False, "auto"), (7, False, "auto"), (4, True, "auto"), (4, True, "loop")]
)
def test_a_client_whose_loss_rose_sends_nothing_and_says_so(chunk_size, secure, trainer):
    """At rate 10 the steps diverge on every client but the one whose inputs are small; a client without rows abstains."""
    rows = [(torch.ones(4, D), torch.ones(4))] * 5 + [(0.1 * torch.ones(4, D), torch.ones(4))]
    clients = dp.Federation.from_clients([*rows, (torch.zeros(0, D), torch.zeros(0))])
    given = {"local": AUTO, "rounds": 1, "secure": secure}
    given |= {"execution": dp.Execution(chunk_size=chunk_size, trainer=trainer)}
    engine, _ = prepare(linear_regression(D), clients, FIXED if secure else dp.fedavg(), **given)
    quiet = replace(engine.mechanism, votes=tuple(replace(vote, noise=1e-3) for vote in engine.mechanism.votes))
    state, cohort, found = at_rate(engine, 10.0), engine.cohort, {}
    request = Request(UPDATE, 1, state, quiet)
    for chunk in cohort.chunks(torch.arange(7)):
        updates = cohort.updates(request, state.w.float(), chunk)
        votes = cohort.improved(chunk, updates).flatten()
        assert bool(votes[len(chunk) :].isnan().all()), "padding abstains"
        sent = zip((updates != 0).any(1).tolist(), votes.tolist(), strict=True)
        found |= dict(zip(chunk.tolist(), sent, strict=False))
    assert [found[client][0] for client in range(7)] == [False] * 5 + [True, False]
    assert [found[client][1] for client in range(7)] == pytest.approx([0.0] * 5 + [1.0, math.nan], nan_ok=True)
    assert cohort.collect(request, torch.arange(0)).sums.votes.tolist() == [0.0]
    new, result = replace(engine, mechanism=quiet).step(state, Ledger.in_memory())
    # Who abstains counts as a half. Eight deviations of the noise.
    share = 1.5 / 7
    assert result.extra["noisy_mean_improved"] == pytest.approx(share, abs=8e-3 / 7)
    assert float(new.memory[LOCAL_RATE]) < 10.0
    assert float(new.memory[IMPROVED_SO_FAR]) == pytest.approx(0.7 + 0.3 * share, abs=8e-3 / 7)


def test_the_vote_changes_neither_the_clients_nor_the_noise_of_an_update(clients):
    engine, _ = prepare(linear_regression(D), clients, FIXED, local=AUTO, rounds=1)
    state, silent = at_rate(engine, 0.1), replace(engine.mechanism, votes=())
    requests = [Request(UPDATE, 1, state, mechanism) for mechanism in (engine.mechanism, silent)]
    ours, theirs = (engine.ask(request, Ledger.in_memory())[0].c_bar for request in requests)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("local", "algorithm"),
    [(AdamW(lr="auto", steps=3), dp.fedavg()), *sized([], [(AUTO, dp.dp_fedavg(clip="adaptive", target_epsilon=8.0))])],
)
def test_the_rate_ends_where_the_best_of_a_grid_is(clients, local, algorithm):
    """Without any starting value the loss is within a tenth of the start's of the best of a grid, for any optimizer."""

    def loss(local):
        made = run(clients, algorithm, local=local, rounds=10)
        x, y = (torch.cat(part) for part in zip(*(clients.client(n) for n in range(400)), strict=True))
        return float(nn.functional.mse_loss(made.model(x).detach(), y))

    grid = [loss(local.at(10.0**exponent)) for exponent in sized((-2, -1, 0), (-3, -2, -1, -0.5, 0, 1))]
    start = float(torch.cat([clients.client(n)[1] for n in range(400)]).square().mean())
    best = min(value for value in grid if math.isfinite(value))
    assert loss(local) <= best + 0.1 * (start - best)


def test_few_clients_do_not_fail_and_fall_back_to_the_usual_rate():
    made = run(regression(5), dp.cdp_fedexp(clip="adaptive", target_epsilon=2.0), rounds=3)
    assert 0.02 <= made.history[0]["local_rate"] <= 0.5
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())
    assert RATES[0] <= run(regression(5), dp.fedavg(), rounds=3).history[0]["local_rate"] <= 1.0


def test_one_clients_answers_do_not_change_with_the_others_data_in_a_secure_run(monkeypatch):
    monkeypatch.setattr("dpfedexp.engine.prepare.secrets.randbits", lambda bits: 12345)
    replaced, everybody, found = 7, torch.arange(24), []
    for other in (1.0, 1e4):
        rows = [regression(24).client(n) for n in range(24)]
        rows[replaced] = (other * rows[replaced][0], rows[replaced][1])
        given = {"local": AUTO, "rounds": 1, "secure": True, "execution": "cpu"}
        engine, _ = prepare(linear_regression(D), dp.Federation.from_clients(rows), ADAPTIVE, **given)
        # A client abstains from a vote on the scale where the model has not moved.
        state, answers = replace(at_rate(engine, 0.1), w=engine.start + 0.3), []
        for purpose in (RATE, CLIP, SCALE, UPDATE):
            request = Request(purpose, int(purpose == UPDATE), state, engine.mechanism_of(purpose, 1.0), shake=0.1)
            answers.append(engine.cohort.rows(request, state.w.float(), everybody)[everybody != replaced])
        found.append(torch.cat(answers, dim=1))
        assert all(bool(one.any()) for one in answers)
    assert torch.equal(*found)


def labeled(sizes):
    """Clients of these sizes with labels of three classes."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(len(sizes), 8, 4, generator=draw), torch.randint(0, 3, (len(sizes), 8), generator=draw)
    return [(a[:n], b[:n]) for a, b, n in zip(x, y, sizes, strict=True)]


def test_a_client_whose_rows_make_the_loss_fail_stops_no_secure_run_and_is_not_named():
    clients = labeled([6] * 12)
    clients[7][1][2] = 9
    federation = dp.Federation.from_clients(clients)
    done = dp.train(nn.Linear(4, 3), federation, FIXED, local=AUTO, rounds=2, secure=True)
    assert len(done.history) == 2


def test_a_clients_size_changes_no_other_row_where_the_transform_draws(monkeypatch):
    """Losses decide whether a row is sent, so what they draw must be the client's own too."""
    monkeypatch.setattr("dpfedexp.engine.prepare.secrets.randbits", lambda bits: 3)
    found = []
    for first in (4, 8):
        torch.manual_seed(5)
        noisy = dp.Federation.from_clients(labeled([first] + [4] * 11))
        noisy.transform = lambda x: x + 0.1 * torch.randn_like(x)
        simulation, _ = prepare(nn.Linear(4, 3), noisy, FIXED, local=AUTO, rounds=2, secure=True)
        state = at_rate(simulation, 0.3)
        torch.manual_seed(9)
        requests = [Request(UPDATE, number, state, simulation.mechanism) for number in (1, 2)]
        rows = [simulation.cohort.updates(one, state.w.float(), torch.arange(12))[1:12] for one in requests]
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("rounds", [10, 5000])
def test_a_vote_before_the_first_round_never_costs_more_than_a_round(rounds):
    sampling = Full().sampling(1000)
    mechanism = dp.cdp_fedexp(clip=0.3, noise_multiplier=5.0).bind(15, 1000.0, sampling, rounds)
    for event in make_probe(mechanism, rounds, sampling).events(sampling, adaptive=True):
        assert event.mu <= mechanism.event(sampling).mu * (1 + 1e-12)


def test_a_ledger_without_the_votes_that_the_configuration_plans_does_not_verify(tmp_path):
    done = run(regression(40), rounds=2)
    kept = [entry for entry in done.ledger.entries if entry.round > 0]
    with Ledger.create(tmp_path / "ledger.jsonl", delta=1e-5, run=kept[0].run) as ledger:
        for entry in kept:
            ledger.charge(entry.round, entry.event, run=entry.run, noise=entry.noise)
    before = [entry.event for entry in done.ledger.entries if entry.event.question]
    checks = {check.name: check for check in verify.verify_run(tmp_path, kept[0].event, before)}
    assert not checks["configuration"].passed
    assert "never charged" in checks["configuration"].detail


class RemembersLarge(nn.Module):
    """A module whose buffer changes for large inputs only, which made-up rows never are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if float(x.detach().abs().max()) > 50:
            self.seen.add_(1)
        return self.linear(x) + 0 * self.seen


def test_a_module_that_remembers_is_refused_before_a_vote_is_charged():
    clients = labeled([6] * 20)
    clients[5] = (100 * clients[5][0], clients[5][1])
    ledger = Ledger.in_memory()
    given = {"local": AUTO, "rounds": 2, "secure": True, "ledger": ledger}
    with pytest.raises(dp.InputError, match="looks at values"):
        dp.train(RemembersLarge(), dp.Federation.from_clients(clients), FIXED, **given)
    assert len(ledger) == 0


def test_a_vote_that_the_update_decides_is_not_called_exact():
    """Whether training helped is whether the row is zero, so no two neighbors differ in both to the full."""
    sampling = Full().sampling(1000)
    votes, one_time = extra_releases(FIXED, AUTO, 50, sampling)
    event = FIXED.bind(15, 1000.0, sampling, 50, votes=votes, one_time=one_time).event(sampling)
    assert not event.exact
    assert compose([(event, 50)], 1e-5).epsilon > 0
