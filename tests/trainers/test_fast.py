import importlib.util
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfedexp import Execution, Federation, InputError, Sgd, fedavg, train
from dpfedexp.core.batches import schedule
from dpfedexp.core.losses import binary_cross_entropy, half_squared_error
from dpfedexp.engine.prepare import prepare
from dpfedexp.models import mnist_cdp_net, resnet18_gn
from dpfedexp.trainers import choices, programs
from dpfedexp.trainers import select as tune
from dpfedexp.trainers.fast.convolution import Convolve
from dpfedexp.trainers.fast.library import LibraryConvolve
from dpfedexp.trainers.fast.ops import Pointwise, Product
from dpfedexp.trainers.fast.trace import RULES, register
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.programs import Programs, by_program
from dpfedexp.trainers.registry import trainer_again
from dpfedexp.trainers.stepped import ByVmap, Steps
from dpfedexp.trainers.tiled import Parallel
from dpfedexp.trainers.vectorised import Vectorised
from tests.engine.plain import cases, plain_update

SIZES = [1, 7, 3, 4]
LOCAL = Sgd(lr=0.1, steps=3)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(1, 2)
        self.shortcut = nn.Sequential()

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + self.shortcut(x))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(3, 128))
        self.scale = nn.Linear(3, 3)

    def forward(self, x):
        return self.scale(torch.relu(F.linear(torch.flatten(x, 1), self.weight)))


def networks():
    torch.manual_seed(1)
    head = lambda width: (nn.Flatten(), nn.Linear(width, 3))  # noqa: E731
    return {
        "paper": nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.MaxPool2d(2), *head(4)),
        "relu before the pool": nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), *head(27)),
        "strides": nn.Sequential(nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0), (1, 2)), nn.Tanh(), *head(72)),
        "pool of strides": nn.Sequential(nn.Conv2d(2, 3, 2, 2, 1, bias=False), nn.MaxPool2d((2, 1)), *head(30)),
        "pool of three": nn.Sequential(nn.Conv2d(2, 3, 3, dilation=2), nn.MaxPool2d(3), *head(3)),
        "1×1": nn.Sequential(nn.Conv2d(2, 3, 1), nn.SiLU(), nn.AvgPool2d(2), *head(48)),
        "pools alone": nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(2, 3, 2), nn.Sigmoid(), nn.MaxPool2d((3, 2)), *head(3)),
        "mean": nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), *head(4)),
        "norms": nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.LeakyReLU(), nn.LayerNorm([6, 6]), nn.Flatten(), nn.LayerNorm(144),
            nn.Linear(144, 3),
        ),
        "nested": nn.Sequential(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Identity()), nn.Dropout(0.0), *head(72)),
        "residual": nn.Sequential(Residual(), Residual(), *head(128)),
        "functional": Functional(),
    }  # fmt: skip


NETWORKS = networks()


def images(n, generator):
    return torch.randn(n, 2, 8, 8, generator=generator), torch.randint(3, (n,), generator=generator)


def federation(sampler=images, sizes=SIZES):
    generator = torch.Generator().manual_seed(7)
    return Federation.from_clients([sampler(n, generator) for n in sizes])


def bound(model, clients, local=LOCAL, trainer="fast", precision="fp32", **options):
    execution = Execution(device="cpu", trainer=trainer, precision=precision)
    return prepare(model, clients, fedavg(), local=local, rounds=1, execution=execution, **options)[0]


def updates(simulation, trainer=None, correction=None):
    task = simulation.task
    shuffles = simulation.streams.at("batches", 1)
    plan = schedule(task.local, task.clients.sizes, lambda row: shuffles.generator(row))
    w = task.layout.read(task.model).float()
    return (trainer or simulation.trainer)(w, torch.arange(len(task.clients)), plan, 1, correction)


def check(ours, model, clients, **options):
    for i in range(len(clients)):
        expected = plain_update(model, *clients.client(i), lr=0.1, steps=3, **options)
        # Some processors' libraries add a weight's gradient up number by number.
        assert torch.allclose(ours[i], expected, atol=5e-5 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_rule_gives_the_plain_loops_updates(name):
    """Float32 rounding: 1e-5 of the largest entry after three steps."""
    clients = federation()
    check(updates(bound(NETWORKS[name], clients)), NETWORKS[name], clients)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "functional"])
