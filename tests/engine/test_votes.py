"""Votes in a simulated round: who answers, what is recorded, and that nothing else of a run changes."""

from dataclasses import replace

import pytest
import torch

from dpfedexp import Execution, Sgd, cdp_fedexp, fedavg
from dpfedexp.accounting import Ledger
from dpfedexp.algorithms.probe import UPDATE
from dpfedexp.core.sums import VoteSpec
from dpfedexp.data import Federation, synthetic_regression
from dpfedexp.engine.engine import Request
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import InputError
from dpfedexp.models import linear_regression

D, M = 12, 30
LENGTH, NUMBER = VoteSpec("length", 0.0, 2.0), VoteSpec("number", 0.0, M - 1.0)
CLIENTS = synthetic_regression(M, D, seed=1).federation


def answers(request, clients, updates):
    lengths = updates[: len(clients)].double().norm(dim=1)
    return torch.stack([lengths, clients.to(lengths)], dim=1)


def simulation(algorithm, clients=CLIENTS, ballots=answers, votes=(LENGTH, NUMBER), **options):
    given = {"local": Sgd(lr=0.02, steps=3), "rounds": 2, "execution": "cpu"} | options
    made, _ = prepare(linear_regression(D), clients, algorithm, **given)
    secure = options.get("secure", False)
    mechanism = algorithm.bind(D, made.participation.expected(M), made.sampling, 2, secure, votes=votes)
    return replace(made, mechanism=mechanism, cohort=replace(made.cohort, ballots=ballots))


def rounds_of(made):
    state, ledger, found = made.begin(), Ledger.in_memory(), []
    for _ in range(2):
        state, result = made.step(state, ledger)
        found.append(result)
    return state, found, ledger


def test_released_votes_are_recorded_by_name_and_charged_together():
    _, found, ledger = rounds_of(simulation(cdp_fedexp(clip="adaptive", noise_multiplier=1e-6)))
    assert list(found[0].extra) == ["noisy_mean_within_clip", "noisy_mean_length", "noisy_mean_number"]
    [(event, count)] = ledger.charges()
    assert (count, [query.name for query in event.queries]) == (2, ["update", "within clip", "length", "number"])


def test_every_client_answers_for_itself_whatever_the_chunks():
    """A run without privacy shows the exact means: of the clients' numbers it is known."""
    found = [rounds_of(simulation(fedavg(), execution=Execution(chunk_size=n)))[1][0].extra for n in (1, 7, 30)]
    for extra in found:
        assert extra["noisy_mean_number"] == pytest.approx((M - 1) / 2, abs=1e-9)
        assert extra == pytest.approx(found[0], rel=1e-5)
    assert 0.0 < found[0]["noisy_mean_length"] < 2.0


def test_votes_change_neither_the_clients_nor_the_noise_of_an_update():
    """The same noise on the update, but for the little that the votes cost it: with z = 5 and 30 clients 0.995%."""
    algorithm = cdp_fedexp(clip=0.3, noise_multiplier=5.0)
    with_votes = simulation(algorithm)
    assert 1.0 < with_votes.mechanism.noise_multiplier / 5.0 <= 1.01
    without = replace(with_votes, mechanism=replace(with_votes.mechanism, votes=()))
    (ours, _, _), (theirs, _, _) = rounds_of(with_votes), rounds_of(without)
    assert torch.equal(ours.w, theirs.w)


def test_a_secure_run_answers_in_padded_shapes():
    secure = {"secure": True, "execution": Execution(chunk_size=8)}
    made = simulation(cdp_fedexp(clip="adaptive", noise_multiplier=1e-4), **secure)
    assert made.cohort.unit is not None
    # The noise of 30 clients' default is 1.5, and the range of numbers 29: 29·1.5/30·8 is eight deviations.
    quiet = replace(made.mechanism, votes=tuple(replace(vote, noise=1e-3) for vote in made.mechanism.votes))
    _, found, _ = rounds_of(replace(made, mechanism=quiet))
    assert found[0].extra["noisy_mean_number"] == pytest.approx((M - 1) / 2, abs=29 * 1e-3 / 30 * 8)
    _, plain, _ = rounds_of(simulation(fedavg()))
    # Eight deviations of the noise, and float32 rounding of other shapes.
    ours, exact = (one[0].extra["noisy_mean_length"] for one in (found, plain))
    assert ours == pytest.approx(exact, abs=2 * 1e-3 / 30 * 8 + 1e-5)


def test_an_empty_client_answers_too_and_an_empty_cohort_has_votes_of_zero():
    some = Federation.from_clients([(torch.ones(n, D), torch.zeros(n)) for n in (0, 2, 3)])
    made = simulation(fedavg(), some)
    _, found, _ = rounds_of(made)
    assert found[0].extra["noisy_mean_number"] == pytest.approx(1.0, abs=1e-9)
    request = Request(UPDATE, 1, made.begin(), made.mechanism)
    sums = made.cohort.collect(request, torch.zeros(0, dtype=torch.int64)).sums
    assert (sums.count, sums.votes.tolist()) == (0, [0.0, 0.0])


@pytest.mark.parametrize(
    ("ballots", "reason"),
    [
        (None, "'length' has no ballots"),
        (lambda r, c, u: torch.zeros(len(c), 1), r"the votes have shape \(30, 1\)"),
        (lambda r, c, u: torch.zeros(3, 2), r"the votes have shape \(3, 2\)"),
    ],
)
def test_votes_without_answers_are_one_sentence_and_cost_nothing(ballots, reason):
    made, ledger = simulation(cdp_fedexp(clip=0.3, noise_multiplier=1.0), ballots=ballots), Ledger.in_memory()
    with pytest.raises(InputError, match=reason):
        made.step(made.begin(), ledger)
    assert len(ledger) == 0
