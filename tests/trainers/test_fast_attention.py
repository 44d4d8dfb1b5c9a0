"""Transformers and frozen weights as fast programs, against the loop over clients."""

import pytest
import torch
from reproduction.benchmarks.networks import Transformer
from torch import nn
from torch.nn import functional as F

from dpfedexp import Execution, Federation, InputError, Sgd, fedavg
from dpfedexp.engine.prepare import prepare
from dpfedexp.trainers.fast import ops
from dpfedexp.trainers.fast.convolution import ContractAndPool
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.programs import Programs
from tests.trainers.test_frozen import Largest, adapted

LOCAL = Sgd(lr=0.1, steps=3)
WORDS, LENGTH, WIDTH, CLASSES = 11, 5, 8, 3


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, **({"dropout": 0.0, "batch_first": True} | options))


class Encoder(nn.Module):
    """Tokens to classes through any sequence of layers, read at one position."""

    def __init__(self, inner, *, masked=False, place=0):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(WORDS, WIDTH), inner, nn.Linear(WIDTH, CLASSES)
        self.position = nn.Parameter(0.1 * torch.randn(1, LENGTH, WIDTH))
        self.masked, self.place = masked, place
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, tokens):
        x = self.embedding(tokens) * 0.5 + self.position
        return self.head(self.inner(x, self.mask)[:, self.place] if self.masked else self.inner(x)[:, self.place])


class Block(nn.Module):
    """Attention by hand, with functions in the place of layers."""

    def __init__(self, dropout=0.0, *, weights=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout, batch_first=True)
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.weights = weights

    def forward(self, x):
        found, _ = self.attention(x, x, x, need_weights=self.weights)
        return F.silu(F.layer_norm(x + found / 2, (WIDTH,), self.weight, self.bias)) + F.gelu(x, approximate="tanh")


