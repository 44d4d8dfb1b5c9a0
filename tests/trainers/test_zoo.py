"""What share of harmless modules a secure run refuses wrongly: torch's own layers, losses and, where it is there, torchvision's.

Each is prepared for a secure run with trainer "auto", as users write them: a small network around the layer that classifies.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from dpfedexp import Execution, Federation, InputError, Sgd, dp_fedavg
from dpfedexp.engine.prepare import prepare
from tests.sizes import LONG

try:
    import torchvision
    from torchvision.transforms import v2
except (ImportError, RuntimeError):
    torchvision = None

PRIVATE = dp_fedavg(clip=1.0, noise_multiplier=2.0)
SMALL, LARGE = (Sgd(lr=0.1, steps=2, max_examples=4), 3), (Sgd(lr=0.1, steps=1, max_examples=2), 1)
"""Local steps and chunk size: of layers, and of whole networks."""
MOST_REFUSED = 0.03
CLIENTS, ROWS, LABELS = 3, 4, 3

Case = tuple[Callable[[], nn.Module], Any, Any]
"""A module, a row of inputs like those of its clients, and what else `prepare` is given."""


class Around(nn.Module):
    """A layer in a network that classifies: `into` brings the inputs to the layer's shape, and a linear layer reads its outputs."""

    def __init__(self, layer: nn.Module, row: tuple[int, ...], call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.stem, self.layer, self.row = nn.Linear(6, int(torch.tensor(row).prod())), layer, row
        self.call = call or (lambda layer, h: layer(h))
        with torch.no_grad():
            width = self._features(torch.randn(2, 6)).shape[1]
        self.head = nn.Linear(width, LABELS)

    def _features(self, x: Tensor) -> Tensor:
        out = self.call(self.layer, self.stem(x).view(-1, *self.row))
        while isinstance(out, tuple):
            out = out[0]
        return out.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._features(x))


