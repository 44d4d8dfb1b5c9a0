"""What is read once: the rows of a round on the device."""

import pytest
import torch
from torch import nn

from dpfedexp import Execution, Federation, Sgd, fedavg, train
from dpfedexp.trainers.select import Programs, by_program
from dpfedexp.trainers.steps import Steps
from tests.trainers.shared import labeled, simulated

FULL, SHUFFLED = Sgd(lr=0.1, steps=2), Sgd(lr=0.1, epochs=1, batch_size=2)


def clients(sizes=(4,) * 6, **options) -> Federation:
    return labeled((3,), sizes, labels=2, seed=3, **options)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def trained(federation: Federation, trainer: str, local: Sgd, **options) -> torch.Tensor:
    execution = Execution(device="cpu", trainer=trainer)
    run = train(net(), federation, fedavg(), local=local, rounds=5, execution=execution, **options)
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def recorded(federation: Federation, local: Sgd):
    """Clients, steps over memory that stays, and a call of such steps for some clients and a round."""
    run = simulated(net(), federation, local)
    core = by_program(run.task, Programs(run.task).plain)
    held = Steps(run.task, "recorded", core, record=lambda function: function)
    w = run.task.layout.read(run.task.model).float()
    return run, held, lambda who, number, steps=held: steps(w, who, run.plan(who, number), number)


@pytest.fixture
def readings(monkeypatch):
    """The clients of every reading of a federation."""
    seen, read = [], Federation.row_reader

    def counted(self, clients, positions, device=None):
        seen.append(torch.as_tensor(clients).tolist())
        return read(self, clients, positions, device)

    monkeypatch.setattr(Federation, "row_reader", counted)
    return seen


def test_a_recording_takes_every_clients_own_number_of_steps():
    """Two threes of clients, alike in the most that one of them holds and in nothing else."""
    federation, local = clients((2, 8, 4, 8, 2, 6)), Sgd(lr=0.1, epochs=2, batch_size=2)
    simulation, held, step = recorded(federation, local)
    plain, every = Steps(simulation.task, "plain", held.core), torch.arange(6)
    for number, who in enumerate((every[:3], every[:3], every[3:], every[:3], every[3:]), start=1):
        assert torch.equal(step(who, number), step(who, number, plain))


def test_the_same_clients_with_the_same_rows_are_read_once(readings):
    _, _, step = recorded(clients(), FULL)
    who = torch.arange(6)
    readings.clear()
    rows = [step(who, number) for number in range(1, 5)]
    assert readings == [who.tolist()]
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("local", [FULL, SHUFFLED], ids=["full", "shuffled"])
def test_other_clients_rows_or_shuffles_are_read_again(local):
    """As many clients of the same sizes, so that nothing but the rows is another."""
    _, _, step = recorded(clients(), local)
    for number, who in enumerate(([0, 1, 2], [0, 1, 2], [3, 4, 5], [0, 1, 2], [2, 1, 0]), start=1):
        assert torch.equal(step(torch.tensor(who), number), recorded(clients(), local)[2](torch.tensor(who), number))


class Masked(Federation):
    """A view that hides a feature, and writes into the positions that it is given."""

    def gather(self, clients, positions, device=None):
        x, y = super().gather(clients, positions.clone(), device)
        positions += 1000
        return x * torch.tensor([1.0, 1.0, 0.0]), y


@pytest.mark.parametrize("trainer", ["loop", "fast"])
def test_clients_that_gather_their_own_way_are_read_that_way(trainer):
    held = clients()
    masked = Masked(held.inputs, held.targets, [list(range(4 * i, 4 * i + 4)) for i in range(6)])
    model = trained(masked, trainer, FULL)
    assert torch.allclose(model, trained(masked, "loop", FULL), atol=1e-6)
    assert torch.equal(model[:15].reshape(5, 3)[:, 2], net()[0].weight[:, 2])


def test_data_that_change_and_tensors_of_the_caller_are_seen():
    simulation, steps, _ = recorded(clients(), FULL)
    who, w = torch.tensor([0, 1, 2]), simulation.task.layout.read(simulation.task.model).float()
    first = steps(w, who, simulation.plan(who, 1), 1)
    simulation.task.clients.inputs.mul_(2.0)
    second = steps(w, who, simulation.plan(who, 2), 2)
    plan = simulation.plan(who, 3)
    who.copy_(torch.tensor([3, 4, 5]))
    third = steps(w, who, plan, 3)
    simulation.task.clients.targets = 1 - simulation.task.clients.targets
    fourth = steps(w, who, simulation.plan(who, 4), 4)
    for one, other in ((first, second), (second, third), (third, fourth)):
        assert not torch.equal(one, other)


def test_chunks_do_not_push_one_another_out():
    _, held, step = recorded(clients(), FULL)
    for number in (1, 2, 3):
        for who in (torch.arange(3), torch.arange(3, 6)):
            step(who, number)
    assert held._kept is None


def test_a_transform_is_asked_in_every_round():
    calls = []

    def noisy(x):
        calls.append(len(x))
        return x + 0.1 * len(calls)

    simulation, _, step = recorded(clients(transform=noisy), FULL)
    assert simulation.task.clients.data_version is None
    first, second = (step(torch.arange(6), number) for number in (1, 2))
    assert not torch.equal(first, second)