class Adapter(nn.Module):
    def __init__(self, inner, width=WIDTH):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def tokens(n, generator):
    return torch.randint(WORDS, (n, LENGTH), generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def images(n, generator):
    return torch.randn(n, 2, 8, 8, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def bound(model, sampler=tokens, **execution):
    generator = torch.Generator().manual_seed(7)
    clients = Federation.from_clients([sampler(n, generator) for n in (1, 7, 3, 4)])
    options = Execution(device="cpu", **({"trainer": "fast"} | execution))
    return prepare(model, clients, fedavg(), local=LOCAL, rounds=1, execution=options)[0]


def both(simulation):
    """The updates by the fast program, and by the loop."""
    w, everybody = simulation.begin().w.float(), torch.arange(4)
    plan = simulation.plan(everybody, 1)
    loop = Loop(simulation.task, simulation.streams)
    return simulation.trainer(w, everybody, plan, 1), loop(w, everybody, plan, 1)


def check(simulation):
    """Float32 rounding: 2e-5 of the largest entry after three steps."""
    ours, expected = both(simulation)
    assert float(expected.abs().max()) > 1e-3
    assert torch.allclose(ours, expected, atol=2e-5 * float(expected.abs().max()))


def frozen(model, *names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return model


NETWORKS = {
    "post-norm": lambda: Transformer(WORDS, WIDTH, 2, CLASSES, heads=2),
    "pre-norm": lambda: Encoder(nn.Sequential(encoder_layer(norm_first=True), nn.LayerNorm(WIDTH)), place=-1),
    "gelu": lambda: Encoder(encoder_layer(activation="gelu", bias=False)),
    "an activation of its own": lambda: Encoder(encoder_layer(activation=nn.Tanh())),
    "dropout": lambda: Encoder(nn.Sequential(encoder_layer(dropout=0.3), encoder_layer(dropout=0.2, norm_first=True))),
    "encoder and mask": lambda: Encoder(
        nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False), masked=True
    ),
    "attention alone": lambda: Encoder(nn.Sequential(Block(), Block(weights=False))),
    "dropout of weights": lambda: Encoder(nn.Sequential(Block(0.3), Block(0.3, weights=False))),
    "frozen embedding and layer": lambda: frozen(Transformer(WORDS, WIDTH, 2, CLASSES, 2), "embedding", "layers.0"),
    "frozen positions": lambda: frozen(Encoder(encoder_layer()), "position"),
    "frozen within a layer": lambda: frozen(
        Encoder(encoder_layer()), "inner.self_attn.in_proj_weight", "inner.linear1.weight", "inner.norm1.bias", "head.bias"
    ),
    "frozen before the end": lambda: frozen(Encoder(Block()), "inner", "head"),
    "frozen with dropout": lambda: frozen(Encoder(encoder_layer(dropout=0.3)), "embedding", "position", "inner"),
    "adapters": lambda: Encoder(nn.Sequential(Adapter(encoder_layer()), Adapter(nn.Linear(WIDTH, WIDTH)))),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_transformers_and_frozen_parts_give_the_loops_updates(name):
    torch.manual_seed(1)
    check(bound(NETWORKS[name]()))


def backbone():
    torch.manual_seed(2)
    body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(1, 3)).requires_grad_(False)
    return nn.Sequential(body, nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def test_a_frozen_backbone_is_computed_once_for_a_batch_that_stays(monkeypatch):
    simulation = bound(backbone(), images)
    check(simulation)
    calls = []
    for kind in (ContractAndPool, ops.Linear):
        whole = kind.forward
        monkeypatch.setattr(
            kind, "forward", lambda op, *given, kind=kind, whole=whole: (calls.append(kind), whole(op, *given))[1]
        )
    w, one = simulation.begin().w.float(), torch.tensor([1])
    simulation.trainer(w, one, simulation.plan(one, 1), 1)
    assert calls.count(ContractAndPool) == 1
    assert calls.count(ops.Linear) == 2 * LOCAL.steps


def test_a_frozen_layer_gets_no_gradient_made(monkeypatch):
    """The adapters' matrices have no bias and their gradients are products, so that a sum could only be the frozen layer's."""
    simulation = bound(nn.Sequential(nn.Flatten(), Adapter(nn.Linear(128, 128), 128), Adapter(nn.Linear(128, 128), 128),
                                     nn.Linear(128, CLASSES, bias=False)), images)  # fmt: skip
    check(simulation)
    monkeypatch.setattr(ops.Later, "tensor", lambda self: pytest.fail("a gradient that nobody uses"))
    both(simulation)


@pytest.mark.parametrize("make", [lambda: NETWORKS["frozen embedding and layer"](), backbone], ids=["tokens", "images"])
def test_frozen_parts_of_a_program_compute_in_bf16_with_the_rest(make):
    """5 per cent of the update is some twenty roundings."""
    torch.manual_seed(1)
    model = make()
    sampler = tokens if isinstance(model, Transformer) else images
    simulation = bound(model, sampler, precision="bf16")
    held = simulation.trainer._trainer().core.program.frozen
    assert held
    assert all(value.dtype == torch.bfloat16 for value in held.values())
    rough, exact = both(simulation)[0], both(bound(model, sampler))[1]
    assert 0 < float((rough - exact).norm() / exact.norm()) < 0.05


def test_frozen_tensors_of_a_program_are_the_models_own():
    simulation = bound(frozen(Encoder(encoder_layer()), "embedding", "inner"))
    held, model = Programs(simulation.task).plain.frozen, simulation.task.model
    assert held.keys() == {name for name, value in model.named_parameters() if not value.requires_grad}
    assert all(value.data_ptr() == model.get_parameter(name).data_ptr() for name, value in held.items())


def test_a_program_holds_frozen_parameters_once():
    """No tensor of 32 clients comes near 32 copies of a frozen matrix; 4 rows of width 256 each do not either."""
    width, count = 256, 32
    clients = Federation.from_clients([(torch.randn(4, width), torch.randint(0, 3, (4,))) for _ in range(count)])
    execution = Execution(device="cpu", trainer="fast")
    simulation, _ = prepare(adapted(width, 1), clients, fedavg(), local=LOCAL, rounds=1, execution=execution)
    w, everybody = simulation.begin().w.float(), torch.arange(count)
    with Largest() as seen:
        simulation.trainer._trainer()(w, everybody, simulation.plan(everybody, 1), 1)
    assert 0 < seen.numbers < 4 * width * width


class Crossed(Block):
    def forward(self, x):
        return self.attention(x, F.silu(x), x)[0] + self.weight + self.bias


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (lambda: encoder_layer(batch_first=False), "batch first"),
        (lambda: encoder_layer(activation=F.softplus), "activation without a rule"),
        (lambda: Crossed(), "attends to something else"),
    ],
)
def test_what_has_no_rule_says_so(inner, words):
    with pytest.raises(InputError, match=words):
        bound(Encoder(inner()))
