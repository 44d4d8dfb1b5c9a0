import pytest
import torch
from torch import nn

from dpfedexp import Execution, Federation, InputError, Sgd, dp_fedavg, fedavg
from dpfedexp.core.batches import schedule
from dpfedexp.core.noise.streams import Streams
from dpfedexp.engine.prepare import prepare
from tests.engine.plain import cases, plain_update

CASES = cases()
EQUAL, UNEQUAL = [4, 4, 4, 4], [1, 7, 3, 4]


def federation(sampler, sizes):
    generator = torch.Generator().manual_seed(7)
    return Federation.from_clients([sampler(n, generator) for n in sizes])


def updates(model, clients, local, trainer, correction=None, round=1):
    simulation, _ = prepare(
        model, clients, fedavg(), local=local, rounds=1, execution=Execution(device="cpu", trainer=trainer)
    )
    ids = torch.arange(len(clients))
    shuffles = simulation.streams.at("batches", round)
    plan = schedule(local, clients.sizes, lambda row: shuffles.generator(row))
    w = simulation.task.layout.read(model).float()
    return simulation.trainer(w, ids, plan, round, correction), plan


@pytest.mark.parametrize("trainer", ["vectorised", "loop"])
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", ["sgd", "fedprox", "scaffold"])
def test_updates_equal_the_plain_loop(name, variant, sizes, trainer):
    """Float32 rounding after four steps: 1e-5 of the largest entry."""
    model, sampler = CASES[name]
    clients = federation(sampler, sizes)
    local = Sgd(lr=0.1, steps=4, proximal=0.3 if variant == "fedprox" else 0.0)
    d = sum(p.numel() for p in model.parameters())
    correction = 0.05 * torch.randn(4, d, generator=torch.Generator().manual_seed(3)) if variant == "scaffold" else None
    ours, _ = updates(model, clients, local, trainer, correction)
    for i in range(4):
        x, y = clients.client(i)
        expected = plain_update(
            model,
            x,
            y,
            lr=0.1,
            steps=4,
            proximal=local.proximal,
            correction=None if correction is None else correction[i],
        )
        assert torch.allclose(ours[i], expected, atol=1e-5 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize("trainer", ["vectorised", "loop"])
@pytest.mark.parametrize(
    "local", [Sgd(lr=0.1, epochs=2, batch_size=2), Sgd(lr=0.1, steps=5, batch_size=3)], ids=["epochs", "steps"]
)
def test_mini_batches_equal_the_plain_loop_over_the_same_batches(local, trainer):
    model, sampler = CASES["mlp"]
    clients = federation(sampler, UNEQUAL)
    ours, plan = updates(model, clients, local, trainer)
    for i in range(4):
        x, y = clients.client(i)
        steps = int(plan.steps[i])
        batches = [
            plan.positions[i, k if plan.positions.shape[1] > 1 else 0][plan.weights[i, k] > 0] for k in range(steps)
        ]
        expected = plain_update(model, x, y, lr=0.1, steps=steps, batches=batches)
        assert torch.allclose(ours[i], expected, atol=1e-6)


def test_an_epoch_visits_every_row_once_and_steps_follow_the_clients_own_size():
    sizes = torch.tensor([1, 7, 3, 4])
    streams = Streams(0).at("batches", 1)
    plan = schedule(Sgd(lr=0.1, epochs=2, batch_size=2), sizes, streams.generator)
    assert plan.steps.tolist() == [2, 8, 4, 4]
    for i, size in enumerate(sizes.tolist()):
        first_epoch = plan.steps[i] // 2
        seen = plan.positions[i, :first_epoch][plan.weights[i, :first_epoch] > 0]
        assert sorted(seen.tolist()) == list(range(size))


class Switching(nn.Module):
    """Control flow on a value: no program of tensors can hold it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)


def test_a_module_that_cannot_be_vectorised_runs_on_the_loop_and_says_why():
    model = Switching()
    clients = federation(CASES["mlp"][1], EQUAL)
    simulation, note = prepare(model, clients, fedavg(), local=Sgd(lr=0.1, steps=2), rounds=1)
    assert simulation.trainer.name == "loop"
    assert "vectorised" in note
    assert "slower" in note
    with pytest.raises(InputError, match="can't be vectorised"):
        prepare(
            model, clients, fedavg(), local=Sgd(lr=0.1, steps=2), rounds=1, execution=Execution(trainer="vectorised")
        )


def test_dropout_draws_do_not_depend_on_the_chunk():
    from dpfedexp import train

    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    clients = federation(CASES["mlp"][1], EQUAL)
    runs = [
        train(
            model,
            clients,
            fedavg(),
            local=Sgd(lr=0.1, steps=2),
            rounds=2,
            execution=Execution(chunk_size=size, trainer="loop"),
            progress=False,
        )
        for size in (1, 4)
    ]
    assert torch.allclose(runs[0].model[0].weight, runs[1].model[0].weight, atol=1e-7)


def test_batch_norm_with_running_statistics_is_refused():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(InputError, match="GroupNorm"):
        prepare(model, federation(CASES["mlp"][1], EQUAL), fedavg(), local=Sgd(lr=0.1, steps=1), rounds=1)


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (nn.Linear(5, 3), None, "shape"),
        (nn.Linear(6, 3), lambda o, t: nn.functional.cross_entropy(o, t), "one number per example"),
        (nn.Linear(6, 3), "cross-entrpy", "Did you mean 'cross-entropy'"),
    ],
)
def test_a_model_or_loss_that_does_not_fit_is_one_sentence(model, loss, words):
    with pytest.raises(InputError, match=words):
        prepare(model, federation(CASES["mlp"][1], EQUAL), fedavg(), local=Sgd(lr=0.1, steps=1), rounds=1, loss=loss)


def test_recorded_programs_give_the_same_numbers_as_the_program_itself():
    model, sampler = CASES["cnn"]
    clients = federation(sampler, EQUAL)
    simulation, _ = prepare(
        model, clients, dp_fedavg(clip=1.0, noise_multiplier=1.0), local=Sgd(lr=0.1, steps=1), rounds=1
    )
    gradients = simulation.trainer.gradients
    x, y = clients.gather(torch.arange(4), torch.arange(4).expand(4, 4))
    params = simulation.task.layout.unflatten(simulation.task.layout.read(model).float().repeat(4, 1))
    weights = torch.full((4, 4), 0.25)
    for _ in range(20):
        recorded = gradients(params, x, y, weights)
    assert gradients.tapes
    direct = gradients.program(params, x, y, weights)
    assert all(torch.equal(recorded[name], direct[name]) for name in direct)
