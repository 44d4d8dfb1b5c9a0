"""What a module draws: the same masks in every trainer, each client's from its own key, with the law that torch's own have."""

import math
import warnings
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from dpfedexp import Execution, Sgd, fedavg, train
from dpfedexp.core.noise import Streams
from dpfedexp.engine.prepare import prepare
from dpfedexp.trainers.draws import Drawing, attention, client_keys, dropout_mask, step_keys
from tests.trainers.shared import Made, labeled, recorded, simulated, updates

SIZES = [4, 2, 7, 1]


def attends(self, x):
    """Attention, functional dropout and noise of the module's own."""
    x = x + 0.1 * torch.randn_like(x) * torch.rand(x.shape) * torch.bernoulli(torch.full_like(x, 0.7))
    return F.dropout(self.head(self.layer(x).mean(1)), 0.1, training=self.training)


def sequence_first(self, x):
    """Dropout where the rows are not the first dimension: padding must not move a client's masks."""
    return F.dropout(self.layer(x.transpose(0, 1)), 0.4).mean(0)


def reads(self, x):
    """The last output and the last state of a recurrent layer."""
    states, last = self.layer(x)
    hidden = last[0] if isinstance(last, tuple) else last
    return self.head(torch.cat([states[:, -1], hidden[-1]], -1))


RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": partial(nn.RNN, nonlinearity="relu")}


def modules():
    torch.manual_seed(0)
    image, text = (1, 8, 8), (5, 8)
    conv = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    deep, dropped = {"num_layers": 2, "bidirectional": True}, {"num_layers": 2, "dropout": 0.5}
    recurrent = [("lstm", dropped, 8), ("gru", dropped, 8), ("tanh", deep, 12), ("relu", {}, 8)]
    return {
        "dense": (nn.Sequential(nn.Flatten(), nn.Linear(40, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 3)), text),
        "channels": (nn.Sequential(*conv, nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3)), image),
        "alpha": (nn.Sequential(nn.Flatten(), nn.Linear(40, 8), nn.AlphaDropout(0.2), nn.Linear(8, 3)), text),
        "in place": (nn.Sequential(nn.Flatten(), nn.Linear(40, 8), nn.Dropout(0.3, True), nn.Linear(8, 3)), text),
        "attention": (
            Made(attends, layer=nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), head=nn.Linear(8, 3)),
            text,
        ),
        "sequence first": (Made(sequence_first, layer=nn.Linear(8, 3)), text),
        **{
            kind: (Made(reads, layer=RECURRENT[kind](8, 4, batch_first=True, **how), head=nn.Linear(width, 3)), text)
            for kind, how, width in recurrent
        },
    }


MODULES = modules()


def federation(shape):
    return labeled(shape, SIZES)


def simulation(name, trainer, local=Sgd(lr=0.1, steps=3, batch_size=3), **options):
    model, shape = MODULES[name]
    return simulated(model, federation(shape), local, trainer, **options)


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        *((name, "vectorized") for name in MODULES),
        *(("attention", trainer) for trainer in ("tiled-vectorized", "tiled-loop", "recorded")),
        ("dense", "fast"),
        ("channels", "fast"),
    ],
)
def test_every_trainer_draws_the_loops_masks(name, trainer):
    """1e-6 of the largest entry is float32 rounding; another mask would show as a difference of its own size."""
    expected = updates(simulation(name, "loop"))
    prepared = simulation(name, "vectorized" if trainer == "recorded" else trainer)
    # More than twelve calls of a shape are replayed by torch.fx.
    rows = updates(prepared, recorded(prepared) if trainer == "recorded" else None, calls=6)
    torch.testing.assert_close(rows, expected, rtol=0.0, atol=1e-6 * max(1.0, float(expected.abs().max())))
    assert float(expected.norm(dim=1).min()) > 1e-3


def test_masks_are_there_and_change_with_the_round_and_the_seed():
    """All rows are one batch, so that nothing but the masks changes with the round."""
    make = partial(simulation, "attention", "vectorized", Sgd(lr=0.1, steps=3))
    rows = updates(make())
    assert torch.equal(rows, updates(make()))
    for again in (updates(make(), round=2), updates(make(seed=1))):
        assert float((again - rows).abs().max()) > 1e-3