def test_torchs_library_gives_the_plain_loops_updates_behind_another_layer(name):
    torch.manual_seed(2)
    model, clients = nn.Sequential(nn.Conv2d(2, 2, 1), NETWORKS[name]), federation()
    simulation = bound(model, clients, trainer="library")
    assert any(isinstance(step.op, LibraryConvolve) for step in Programs(simulation.task).library.steps)
    check(updates(simulation), model, clients)


def test_a_network_without_a_convolution_behind_another_layer_is_not_the_librarys():
    for name in ("strides", "functional"):
        with pytest.raises(InputError, match="no convolution behind another layer"):
            bound(NETWORKS[name], federation(), trainer="library")


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn", "groupnorm"])
@pytest.mark.parametrize("variant", ["sgd", "fedprox", "scaffold"])
def test_variants_of_the_local_step_give_the_plain_loops_updates(name, variant):
    model, sampler = cases()[name]
    clients = federation(sampler)
    proximal = 0.3 if variant == "fedprox" else 0.0
    d = sum(p.numel() for p in model.parameters())
    correction = 0.05 * torch.randn(4, d, generator=torch.Generator().manual_seed(3)) if variant == "scaffold" else None
    simulation = bound(model, clients, Sgd(lr=0.1, steps=3, proximal=proximal))
    ours = updates(simulation, correction=correction)
    for i in range(4):
        row = None if correction is None else correction[i]
        x, y = clients.client(i)
        expected = plain_update(model, x, y, lr=0.1, steps=3, proximal=proximal, correction=row)
        assert torch.allclose(ours[i], expected, atol=1e-5 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize("tokens", [nn.Flatten(), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2), nn.Flatten())])
def test_embeddings_and_linear_layers_on_sequences_give_the_plain_loops_updates(tokens):
    torch.manual_seed(0)
    width = 20 if isinstance(tokens, nn.Flatten) else 10
    model = nn.Sequential(nn.Embedding(11, 4), tokens, nn.Linear(width, 3))
    sampler = lambda n, g: (torch.randint(11, (n, 5), generator=g), torch.randint(3, (n,), generator=g))  # noqa: E731
    clients = federation(sampler)
    check(updates(bound(model, clients)), model, clients)


@pytest.mark.parametrize("local", [Sgd(lr=0.1, epochs=2, batch_size=2), Sgd(lr=0.1, steps=5, batch_size=3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mini_batches_and_uneven_steps_equal_plain_vmap(local, precision):
    """In bf16 the two round differently at every step; 5 per cent of the update is some twenty roundings."""
    clients = federation()
    simulation = bound(NETWORKS["paper"], clients, local, precision=precision)
    ours, expected = updates(simulation), updates(simulation, Vectorised(simulation.task))
    assert float((ours - expected).norm()) <= (1e-5 if precision == "fp32" else 0.05) * float(expected.norm())


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (half_squared_error, 1, lambda n: torch.randn(n, 1)),
        (half_squared_error, 2, lambda n: torch.randn(n, 2)),
        (binary_cross_entropy, 2, lambda n: torch.randint(2, (n, 2))),
        (lambda o, t: (o - t).abs().sum(1), 2, lambda n: torch.randn(n, 2)),
        (lambda o, t: (o - o.mean(0) - t).square().sum(1), 2, lambda n: torch.randn(n, 2)),
    ],
    ids=["squared", "squared vector", "binary", "one's own", "one that looks across examples"],
)
def test_every_loss_gives_vmaps_updates(loss, outputs, targets):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, outputs))
    clients = federation(lambda n, g: (torch.randn(n, 2, 8, 8, generator=g), targets(n)), [4, 4, 4])
    simulation = bound(model, clients, Sgd(lr=0.01, steps=3), loss=loss)
    expected = updates(simulation, Vectorised(simulation.task))
    assert torch.allclose(updates(simulation), expected, atol=1e-5 * float(expected.abs().max()))


def test_ties_in_a_pool_go_where_torch_sends_them():
    """Blank images make every window a tie."""
    model = NETWORKS["paper"]
    clients = federation(lambda n, g: (torch.zeros(n, 2, 8, 8), torch.randint(3, (n,), generator=g)))
    check(updates(bound(model, clients)), model, clients)


