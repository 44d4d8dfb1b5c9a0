"""A local optimizer is one class: those of tests/optimizers.py give torch.optim's updates whichever trainer runs them, at rates of
their own or of the call, and one that breaks its contract is refused before a round is paid for."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import dpfedexp
from dpfedexp import Execution, InputError, Sgd, fedavg, train
from dpfedexp.core.local_optimizer import schedule
from dpfedexp.core.noise import Streams
from dpfedexp.trainers.chunk_size import footprint
from dpfedexp.trainers.client_losses import MOST_ROWS, ClientLosses, all_rows
from dpfedexp.trainers.per_client import check_optimizer
from dpfedexp.trainers.steps import ByVmap, Steps, Vectorized
from tests.engine.plain import cases, plain_update
from tests.optimizers import AdamW, Bounded, Cosine, HeavyBall
from tests.trainers.shared import PRIVATE, recorded, sampled, simulated, updates

SIZES, RATES = [5, 2, 7, 1], (0.02, 0.05, 0.02, 0.3)
MODEL, SAMPLER = cases()["cnn"]
SETTINGS = {"lr": 0.05, "epochs": 3, "batch_size": 2, "proximal": 0.3}
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
SCAFFOLD = dpfedexp.dp_scaffold(clip=1.0, noise_multiplier=1.0)
WARM_UP = dpfedexp.StepRate(every=1, factor=0.3, warm_up=3)
# The floor eps is large so that a gradient's last bit does not decide which way a step goes.
OPTIMIZERS = {
    "nesterov with decay": (
        HeavyBall(**SETTINGS, nesterov=True, weight_decay=0.1),
        {"optimizer": partial(SGD, momentum=0.8, nesterov=True, weight_decay=0.1)},
    ),
    "adamw": (AdamW(**SETTINGS), {"optimizer": partial(ADAMW, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.05)}),
    "bounded": (Bounded(**SETTINGS), {"bound": 0.2}),
    "cosine": (Cosine(**SETTINGS), {}),
    "sgd's momentum": (Sgd(**SETTINGS, momentum=0.9), {"optimizer": partial(SGD, momentum=0.9)}),
    "sgd's nesterov with decay": (
        Sgd(**SETTINGS, momentum=0.7, nesterov=True, weight_decay=0.2),
        {"optimizer": partial(SGD, momentum=0.7, nesterov=True, weight_decay=0.2)},
    ),
    "the library's adamw": (
        dpfedexp.AdamW(**SETTINGS, beta2=0.98, eps=1e-3),
        {"optimizer": partial(ADAMW, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.01)},
    ),
    "sgd's bound": (Sgd(**SETTINGS, clip_gradient=0.15), {"bound": 0.15}),
    "schedule": (Sgd(**{**SETTINGS, "lr": 0.1}, schedule=WARM_UP), {"lr": 0.1 / 3}),
}
TRAINERS = {
    **{one: (one, lambda run: run.trainer) for one in ("loop", "vectorized", "fast", "tiled-vectorized", "tiled-loop")},
    "stepped vmap": ("vectorized", lambda run: Steps(run.task, "", ByVmap(Vectorized(run.task).gradients.program))),
    "recorded vmap": ("vectorized", recorded),
    "recorded program": ("fast", lambda run: recorded(run, run.trainer._trainer().core)),
}
PAIRS = [(name, list(TRAINERS)[number % len(TRAINERS)]) for number, name in enumerate(OPTIMIZERS)]


@pytest.fixture(scope="module")
def clients():
    return sampled(SAMPLER, SIZES)


def correction():
    d = sum(p.numel() for p in MODEL.parameters())
    return 0.05 * torch.randn(len(SIZES), d, generator=torch.Generator().manual_seed(3))


def plainly(name, clients, rates=None):
    """Updates by torch.optim, one client at a time, on the batches of the simulator's own schedule."""
    local, options = OPTIMIZERS[name]
    plan = schedule(local, clients.sizes, Streams(0).at("batches", 1).generator)
    rows = []
    for i, steps in enumerate(plan.steps.tolist()):
        batches = [plan.positions[i, k][plan.weights[i, k] > 0] for k in range(steps)]
        more = {"rate": lambda k, n=steps: 0.5 * (1 + math.cos(math.pi * k / n))} if type(local) is Cosine else {}
        more |= {"steps": steps, "proximal": local.proximal, "correction": correction()[i], "batches": batches}
        more |= {} if rates is None else {"lr": rates[i]}
        rows.append(plain_update(MODEL, *clients.client(i), **{"lr": local.lr, **options, **more}))
    assert len(set(plan.steps.tolist())) > 2, "clients must stand still at different steps"
    return torch.stack(rows)


@pytest.fixture(scope="module")
def expected(clients):
    return {name: plainly(name, clients) for name in OPTIMIZERS}


