"""The paper's networks and a few general ones, all of them free of what `torch.func.vmap` cannot trace.

No batch normalisation, no in-place operations, no fused recurrences: each runs for many clients as one tensor program.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfedexp.errors import InputError, nearest, require


def mnist_cdp_net() -> nn.Sequential:
    """The paper's network for central privacy, d = 5046; its only ReLU is between the linear layers."""
    features = nn.Conv2d(1, 4, 4), nn.MaxPool2d(2), nn.Conv2d(4, 8, 4), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))


def mnist_ldp_net() -> nn.Sequential:
    """The paper's network for local privacy, d = 237; it has no ReLU at all."""
    features = nn.Conv2d(1, 2, 4), nn.MaxPool2d(2), nn.Conv2d(2, 1, 4), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(16, 10))


def mnist_relu_net() -> nn.Sequential:
    """The CDP network with a ReLU after each convolution, d = 5046; better conditioned on standardised inputs."""
    return _with_relus(nn.Conv2d(1, 4, 4), nn.Conv2d(4, 8, 4), nn.Linear(128, 32))


def cifar_net() -> nn.Sequential:
    """Two convolutions and two linear layers for 32×32 images in colour, d = 16,986."""
    return _with_relus(nn.Conv2d(3, 8, 5), nn.Conv2d(8, 16, 5), nn.Linear(400, 32))


def _with_relus(first: nn.Conv2d, second: nn.Conv2d, hidden: nn.Linear) -> nn.Sequential:
    features = first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, hidden, nn.ReLU(), nn.Linear(hidden.out_features, 10))


class LinearRegression(nn.Linear):
    """x ↦ xᵀw, one number per row, from w = 0."""

    def __init__(self, dimension: int) -> None:
        super().__init__(dimension, 1, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1)


def linear_regression(dimension: int) -> LinearRegression:
    """The paper's synthetic model, from w⁰ = 0."""
    return LinearRegression(dimension)


def linear(inputs: int, outputs: int = 1) -> nn.Sequential:
    """x ↦ Wx + b on flattened inputs, from zero: one number per row where there is one output."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer, *([nn.Flatten(0)] if outputs == 1 else []))


def mlp(inputs: int, hidden: int | Sequence[int], classes: int) -> nn.Sequential:
    """Linear layers with ReLU between them on flattened inputs; `hidden` is one width or several."""
    widths = [inputs, *([hidden] if isinstance(hidden, int) else hidden)]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


class _Block(nn.Module):
    """Two 3×3 convolutions with GroupNorm, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(groups, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet18_gn(classes: int = 10, channels: int = 3, groups: int = 32) -> nn.Sequential:
    """ResNet-18 for 32×32 images with GroupNorm in place of BatchNorm, d ≈ 11.17 million."""
    require(groups >= 1 and 64 % groups == 0, f"groups is {groups}; it must divide 64.")
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.GroupNorm(groups, 64), nn.ReLU()]
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Block(width, outputs, stride, groups), _Block(outputs, outputs, 1, groups)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class LstmClassifier(nn.Module):
    """Embedding, one LSTM layer, and a linear layer on its last hidden state; tokens are integers [batch, length]."""

    def __init__(self, vocab: int, embed: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed)
        # nn.LSTM has no vmap rule, so the cell is written out; names, layout and start are those of nn.LSTM.
        bound = hidden**-0.5
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, embed).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden).uniform_(-bound, bound))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden).uniform_(-bound, bound))
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        driven = F.linear(self.embedding(tokens), self.weight_ih, self.bias_ih + self.bias_hh)
        hidden = cell = driven.new_zeros(tokens.shape[0], self.weight_hh.shape[1])
        for step in driven.unbind(1):
            gate_in, gate_forget, candidate, gate_out = (step + F.linear(hidden, self.weight_hh)).chunk(4, dim=-1)
            cell = torch.sigmoid(gate_forget) * cell + torch.sigmoid(gate_in) * torch.tanh(candidate)
            hidden = torch.sigmoid(gate_out) * torch.tanh(cell)
        logits: Tensor = self.head(hidden)
        return logits


def lstm_classifier(vocab: int, embed: int = 8, hidden: int = 64, classes: int = 2) -> LstmClassifier:
    """A small recurrent classifier of token sequences."""
    return LstmClassifier(vocab, embed, hidden, classes)


_SMALL = (mnist_cdp_net, mnist_ldp_net, mnist_relu_net, cifar_net)
_GENERAL = (linear_regression, linear, mlp, resnet18_gn, lstm_classifier)
MODELS: dict[str, Callable[..., nn.Module]] = {factory.__name__: factory for factory in (*_SMALL, *_GENERAL)}


def build(name: str, seed: int, **settings: Any) -> nn.Module:
    """A network by name, with a start that depends on `seed` alone; torch's global generator is left as it was."""
    if name not in MODELS:
        raise InputError(f"model is {name!r}, which is unknown.{nearest(name, MODELS)}")
    factory = MODELS[name]
    known = inspect.signature(factory).parameters
    for setting in settings:
        hint = nearest(setting, known) if known else " It takes no settings."
        require(setting in known, f"model {name!r} has no setting {setting!r}.{hint}")
    missing = [given for given, its in known.items() if its.default is its.empty and given not in settings]
    require(not missing, f"model {name!r} needs {', '.join(missing)}.")
    for setting, value in settings.items():
        numbers = value if isinstance(value, list | tuple) and setting == "hidden" and name == "mlp" else [value]
        require(
            all(isinstance(number, int) and not isinstance(number, bool) and number >= 1 for number in numbers),
            f"model {name!r} has {setting} = {value!r}; it must be a whole number of at least 1.",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory(**settings)