@pytest.mark.parametrize("local", [LOCAL, Sgd(lr=0.1, epochs=2, batch_size=2)], ids=["full batch", "mini-batches"])
@pytest.mark.parametrize("core", ["program", "vmap"])
def test_a_recorded_step_over_memory_that_stays_gives_the_same_updates(local, core):
    """What a CUDA graph replays, with a recording that merely calls: a second round and other clients reuse the memory."""
    clients = federation()
    simulation = bound(NETWORKS["paper"], clients, local)
    task = simulation.task
    how = simulation.trainer._trainer().core if core == "program" else ByVmap(Vectorised(task).gradients.program)
    recorded = Steps(task, "recorded", how, record=True, capture=lambda function: function)
    d = task.layout.dimension
    for correction in (None, torch.full((4, d), 0.01), torch.full((4, d), 0.02)):
        expected = updates(simulation, correction=correction)
        for _ in range(3):
            assert torch.allclose(updates(simulation, recorded, correction), expected, atol=1e-6)
    assert recorded.recordings.held


def test_cohorts_whose_size_keeps_changing_share_recordings():
    clients = federation(sizes=[4] * 40)
    simulation = bound(NETWORKS["paper"], clients)
    how = simulation.trainer._trainer().core
    recorded = Steps(simulation.task, "recorded", how, record=True, capture=lambda function: function)
    w, shuffles = simulation.task.layout.read(simulation.task.model).float(), simulation.streams.at("batches", 1)
    for count in (30, 31, 29, 27, 26, 28, 25):
        some = torch.arange(count) + 2
        plan = schedule(LOCAL, clients.sizes[some], lambda row: shuffles.generator(row))
        expected = simulation.trainer(w, some, plan, 1)
        assert torch.allclose(recorded(w, some, plan, 1), expected, atol=1e-6)
    assert {key[0] for key in recorded.recordings.seen} == {30, 31, 29, 32}


def test_recordings_make_room():
    from dpfedexp.trainers.stepping import Recordings

    held = Recordings(lambda: None, capture=None, keep=2)
    for _ in range(2):
        for key in (1, 2, 3):
            held.stepper(key)
    assert list(held.held) == [2, 3]


@pytest.mark.parametrize("program", ["gathered", "lean"])
@pytest.mark.parametrize(
    "model",
    [
        NETWORKS["residual"],
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, (3, 2), padding=(2, 0), bias=False), nn.Tanh(),
            nn.Conv2d(4, 2, 3, stride=2), nn.Flatten(), nn.Linear(24, 3),
        ),
    ],
    ids=["residual", "two convolutions"],
)  # fmt: skip
def test_convolutions_by_turned_kernels_give_the_plain_loops_updates(model, program):
    clients = federation()
    simulation = bound(model, clients)
    made = getattr(Programs(simulation.task), program)
    found = [step.op for step in made.steps if isinstance(step.op, Convolve)]
    assert len(found) == 1
    assert found[0].again == (program == "lean")
    check(updates(simulation, Steps(simulation.task, program, by_program(simulation.task, made))), model, clients)


@pytest.mark.parametrize("tile", [1, 2, 3, 100])
@pytest.mark.parametrize("threads", [1, 3])
def test_tiles_and_threads_change_nothing_but_rounding(tile, threads):
    clients = federation(sizes=[3, 5, 1, 4, 4, 2, 6])
    simulation = bound(NETWORKS["paper"], clients)
    task = simulation.task
    expected = updates(simulation, Vectorised(task))
    makers = [lambda: simulation.trainer._trainer(), lambda: Vectorised(task.apart(), record=False),
              lambda: Loop(task.apart(), simulation.streams)]  # fmt: skip
    for make in makers:
        found = updates(simulation, Parallel("tiles", make, tile, threads))
        assert torch.allclose(found, expected, atol=1e-6)
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(72, 3)), "grouped"),
        (nn.Sequential(nn.Conv2d(2, 2, 3), nn.MaxPool2d(3, 1), nn.Flatten(), nn.Linear(32, 3)), "overlap"),
        (nn.Sequential(nn.Flatten(), nn.Linear(128, 3), nn.Softplus()), "Softplus"),
    ],
)
def test_a_network_without_rules_says_so_and_trains_otherwise(model, words):
    clients = federation()
    with pytest.raises(InputError, match=words):
        bound(model, clients)
    assert bound(model, clients, trainer="auto").trainer.name == "vectorised"


