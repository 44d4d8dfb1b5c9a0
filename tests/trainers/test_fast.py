"""Fast programs against the plain loop and against `vmap`, and what they must not take for something else."""

from dataclasses import dataclass
from functools import partial
from unittest.mock import create_autospec

import pytest
import torch
from reproduction.benchmarks.networks import Transformer, resnet18_gn
from torch import nn
from torch.nn import functional as F

from dpfedexp import InputError, Sgd
from dpfedexp.models import mnist_cdp_net
from dpfedexp.trainers import select as programs
from dpfedexp.trainers.fast import ops
from dpfedexp.trainers.fast.convolution import ContractAndPool
from dpfedexp.trainers.fast.ops import Function, computed
from dpfedexp.trainers.fast.program import Program, ProgramStep
from dpfedexp.trainers.fast.trace import RULES
from dpfedexp.trainers.select import Programs, with_checked_ops
from dpfedexp.trainers.steps import Loop, Vectorized
from tests.engine.plain import plain_update
from tests.sizes import sized
from tests.trainers.shared import Made, labeled, sampled, simulated, updates
from tests.trainers.test_frozen import Adapter

SIZES = [1, 7, 3, 4]
LOCAL = Sgd(lr=0.1, steps=3)
WORDS, LENGTH, WIDTH, CLASSES = 11, 5, 8, 3


def residual():
    parts = {"conv": nn.Conv2d(2, 2, 3, padding=1, bias=False), "norm": nn.GroupNorm(1, 2), "shortcut": nn.Sequential()}
    return Made(lambda self, x: F.relu(self.norm(self.conv(x)) + self.shortcut(x)), **parts)


def functional(self, x):
    return self.scale(torch.relu(F.linear(torch.flatten(x, 1), self.weight)))


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


def networks():
    torch.manual_seed(1)
    head = lambda width: (nn.Flatten(), nn.Linear(width, 3))  # noqa: E731
    return {
        "paper": nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.MaxPool2d(2), *head(4)),
        "relu before the pool": nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), *head(27)),
        "strides": nn.Sequential(nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0), (1, 2)), nn.Tanh(), *head(72)),
        "1×1": nn.Sequential(nn.Conv2d(2, 3, 1), nn.SiLU(), nn.AvgPool2d(2), *head(48)),
        "pools alone": nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(2, 3, 2), nn.Sigmoid(), nn.MaxPool2d((3, 2)), *head(3)),
        "mean": nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), *head(4)),
        "norms": nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.LeakyReLU(), nn.LayerNorm([6, 6]), nn.Flatten(), nn.LayerNorm(144),
            nn.Linear(144, 3),
        ),
        "residual": nn.Sequential(residual(), residual(), *head(128)),
        "functional": Made(functional, weight=nn.Parameter(0.3 * torch.randn(3, 128)), scale=nn.Linear(3, 3)),
    }  # fmt: skip


NETWORKS = networks()


def images(n, generator):
    return torch.randn(n, 2, 8, 8, generator=generator), torch.randint(3, (n,), generator=generator)


