"""The same clients, models and local steps for every system that is compared; needs torch and the models alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfedexp import models
from dpfedexp.errors import InputError, nearest
from reproduction.benchmarks import networks


@dataclass(frozen=True)
class Workload:
    """What every client does in a round: `steps` steps on `rows` examples of its own, all of them or `batch` at a time."""

    name: str
    rows: int
    steps: int
    model: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    classes: int
    lr: float = 0.1
    batch: int | None = None

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model()

    def data(self, clients: int) -> tuple[Tensor, Tensor]:
        """Inputs [clients, rows, …] and class labels [clients, rows], random: what is computed does not depend on them."""
        generator = torch.Generator().manual_seed(1)
        x = self.inputs(clients * self.rows, generator)
        y = torch.randint(self.classes, (clients * self.rows,), generator=generator)
        return x.unflatten(0, (clients, self.rows)), y.unflatten(0, (clients, self.rows))


def _images(channels: int, side: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.rand(n, channels, side, side, generator=generator)


def _tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.randint(vocabulary, (n, length), generator=generator)


WORKLOADS = {
    work.name: work
    for work in (
        Workload("cnn", 60, 10, models.mnist_cdp_net, _images(1, 28), 10),
        Workload("pfl-cnn", 50, 5, networks.pfl_cifar_net, _images(3, 32), 10, batch=10),
        Workload("mlp", 60, 10, lambda: models.mlp(784, 64, 10), _images(1, 28), 10),
        Workload("resnet", 50, 4, networks.resnet18_gn, _images(3, 32), 10),
        Workload("resnet-5", 50, 5, networks.resnet18_gn, _images(3, 32), 10),
        Workload("lstm", 20, 5, lambda: networks.lstm_classifier(100, 8, 32, 2), _tokens(100, 16), 2),
        Workload("characters", 20, 5, lambda: networks.CharacterModel(80, 8, 128), _tokens(80, 40), 80),
        Workload("transformer", 16, 4, networks.transformer, _tokens(5000, 20), 5000),
        Workload("frozen", 16, 4, lambda: networks.transformer(frozen=True), _tokens(5000, 20), 5000),
        Workload("embedding", 20, 5, networks.embedding_bag, _tokens(10_000, 20), 10),
    )
}


def workload(name: str) -> Workload:
    """By its name, or "mlp-4096" and "mlp-4096-240": the MLP with so many hidden units, and with so many examples of a client."""
    sizes = re.fullmatch(r"mlp-(\d+)(?:-(\d+))?", name)
    if sizes is not None:
        return wide(int(sizes[1]), int(sizes[2] or 60))
    if name not in WORKLOADS:
        raise InputError(f"workload is {name!r}, which does not exist.{nearest(name, WORKLOADS)}")
    return WORKLOADS[name]


def wide(hidden: int, rows: int = 60) -> Workload:
    """The MLP with another width or on more examples: how a round's time grows with them."""
    name = f"mlp-{hidden}" if rows == 60 else f"mlp-{hidden}-{rows}"
    return Workload(name, rows, 10, lambda: models.mlp(784, hidden, 10), _images(1, 28), 10)
