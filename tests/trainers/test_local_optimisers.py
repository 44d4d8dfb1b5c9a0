"""A local optimiser is one class: those of tests/optimisers.py give torch.optim's updates whichever trainer runs them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import dpfedexp
from dpfedexp import (
    CosineRate,
    Execution,
    Federation,
    InputError,
    LocalOptimiser,
    RateSchedule,
    Sgd,
    StepRate,
    dp_scaffold,
    fedavg,
    train,
)
from dpfedexp.core.batches import schedule
from dpfedexp.core.noise.streams import Streams
from dpfedexp.engine.prepare import prepare
from dpfedexp.trainers.chunk_size import footprint
from dpfedexp.trainers.steps import ByVmap, Steps
from dpfedexp.trainers.vectorised import Vectorised
from tests.engine.plain import cases, plain_update
from tests.optimisers import AdamW, Bounded, Cosine, HeavyBall

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
    "sgd's momentum": (Sgd(**SETTINGS, momentum=0.9), {"optimiser": partial(torch.optim.SGD, momentum=0.9)}),
    "sgd's nesterov with decay": (
        Sgd(**SETTINGS, momentum=0.7, nesterov=True, weight_decay=0.2),
        {"optimiser": partial(torch.optim.SGD, momentum=0.7, nesterov=True, weight_decay=0.2)},
    ),
    "sgd's decay": (Sgd(**SETTINGS, weight_decay=0.3), {"optimiser": partial(torch.optim.SGD, weight_decay=0.3)}),
    # The floor eps is large so that a gradient's last bit does not decide which way a step goes.
    "the library's adamw": (
        dpfedexp.AdamW(**SETTINGS, beta2=0.98, eps=1e-3),
        {"optimiser": partial(torch.optim.AdamW, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.01)},
    ),
    "sgd's bound": (Sgd(**SETTINGS, clip_gradient=0.15), {"bound": 0.15}),
    "schedule": (Sgd(**{**SETTINGS, "lr": 0.1}, schedule=StepRate(every=1, factor=0.3, warm_up=3)), {"lr": 0.1 / 3}),
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
                    steps=steps,
                    proximal=local.proximal,
                    correction=correction()[i],
                    batches=batches,
                    **{"lr": local.lr, **options},
                    **more,
                )
            )
        assert len(set(plan.steps.tolist())) > 2, "clients must stand still at different steps"
        return torch.stack(rows)

    return {name: updates(*given) for name, given in OPTIMISERS.items()}


PAIRS = [(name, list(TRAINERS)[number % len(TRAINERS)]) for number, name in enumerate(OPTIMISERS)] + [
    ("adamw", trainer) for trainer in TRAINERS
]


@pytest.mark.parametrize(("name", "trainer"), dict.fromkeys(PAIRS))
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
@pytest.mark.parametrize("trainer", ["fast", "recorded-vectorised"])
@pytest.mark.parametrize("name", ["adamw", "bounded", "schedule"])
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


@pytest.mark.parametrize(
    ("trainer", "make"),
    [
        ("vectorised", partial(AdamW, lr=0.02)),
        ("tiled-vectorised", partial(Sgd, lr=0.02, clip_gradient=0.1, momentum=0.9)),
        ("fast", partial(Sgd, lr=0.02, clip_gradient=0.1, momentum=0.9)),
    ],
)
def test_a_trainer_that_keeps_clients_apart_does_so_with_moments(trainer, make, clients):
    """`prepare` refuses a trainer by name unless made-up clients' rows are the same bit for bit beside any others."""
    local = make(epochs=2, batch_size=2, max_examples=6)
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


@pytest.mark.parametrize(
    ("local", "optimiser"),
    [
        (Sgd(lr=0.05, steps=4, momentum=0.9, nesterov=True, weight_decay=0.1), torch.optim.SGD),
        (dpfedexp.AdamW(lr=0.01, steps=4), torch.optim.AdamW),
    ],
    ids=["sgd", "adamw"],
)
def test_one_client_takes_torchs_steps_to_a_millionth(local, optimiser):
    """A smooth loss of a few parameters, so that only the optimiser rounds: 1e-6 with torch's own defaults for AdamW."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 3, generator=generator), torch.randn(9, 1, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1} if optimiser is torch.optim.SGD else {}
    trained = train(model, Federation.from_clients([(x, y)]), fedavg(), local=local, rounds=1, progress=False).model
    steps = optimiser(model.parameters(), lr=local.lr, **options)
    for _ in range(4):
        steps.zero_grad()
        (0.5 * (model(x) - y).square().sum(1)).mean().backward()
        steps.step()
    for ours, theirs in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_schedules_rates_are_those_of_its_rounds(clients):
    """Three rounds under a schedule are three runs of one round at its rates; 1e-6 for the model's float32 in between."""
    schedule = CosineRate(rounds=4, floor=0.1, warm_up=1)
    options = {"rounds": 1, "progress": False, "execution": Execution(device="cpu", trainer="vectorised")}
    model = MODEL
    for number in (1, 2, 3):
        local = Sgd(lr=0.2 * schedule.share(number), steps=2)
        model = train(model, clients, fedavg(), local=local, **options).model
    local = Sgd(lr=0.2, steps=2, schedule=schedule)
    together = train(MODEL, clients, fedavg(), local=local, **{**options, "rounds": 3}).model
    for ours, theirs in zip(together.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_schedules_have_the_shares_that_they_say():
    assert [RateSchedule(warm_up=4).share(t) for t in (1, 4, 9)] == [0.25, 1.0, 1.0]
    assert [StepRate(every=3, factor=0.1, warm_up=2).share(t) for t in (1, 2, 3, 5, 6)] == [0.5, 1.0, 1.0, 1.0, 0.1]
    cosine = CosineRate(rounds=10, floor=0.2)
    torch.testing.assert_close(
        torch.tensor([cosine.share(t) for t in (1, 6, 11, 50)]), torch.tensor([1.0, 0.6, 0.2, 0.2]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sgd(lr=0.1, steps=1, momentum=1.0), r"local momentum is 1\.0; it must be a number from 0 and below 1"),
        (lambda: Sgd(lr=0.1, steps=1, nesterov=True), "nesterov is True without momentum; give momentum too"),
        (lambda: Sgd(lr=0.1, steps=1, weight_decay=-1.0), "weight_decay is -1"),
        (lambda: Sgd(lr=0.1, steps=1, clip_gradient=0.0), "clip_gradient is 0"),
        (lambda: Sgd(lr=0.1, steps=1, schedule="cosine"), "must be a schedule such as CosineRate"),
        (lambda: Sgd(lr="auto", steps=1, schedule=CosineRate(rounds=3)), "a rate that sets itself has none"),
        (lambda: dpfedexp.AdamW(lr=0.1, steps=1, beta1=1.0), "beta1 is 1"),
        (lambda: dpfedexp.AdamW(lr=0.1, steps=1, eps=0.0), "eps is 0"),
        (lambda: CosineRate(), "over how many rounds"),
        (lambda: CosineRate(rounds=3, floor=2.0), "floor is 2"),
        (lambda: StepRate(every=2, factor=0.0), "factor is 0"),
        (lambda: RateSchedule(warm_up=-1), "warm_up is -1"),
        (
            lambda: Sgd(lr=0.1, steps=1, momentum=0.5).tau_eta_l(3),
            "Sgd with momentum does not have; leave momentum out",
        ),
    ],
)
def test_a_setting_out_of_range_is_one_sentence(make, words):
    with pytest.raises(InputError, match=words):
        make()