@pytest.mark.parametrize(("name", "trainer"), [("channels", "loop"), ("sequence first", "vectorized")])
def test_a_run_is_the_same_whatever_the_chunk_size(name, trainer):
    """1e-6: a chunk of one has other shapes, which round in their own way; clients' sizes differ, so that chunks pad."""
    model, shape = MODULES[name]
    given, found = {"local": Sgd(lr=0.1, steps=2), "rounds": 2}, []
    for size in (1, 3, 4):
        execution = Execution(device="cpu", chunk_size=size, trainer=trainer)
        run = train(model, federation(shape), fedavg(), execution=execution, **given)
        found.append(nn.utils.parameters_to_vector(run.model.parameters()))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0.0, atol=1e-6)


def test_a_model_without_draws_gets_no_keys():
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.0))
    prepared = simulated(model, federation((8,)), Sgd(lr=0.1, steps=1))
    assert not prepared.task.module_traits.draws
    assert prepared.task.keys(prepared.streams, 1, torch.arange(4)) is None


def test_a_layer_whose_draws_can_not_be_replaced_runs_on_the_loop():
    own = Made(lambda self, x: self.layer(x * torch.empty_like(x).exponential_()), layer=nn.Linear(8, 3))
    prepared, note = prepare(own, federation((8,)), fedavg(), local=Sgd(lr=0.1, steps=1), rounds=1)
    assert prepared.cohort.trainer.name == "loop"
    assert "slower" in note


def masks(p=0.3, clients=40, steps=5, calls=3, shape=(10, 70)):
    """[clients, steps, calls, 700] of kept places."""
    keys = client_keys(Streams(3), 1, torch.arange(clients), torch.device("cpu"))
    found = [
        dropout_mask(key, call, p, shape, torch.float32).flatten()
        for step in range(steps)
        for key in step_keys(keys, torch.tensor(float(step), dtype=torch.float64))
        for call in range(calls)
    ]
    return torch.stack(found).view(steps, clients, calls, -1).transpose(0, 1)


def test_masks_keep_the_share_that_was_asked_for():
    """420,000 draws: five deviations of the share, and of every client's own; all fail by chance less than once in 10⁶ runs."""
    for p in (0.1, 0.5):
        kept = masks(p).mean((1, 2, 3))
        deviation = math.sqrt(p * (1 - p))
        assert abs(float(kept.mean()) - (1 - p)) < 5 * deviation / math.sqrt(420_000)
        assert float((kept - (1 - p)).abs().max()) < 6 * deviation / math.sqrt(10_500)


def test_masks_of_clients_steps_calls_rows_and_places_are_independent():
    """At most 19,900 correlations of n draws each below 7/√n, which chance passes but for 5·10⁻⁸."""
    centered = (masks() - 0.7) / math.sqrt(0.21)
    flat = centered.flatten(0, 2)
    for rows, n in ((flat[:200], 700), (centered.flatten(1)[:, :7000], 7000)):
        products = rows @ rows.T / n
        products.fill_diagonal_(0)
        assert float(products.abs().max()) < 7 / math.sqrt(n)
    # Neighboring places, and a place and the one below it in the next row.
    places = centered.reshape(-1, 10, 70)
    for one, two in ((places[:, :, 1:], places[:, :, :-1]), (places[:, 1:], places[:, :-1])):
        assert abs(float((one * two).mean())) < 5.5 / math.sqrt(one.numel())


def drawn(function, count=200):
    keys = client_keys(Streams(1), 1, torch.arange(count), torch.device("cpu"))
    out = []
    for key in keys:
        with Drawing(key):
            out.append(function())
    return torch.stack(out).double()