def test_shared_parameters_have_no_fast_program():
    layer, twin = nn.Linear(128, 128), nn.Linear(128, 128)
    twin.weight = layer.weight
    with pytest.raises(InputError, match="another layer's too"):
        bound(nn.Sequential(nn.Flatten(), layer, twin, nn.Linear(128, 3)), federation())
    with pytest.raises(InputError, match="more than once"):
        bound(nn.Sequential(nn.Flatten(), layer, layer, nn.Linear(128, 3)), federation())


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_rule_of_ones_own_is_used_and_a_wrong_one_is_found_out():
    clients = federation()
    model = nn.Sequential(nn.Flatten(), Doubled(), nn.Linear(128, 3))
    try:
        register(Doubled)(lambda layer: [(Pointwise(lambda x: 2 * x, lambda dy, x, y: 2 * dy), ())])
        check(updates(bound(model, clients)), model, clients)
        register(Doubled)(lambda layer: [(Pointwise(lambda x: 3 * x, lambda dy, x, y: 3 * dy), ())])
        with pytest.raises(InputError, match="another gradient"):
            bound(model, clients)
    finally:
        RULES.pop(Doubled, None)


def test_a_plain_step_multiplies_no_gradient_of_a_linear_layer_out(monkeypatch):
    model, clients = NETWORKS["paper"], federation()
    simulation = bound(model, clients)
    monkeypatch.setattr(Product, "tensor", lambda self: pytest.fail("a gradient as large as the layer"))
    check(updates(simulation), model, clients)


def test_long_runs_choose_by_measurement_and_short_ones_do_not_ask(monkeypatch, tmp_path):
    clients = federation()
    asked = []

    def timed(task, trainer, *rest, warm=False):
        if not warm:
            asked.append(trainer.name)
        return {"fast": 1.0, "library": 2.0, "tiled-vectorised": 1.5, "tiled-loop": 9.0}[trainer.name]

    monkeypatch.setattr(tune, "_time", timed)
    monkeypatch.setattr(tune, "_remembered", {})
    monkeypatch.setenv("DPFEDEXP_TRAINERS", str(tmp_path / "trainers.json"))
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "vectorised"
    assert not asked
    monkeypatch.setattr(tune, "WORTH_MEASURING", 0)
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "fast"
    assert asked == ["fast", "library", "tiled-vectorised", "tiled-loop"]
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "fast"
    monkeypatch.setattr(tune, "_remembered", {})
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "fast"
    assert len(asked) == 4
    (kept,) = json.loads((tmp_path / "trainers.json").read_text()).values()
    assert kept == {
        "trainer": "fast",
        "seconds": {"fast": 1.0, "library": 2.0, "tiled-vectorised": 1.5, "tiled-loop": 9.0},
    }


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "{" * 5000, None])
def test_a_file_of_choices_that_makes_no_sense_is_measured_over(monkeypatch, tmp_path, text):
    path = tmp_path / "folder" / "trainers.json"
    monkeypatch.setenv("DPFEDEXP_TRAINERS", str(path))
    if text is not None:
        path.parent.mkdir()
        path.write_text(text)
    assert choices.known("a") is None
    choices.keep("a", "fast", {"fast": 1.0, "loop": float("inf")})
    assert choices.known("a") == "fast"


def test_the_quickest_is_chosen_and_the_preferred_one_only_where_they_are_alike(monkeypatch, tmp_path):
    clients, chosen = federation(), []
    monkeypatch.setattr(tune, "WORTH_MEASURING", 0)
    for loop in (0.9, 0.96):
        seconds = {"fast": 1.0, "library": 3.0, "tiled-vectorised": 5.0, "tiled-loop": loop}
        monkeypatch.setattr(tune, "_time", lambda task, trainer, *rest, warm=False, s=seconds: s[trainer.name])
        monkeypatch.setattr(tune, "_remembered", {})
        monkeypatch.setenv("DPFEDEXP_TRAINERS", str(tmp_path / f"{loop}.json"))
        chosen.append(bound(NETWORKS["paper"], clients, trainer="auto").trainer.name)
    assert chosen == ["tiled-loop", "fast"]


def test_a_resumed_run_keeps_the_trainer_that_was_chosen(tmp_path, monkeypatch):
    options = {"local": LOCAL, "rounds": 2, "progress": False, "device": "cpu", "checkpoint": tmp_path}

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            NETWORKS["paper"],
            federation(),
            fedavg(),
            execution=Execution(trainer="tiled-vectorised"),
            on_round=stop,
            **options,
        )
    monkeypatch.setattr(tune, "_time", lambda *_: pytest.fail("a resumed run does not choose again"))
    assert train(NETWORKS["paper"], federation(), fedavg(), resume=True, **options).trainer == "tiled-vectorised"
    assert trainer_again("tiled-loop", "cuda") == "auto"
    assert trainer_again("fused", "cpu") == "auto"


