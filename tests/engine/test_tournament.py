"""Candidates on disjoint groups: a client moves one of their sums, a round costs what a round costs, and the votes choose."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import dpfedexp as dp
from dpfedexp.accounting import Ledger, compose
from dpfedexp.algorithms.probe import CANDIDATE, CLIP, RATE, SCALE, UPDATE, Extras
from dpfedexp.core.sums import WITHIN_CLIP
from dpfedexp.engine import verify
from dpfedexp.engine.engine import LOCAL_RATE, Engine, Request
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.simulated import Simulation
from dpfedexp.engine.tournament import candidates_of, compared, phases_of
from dpfedexp.errors import InputError, RoundFailed
from dpfedexp.mechanisms import Release
from tests.arguments import arguments

from .small import Crash, crash_after, crash_in

M, D, ROUNDS = 60, 5, 8
ALGORITHM = dp.cdp_fedexp(clip="adaptive", target_epsilon=50.0)
GOOD, BAD = dp.Sgd(lr=0.2, steps=3), dp.Sgd(lr=1e-6, steps=3)


def net(width):
    return nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, 2))


def problem(clients=M, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, 12, D, generator=draw)
    return dp.Federation.from_clients([(one, (one[:, 0] > 0).long()) for one in x])


def engine_of(federation, candidates, algorithm=ALGORITHM, local=GOOD, rounds=ROUNDS, **options):
    torch.manual_seed(0)
    model = net(3)

    def prepared(one: dp.Candidate, extras: Extras):
        given = {"local": one.local or local, "rounds": rounds, "extras": extras, **options}
        return prepare(one.model or model, federation, one.algorithm or algorithm, **arguments(given))

    return compared(candidates_of(candidates), local, rounds, prepared)[0]


def run(candidates, federation=None, algorithm=ALGORITHM, *, local=GOOD, rounds=ROUNDS, **options):
    torch.manual_seed(0)
    given = {"local": local, "rounds": rounds, "candidates": candidates, **options}
    return dp.train(net(3), federation or problem(), algorithm, **arguments(given))


def requests(engine, number=1):
    players = engine.begin().players
    return [
        Request(UPDATE, number, one, engine.playing(k).mechanism.at_radius(1.0), (place, len(players)))
        for place, (k, one) in enumerate(players.items())
    ]


def test_half_of_the_candidates_go_after_each_phase_and_all_phases_take_a_fifth_of_the_rounds():
    assert phases_of(2, 50) == ((5, 1),)
    assert phases_of(3, 50) == ((3, 2), (8, 1))
    assert phases_of(5, 50) == ((2, 3), (5, 2), (10, 1))
    assert phases_of(5, 100) == ((4, 3), (10, 2), (20, 1))
    assert phases_of(8, 5) == ((1, 4), (2, 2), (3, 1))
    with pytest.raises(InputError, match="too few"):
        phases_of(8, 3)


@pytest.mark.parametrize("participation", [None, dp.Poisson(0.5)])
def test_every_client_is_in_one_group_and_groups_change_from_round_to_round(participation):
    algorithm = dp.cdp_fedexp(clip="adaptive", noise_multiplier=1.0)
    engine = engine_of(problem(), [GOOD, BAD, dp.Sgd(lr=0.1, steps=3)], algorithm, participation=participation)
    drawn = [torch.cat([engine.cohort.drawn(one) for one in requests(engine, number)]) for number in (1, 2)]
    for cohort in drawn:
        assert len(cohort.unique()) == len(cohort)
    if participation is None:
        assert [len(engine.cohort.drawn(one)) for one in requests(engine)] == [M // 3] * 3
        assert not torch.equal(*drawn)


def test_rates_of_all_candidates_are_rescaled_after_the_same_rounds_and_every_vote_is_announced():
    algorithm = dp.cdp_fedexp(clip="adaptive", noise_multiplier=4.0)
    engine = engine_of(problem(), [net(3), net(60)], algorithm, local=dp.Sgd(lr="auto", steps=3))
    probes = [engine.playing(number).probe for number in (0, 1)]
    noises = [one.mechanism.noise_share(len(one.start), M) for one in engine.tournament.engines]
    assert noises[0] < 1 < noises[1]
    assert probes[0].scale_rounds == probes[1].scale_rounds
    announced = next(rounds for event, rounds in engine.later_votes() if event.question == SCALE)
    assert set(announced) == set(probes[0].scale_rounds)


def test_noise_moves_an_adaptive_clip_by_at_most_a_tenth_in_a_small_group_too():
    engine = engine_of(problem(), [GOOD, BAD], dp.cdp_fedexp(clip="adaptive", noise_multiplier=20.0)).playing(0)
    for groups in (1, 2, 8):
        off = engine.mechanism.vote_noise(WITHIN_CLIP) / (M / groups)
        votes = {WITHIN_CLIP: engine.algorithm.clip.quantile - off}
        release = Release(torch.zeros_like(engine.start), 0.0, votes, engine.mechanism.clip)
        moved, _ = engine._advance(engine.begin(), release, groups)
        assert off > 0.2
        assert math.log(moved.radius / engine.mechanism.clip) == pytest.approx(0.1)


@pytest.mark.parametrize("participation", [dp.Full(), dp.FixedSize(M)])
def test_a_clients_group_does_not_depend_on_how_many_others_there_are(participation):
    """Under add-remove adjacency nothing else of the others may move when one leaves; with a fixed size it was an error."""
    algorithm = dp.cdp_fedexp(clip="adaptive", target_epsilon=50.0, adjacency="add-remove")
    groups = []
    for clients in (M, M - 1):
        engine = engine_of(problem(clients), [GOOD, BAD], algorithm, population=2 * M, participation=participation)
        groups.append(engine.cohort.groups(requests(engine)[0], 2))
    assert torch.equal(groups[0][: M - 1], groups[1])


def test_one_client_changes_one_candidates_sum():
    rows, sums = [problem().client(number) for number in range(M)], []
    for x, y in (rows[7], (10 * rows[7][0], 1 - rows[7][1])):
        clients = dp.Federation.from_clients([*rows[:7], (x, y), *rows[8:]])
        engine = engine_of(clients, [GOOD, dp.Sgd(lr=0.1, steps=3), dp.Sgd(lr=0.3, steps=3)])
        sums.append([engine.cohort.answer(one).sums.vector for one in requests(engine)])
    assert [torch.equal(a, b) for a, b in zip(*sums, strict=True)].count(False) == 1


def test_groups_that_share_a_client_end_the_round_before_it_is_charged(monkeypatch):
    engine, ledger = engine_of(problem(), [GOOD, BAD]), Ledger.in_memory()
    monkeypatch.setattr(Simulation, "groups", lambda self, request, groups: torch.full((M,), request.group[0]))
    with pytest.raises(RoundFailed, match="two candidates"):
        engine.step(engine.begin(), ledger)
    assert len(ledger) == 0


class Remembers(nn.Module):
    """A network whose sign follows from how many different numbers of rows it has seen."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(D, 2), set()

    def forward(self, x):
        self.seen.add(x.shape[0])
        return self.layer(x) * (-1.0) ** len(self.seen)


