"""Steps that are recorded once and replayed: every round reads its own clients' rows."""

import math

import pytest
import torch
from torch import nn

from dpfedexp import Execution, Federation, Sgd, fedavg, train
from dpfedexp.trainers.recording import record
from dpfedexp.trainers.select import Programs, by_program
from dpfedexp.trainers.steps import Steps
from tests.trainers.shared import labeled, recorded, simulated, updates

FULL, SHUFFLED = Sgd(lr=0.1, steps=2), Sgd(lr=0.1, epochs=1, batch_size=2)


def clients(sizes=(4,) * 6, **options) -> Federation:
    return labeled((3,), sizes, labels=2, seed=3, **options)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def held(federation: Federation, local: Sgd):
    """A run, and its steps over memory that stays."""
    run = simulated(net(), federation, local)
    return run, recorded(run, by_program(run.task, Programs(run.task).plain))


def test_a_recording_takes_every_clients_own_number_of_steps():
    """Two threes of clients, alike in the most that one of them holds and in nothing else."""
    federation, local = clients((2, 8, 4, 8, 2, 6)), Sgd(lr=0.1, epochs=2, batch_size=2)
    run, steps = held(federation, local)
    plain, every = Steps(run.task, "plain", steps.core), torch.arange(6)
    for number, who in enumerate((every[:3], every[:3], every[3:], every[:3], every[3:]), start=1):
        assert torch.equal(updates(run, steps, number, who=who), updates(run, plain, number, who=who))


@pytest.mark.parametrize("local", [FULL, SHUFFLED], ids=["full", "shuffled"])
def test_other_clients_rows_or_shuffles_are_read_again(local):
    """As many clients of the same sizes, so that nothing but the rows is another."""
    run = held(clients(), local)
    for number, who in enumerate(torch.tensor([[0, 1, 2], [0, 1, 2], [3, 4, 5], [0, 1, 2], [2, 1, 0]]), start=1):
        assert torch.equal(updates(*run, number, who=who), updates(*held(clients(), local), number, who=who))


class Masked(Federation):
    """A view that hides a feature, and writes into the positions that it is given."""

    def gather(self, clients, positions, device=None):
        x, y = super().gather(clients, positions.clone(), device)
        positions += 1000
        return x * torch.tensor([1.0, 1.0, 0.0]), y


def test_clients_that_gather_their_own_way_are_read_that_way():
    held = clients()
    masked = Masked(held.inputs, held.targets, [list(range(4 * i, 4 * i + 4)) for i in range(6)])

    def trained(trainer: str) -> torch.Tensor:
        execution = Execution(device="cpu", trainer=trainer)
        run = train(net(), masked, fedavg(), local=FULL, rounds=5, execution=execution)
        return nn.utils.parameters_to_vector(run.model.parameters()).detach()

    fast, loop = trained("fast"), trained("loop")
    assert torch.allclose(fast, loop, atol=1e-6)
    for model in (fast, loop):
        assert torch.equal(model[:15].reshape(5, 3)[:, 2], net()[0].weight[:, 2])


def test_a_transform_is_called_in_every_round():
    calls = []

    def noisy(x):
        calls.append(len(x))
        return x + 0.1 * len(calls)

    run = held(clients(transform=noisy), FULL)
    assert not torch.equal(updates(*run, 1), updates(*run, 2))


@pytest.mark.parametrize("other", [torch.finfo(torch.float32).max, -math.inf, math.nan])
def test_recordings_with_different_constants_are_not_the_same(other):
    tapes = [record(lambda x, c=torch.tensor([c]): x + c, (torch.zeros(2),)) for c in (math.inf, math.inf, other)]
    assert tapes[0].same(tapes[1])
    assert not tapes[0].same(tapes[2])