def test_every_trainer_by_name_trains_alike():
    clients = federation()
    runs = [
        train(
            NETWORKS["paper"],
            clients,
            fedavg(),
            local=LOCAL,
            rounds=2,
            progress=False,
            execution=Execution(device="cpu", trainer=name),
        )
        for name in ("fast", "library", "vectorised", "tiled-vectorised", "loop", "tiled-loop")
    ]
    for run in runs[1:]:
        assert torch.allclose(run.model[0].weight, runs[0].model[0].weight, atol=1e-6)
    with pytest.raises(InputError, match="Did you mean 'fast'"):
        bound(NETWORKS["paper"], clients, trainer="fasst")
    with pytest.raises(InputError, match="does not have"):
        bound(NETWORKS["paper"], clients, trainer="fused")


def test_bf16_trains_to_about_the_same_model_and_other_names_are_refused():
    clients = federation()
    full, half = (bound(NETWORKS["paper"], clients, precision=p) for p in ("fp32", "bf16"))
    a, b = updates(full), updates(half)
    assert 0 < float((a - b).norm()) < 0.05 * float(a.norm())
    loop = updates(half, Loop(half.task, half.streams))
    assert 0 < float((loop - a).norm()) < 0.05 * float(a.norm())
    with pytest.raises(InputError, match="precision is 'fp16'"):
        bound(NETWORKS["paper"], clients, precision="fp16")


def test_the_papers_network_and_a_resnet_have_fast_programs():
    for model, channels, side in ((mnist_cdp_net(), 1, 28), (resnet18_gn(groups=8), 3, 32)):
        sampler = lambda n, g, c=channels, s=side: (torch.randn(n, c, s, s), torch.randint(10, (n,)))  # noqa: E731
        assert bound(model, federation(sampler, [2, 2]), trainer="fast").trainer.name == "fast"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not here")
def test_tritons_kernels_give_what_products_of_patches_give():
    """In triton's interpreter, which computes on a CPU what a GPU would."""
    program = """
import torch
from dpfedexp.trainers.fast.convolution import ContractAndPool, Patches
from dpfedexp.trainers.fast.window import Window
from dpfedexp.trainers.fast.triton_kernels.pooled import ConvolveAndPool
torch.manual_seed(0)
for n, c, o, h, w, s, size, stride, dilation, pool in [
    (2, 1, 4, 14, 14, 6, (4, 4), (1, 1), (1, 1), (2, 2)),
    (2, 3, 5, 9, 10, 3, (3, 2), (2, 1), (1, 2), (2, 2)),
    (2, 2, 3, 11, 11, 4, (3, 3), (1, 1), (1, 1), (3, 2)),
]:
    window = Window(size, stride, (0, 0), dilation)
    x, params = torch.randn(n, c, h, w, s), [torch.randn(n, o, c, *size), torch.randn(n, o)]
    fused, patches, product = ConvolveAndPool(window, pool, True), Patches(window.pooled(pool)), ContractAndPool(window, pool, True)
    y, kept = fused.forward(params, x)
    made, shape = patches.forward((), x)
    expected, saved = product.forward(params, made)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(y)
    grads, (dx,) = fused.backward(params, kept, dy, True)
    expected_grads, (through,) = product.backward(params, saved, dy, True)
    torch.testing.assert_close(list(grads), list(expected_grads), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx, patches.backward((), shape, through, True)[1][0], rtol=1e-4, atol=1e-5)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_near_tie_does_not_refuse_a_program_and_a_wrong_rule_is_refused_everywhere(monkeypatch):
    tried, real = [], programs._differing

    def differing(expected, found, *, wrong=1):
        tried.append(real(expected, found))
        return "0.weight" if len(tried) <= wrong else tried[-1]

    monkeypatch.setattr(programs, "_differing", differing)
    model = NETWORKS["norms"]
    assert bound(model, federation(), trainer="fast").trainer.name == "fast"
    assert tried == [None, None, None]
    tried.clear()
    monkeypatch.setattr(programs, "_differing", partial(differing, wrong=programs.ATTEMPTS))
    with pytest.raises(InputError, match=r"another gradient of '0\.weight'"):
        bound(model, federation(), trainer="fast")
    assert len(tried) == programs.ATTEMPTS
