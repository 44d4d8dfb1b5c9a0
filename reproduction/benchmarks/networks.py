"""Networks that only benchmarks need; torch is all that they ask for."""

from __future__ import annotations

from collections.abc import Callable

import torch
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
