"""Ways round the promise of a rate that sets itself, each as somebody found it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from dpfedexp import Federation, InputError, Sgd, cdp_fedexp, train
from dpfedexp.accounting import Ledger, compose
from dpfedexp.algorithms.participation import Full
from dpfedexp.algorithms.probe import asked, probe_of
from dpfedexp.core.noise.streams import Streams
from dpfedexp.engine import verify
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.rounds import RATE

AUTO = Sgd(lr="auto", steps=2, max_examples=8)
FIXED = cdp_fedexp(clip=0.3, noise_multiplier=2.0)


def federation(count=24, rows=6, first=None, wrong=False, transform=None):
    generator = torch.Generator().manual_seed(1)
    clients = []
    for client in range(count):
        x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        held = first if first and client == 0 else rows
        if wrong and client == 7:
            y[2] = 9
        clients.append((x[:held], y[:held]))
    made = Federation.from_clients(clients)
    made.transform = transform
    return made


def test_a_client_whose_rows_make_the_loss_fail_stops_no_secure_run_and_is_not_named():
    done = train(nn.Linear(4, 3), federation(12, wrong=True), FIXED, local=AUTO, rounds=2, secure=True, progress=False)
    assert len(done.history) == 2


def test_a_clients_size_changes_no_other_row_where_the_transform_draws(monkeypatch):
    """Losses decide whether a row is sent, so what they draw must be the client's own too."""
    monkeypatch.setattr("dpfedexp.engine.prepare.secrets.randbits", lambda bits: 3)
    found = []
    for first in (4, 8):
        torch.manual_seed(5)
        noisy = federation(12, 4, first, transform=lambda x: x + 0.1 * torch.randn_like(x))
        simulation, _ = prepare(nn.Linear(4, 3), noisy, FIXED, local=AUTO, rounds=2, secure=True)
        state = simulation.begin()
        state = replace(state, memory={**state.memory, RATE: torch.full_like(state.memory[RATE], 0.3)})
        torch.manual_seed(9)
        rows = [simulation.updates(state, state.w.float(), torch.arange(12), number)[1:12] for number in (1, 2)]
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1])


def test_a_client_who_leaves_changes_no_other_bin():
    probe = probe_of(FIXED.bind(15, 1000.0, Full().sampling(1000), 50), 50, Full().sampling(1000), False)
    places = torch.randint(0, 14, (1000,), generator=torch.Generator().manual_seed(0))

    def sums(clients):
        seen = []
        quiet = replace(probe, rate_noise=1e-12)
        shares, _ = quiet.answers(
            "local rate",
            iter(clients.split(300)),
            lambda some: places[some],
            1000.0,
            Streams(0).at("probe noise", 0),
            lambda: seen.append(1),
        )
        assert seen == [1]
        return shares

    everybody = torch.arange(1000)
    moved = sums(everybody) - sums(everybody[1:])
    own = int(places[0]) - 1
    assert float(moved[own]) == pytest.approx(1e-3, abs=1e-9)
    assert float(moved.abs().sum()) == pytest.approx(1e-3, abs=1e-8)


@pytest.mark.parametrize("rounds", [10, 200, 5000])
def test_a_vote_before_the_first_round_never_costs_more_than_a_round(rounds):
    sampling = Full().sampling(1000)
    mechanism = FIXED.bind(15, 1000.0, sampling, rounds)
    for event in probe_of(mechanism, rounds, sampling, False).events(sampling, adaptive=True):
        assert event.mu <= mechanism.event(sampling).mu * (1 + 1e-12)


def test_a_ledger_without_the_votes_that_the_configuration_plans_does_not_verify(tmp_path):
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0)
    done = train(nn.Linear(4, 3), federation(40), algorithm, local=AUTO, rounds=2, progress=False)
    kept = [entry for entry in done.ledger.entries if entry.round > 0]
    with_out = Ledger.create(tmp_path / "ledger.jsonl", delta=1e-5, run=kept[0].run)
    for entry in kept:
        with_out.charge(entry.round, entry.event, run=entry.run, noise=entry.noise)
    with_out.close()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in done.history))
    sampling = Full().sampling(40)
    _, beside = asked(algorithm, AUTO, 2, sampling, False)
    before = [entry.event for entry in done.ledger.entries if entry.round == 0]
    assert beside is not None
    checks = {check.name: check for check in verify.verify_run(tmp_path, kept[0].event, before)}
    assert not checks["configuration"].passed
    assert "never charged" in checks["configuration"].detail


class Remembers(nn.Module):
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
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(6, 4, generator=generator), torch.zeros(6, dtype=torch.int64)) for _ in range(20)]
    clients[5] = (100 * clients[5][0], clients[5][1])
    ledger = Ledger.in_memory()
    with pytest.raises(InputError, match="looks at values"):
        train(
            Remembers(),
            Federation.from_clients(clients),
            FIXED,
            local=AUTO,
            rounds=2,
            secure=True,
            ledger=ledger,
            progress=False,
        )
    assert len(ledger) == 0


def test_a_vote_that_the_update_decides_is_not_called_exact():
    """Whether training helped is whether the row is zero, so no two neighbours differ in both to the full."""
    sampling = Full().sampling(1000)
    votes, beside = asked(FIXED, AUTO, 50, sampling, False)
    event = FIXED.bind(15, 1000.0, sampling, 50, votes=votes, beside=beside).event(sampling)
    assert not event.exact
    assert compose([(event, 50)], 1e-5).epsilon > 0