class Reads(nn.Module):
    """Words through a layer of embeddings."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(6, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.head(h.mean(1) if h.dim() == 3 else h)


FLAT, SERIES, IMAGE, VOLUME = (8,), (4, 8), (4, 6, 6), (2, 4, 4, 4)
NUMBERS, TOKENS = torch.zeros(6), torch.zeros(5, dtype=torch.int64)


def _layers() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]]:
    found: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {}

    def add(name: str, make: Callable[[], nn.Module], row: tuple[int, ...], call: Any = None) -> None:
        found[name] = make, row, call

    for kind in (  # noqa: SIM905
        "ELU CELU SELU GELU SiLU Mish ReLU ReLU6 LeakyReLU PReLU RReLU Hardshrink Hardsigmoid Hardtanh Hardswish LogSigmoid "
        "Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Identity Flatten"
    ).split():
        add(kind, getattr(nn, kind), FLAT)
    add("ReLU in place", lambda: nn.ReLU(inplace=True), FLAT)
    add("Dropout in place", lambda: nn.Dropout(0.2, inplace=True), FLAT)
    add("Threshold", lambda: nn.Threshold(0.1, 0.0), FLAT)
    add("GLU", lambda: nn.GLU(), FLAT)
    for kind in ("Softmax", "Softmin", "LogSoftmax"):
        add(kind, lambda kind=kind: getattr(nn, kind)(1), FLAT)
    add("Softmax2d", nn.Softmax2d, IMAGE)
    for kind in ("Dropout", "AlphaDropout", "FeatureAlphaDropout"):
        add(kind, lambda kind=kind: getattr(nn, kind)(0.2), SERIES)
    for dims, row in ((1, SERIES), (2, IMAGE), (3, VOLUME)):
        channels = row[0]
        for kind, more in (
            ("Conv", (channels, 4, 3)),
            ("ConvTranspose", (channels, 4, 3)),
            ("MaxPool", (2,)),
            ("AvgPool", (2,)),
            ("AdaptiveMaxPool", (2,)),
            ("AdaptiveAvgPool", (2,)),
            ("LPPool", (2, 2)),
            ("Dropout", (0.2,)),
            ("ConstantPad", (1, 0.5)),
            ("ZeroPad", (1,)),
            ("ReflectionPad", (1,)),
            ("ReplicationPad", (1,)),
            ("CircularPad", (1,)),
            ("InstanceNorm", (channels,)),
        ):
            name = f"{kind}{dims}d"
            add(name, lambda name=name, more=more: getattr(nn, name)(*more), row)
        add(f"BatchNorm{dims}d in eval", lambda dims=dims, c=channels: getattr(nn, f"BatchNorm{dims}d")(c).eval(), row)
        unpool = {1: nn.MaxUnpool1d, 2: nn.MaxUnpool2d, 3: nn.MaxUnpool3d}[dims](2)
        pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[dims]
        add(
            f"MaxUnpool{dims}d",
            lambda unpool=unpool: copy.deepcopy(unpool),
            row,
            lambda layer, h, pool=pool: layer(*pool(h, 2, return_indices=True)),
        )
    add("grouped Conv2d", lambda: nn.Conv2d(4, 8, 3, groups=2, padding="same", padding_mode="reflect"), IMAGE)
    add("dilated Conv1d", lambda: nn.Conv1d(4, 4, 3, dilation=2, bias=False), SERIES)
    add("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, output_size=3), IMAGE)
    add("FractionalMaxPool3d", lambda: nn.FractionalMaxPool3d(2, output_size=2), VOLUME)
    add("GroupNorm", lambda: nn.GroupNorm(2, 4), IMAGE)
    add("LayerNorm", lambda: nn.LayerNorm(8), FLAT)
    add("RMSNorm", lambda: nn.RMSNorm(8), FLAT)
    add("LocalResponseNorm", lambda: nn.LocalResponseNorm(2), IMAGE)
    add("CrossMapLRN2d", lambda: nn.CrossMapLRN2d(2), IMAGE)
    add("Linear", lambda: nn.Linear(8, 5), FLAT)
    add("Bilinear", lambda: nn.Bilinear(4, 4, 5), FLAT, lambda layer, h: layer(h[:, :4], h[:, 4:]))
    add("Unflatten", lambda: nn.Unflatten(1, (2, 4)), FLAT)
    add("PixelShuffle", lambda: nn.PixelShuffle(2), IMAGE)
    add("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), IMAGE)
    add("ChannelShuffle", lambda: nn.ChannelShuffle(2), IMAGE)
    for mode in ("nearest", "bilinear", "bicubic"):
        add(f"Upsample {mode}", lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode), IMAGE)
    add("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE)
    add("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE)
    add("Unfold", lambda: nn.Unfold(3), IMAGE)
    add("Fold", lambda: nn.Fold(4, 2, stride=2), (8, 4))
    add("CosineSimilarity", lambda: nn.CosineSimilarity(2), SERIES, lambda layer, h: layer(h, h.roll(1, 1)))
    add("PairwiseDistance", nn.PairwiseDistance, SERIES, lambda layer, h: layer(h, h.roll(1, 1)))
    for kind in ("RNN", "LSTM", "GRU"):
        add(kind, lambda kind=kind: getattr(nn, kind)(8, 5, batch_first=True), SERIES)
        add(
            f"{kind} of two layers, both ways",
            lambda kind=kind: getattr(nn, kind)(8, 4, 2, dropout=0.1, bidirectional=True, batch_first=True),
            SERIES,
        )
        add(f"{kind}Cell", lambda kind=kind: getattr(nn, f"{kind}Cell")(8, 5), FLAT)
    add(
        "MultiheadAttention",
        lambda: nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True),
        SERIES,
        lambda layer, h: layer(h, h, h),
    )
    add("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), SERIES)
    add(
        "TransformerEncoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, norm_first=True, batch_first=True), 2),
        SERIES,
    )
    add(
        "TransformerDecoderLayer",
        lambda: nn.TransformerDecoderLayer(8, 2, 12, batch_first=True),
        SERIES,
        lambda layer, h: layer(h, h),
    )
    add(
        "Transformer",
        lambda: nn.Transformer(8, 2, 1, 1, 12, batch_first=True),
        SERIES,
        lambda layer, h: layer(h, h, tgt_mask=nn.Transformer.generate_square_subsequent_mask(4)),
    )
    add("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(8, 5)), FLAT)
    add("weight_norm of Conv2d", lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), IMAGE)
    add("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(8, 8)), FLAT)
    add("spectral_norm in eval", lambda: parametrizations.spectral_norm(nn.Linear(8, 5)).eval(), FLAT)
    add("used twice", lambda: nn.Linear(8, 8), FLAT, lambda layer, h: layer(layer(h).relu()))
    add("checkpoint", lambda: nn.Linear(8, 8), FLAT, _checkpointed)
    return found


def _checkpointed(layer: nn.Module, h: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False)


def _losses() -> dict[str, Case]:
    whole, real = torch.zeros((), dtype=torch.int64), torch.zeros(LABELS)
    plain = {
        "CrossEntropyLoss": (nn.CrossEntropyLoss(), whole),
        "CrossEntropyLoss, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), whole),
        "MultiMarginLoss": (nn.MultiMarginLoss(), whole),
        "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), real),
        "MSELoss": (nn.MSELoss(), real),
        "L1Loss": (nn.L1Loss(), real),
        "HuberLoss": (nn.HuberLoss(), real),
        "SmoothL1Loss": (nn.SmoothL1Loss(), real),
        "PoissonNLLLoss": (nn.PoissonNLLLoss(), real),
        "SoftMarginLoss": (nn.SoftMarginLoss(), real),
        "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), real),
    }
    after = {
        "NLLLoss": (nn.NLLLoss(), nn.LogSoftmax(1), whole),
        "BCELoss": (nn.BCELoss(), nn.Sigmoid(), real),
        "KLDivLoss": (nn.KLDivLoss(reduction="batchmean"), nn.LogSoftmax(1), real),
    }
    own = {
        "GaussianNLLLoss": (
            lambda out, y: nn.GaussianNLLLoss(reduction="none")(out, y, torch.ones_like(out)).mean(1),
            real,
        ),
        "focal loss": (
            lambda out, y: (1 - (p := out.softmax(1).gather(1, y[:, None])[:, 0])) ** 2 * -p.log(),
            whole,
        ),
        "CosineEmbeddingLoss": (
            lambda out, y: F.cosine_embedding_loss(out, y, torch.ones(len(y)), reduction="none"),
            real,
        ),
    }
    found: dict[str, Case] = {}
    for name, (loss, target) in {**plain, **own}.items():
        found[name] = (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, LABELS))), NUMBERS, (loss, target)
    for name, (loss, last, target) in after.items():
        found[name] = (
            (lambda last=last: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, LABELS), last)),
            NUMBERS,
            (loss, target),
        )
    return found


def torchs() -> dict[str, Case]:
    """Modules and losses of torch."""
    found: dict[str, Case] = {
        name: (lambda make=make, row=row, call=call: Around(make(), row, call), NUMBERS, None)
        for name, (make, row, call) in _layers().items()
    }
    for name, make in {
        "Embedding": lambda: nn.Embedding(9, 6),
        "Embedding with padding": lambda: nn.Embedding(9, 6, padding_idx=0),
        "Embedding with max_norm": lambda: nn.Embedding(9, 6, max_norm=1.0),
        "EmbeddingBag": lambda: nn.EmbeddingBag(9, 6),
        "EmbeddingBag sum": lambda: nn.EmbeddingBag(9, 6, mode="sum"),
        "EmbeddingBag max": lambda: nn.EmbeddingBag(9, 6, mode="max"),
    }.items():
        found[name] = (lambda make=make: Reads(make())), TOKENS, None
    return {**found, **_losses()}


def torchvisions() -> dict[str, Case]:
    """Classifiers of torchvision as they come pretrained, with their statistics standing still, and transforms of batches."""
    if torchvision is None:
        return {}
    image, found = torch.zeros(3, 32, 32), {}
    names = (  # noqa: SIM905
        "resnet18 mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 densenet121 efficientnet_b0 convnext_tiny "
        "swin_t mnasnet0_5 regnet_y_400mf googlenet"
    ).split()
    for name in names:
        more = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        found[name] = (
            (lambda name=name, more=more: getattr(torchvision.models, name)(num_classes=LABELS, **more).eval()),
            image,
            None,
        )
    found["resnet18 with GroupNorm"] = (
        (lambda: torchvision.models.resnet18(num_classes=LABELS, norm_layer=lambda c: nn.GroupNorm(8, c))),
        image,
        None,
    )
    found["vit"] = (
        (lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.1, num_classes=LABELS)),
        image,
        None,
    )
    transforms = {
        "Normalize": v2.Normalize([0.5] * 3, [0.5] * 3),
        "Resize": v2.Resize((16, 16)),
        "CenterCrop": v2.CenterCrop(16),
        "Pad": v2.Pad(2),
        "Grayscale": v2.Grayscale(3),
        "GaussianBlur of one sigma": v2.GaussianBlur(3, 1.0),
        "ToDtype": v2.ToDtype(torch.float32, scale=True),
        "FiveCrop's first": lambda x: v2.FiveCrop(16)(x)[0],
        "RandomHorizontalFlip": v2.RandomHorizontalFlip(),
        "RandomVerticalFlip": v2.RandomVerticalFlip(),
        "RandomCrop": v2.RandomCrop(24, padding=2),
        "RandomResizedCrop": v2.RandomResizedCrop(24),
        "RandomRotation": v2.RandomRotation(20),
        "RandomAffine": v2.RandomAffine(10, (0.1, 0.1)),
        "RandomPerspective": v2.RandomPerspective(),
        "RandomErasing": v2.RandomErasing(),
        "RandomGrayscale": v2.RandomGrayscale(),
        "RandomInvert": v2.RandomInvert(),
        "RandomAutocontrast": v2.RandomAutocontrast(),
        "ColorJitter": v2.ColorJitter(0.2, 0.2, 0.2),
        "GaussianNoise": v2.GaussianNoise(clip=False),
        "GaussianBlur": v2.GaussianBlur(3),
    }
    for name, transform in transforms.items():
        found[f"v2.{name}"] = (
            lambda: nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, LABELS)),
            image,
            transform,
        )
    return found


def refusal(make: Callable[[], nn.Module], row: Tensor, more: Any) -> str | None:
    """The sentence with which a secure run refuses a case, None where it takes it and its clients learn."""
    torch.manual_seed(0)
    local, chunk = LARGE if row.numel() > 1000 else SMALL
    loss, target = more if isinstance(more, tuple) else (None, torch.zeros((), dtype=torch.int64))
    whole, shape = not row.is_floating_point(), (ROWS, *row.shape)
    held = []
    for _ in range(CLIENTS):
        x = torch.randint(0, 9, shape) if whole else torch.randn(shape)
        y = torch.rand(ROWS, *target.shape) if target.is_floating_point() else torch.randint(0, LABELS, (ROWS,))
        held.append((x, y))
    clients = Federation.from_clients(held, transform=None if isinstance(more, tuple) else more)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            simulation, _ = prepare(
                make(),
                clients,
                PRIVATE,
                local=local,
                rounds=1,
                loss=loss,
                secure=True,
                execution=Execution(device="cpu", chunk_size=chunk),
            )
            state = simulation.begin()
            rows = simulation.updates(state, state.w.float(), torch.arange(chunk), 1)[:chunk]
    except InputError as reason:
        return str(reason)
    # Random numbers may leave a single client's update at zero, as a dropped-out path does; not all of them.
    return None if bool((rows != 0).any()) and bool(rows.isfinite().all()) else "the clients learn nothing"


def refusals(cases: dict[str, Case]) -> dict[str, str]:
    found = {name: refusal(*case) for name, case in cases.items()}
    return {name: sentence for name, sentence in found.items() if sentence is not None}


REFUSED = {"GaussianNLLLoss", "CrossMapLRN2d"}
"""What is refused of torch's: one looks for negative variances, one resizes a tensor whose memory is not filled."""
ACCEPTED_TRANSFORMS = {
    "Normalize",
    "Resize",
    "CenterCrop",
    "Pad",
    "Grayscale",
    "ToDtype",
    "FiveCrop's first",
    "GaussianNoise",
}
"""torchvision's other transforms decide by `if` or .item() on a draw, which a secure run refuses."""


def _show(refused: dict[str, str], cases: dict[str, Case]) -> None:
    print(f"{len(refused)} of {len(cases)} refused:", *(f"{name}: {why}" for name, why in refused.items()), sep="\n")


def test_harmless_modules_of_torch_are_accepted():
    """In `make test` every third one, in `make test-long` all."""
    cases = torchs()
    tried = cases if LONG else dict(list(cases.items())[::3])
    refused = refusals(tried)
    _show(refused, tried)
    assert set(refused) <= REFUSED
    assert len(cases) >= 100
    assert len(REFUSED) <= MOST_REFUSED * len(cases)


@pytest.mark.skipif(torchvision is None or not LONG, reason="needs torchvision, and takes minutes: make test-long")
def test_networks_of_torchvision_are_accepted_and_so_are_transforms_that_decide_nothing_by_a_draw():
    cases = torchvisions()
    refused = refusals(cases)
    _show(refused, cases)
    transforms = {name for name in cases if name.startswith("v2.")}
    assert set(refused) <= transforms - {f"v2.{name}" for name in ACCEPTED_TRANSFORMS}
