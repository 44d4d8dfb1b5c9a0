"""Networks that only benchmarks need; torch is all that they ask for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def pfl_cifar_net() -> nn.Sequential:
    """The network of pfl's CIFAR-10 benchmark: two convolutions, dropout and two linear layers, d = 1,626,442."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


class Transformer(nn.Module):
    """Embedding, encoder layers and a linear layer on the mean of all places: tokens [batch, length] to classes."""

    def __init__(self, vocabulary: int, width: int, layers: int, classes: int, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def transformer(frozen: bool = False) -> Transformer:
    """d = 2,871,176; with `frozen` only the last layer and the head are trained, d = 843,272."""
    model = Transformer(5000, 128, 8, 5000)
    if frozen:
        for part in (model.embedding, *model.layers[:-1]):
            part.requires_grad_(False)
    return model


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


class CharacterModel(nn.Module):
    """torch's own LSTM over characters, as language models of next characters have it: the last state to classes."""

    def __init__(self, vocabulary: int, embed: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embed)
        self.lstm = nn.LSTM(embed, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(states[:, -1])
        return logits


def embedding_bag(vocabulary: int = 10_000, length: int = 20, width: int = 16, classes: int = 10) -> nn.Sequential:
    """A table of words and a linear layer on all of a text's rows, d = 163,210."""
    return nn.Sequential(nn.Embedding(vocabulary, width), nn.Flatten(), nn.Linear(length * width, classes))


def parameters(model: nn.Module) -> int:
    """How many are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def build(name: str, seed: int) -> nn.Module:
    """One of these networks by name, with a start that depends on `seed` alone."""
    makers: dict[str, Callable[[], nn.Module]] = {"pfl_cifar_net": pfl_cifar_net, "transformer": transformer}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return makers[name]()
