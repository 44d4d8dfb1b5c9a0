"""A local optimiser is one class: those of tests/optimisers.py give torch.optim's updates whichever trainer runs them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from dpfedexp import Execution, Federation, InputError, LocalOptimiser, Sgd, dp_scaffold, fedavg, train
from dpfedexp.batches import schedule
from dpfedexp.noise.streams import Streams
from dpfedexp.simulation.prepare import prepare
from dpfedexp.trainers.chunk_size import footprint
from dpfedexp.trainers.stepped import ByVmap, Steps
from dpfedexp.trainers.vectorised import Vectorised
from tests.optimisers import AdamW, Bounded, Cosine, HeavyBall
from tests.simulation.plain import cases, plain_update

SIZES = [5, 2, 7, 1]
MODEL, SAMPLER = cases()["cnn"]
SETTINGS = {"lr": 0.05, "epochs": 3, "batch_size": 2, "proximal": 0.3}
OPTIMISERS = {
    "heavy ball": (HeavyBall(**SETTINGS), {"optimiser": partial(torch.optim.SGD, momentum=0.8)}),
    "nesterov with decay": (
        HeavyBall(**SETTINGS, nesterov=True, weight_decay=0.1),
        {"optimiser": partial(torch.optim.SGD, momentum=0.8, nesterov=True, weight_decay=0.1)},
    ),
    "adamw": (
        AdamW(**SETTINGS),
        {"optimiser": partial(torch.optim.AdamW, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.05)},
    ),
    "bounded": (Bounded(**SETTINGS), {"bound": 0.2}),
    "cosine": (Cosine(**SETTINGS), {}),
}


def captured(function):
    """What `cuda_graph` does to the memory: it runs the step a few times before it is replayed."""
    function()
    function()
    return function


def recorded(task, core):
    return Steps(task, "recorded", core, record=True, capture=captured)


TRAINERS = {
    "loop": ("loop", None),
    "vectorised": ("vectorised", None),
    "fast": ("fast", None),
    "tiled-vectorised": ("tiled-vectorised", None),
    "tiled-loop": ("tiled-loop", None),
    "stepped vmap": ("vectorised", lambda s: Steps(s.task, "stepped", ByVmap(Vectorised(s.task).gradients.program))),
    "recorded vmap": ("vectorised", lambda s: recorded(s.task, ByVmap(Vectorised(s.task).gradients.program))),
    "recorded program": ("fast", lambda s: recorded(s.task, s.trainer._trainer().core)),
}


@pytest.fixture(scope="module")
def clients():
    generator = torch.Generator().manual_seed(7)
    return Federation.from_clients([SAMPLER(n, generator) for n in SIZES])


def correction():
    d = sum(p.numel() for p in MODEL.parameters())
    return 0.05 * torch.randn(len(SIZES), d, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def expected(clients):
    """name → updates by torch.optim, one client at a time, on the batches of the simulator's own schedule."""

    def updates(local, options):
        plan = schedule(local, clients.sizes, Streams(0).at("batches", 1).generator)
        rows = []
        for i, steps in enumerate(plan.steps.tolist()):
            batches = [plan.positions[i, k][plan.weights[i, k] > 0] for k in range(steps)]
            more = {"rate": lambda k, n=steps: 0.5 * (1 + math.cos(math.pi * k / n))} if type(local) is Cosine else {}
            rows.append(
                plain_update(
                    MODEL,
                    *clients.client(i),
                    lr=local.lr,
                    steps=steps,
                    proximal=local.proximal,
                    correction=correction()[i],
                    batches=batches,
                    **options,
                    **more,
                )
            )
        assert len(set(plan.steps.tolist())) > 2, "clients must stand still at different steps"
        return torch.stack(rows)

    return {name: updates(*given) for name, given in OPTIMISERS.items()}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_optimiser_of_ones_own_gives_torchs_updates_in_every_trainer(name, trainer, clients, expected):
    """Uneven mini-batches, the proximal pull and SCAFFOLD's correction at once. Float32 after up to twelve steps: 2e-5 of the
    largest entry. The third call replays what the second recorded, so memory of another round would show."""
    local, _ = OPTIMISERS[name]
    base, make = TRAINERS[trainer]
    simulation, _ = prepare(
        MODEL, clients, fedavg(), local=local, rounds=1, execution=Execution(trainer=base, device="cpu")
    )
    run = simulation.trainer if make is None else make(simulation)
    plan = schedule(local, clients.sizes, simulation.streams.at("batches", 1).generator)
    w = simulation.task.layout.read(MODEL).float()
    for _ in range(3 if "recorded" in trainer else 1):
        found = run(w, torch.arange(len(SIZES)), plan, 1, correction())
    torch.testing.assert_close(found, expected[name], rtol=0.0, atol=2e-5 * float(expected[name].abs().max()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("trainer", ["fast", "recorded-vectorised", "vectorised", "loop"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_gpus_recordings_give_torchs_updates_too(name, trainer, clients, expected):
    """CUDA graphs hold the moments and the clock; 1e-4 of the largest entry, because a GPU sums in another order."""
    local, _ = OPTIMISERS[name]
    simulation, _ = prepare(
        MODEL, clients, fedavg(), local=local, rounds=1, execution=Execution(trainer=trainer, device="cuda")
    )
    plan = schedule(local, clients.sizes, simulation.streams.at("batches", 1).generator)
    w = simulation.task.layout.read(MODEL).float().cuda()
    for _ in range(3):
        found = simulation.trainer(w, torch.arange(len(SIZES)), plan, 1, correction().cuda()).cpu()
        torch.testing.assert_close(found, expected[name], rtol=0.0, atol=1e-4 * float(expected[name].abs().max()))


def test_the_optimisers_differ_by_more_than_the_tolerance(expected):
    rows = [*expected.values()]
    for i, one in enumerate(rows):
        for other in rows[:i]:
            assert float((one - other).abs().max()) > 1e-3 * float(one.abs().max())


@pytest.mark.parametrize("trainer", ["loop", "vectorised", "fast"])
def test_moments_are_zero_when_a_round_begins(trainer, clients):
    """Two rounds are one round and then a new run from its model; 1e-6 is the rounding of the model to float32 in between."""

    def run(model, rounds, local):
        options = {"local": local, "rounds": rounds, "progress": False}
        options["execution"] = Execution(device="cpu", trainer=trainer)
        trained = train(model, clients, fedavg(), **options).model
        return trained, torch.cat([p.detach().flatten() for p in trained.parameters()])

    local = HeavyBall(lr=0.05, steps=3)
    between, _ = run(MODEL, 1, local)
    torch.testing.assert_close(run(MODEL, 2, local)[1], run(between, 1, local)[1], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("trainer", ["vectorised", "tiled-vectorised", "fast"])
def test_a_trainer_that_keeps_clients_apart_does_so_with_moments(trainer, clients):
    """`prepare` refuses a trainer by name unless made-up clients' rows are the same bit for bit beside any others."""
    local = AdamW(lr=0.02, epochs=2, batch_size=2, max_examples=6)
    given = {"local": local, "rounds": 1, "execution": Execution(device="cpu", trainer=trainer), "isolated": True}
    simulation, _ = prepare(MODEL, clients, fedavg(), **given)
    w, state = simulation.task.layout.read(MODEL).float(), simulation.begin()
    rows = simulation.updates(state, w, torch.arange(len(SIZES)), 1)
    for client in range(len(SIZES)):
        alone = simulation.updates(state, w, torch.tensor([client]), 1)
        assert torch.equal(alone[0], rows[client])


def test_moments_count_towards_the_memory_of_a_client(clients):
    def size(local):
        return footprint(prepare(MODEL, clients, fedavg(), local=local, rounds=1, device="cpu")[0].task)

    plain, adam, bounded = size(Sgd(lr=0.1, steps=1)), size(AdamW(lr=0.1, steps=1)), size(Bounded(lr=0.1, steps=1))
    assert adam.bytes - plain.bytes == 2 * 4 * plain.dimension
    assert bounded.bytes - plain.bytes == 4 * plain.dimension
    assert adam.tile(10**6) < plain.tile(10**6)


def test_what_an_optimiser_lacks_is_a_sentence(clients):
    with pytest.raises(InputError, match=r"dp_scaffold divides updates by .* which AdamW does not have; use Sgd\."):
        train(MODEL, clients, dp_scaffold(clip=1.0, noise_multiplier=1.0), local=AdamW(lr=0.1, steps=2), rounds=1)
    with pytest.raises(InputError, match="local lr is -1"):
        HeavyBall(lr=-1.0, steps=1)
    with pytest.raises(InputError, match=r"LocalOptimiser does not say which way a step goes"):
        LocalOptimiser(lr=0.1, steps=1).direction(torch.zeros(1, 1), torch.zeros(1, 1), {}, None)
    assert Sgd(lr=0.1, steps=4).tau_eta_l(4) == 0.4