def secure_votes(clients, models):
    """The bin of each client's vote on two candidates with fixed rates, in a secure run; None for no vote."""
    optimizers = [dp.Sgd(lr=lr, steps=2, max_examples=32) for lr in (0.1, 0.2)]
    pair = [dp.Candidate(model=model, local=local) for model, local in zip(models, optimizers, strict=True)]
    algorithm = dp.cdp_fedexp(clip=1.0, target_epsilon=50.0)
    engine = engine_of(dp.Federation.from_clients(clients, finite=False), pair, algorithm, secure=True)
    draw, state = torch.Generator().manual_seed(0), engine.begin()
    moved = {}
    for number, one in state.players.items():
        w = one.w + torch.randn(len(one.w), generator=draw, dtype=one.w.dtype)
        moved[number] = replace(one, w=w, recent=(w,))
    state = replace(moved.pop(0), rivals=moved)
    request = Request(CANDIDATE, 1, state, engine.mechanism_of(CANDIDATE, 1.0))
    found = {}
    for chunk in engine.cohort.chunks(torch.arange(len(clients))):
        for client, row in zip(chunk.tolist(), engine.cohort.rows(request, state.w.float(), chunk), strict=False):
            found[client] = int(row.argmax()) if bool(row.any()) else None
    return found


def test_in_a_secure_run_a_vote_does_not_depend_on_the_sizes_of_others():
    draw = torch.Generator().manual_seed(1)
    clients = [(torch.randn(n, D, generator=draw), torch.randint(2, (n,), generator=draw)) for n in (30, 3, 9, 17, 2)]
    found = []
    for size in (9, 0):
        given = [(x[:size], y[:size]) if number == 2 else (x, y) for number, (x, y) in enumerate(clients)]
        torch.manual_seed(0)
        found.append(secure_votes(given, [Remembers(), Remembers()]))
    assert found[1].pop(2) is None
    assert found[0].pop(2) is not None
    assert found[0] == found[1]


