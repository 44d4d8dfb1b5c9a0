"""What share of harmless modules a secure run refuses wrongly: torch's own layers and losses.

Each is prepared for a secure run with trainer "auto", as users write them: a small network around the layer that classifies.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfedexp import Federation, InputError, Sgd
from tests.sizes import long
from tests.trainers.shared import Made, one_round, secured

MOST_REFUSED = 0.03
CLIENTS, ROWS, LABELS = 3, 4, 3
Case = tuple[Callable[[], nn.Module], Tensor, Any, Tensor]
"""A module, a row of inputs like those of its clients, a loss or None, and a target."""


def around(layer: nn.Module, row: tuple[int, ...], call: Callable[..., Any] | None = None) -> nn.Module:
    """A layer for inputs of this shape in a network that classifies: a linear layer before it, and one behind its outputs."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.stem(x).view(-1, *row)
        out = self.layer(h) if call is None else call(self.layer, h)
        while isinstance(out, tuple):
            out = out[0]
        return self.head(out.flatten(1))

    network = Made(forward, stem=nn.Linear(6, math.prod(row)), layer=layer, head=nn.LazyLinear(LABELS))
    network(torch.randn(2, 6))
    return network


def reads(self: Any, x: Tensor) -> Tensor:
    """Words through a layer of embeddings."""
    h = self.layer(x)
    return self.head(h.mean(1) if h.dim() == 3 else h)


FLAT, SERIES, IMAGE, VOLUME = (8,), (4, 8), (4, 6, 6), (2, 4, 4, 4)
NUMBERS, TOKENS = torch.zeros(6), torch.zeros(5, dtype=torch.int64)
PLAIN = """ELU CELU SELU GELU SiLU Mish ReLU ReLU6 LeakyReLU PReLU RReLU Hardshrink Hardsigmoid Hardtanh Hardswish LogSigmoid
    Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Identity Flatten GLU"""
LAYERS = {
    FLAT: """ReLU(inplace=True); Dropout(0.2, inplace=True); Threshold(0.1, 0.0); Softmax(1); Softmin(1); LogSoftmax(1);
        LayerNorm(8); RMSNorm(8); Linear(8, 5); Unflatten(1, (2, 4)); RNNCell(8, 5); LSTMCell(8, 5); GRUCell(8, 5);
        utils.parametrizations.weight_norm(nn.Linear(8, 5)); utils.parametrizations.orthogonal(nn.Linear(8, 8));
        utils.parametrizations.spectral_norm(nn.Linear(8, 5)).eval()""",
    SERIES: """Dropout(0.2); AlphaDropout(0.2); FeatureAlphaDropout(0.2); Conv1d(4, 4, 3, dilation=2, bias=False);
        RNN(8, 5, batch_first=True); LSTM(8, 5, batch_first=True); GRU(8, 5, batch_first=True);
        RNN(8, 4, 2, dropout=0.1, bidirectional=True, batch_first=True);
        LSTM(8, 4, 2, dropout=0.1, bidirectional=True, batch_first=True);
        GRU(8, 4, 2, dropout=0.1, bidirectional=True, batch_first=True); TransformerEncoderLayer(8, 2, 12, batch_first=True);
        TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, norm_first=True, batch_first=True), 2)""",
    IMAGE: """Softmax2d(); Conv2d(4, 8, 3, groups=2, padding='same', padding_mode='reflect'); GroupNorm(2, 4);
        FractionalMaxPool2d(2, output_size=3); LocalResponseNorm(2); CrossMapLRN2d(2); PixelShuffle(2); PixelUnshuffle(2);
        ChannelShuffle(2); Upsample(scale_factor=2, mode='nearest'); Upsample(scale_factor=2, mode='bilinear');
        Upsample(scale_factor=2, mode='bicubic'); UpsamplingNearest2d(scale_factor=2); UpsamplingBilinear2d(scale_factor=2);
        Unfold(3); utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))""",
    VOLUME: "FractionalMaxPool3d(2, output_size=2)",
    (8, 4): "Fold(4, 2, stride=2)",
}
BY_DIMENSION = """Conv{}d({c}, 4, 3); ConvTranspose{}d({c}, 4, 3); MaxPool{}d(2); AvgPool{}d(2); AdaptiveMaxPool{}d(2);
    AdaptiveAvgPool{}d(2); LPPool{}d(2, 2); Dropout{}d(0.2); ConstantPad{}d(1, 0.5); ZeroPad{}d(1); ReflectionPad{}d(1);
    ReplicationPad{}d(1); CircularPad{}d(1); InstanceNorm{}d({c}); BatchNorm{}d({c}).eval()"""