@pytest.mark.parametrize(("name", "trainer"), PAIRS)
def test_an_optimizer_of_ones_own_gives_torchs_updates_in_every_trainer(name, trainer, clients, expected):
    """Uneven mini-batches, the proximal pull and SCAFFOLD's correction at once, at the optimizer's rate and at a rate of each
    client. Float32 after up to twelve steps: 2e-5 of the largest entry. The third call replays what the second recorded, so
    memory of another round would show."""
    base, make = TRAINERS[trainer]
    run = simulated(MODEL, clients, OPTIMIZERS[name][0], base)
    for right, *rates in ((expected[name],), (plainly(name, clients, RATES), torch.tensor(RATES))):
        found = updates(run, make(run), 1, 3 if "recorded" in trainer else 1, correction(), *rates)
        torch.testing.assert_close(found, right, rtol=0.0, atol=2e-5 * float(right.abs().max()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("trainer", ["fast", "recorded-vectorized"])
@pytest.mark.parametrize("name", ["adamw", "bounded", "schedule"])
def test_a_gpus_recordings_give_torchs_updates_too(name, trainer, clients, expected):
    """CUDA graphs hold the moments and the clock; 1e-4 of the largest entry, because a GPU sums in another order."""
    run = simulated(MODEL, clients, OPTIMIZERS[name][0], trainer, device="cuda")
    for _ in range(3):
        found = updates(run, None, 1, 1, correction().cuda()).cpu()
        torch.testing.assert_close(found, expected[name], rtol=0.0, atol=1e-4 * float(expected[name].abs().max()))


def test_the_optimizers_differ_by_more_than_the_tolerance(expected):
    rows = [*expected.values()]
    for i, one in enumerate(rows):
        for other in rows[:i]:
            assert float((one - other).abs().max()) > 1e-3 * float(one.abs().max())


def test_moments_count_towards_the_memory_of_a_client(clients):
    def size(local):
        return footprint(simulated(MODEL, clients, local).task)

    plain, adam, bounded = size(Sgd(lr=0.1, steps=1)), size(AdamW(lr=0.1, steps=1)), size(Bounded(lr=0.1, steps=1))
    assert adam.bytes - plain.bytes == 2 * 4 * plain.dimension
    assert bounded.bytes - plain.bytes == 4 * plain.dimension
    assert adam.tile(10**6) < plain.tile(10**6)


def test_what_an_optimizer_lacks_is_a_sentence(clients):
    with pytest.raises(InputError, match=r"dp_scaffold divides updates by .* which AdamW does not have; use Sgd\."):
        train(MODEL, clients, SCAFFOLD, local=AdamW(lr=0.1, steps=2), rounds=1)
    with pytest.raises(InputError, match="local lr is -1"):
        HeavyBall(lr=-1.0, steps=1)
    assert Sgd(lr=0.1, steps=4).tau_eta_l(4) == 0.4


def test_a_schedules_rates_are_those_of_its_rounds(clients):
    """Three rounds under a schedule are three runs of one round at its rates; 1e-6 for the model's float32 in between."""
    schedule = dpfedexp.CosineRate(rounds=4, final_share=0.1, warm_up=1)
    execution, model = Execution(device="cpu", trainer="vectorized"), MODEL
    for number in (1, 2, 3):
        local = Sgd(lr=0.2 * schedule.share(number), steps=2)
        model = train(model, clients, fedavg(), local=local, rounds=1, execution=execution).model
    local = Sgd(lr=0.2, steps=2, schedule=schedule)
    together = train(MODEL, clients, fedavg(), local=local, rounds=3, execution=execution).model
    torch.testing.assert_close(dict(together.named_parameters()), dict(model.named_parameters()), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sgd(lr=0.1, steps=1, momentum=1.0), r"local momentum is 1\.0; it must be a number in \[0, 1\)"),
        (lambda: Sgd(lr=0.1, steps=1, weight_decay=-1.0), "weight_decay is -1"),
        (lambda: Sgd(lr=0.1, steps=1, clip_gradient=0.0), "clip_gradient is 0"),
        (lambda: Sgd(lr=0.1, steps=1, schedule="cosine"), "must be a schedule such as CosineRate"),
        (lambda: Sgd(lr="auto", steps=1, schedule=dpfedexp.CosineRate(rounds=3)), "a number for lr, or no schedule"),
        (lambda: dpfedexp.AdamW(lr=0.1, steps=1, beta1=1.0), "beta1 is 1"),
        (lambda: dpfedexp.AdamW(lr=0.1, steps=1, eps=0.0), "eps is 0"),
        (lambda: dpfedexp.CosineRate(), "schedule rounds is 0"),
        (lambda: dpfedexp.CosineRate(rounds=3, final_share=2.0), "final_share is 2"),
        (lambda: dpfedexp.StepRate(every=2, factor=0.0), "factor is 0"),
        (lambda: dpfedexp.RateSchedule(warm_up=-1), "warm_up is -1"),
        (lambda: Sgd(lr=0.1, steps=1, momentum=0.5).tau_eta_l(3), "with momentum does not have; leave momentum out"),
    ],
)
def test_a_setting_out_of_range_is_one_sentence(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_schedules_have_the_shares_that_they_say():
    assert [dpfedexp.RateSchedule(warm_up=4).share(t) for t in (1, 4, 9)] == [0.25, 1.0, 1.0]
    step = dpfedexp.StepRate(every=3, factor=0.1, warm_up=2)
    assert [step.share(t) for t in (1, 2, 3, 5, 6)] == [0.5, 1.0, 1.0, 1.0, 0.1]
    cosine = dpfedexp.CosineRate(rounds=10, final_share=0.2)
    assert [cosine.share(t) for t in (1, 6, 11, 50)] == pytest.approx([1.0, 0.6, 0.2, 0.2], rel=0, abs=1e-6)


def made(direction):
    return dataclass(frozen=True)(type("Own", (dpfedexp.LocalOptimizer,), {"direction": direction}))(lr=0.1, steps=6)


def late(self, w, gradient, moments, clock):
    """Couples the clients from the fourth step on."""
    return torch.where(clock.step >= 3, gradient.mean(0, keepdim=True).expand_as(gradient), gradient)


class Memory:
    last = 0.0


def remembering(self, w, gradient, moments, clock):
    before, Memory.last = Memory.last, float(gradient[-1].sum())
    return gradient + 0.1 * before * (len(gradient) == 1)


BROKEN = {
    "mixes clients": lambda self, w, gradient, moments, clock: gradient - gradient.mean(0, keepdim=True),
    "mixes clients:": late,
    "shape of w": lambda self, w, gradient, moments, clock: gradient.mean(0),
    "gradient in place": lambda self, w, gradient, moments, clock: gradient.mul_(2.0),
    "fails on synthetic gradients": lambda self, w, gradient, moments, clock: moments["v"],
    "mixes clients|remembers": remembering,
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_direction_that_breaks_the_contract_is_refused(sentence):
    with pytest.raises(InputError, match=sentence):
        check_optimizer(made(BROKEN[sentence]))


def test_nothing_is_charged_for_a_run_that_is_refused(clients, tmp_path):
    with pytest.raises(InputError, match="mixes clients"):
        train(MODEL, clients, PRIVATE, local=made(late), rounds=2, ledger=tmp_path / "ledger.jsonl")
    assert not (tmp_path / "ledger.jsonl").exists()


def test_an_optimizer_without_a_direction_is_one_sentence():
    with pytest.raises(InputError, match=r"has no method direction"):
        check_optimizer(dpfedexp.LocalOptimizer(lr=0.1, steps=1))


@pytest.fixture(scope="module")
def asked():
    simulation = simulated(MODEL, sampled(SAMPLER, SIZES), Sgd(lr=0.1, steps=1), "vectorized")
    w, clients = simulation.task.layout.read(simulation.task.model).float(), simulation.task.clients
    return clients, simulation, w, 0.1 * torch.randn(len(clients), len(w), generator=torch.Generator().manual_seed(3))


def losses(asked, rows, *, apart, who=slice(None)):
    clients, simulation, w, _ = asked
    numbers, streams = torch.arange(len(clients))[who], Streams(0)
    plan = schedule(all_rows(None), clients.sizes[numbers], streams.at("losses", 1).generator)
    return ClientLosses(simulation.task, simulation.trainer, streams, unit=1 if apart else None)(
        w, rows, numbers, plan, 1
    )


@pytest.mark.parametrize("apart", [False, True])
def test_it_is_the_mean_loss_of_a_plain_forward(asked, apart):
    clients, simulation, w, rows = asked
    plain = []
    for n in range(len(clients)):
        x, y = clients.client(n)
        params = {name: value[n] for name, value in simulation.task.layout.unflatten(w + rows).items()}
        output = torch.func.functional_call(MODEL, params, (x,))
        plain.append(torch.nn.functional.cross_entropy(output, y))
    # Float32 in another order of addition.
    torch.testing.assert_close(losses(asked, rows, apart=apart), torch.stack(plain), rtol=1e-5, atol=1e-6)


def test_apart_it_is_the_same_bit_for_bit_without_the_others(asked):
    rows = asked[3]
    together = losses(asked, rows, apart=True)
    for n in range(len(rows)):
        assert torch.equal(losses(asked, rows[n : n + 1], apart=True, who=slice(n, n + 1))[0], together[n])


def test_a_loss_that_is_not_a_number_is_infinite(asked):
    rows = asked[3].clone()
    rows[1] = math.nan
    for apart in (False, True):
        found = losses(asked, rows, apart=apart)
        assert found[1] == math.inf
        assert bool(found[[0, 2, 3]].isfinite().all())


def test_no_more_rows_count_than_a_client_trains_on():
    assert (all_rows(None).max_examples, all_rows(20).max_examples) == (MOST_ROWS, 20)