def test_a_client_does_not_vote_for_a_candidate_that_fails_on_its_rows():
    draw = torch.Generator().manual_seed(1)
    clients = [(torch.randn(4, D, generator=draw), torch.randint(2, (4,), generator=draw)) for _ in range(4)]
    clients[2] = (clients[2][0], clients[2][1] * 0 + 4)  # a label that only the wide network knows
    clients[3] = (clients[3][0] * math.nan, clients[3][1])
    for wide in (0, 1):
        models = [nn.Linear(D, 2), nn.Linear(D, 2)]
        models[wide] = nn.Linear(D, 5)
        votes = secure_votes(clients, models)
        assert (votes[2], votes[3]) == (wide, None)


def test_requests_of_one_round_must_cost_the_same_and_have_groups_of_their_own():
    engine, ledger = engine_of(problem(), [GOOD, BAD]), Ledger.in_memory()
    first, second = requests(engine)
    dearer = replace(second, mechanism=replace(second.mechanism, noise_multiplier=0.01))
    for pair in ([first, dearer], [first, replace(second, group=first.group)], [first, replace(second, group=None)]):
        with pytest.raises(InputError, match="must cost the same"):
            engine._ask(pair, ledger)
    assert len(ledger) == 0


def test_a_tournament_costs_its_rounds_and_its_votes():
    made = run([GOOD, BAD, dp.Sgd(lr=0.1, steps=3)])
    rounds = [entry for entry in made.ledger.entries if not entry.event.question]
    votes = [entry for entry in made.ledger.entries if entry.event.question]
    assert [(entry.round, entry.event) for entry in rounds] == [(n + 1, rounds[0].event) for n in range(ROUNDS)]
    assert [entry.event.question for entry in votes] == [CANDIDATE] * 2
    expected = compose([(rounds[0].event, ROUNDS), (votes[0].event, 2)], 1e-5).epsilon
    assert made.privacy.epsilon_total == pytest.approx(expected, rel=1e-9)
    assert 49.9 < made.privacy.epsilon_total <= 50.0
    plain = engine_of(problem(), [GOOD, BAD]).mechanism.noise_multiplier
    alone = prepare(net(3), problem(), ALGORITHM, local=GOOD, rounds=ROUNDS)[0].mechanism.noise_multiplier
    assert 1.0 < plain / alone < 1.01


def test_the_better_candidate_wins_and_its_network_comes_back(tmp_path):
    algorithm = dp.cdp_fedexp(clip="adaptive", target_epsilon=1000.0)
    candidates = [dp.Candidate(model=net(2), local=BAD), dp.Candidate(model=net(16), local=GOOD)]
    made = run(candidates, algorithm=algorithm, rounds=40, out=tmp_path / "r")
    assert [line["candidates"] for line in made.history] == [2] * 4 + [1] * 36
    assert made.history[-1]["candidate"] == 1
    loaded = dp.Run.load(tmp_path / "r", net(16))
    assert all(map(torch.equal, loaded.model.parameters(), made.model.parameters()))
    assert verify.outcome(verify.verify_run(tmp_path / "r")) == "holds"


