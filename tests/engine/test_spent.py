"""The ε in the record of a round: never below what was charged, and cheap however many rounds there are."""

from __future__ import annotations

import pytest

from dpfedexp.accounting import Ledger, Sampling, compose
from dpfedexp.accounting.charges import central_gaussian
from dpfedexp.engine import spent

DELTA = 1e-5


def charged(rounds: int, sampling: Sampling) -> Ledger:
    ledger = Ledger.in_memory()
    for number in range(1, rounds + 1):
        ledger.charge(number, central_gaussian(3.0, sampling=sampling), noise="seed 0")
    return ledger


@pytest.mark.parametrize("rounds", [1, 8, 9, 23, 100])
def test_a_record_of_sampled_rounds_bounds_what_was_charged_by_a_quarter_more_rounds_at_most(rounds):
    ledger = charged(rounds, Sampling("poisson", 0.1))
    exact = ledger.guarantee(DELTA).epsilon
    event = central_gaussian(3.0, sampling=Sampling("poisson", 0.1))
    most = compose([(event, max(rounds, int(1.25 * rounds) + 1))], DELTA).epsilon
    assert exact <= spent.epsilon_so_far(ledger, DELTA, last=False) <= most
    assert spent.epsilon_so_far(ledger, DELTA, last=True) == exact


@pytest.mark.parametrize("kind", [Sampling(), Sampling("fixed", 0.1)])
def test_what_is_computed_in_a_moment_is_that_of_the_round(kind):
    ledger = charged(37, kind)
    assert spent.epsilon_so_far(ledger, DELTA, last=False) == ledger.guarantee(DELTA).epsilon


def test_a_thousand_records_need_few_numbers_of_rounds():
    known = {spent.next_known(rounds) for rounds in range(1, 1001)}
    assert len(known) < 35
    assert all(rounds <= spent.next_known(rounds) <= 1.25 * rounds + 1 for rounds in range(1, 1001))
