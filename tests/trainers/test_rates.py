"""Rates that come with the call: every trainer does with them what it does with an optimiser's own rate."""

import pytest
import torch

from dpfedexp import Execution, Federation, Sgd, fedavg
from dpfedexp.engine.prepare import prepare
from tests.optimisers import AdamW, Bounded, HeavyBall
from tests.trainers.test_local_optimisers import MODEL, SAMPLER, SIZES, TRAINERS

RATES = (0.02, 0.05, 0.02, 0.3)
WORK = {"epochs": 2, "batch_size": 2, "proximal": 0.3}
OPTIMISERS = {"sgd": Sgd, "heavy ball": HeavyBall, "adamw": AdamW, "bounded": Bounded}


@pytest.fixture(scope="module")
def clients():
    generator = torch.Generator().manual_seed(7)
    return Federation.from_clients([SAMPLER(n, generator) for n in SIZES])


def updates(clients, local, trainer, rates=None, calls=1):
    base, make = TRAINERS[trainer]
    execution = Execution(trainer=base, device="cpu")
    simulation, _ = prepare(MODEL, clients, fedavg(), local=local, rounds=1, execution=execution)
    everybody, w = torch.arange(len(clients)), simulation.begin().w.float()
    made = simulation.trainer if make is None else make(simulation)
    given = None if rates is None else torch.tensor(rates)
    for _ in range(calls):
        rows = made(w, everybody, simulation.plan(everybody, 1), 1, None, given)
    return rows


@pytest.fixture(scope="module")
def expected(clients):
    """name → each client's update by the loop, with its rate as the optimiser's own."""
    return {
        name: torch.stack([updates(clients, kind(lr=rate, **WORK), "loop")[n] for n, rate in enumerate(RATES)])
        for name, kind in OPTIMISERS.items()
    }


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_each_client_goes_at_its_own_rate_in_every_trainer(name, trainer, clients, expected):
    """Float32 after up to eight steps: 2e-5 of the largest entry. The third call replays a recording with its own rates."""
    local = OPTIMISERS[name](lr=9.0, **WORK)
    rows = updates(clients, local, trainer, RATES, calls=3)
    atol = 2e-5 * float(expected[name].abs().max())
    torch.testing.assert_close(rows, expected[name], rtol=0, atol=atol)