def test_fit_compares_multiples_of_the_voted_rate_under_one_promise():
    made = dp.fit(net(3), problem(), epsilon=50, rounds=6, candidates=[dp.Candidate(), dp.Candidate(rate=4.0)])
    asked = [entry.event.question for entry in made.ledger.entries if entry.event.question]
    assert asked[:2] == [RATE, CLIP]
    # After the first round one candidate is left, so that the rate is rescaled as often as without a tournament.
    assert Counter(asked) == {RATE: 1, CLIP: 1, CANDIDATE: 1, SCALE: 2}
    # A third vote on the scale is reserved, because candidates may differ in their noise; with small noise it is not asked.
    assert 49.7 < made.privacy.epsilon_total <= 50.0
    assert any("of 2 candidates" in fact for fact in made.privacy.choices)


def test_a_candidate_with_a_multiple_of_the_voted_rate_begins_with_as_large_a_multiple_of_the_first_clip():
    engine = engine_of(problem(), [dp.Candidate(), dp.Candidate(rate=4.0)], local=dp.Sgd(lr="auto", steps=3))
    voted, other = engine.choose(engine.begin(), Ledger.in_memory(), save=lambda state: None).players.values()
    assert other.radius == 4.0 * voted.radius
    assert float(other.memory[LOCAL_RATE]) == 4.0 * float(voted.memory[LOCAL_RATE])


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("secure", [False, True])
def test_a_run_that_is_interrupted_in_a_tournament_ends_as_if_it_had_not_been(tmp_path, monkeypatch, secure):
    """A secure run draws anew, so that only its charges are compared: no vote is taken twice."""
    candidates, few = [GOOD, BAD, net(4)], problem(18)
    given = {"secure": secure, "rounds": 4}
    whole = run(candidates, few, **given)
    for number in (2,) if secure else (1, 2, 3):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            crash_in(patch, Engine, "step", number, before=True)
            with pytest.raises(Crash):
                run(candidates, few, out=folder, **given)
        again = run(candidates, few, out=folder, **given)
        charges, expected = ([(e.round, e.event.question) for e in one.ledger.entries] for one in (again, whole))
        assert charges == expected
        if not secure:
            assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


def test_a_run_that_a_callback_stops_in_a_tournament_claims_what_it_had_planned(tmp_path):
    made = run([GOOD, BAD, dp.Sgd(lr=0.1, steps=3)], on_round=crash_after(1, dp.Stop), out=tmp_path / "r")
    assert len(made.history) == 1
    assert made.privacy.planned_epsilon_total == pytest.approx(50.0, rel=1e-3)
    assert verify.outcome(verify.verify_run(tmp_path / "r")) == "holds"


@pytest.mark.parametrize(
    ("candidates", "options", "sentence"),
    [
        ([GOOD], {}, "2 to 8"),
        ([GOOD, 3], {}, "Candidate"),
        ([GOOD, GOOD], {}, "the same"),
        ([net(2)] * 2, {"local": dp.Sgd(lr="auto", steps=3)}, "the same"),
        ([dp.Candidate(), dp.Candidate(rate=3.0)], {}, "multiplies a rate that is fixed"),
        ([dp.Candidate(rate=3.0), dp.Candidate(rate=2.0)], {"local": dp.Sgd(lr="auto", steps=3)}, "before them"),
        ([GOOD, BAD], {"algorithm": dp.ldp_fedexp(clip=0.5, noise_multiplier=1.0)}, "local setting"),
        ([GOOD, BAD], {"algorithm": dp.dp_scaffold(clip=0.5, noise_multiplier=1.0)}, "DP-SCAFFOLD"),
        ([ALGORITHM, dp.dp_fedavg(clip="adaptive", target_epsilon=20.0)], {}, "does not cost"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_its_sentence(candidates, options, sentence):
    with pytest.raises(InputError, match=sentence):
        run(candidates, **options)