KINDS = {
    "alpha": lambda: F.alpha_dropout(torch.full((100, 4), 0.5), 0.3, training=True),
    "channels": lambda: F.dropout2d(torch.full((20, 5, 2, 2), 0.5), 0.3),
    "feature alpha": lambda: F.feature_alpha_dropout(torch.full((20, 5, 2, 2), 0.5), 0.3, training=True),
    "uniform": lambda: torch.rand(20, 20),
    "normal": lambda: torch.randn(20, 20),
    "attention": lambda: F.scaled_dot_product_attention(
        torch.ones(2, 6, 4), torch.ones(2, 6, 4), torch.arange(24.0).view(1, 6, 4).expand(2, 6, 4), dropout_p=0.3
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_moments_of_torchs_own(kind):
    """Mean and second moment over 200 clients' draws against torch's over as many: 5.5 deviations of the difference, which are
    taken over clients because places of a channel go together."""
    ours = drawn(KINDS[kind])
    torch.manual_seed(5)
    theirs = torch.stack([KINDS[kind]() for _ in range(200)]).double()
    for power in (1, 2):
        one, two = (x.pow(power).flatten(1).mean(1) for x in (ours, theirs))
        deviation = math.sqrt(float(one.var() + two.var()) / 200)
        assert abs(float(one.mean() - two.mean())) < 5.5 * deviation
    assert float(ours.std(0).max()) > 0


def test_whole_channels_are_dropped():
    kept = drawn(KINDS["channels"], 3)
    assert torch.equal(kept, kept[..., :1, :1].expand_as(kept))
    assert {round(v, 5) for v in kept.unique().tolist()} == {0.0, round(0.5 / 0.7, 5)}


@pytest.mark.parametrize(("kind", "options"), [("", {"is_causal": True}), ("bool", {}), ("float", {"scale": 0.3})])
def test_attention_is_torchs_and_to_nothing_it_is_zero_without_a_gradient(kind, options):
    """A row that is masked as a whole, such as the padding before a sentence, must not make a client's update NaN. 1e-6 is
    float32 rounding of means of numbers of order one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, generator=generator, requires_grad=True) for _ in range(3))
    scores = torch.randn(5, 5, generator=generator)
    seen = (scores > -0.5) | torch.eye(5, dtype=torch.bool)
    seen[:2] = False
    if kind:
        options = options | {"attn_mask": seen if kind == "bool" else scores.masked_fill(~seen, -torch.inf)}
    found = []
    for attend in (F.scaled_dot_product_attention, partial(attention, drop=F.dropout)):
        output = attend(q, k, v, **options)
        found.append((output, *torch.autograd.grad(output.square().sum(), (q, k, v))))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)
    assert bool((found[1][0][:, :2] == 0).all()) == bool(kind)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_is_vectorized_without_torchs_fallback(dropout):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))
    prepared = simulated(model, federation((5, 8)), Sgd(lr=0.1, steps=1), "vectorized")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert updates(prepared).abs().sum() > 0


@pytest.mark.parametrize("kind", RECURRENT)
def test_every_option_of_a_layer_gives_torchs_outputs_and_states(kind):
    for layers, both, first, bias in ((1, False, True, False), (2, True, False, True), (2, True, True, False)):
        how = {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
        layer = RECURRENT[kind](6, 4, **how, dtype=torch.float64)
        x = torch.randn(3, 5, 2, 6, dtype=torch.float64)
        with Drawing(None):
            together = torch.func.vmap(layer)(x)
        for client, rows in enumerate(x):
            torch.testing.assert_close(tree_map(lambda t, at=client: t[at], together), layer(rows))


def test_a_client_alone_keeps_torchs_own_kernel(monkeypatch):
    monkeypatch.setattr("dpfedexp.trainers.draws.recurrent", None)
    with Drawing(None) as mode:
        nn.LSTM(6, 4)(torch.randn(5, 2, 6))
    assert mode.fused


def test_packed_sequences_and_projections_are_left_to_torch():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 6), torch.randn(2, 6)])
    for layer, x in ((nn.LSTM(6, 4), packed), (nn.LSTM(6, 4, proj_size=2), torch.randn(5, 2, 6))):
        with Drawing(None) as mode:
            layer(x)
        assert not mode.fused


def test_no_layer_asks_where_weights_lie_that_have_no_place(monkeypatch):
    """On a GPU a recurrent layer moves changed weights together; those of all clients at once are nowhere."""
    ask = Mock(side_effect=RuntimeError("Cannot access data pointer of Tensor that doesn't have storage"))
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", ask)
    assert updates(simulation("lstm", "vectorized")).isfinite().all()
