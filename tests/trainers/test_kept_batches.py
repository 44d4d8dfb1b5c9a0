"""What is read once: the rows of a round on the device, and the one batch of clients that come again with the same rows."""

import numpy as np
import pytest
import torch
from torch import nn

from dpfedexp import Execution, Federation, FixedSize, Sgd, fedavg, train
from dpfedexp.core.batches import Plans, schedule
from dpfedexp.engine.prepare import prepare
from dpfedexp.trainers.programs import Programs, by_program
from dpfedexp.trainers.steps import Steps

FULL, SHUFFLED = Sgd(lr=0.1, steps=2), Sgd(lr=0.1, epochs=1, batch_size=2)


def clients(count: int = 6, **options) -> Federation:
    generator = torch.Generator().manual_seed(3)
    return Federation.from_clients(
        [
            (torch.randn(4, 3, generator=generator), torch.randint(0, 2, (4,), generator=generator))
            for _ in range(count)
        ],
        **options,
    )


def uneven() -> Federation:
    """Two threes of clients, alike in the most that one of them holds and in nothing else."""
    generator = torch.Generator().manual_seed(4)
    return Federation.from_clients(
        [
            (torch.randn(n, 3, generator=generator), torch.randint(0, 2, (n,), generator=generator))
            for n in (2, 8, 4, 8, 2, 6)
        ]
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def trained(federation: Federation, trainer: str, local: Sgd, **options) -> torch.Tensor:
    execution = Execution(device="cpu", trainer=trainer)
    run = train(net(), federation, fedavg(), local=local, rounds=5, execution=execution, progress=False, **options)
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def recorded(federation: Federation, local: Sgd):
    simulation, _ = prepare(net(), federation, fedavg(), local=local, rounds=1, execution=Execution(device="cpu"))
    core = by_program(simulation.task, Programs(simulation.task).plain)
    return simulation, Steps(simulation.task, "recorded", core, record=True, capture=lambda function: function)


@pytest.fixture
def readings(monkeypatch):
    """The clients of every reading of a federation."""
    seen, read = [], Federation.reading

    def counted(self, clients, positions, device=None):
        seen.append(torch.as_tensor(clients).tolist())
        return read(self, clients, positions, device)

    monkeypatch.setattr(Federation, "reading", counted)
    return seen


@pytest.mark.parametrize(
    ("local", "kept"),
    [
        (FULL, True),
        (Sgd(lr=0.1, steps=2, max_examples=4), True),
        (Sgd(lr=0.1, steps=2, max_examples=3), False),
        (SHUFFLED, False),
    ],
)
def test_a_plan_that_draws_nothing_is_made_once(local, kept, monkeypatch):
    plans, sizes = Plans(), torch.tensor([4, 2, 4])

    def draws(seed: int):
        return lambda row: np.random.default_rng((seed, row))

    for seed, asked in enumerate((sizes, sizes, sizes + 0, sizes[:2], sizes.flip(0), sizes)):
        found, right = plans(local, asked, draws(seed), public=False), schedule(local, asked, draws(seed))
        assert torch.equal(found.positions, right.positions)
        assert torch.equal(found.weights, right.weights)
        assert torch.equal(found.steps, right.steps)
    again = plans(local, sizes, draws(0), public=False)
    # Whoever is given a plan may spoil it.
    again.positions.add_(7)
    made = []
    monkeypatch.setattr("dpfedexp.core.batches.schedule", lambda *a, **k: made.append(schedule(*a, **k)) or made[-1])
    found = plans(local, sizes.clone(), draws(0), public=False)
    assert torch.equal(found.positions, schedule(local, sizes, draws(0)).positions)
    assert (made == []) == kept


def test_a_federation_that_writes_into_its_positions_spoils_only_those():
    class Writing(Federation):
        def gather(self, clients, positions, device=None):
            rows = positions.clone()
            positions += 1000
            return super().gather(clients, rows, device)

    plain, writing = clients(), clients()
    writing.__class__ = Writing
    assert torch.equal(trained(writing, "vectorised", FULL), trained(plain, "vectorised", FULL))


def test_a_recording_takes_every_clients_own_number_of_steps():
    federation, local = uneven(), Sgd(lr=0.1, epochs=2, batch_size=2)
    simulation, by_recording = recorded(federation, local)
    plain = Steps(simulation.task, "plain", by_recording.core)
    w, every = simulation.task.layout.read(simulation.task.model).float(), torch.arange(6)
    for number, who in enumerate((every[:3], every[:3], every[3:], every[:3], every[3:]), start=1):
        plan = simulation.plan(who, number)
        assert torch.equal(by_recording(w, who, plan, number), plain(w, who, plan, number))


def test_a_reading_is_what_gathering_each_step_gives():
    federation, who = clients(), torch.tensor([4, 0, 5])
    positions = torch.randint(0, 4, (3, 7, 2), generator=torch.Generator().manual_seed(0))
    read = federation.reading(who, positions)
    for step in (6, 0, 3):
        for one, other in zip(read(step), federation.gather(who, positions[:, step]), strict=True):
            assert torch.equal(one, other)


def test_the_same_clients_with_the_same_rows_are_read_once(readings):
    simulation, steps = recorded(clients(), FULL)
    who, w = torch.arange(6), simulation.begin().w.float()
    readings.clear()
    rows = [steps(w, who, simulation.plan(who, number), number) for number in range(1, 5)]
    assert readings == [who.tolist()]
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("local", [FULL, SHUFFLED], ids=["full", "shuffled"])
def test_other_clients_rows_or_shuffles_are_read_again(local):
    """As many clients of the same sizes, so that nothing but the rows is another."""
    simulation, steps = recorded(clients(), local)
    w = simulation.begin().w.float()
    for number, who in enumerate(([0, 1, 2], [0, 1, 2], [3, 4, 5], [0, 1, 2], [2, 1, 0]), start=1):
        chosen = torch.tensor(who)
        plan = simulation.plan(chosen, number)
        fresh = recorded(clients(), local)[1]
        assert torch.equal(steps(w, chosen, plan, number), fresh(w, chosen, plan, number))


@pytest.mark.parametrize(("local", "options"), [(FULL, {}), (SHUFFLED, {"participation": FixedSize(3)})])
def test_runs_equal_the_loop(local, options):
    expected = trained(clients(), "loop", local, **options)
    assert torch.allclose(trained(clients(), "fast", local, **options), expected, atol=1e-6)


def test_a_transform_is_asked_in_every_round():
    calls = []

    def noisy(x):
        calls.append(len(x))
        return x + 0.1 * len(calls)

    simulation, steps = recorded(clients(transform=noisy), FULL)
    assert simulation.task.clients.edition is None
    who, w = torch.arange(6), simulation.begin().w.float()
    first, second = (steps(w, who, simulation.plan(who, number), number) for number in (1, 2))
    assert not torch.equal(first, second)


class Masked(Federation):
    """A view that hides a feature."""

    def gather(self, clients, positions, device=None):
        x, y = super().gather(clients, positions, device)
        return x * torch.tensor([1.0, 1.0, 0.0]), y


class Few:
    """Some clients of a federation; what it does not know itself, the federation answers."""

    def __init__(self, inner, which):
        self.inner, self.which, self.sizes = inner, torch.tensor(which), inner.sizes[which]

    def __len__(self):
        return len(self.which)

    def gather(self, clients, positions, device=None):
        return self.inner.gather(self.which[clients], positions, device)

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


@pytest.mark.parametrize("trainer", ["loop", "vectorised", "fast"])
def test_clients_that_gather_their_own_way_are_read_that_way(trainer):
    held = clients()
    masked = Masked(held.inputs, held.targets, [list(range(4 * i, 4 * i + 4)) for i in range(6)])
    model = trained(masked, trainer, FULL)
    assert torch.allclose(model, trained(masked, "loop", FULL), atol=1e-6)
    assert torch.equal(model[:15].reshape(5, 3)[:, 2], net()[0].weight[:, 2])
    few, same = Few(held, [4, 5]), clients()
    rows = [list(range(16, 20)), list(range(20, 24))]
    expected = trained(Federation(same.inputs, same.targets, rows), trainer, FULL)
    assert torch.allclose(trained(few, trainer, FULL), expected, atol=1e-6)


def test_data_that_change_in_place_and_tensors_of_the_caller_are_seen():
    simulation, steps = recorded(clients(), FULL)
    who, w = torch.tensor([0, 1, 2]), simulation.begin().w.float()
    first = steps(w, who, simulation.plan(who, 1), 1)
    simulation.task.clients.inputs.mul_(2.0)
    second = steps(w, who, simulation.plan(who, 2), 2)
    plan = simulation.plan(who, 3)
    who.copy_(torch.tensor([3, 4, 5]))
    third = steps(w, who, plan, 3)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_other_tensors_in_the_place_of_the_old_ones_are_seen():
    simulation, steps = recorded(clients(), FULL)
    who, w = torch.arange(6), simulation.begin().w.float()
    first = steps(w, who, simulation.plan(who, 1), 1)
    simulation.task.clients.targets = 1 - simulation.task.clients.targets
    assert not torch.equal(first, steps(w, who, simulation.plan(who, 2), 2))


def test_a_way_to_rows_that_one_federation_alone_has_is_taken():
    federation, asked = clients(), []
    own = federation.gather

    def noted(*given):
        asked.append(given)
        return own(*given)

    federation.gather = noted
    assert federation.edition is None
    federation.reading(torch.arange(2), torch.zeros(2, 3, 1, dtype=torch.int64))(1)
    assert len(asked) == 1


def test_chunks_do_not_push_one_another_out():
    simulation, steps = recorded(clients(), FULL)
    w = simulation.begin().w.float()
    for number in (1, 2, 3):
        for who in (torch.arange(3), torch.arange(3, 6)):
            steps(w, who, simulation.plan(who, number), number)
    assert steps._kept is None
