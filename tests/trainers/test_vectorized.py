import pytest
import torch
from torch import nn

from dpfedexp import InputError, Sgd, fedavg
from dpfedexp.core.local_optimizer import schedule
from dpfedexp.core.noise import Streams
from dpfedexp.engine.prepare import prepare
from tests.engine.plain import cases, plain_update
from tests.trainers.shared import Made, sampled, simulated, updates

CASES = cases()
EQUAL, UNEQUAL = [4, 4, 4, 4], [1, 7, 3, 4]


VARIANTS = [
    *((name, "vectorized", UNEQUAL) for name in CASES),
    ("cnn", "loop", UNEQUAL),
    *(("linear", trainer, EQUAL) for trainer in ("vectorized", "loop", "fast")),
]


@pytest.mark.parametrize(("name", "trainer", "sizes"), VARIANTS)
def test_updates_equal_the_plain_loop(name, trainer, sizes):
    """Float32 rounding after four steps: 1e-5 of the largest entry. FedProx and SCAFFOLD are in test_local_optimizers.py."""
    model, sampler = CASES[name]
    run = simulated(model, sampled(sampler, sizes), Sgd(lr=0.1, steps=4), trainer)
    for i, row in enumerate(updates(run)):
        expected = plain_update(model, *run.task.clients.client(i), lr=0.1, steps=4)
        assert torch.allclose(row, expected, atol=1e-5 * float(expected.abs().max()) + 1e-7)


def test_an_epoch_visits_every_row_once_and_steps_follow_the_clients_own_size():
    sizes = torch.tensor([1, 7, 3, 4])
    streams = Streams(0).at("batches", 1)
    plan = schedule(Sgd(lr=0.1, epochs=2, batch_size=2), sizes, streams.generator)
    assert plan.steps.tolist() == [2, 8, 4, 4]
    for i, size in enumerate(sizes.tolist()):
        first, second = (epoch.tolist() for epoch in plan.positions[i][plan.weights[i] > 0].split(size))
        assert sorted(first) == sorted(second) == list(range(size))
        assert (first == second) is (size == 1), "every epoch shuffles again"


def test_a_module_that_cannot_be_vectorized_runs_on_the_loop_and_says_why():
    """Control flow on a value: no program of tensors can hold it."""
    model = Made(lambda self, x: self.layer(x) if float(x.sum()) > 0 else self.layer(-x), layer=nn.Linear(6, 3))
    clients = sampled(CASES["mlp"][1], EQUAL)
    simulation, note = prepare(model, clients, fedavg(), local=Sgd(lr=0.1, steps=2), rounds=1)
    assert simulation.cohort.trainer.name == "loop"
    assert "vectorized" in note
    assert "slower" in note
    with pytest.raises(InputError, match="can't be vectorized"):
        simulated(model, clients, Sgd(lr=0.1, steps=2), "vectorized")