def tokens(n, generator):
    return torch.randint(WORDS, (n, LENGTH), generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def federation(sampler=images, sizes=SIZES):
    return sampled(sampler, sizes)


def bound(model, clients, local=LOCAL, trainer="fast", **options):
    return simulated(model, clients, local, trainer, **options)


def check(ours, model, clients):
    for i in range(len(clients)):
        expected = plain_update(model, *clients.client(i), lr=0.1, steps=3)
        # Some processors' libraries add a weight's gradient up number by number.
        assert torch.allclose(ours[i], expected, atol=5e-5 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_rule_gives_the_plain_loops_updates(name):
    """Float32 rounding: 1e-5 of the largest entry after three steps."""
    clients = federation()
    check(updates(bound(NETWORKS[name], clients)), NETWORKS[name], clients)


def test_a_loss_of_ones_own_that_looks_across_examples_gives_vmaps_updates():
    """tests/core/test_losses.py compares the losses that have a gradient by hand."""
    clients = federation(lambda n, g: (torch.randn(n, 4, generator=g), torch.randn(n, 2, generator=g)), [4, 4, 4])
    run = bound(nn.Linear(4, 2), clients, loss=lambda o, t: (o - o.mean(0) - t).square().sum(1))
    expected = updates(run, Vectorized(run.task))
    assert torch.allclose(updates(run), expected, atol=1e-5 * float(expected.abs().max()))


def test_ties_in_a_pool_go_where_torch_sends_them():
    """Blank images make every window a tie."""
    model = NETWORKS["paper"]
    clients = federation(lambda n, g: (torch.zeros(n, 2, 8, 8), torch.randint(3, (n,), generator=g)))
    check(updates(bound(model, clients)), model, clients)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_rule_of_ones_own_is_used_and_a_wrong_one_is_found_out():
    clients = federation()
    model = nn.Sequential(nn.Flatten(), Doubled(), nn.Linear(128, 3))
    try:
        RULES[Doubled] = lambda layer: [(Function(lambda x: 2 * x), ())]
        check(updates(bound(model, clients)), model, clients)
        RULES[Doubled] = lambda layer: [(Function(lambda x: 3 * x), ())]
        with pytest.raises(InputError, match="another gradient"):
            bound(model, clients)
    finally:
        RULES.pop(Doubled, None)


def test_the_papers_network_and_a_resnet_have_fast_programs():
    for model, shape in ((mnist_cdp_net(), (1, 28, 28)), *sized([], [(resnet18_gn(groups=8), (3, 32, 32))])):
        assert bound(model, labeled(shape, [2, 2], 10)).trainer.name == "fast"


def test_one_near_tie_does_not_refuse_a_program_and_a_wrong_rule_is_refused_everywhere(monkeypatch):
    tried, real = [], programs._differs

    def differs(*given, wrong=1):
        tried.append(real(*given))
        return tried[-1] or len(tried) <= wrong * parameters

    monkeypatch.setattr(programs, "_differs", differs)
    model = NETWORKS["norms"]
    parameters = len(list(model.parameters()))
    assert bound(model, federation(), trainer="fast").trainer.name == "fast"
    assert tried == [False] * 3 * parameters
    tried.clear()
    monkeypatch.setattr(programs, "_differs", partial(differs, wrong=programs.ATTEMPTS))
    with pytest.raises(InputError, match=r"another gradient of '0\.weight'"):
        bound(model, federation(), trainer="fast")
    assert len(tried) == programs.ATTEMPTS * parameters


def frozen(model, *names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return model


SEQUENCES = {
    "post-norm": lambda: Transformer(WORDS, WIDTH, 2, CLASSES, heads=2),
    "pre-norm": lambda: Encoder(nn.Sequential(encoder_layer(norm_first=True), nn.LayerNorm(WIDTH)), place=-1),
    "an activation of its own": lambda: Encoder(encoder_layer(activation=nn.Tanh(), bias=False)),
    "dropout": lambda: Encoder(nn.Sequential(nn.Dropout(0.3), encoder_layer(norm_first=True), nn.Dropout(0.2))),
    "encoder and mask": lambda: Encoder(
        nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False), masked=True
    ),
    "attention alone": lambda: Encoder(nn.Sequential(Block(), Block(weights=False))),
    "frozen embedding and layer": lambda: frozen(Transformer(WORDS, WIDTH, 2, CLASSES, 2), "embedding", "layers.0"),
    "frozen within a layer": lambda: frozen(
        Encoder(encoder_layer()), "inner.self_attn.in_proj_weight", "inner.linear1.weight", "inner.norm1.bias", "head.bias"
    ),
    "frozen with dropout": lambda: frozen(
        Encoder(nn.Sequential(nn.Dropout(0.3), encoder_layer())), "embedding", "position", "inner"
    ),
    "adapters": lambda: Encoder(nn.Sequential(Adapter(WIDTH, 2, encoder_layer()), Adapter(WIDTH, 2))),
}  # fmt: skip


def agrees(simulation):
    """With the loop, to float32 rounding: 2e-5 of the largest entry after three steps."""
    ours, expected = updates(simulation), updates(simulation, Loop(simulation.task, simulation.streams))
    assert float(expected.abs().max()) > 1e-3
    assert torch.allclose(ours, expected, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", SEQUENCES)
def test_transformers_and_frozen_parts_give_the_loops_updates(name):
    torch.manual_seed(1)
    agrees(bound(SEQUENCES[name](), federation(tokens)))


def backbone():
    torch.manual_seed(2)
    body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(1, 3)).requires_grad_(False)
    return nn.Sequential(body, nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def test_a_frozen_backbone_is_computed_once_for_a_batch_that_stays(monkeypatch):
    simulation = bound(backbone(), federation())
    agrees(simulation)
    watched = [create_autospec(kind.forward, side_effect=kind.forward) for kind in (ContractAndPool, ops.Linear)]
    for kind, forward in zip((ContractAndPool, ops.Linear), watched, strict=True):
        monkeypatch.setattr(kind, "forward", forward)
    updates(simulation, who=torch.tensor([1]))
    assert [forward.call_count for forward in watched] == [1, 2 * LOCAL.steps]


def features(n, generator):
    return torch.randn(n, 4, generator=generator), torch.randint(2, (n,), generator=generator)


@pytest.mark.parametrize(
    ("trainer", "word", "frozen"),
    [("fast", -1, False), ("fast", WORDS, True), ("vectorized", WORDS, False), ("tiled-vectorized", -1, True)],
)
def test_a_word_that_does_not_exist_is_its_clients_own_affair(trainer, word, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 3), nn.Flatten(), nn.Linear(3 * LENGTH, CLASSES))
    model[0].requires_grad_(not frozen)
    run = bound(model, federation(tokens, [5] * 6), trainer=trainer)
    proper = updates(run)
    # A secure run never looks whether a client's words are in the vocabulary; here they change behind its back.
    run.task.clients.inputs[15:20] = word
    found = updates(run)
    others = torch.arange(6) != 3
    torch.testing.assert_close(found[others], proper[others], rtol=1e-5, atol=1e-6)
    assert not found[3].isfinite().all()


def activated(activate, forward=lambda self, x: self.last(self.activate(self.first(x)))):
    return Made(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 2), activate=activate)


def ignored(self, x):
    """The activation changes the value itself, and its return value is not used."""
    hidden = self.first(x)
    self.activate(hidden)
    return self.last(hidden)


def begins_at_zero():
    """A head that begins at zero, which hides every gradient, on features that are not trained, which no tracer sees."""

    def unseen(self, x):
        with torch.no_grad():
            features = torch.tanh(self.first(x))
        return self.last(features)

    model = activated(None, unseen)
    nn.init.zeros_(model.last.weight)
    return model


def tied():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[1].weight = layers[0].weight
    return nn.Sequential(*layers, nn.Linear(4, 2))


class Crossed(Block):
    def forward(self, x):
        return self.attention(x, F.silu(x), x)[0] + self.weight + self.bias


@pytest.mark.parametrize(
    ("make", "sampler", "words"),
    [
        (lambda: nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(72, 3)), images, "grouped"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3), nn.Softplus()), images, "Softplus"),
        (lambda: Encoder(encoder_layer(batch_first=False)), tokens, "batch first"),
        (lambda: Encoder(encoder_layer(activation=F.softplus)), tokens, "activation without a rule"),
        (lambda: Encoder(Crossed()), tokens, "attends to something else"),
        (lambda: Encoder(encoder_layer(dropout=0.1)), tokens, "has options"),
        (lambda: activated(lambda h: h * h.mean(None)), features, "no fast program"),
        (lambda: activated(nn.ReLU(inplace=True), ignored), features, "nothing reads"),
        (lambda: activated(F.relu_, ignored), features, "nothing reads"),
        (lambda: activated(lambda h: h.clamp_(-2, 2), ignored), features, "nothing reads"),
        (begins_at_zero, features, "another gradient"),
        (tied, features, "another layer's too"),
        (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 2)), features, "more than once"),
    ],
)
def test_what_has_no_rule_says_so_and_trains_otherwise(make, sampler, words):
    clients = federation(sampler)
    with pytest.raises(InputError, match=words):
        bound(make(), clients)
    assert bound(make(), clients, trainer="auto").trainer.name == "vectorized"