CALLED = {
    "Bilinear(4, 4, 5)": (FLAT, lambda layer, h: layer(h[:, :4], h[:, 4:])),
    "CosineSimilarity(2)": (SERIES, lambda layer, h: layer(h, h.roll(1, 1))),
    "PairwiseDistance()": (SERIES, lambda layer, h: layer(h, h.roll(1, 1))),
    "MultiheadAttention(8, 2, dropout=0.1, batch_first=True)": (SERIES, lambda layer, h: layer(h, h, h)),
    "TransformerDecoderLayer(8, 2, 12, batch_first=True)": (SERIES, lambda layer, h: layer(h, h)),
    "Transformer(8, 2, 1, 1, 12, batch_first=True)": (
        SERIES,
        lambda layer, h: layer(h, h, tgt_mask=nn.Transformer.generate_square_subsequent_mask(4)),
    ),
    "MaxUnpool1d(2)": (SERIES, lambda layer, h: layer(*F.max_pool1d(h, 2, return_indices=True))),
    "MaxUnpool2d(2)": (IMAGE, lambda layer, h: layer(*F.max_pool2d(h, 2, return_indices=True))),
    "MaxUnpool3d(2)": (VOLUME, lambda layer, h: layer(*F.max_pool3d(h, 2, return_indices=True))),
    "Linear(8, 8)": (FLAT, lambda layer, h: layer(layer(h).relu())),
    "Linear( 8, 8)": (FLAT, lambda layer, h: torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False)),
}
WORDS = """Embedding(9, 6); Embedding(9, 6, padding_idx=0); Embedding(9, 6, max_norm=1.0); EmbeddingBag(9, 6);
    EmbeddingBag(9, 6, mode='sum'); EmbeddingBag(9, 6, mode='max')"""
WHOLE, REAL = torch.zeros((), dtype=torch.int64), torch.zeros(LABELS)
REAL_LOSSES = "BCEWithLogits MSE L1 Huber SmoothL1 PoissonNLL SoftMargin MultiLabelSoftMargin"
LOSSES = {
    **dict.fromkeys(("CrossEntropyLoss(label_smoothing=0.1)", "MultiMarginLoss()"), (WHOLE, "Identity")),
    **dict.fromkeys([f"{k}Loss()" for k in REAL_LOSSES.split()], (REAL, "Identity")),
    "NLLLoss()": (WHOLE, "LogSoftmax"),
    "BCELoss()": (REAL, "Sigmoid"),
    "KLDivLoss(reduction='batchmean')": (REAL, "LogSoftmax"),
}
OWN_LOSSES = {
    "GaussianNLLLoss": (
        lambda out, y: nn.GaussianNLLLoss(reduction="none")(out, y, torch.ones_like(out)).mean(1),
        REAL,
    ),
    "focal loss": (lambda out, y: (1 - (p := out.softmax(1).gather(1, y[:, None])[:, 0])) ** 2 * -p.log(), WHOLE),
    "CosineEmbeddingLoss": (
        lambda out, y: F.cosine_embedding_loss(out, y, torch.ones(len(y)), reduction="none"),
        REAL,
    ),
}


def _made(expression: str) -> Any:
    return eval(f"nn.{expression}")


def torchs() -> dict[str, Case]:
    """Modules and losses of torch by the expressions that make them."""
    layers = [(f"{kind}()", FLAT, None) for kind in PLAIN.split()]
    layers += [(one.strip(), row, None) for row, many in LAYERS.items() for one in many.split(";")]
    for dims, row in ((1, SERIES), (2, IMAGE), (3, VOLUME)):
        layers += [(one.strip().format(dims, c=row[0]), row, None) for one in BY_DIMENSION.split(";")]
    layers += [(one, row, call) for one, (row, call) in CALLED.items()]
    found: dict[str, Case] = {
        one: (lambda one=one, row=row, call=call: around(_made(one), row, call), NUMBERS, None, WHOLE)
        for one, row, call in layers
    }
    for one in map(str.strip, WORDS.split(";")):
        read = lambda one=one: Made(reads, layer=_made(one), head=nn.Linear(6, LABELS))  # noqa: E731
        found[one] = read, TOKENS, None, WHOLE
    losses = {one: (_made(one), target, last) for one, (target, last) in LOSSES.items()}
    for name, (loss, target, last) in (losses | {n: (*own, "Identity") for n, own in OWN_LOSSES.items()}).items():
        tail = nn.LogSoftmax(1) if last == "LogSoftmax" else getattr(nn, last)()
        make = lambda tail=tail: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, LABELS), tail)  # noqa: E731
        found[name] = make, NUMBERS, loss, target
    return found


def refusal(make: Callable[[], nn.Module], row: Tensor, loss: Any, target: Tensor) -> str | None:
    """The sentence with which a secure run refuses a case, None where it takes it and its clients learn."""
    torch.manual_seed(0)
    shape, held = (ROWS, *row.shape), []
    for _ in range(CLIENTS):
        x = torch.randn(shape) if row.is_floating_point() else torch.randint(0, 9, shape)
        y = torch.rand(ROWS, *target.shape) if target.is_floating_point() else torch.randint(0, LABELS, (ROWS,))
        held.append((x, y))
    local = Sgd(lr=0.1, steps=2, max_examples=4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = one_round(secured(make(), Federation.from_clients(held), local, chunk_size=CLIENTS, loss=loss))
    except InputError as reason:
        return str(reason)
    # Random numbers may leave a single client's update at zero, as a dropped-out path does; not all of them.
    return None if bool((rows != 0).any()) and bool(rows.isfinite().all()) else "the clients learn nothing"


REFUSED = {"GaussianNLLLoss", "CrossMapLRN2d(2)"}
"""What is refused of torch's: one looks for negative variances, one resizes a tensor whose memory is not filled."""


@long
def test_harmless_modules_of_torch_are_accepted():
    cases = torchs()
    refused = {name: sentence for name, case in cases.items() if (sentence := refusal(*case)) is not None}
    assert refused.keys() <= REFUSED, refused
    assert len(cases) >= 100
    assert len(REFUSED) <= MOST_REFUSED * len(cases)
