"""A client's own loss: a plain forward's, whoever it is computed with, and infinite where it is not a number."""

import math

import pytest
import torch

from dpfedexp import Sgd
from dpfedexp.core.batches import schedule
from dpfedexp.core.noise.streams import Streams
from dpfedexp.trainers.client_losses import MOST_ROWS, AllRows, ClientLosses
from tests.trainers.shared import sampled, simulated
from tests.trainers.test_local_optimisers import MODEL, SAMPLER, SIZES


@pytest.fixture(scope="module")
def made():
    simulation = simulated(MODEL, sampled(SAMPLER, SIZES), Sgd(lr=0.1, steps=1), "vectorised")
    w, clients = simulation.task.layout.read(simulation.task.model).float(), simulation.task.clients
    return clients, simulation, w, 0.1 * torch.randn(len(clients), len(w), generator=torch.Generator().manual_seed(3))


def losses(made, rows, *, apart, who=None):
    clients, simulation, w, _ = made
    numbers = torch.arange(len(clients)) if who is None else who
    streams = Streams(0)
    plan = schedule(AllRows.of(simulation.task.local), clients.sizes[numbers], streams.at("losses", 1).generator)
    return ClientLosses(simulation.task, simulation.trainer, streams, unit=1 if apart else None)(
        w, rows, numbers, plan, 1
    )


@pytest.mark.parametrize("apart", [False, True])
def test_it_is_the_mean_loss_of_a_plain_forward(made, apart):
    clients, simulation, w, rows = made
    plain = []
    for n in range(len(clients)):
        x, y = clients.client(n)
        params = {name: value[n] for name, value in simulation.task.layout.unflatten(w + rows).items()}
        output = torch.func.functional_call(MODEL, params, (x,))
        plain.append(torch.nn.functional.cross_entropy(output, y))
    # Float32 in another order of addition.
    torch.testing.assert_close(losses(made, rows, apart=apart), torch.stack(plain), rtol=1e-5, atol=1e-6)


def test_apart_it_is_the_same_bit_for_bit_without_the_others(made):
    rows = made[3]
    together = losses(made, rows, apart=True)
    for n in range(len(rows)):
        alone = losses(made, rows[n : n + 1], apart=True, who=torch.tensor([n]))
        assert torch.equal(alone[0], together[n])


def test_a_loss_that_is_not_a_number_is_infinite(made):
    rows = made[3].clone()
    rows[1] = math.nan
    for apart in (False, True):
        found = losses(made, rows, apart=apart)
        assert found[1] == math.inf
        assert bool(found[[0, 2, 3]].isfinite().all())


def test_no_more_rows_count_than_a_client_trains_on():
    assert AllRows.of(Sgd(lr=0.1, steps=1)).max_examples == MOST_ROWS
    assert AllRows.of(Sgd(lr=0.1, steps=1, max_examples=20)).max_examples == 20