def test_tracing_leaves_the_runs_module_as_it_is():
    """A tensor that is made on the way becomes an attribute of the module that is traced."""
    model = Made(lambda self, x: self.layer(x + torch.arange(4.0)), layer=nn.Linear(4, 2))
    run = bound(model, federation(features), trainer="vectorized")
    names = set(vars(run.task.model))
    with pytest.raises(InputError, match="no fast program"):
        Programs(run.task).plain  # noqa: B018
    assert set(vars(run.task.model)) == names
    assert updates(run).isfinite().all()


@dataclass(frozen=True)
class Fused(Function):
    """Several operations in one, with gradients of the parameters that are wrong by a factor."""

    factor: float

    def backward(self, params, saved, dy, wanted):
        of_params, of_inputs = super().backward(params, saved, dy, wanted)
        return [self.factor * gradient for gradient in of_params], of_inputs


def test_a_kernel_is_held_to_what_it_stands_for_layer_by_layer():
    draws = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(2, *shape, generator=draws) for shape in ((4, 5), (3, 4), (3, 5)))
    first, second = ProgramStep(Function(torch.tanh), (0,), 1), ProgramStep(ops.Linear(False), (1,), 2, ("w",))
    last = ProgramStep(Function(torch.relu), (2,), 3)

    def back_and_forth(factor):
        step = ProgramStep(Fused(lambda x, w: torch.bmm(w, torch.tanh(x)), factor), (0,), 2, ("w",))
        plain = Program((first, second, last), output=3)
        checked, other = with_checked_ops(Program((step, last), output=3), plain, "fp32").steps
        assert other is last
        _, saved = checked.op.forward([w], x)
        return checked.op.backward([w], saved, dy, True)

    (of_w,), (of_x,) = back_and_forth(1.005)
    # The exact gradients are passed on.
    torch.testing.assert_close(computed(of_w), dy @ torch.tanh(x).transpose(1, 2))
    torch.testing.assert_close(of_x, w.transpose(1, 2) @ dy * (1 - torch.tanh(x) ** 2))
    with pytest.raises(ops.Unsupported, match="Fused gives something else than Linear"):
        back_and_forth(1.02)
