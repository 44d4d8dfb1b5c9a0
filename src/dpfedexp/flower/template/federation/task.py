"""The model, the data and the training loop: the file to change for a problem of your own."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfedexp import LocalOptimiser
from dpfedexp.data import Federation, Generated, load_mnist, mnist_federation, synthetic_regression
from dpfedexp.flower import train_local
from dpfedexp.models import linear_regression, mnist_cdp_net

MNIST = bool(os.environ.get("DPFEDEXP_DATA"))
DIMENSION = 20
Settings = Mapping[str, Any]  # a node's own: --node-config


def build_model() -> nn.Module:
    """The same start for everyone."""
    torch.manual_seed(0)
    return mnist_cdp_net() if MNIST else linear_regression(DIMENSION)


def everyone(clients: int) -> Federation | Generated:
    """All clients of this example. In a real federation every node has data of its own and loads only that."""
    return mnist_federation(load_mnist(), clients) if MNIST else synthetic_regression(clients, DIMENSION).federation


def data_of(node: Settings) -> tuple[Tensor, Tensor]:
    """The rows of one node: those of the file that its setting `data` names, with arrays inputs and targets, or its example's."""
    if "data" in node:
        rows = np.load(str(node["data"]), allow_pickle=False)
        return torch.from_numpy(rows["inputs"]).float(), torch.from_numpy(rows["targets"])
    return everyone(node["num-partitions"]).client(node["partition-id"])


def data_of_hosted(node: Settings, clients: int) -> Federation:
    """All the clients that one node simulates."""
    first, all_ = node["partition-id"] * clients, everyone(node["num-partitions"] * clients)
    return Federation.from_clients([all_.client(first + c) for c in range(clients)])


def train(
    model: nn.Module, inputs: Tensor, targets: Tensor, local: LocalOptimiser, correction: dict[str, Tensor] | None
) -> None:
    """Changes the model by training on the client's own data: put a training loop of your own here if you have one.

    `local` is [tool.flwr.app.config.local] of pyproject.toml: this loop does what all its settings say. One of your own may read
    `local.lr`, `local.steps` and so on, or ignore them. `correction` is None unless the algorithm is dp_scaffold; your loop then
    adds correction[name] to the gradient of every parameter.
    """
    train_local(model, inputs, targets, local=local, correction=correction)


def evaluate(model: nn.Module, clients: int) -> dict[str, float]:
    """A score on data that the server may see: a public test set here, never the clients' data."""
    if not MNIST:
        weight = next(iter(model.parameters())).detach()
        return {"distance": synthetic_regression(clients, DIMENSION).distance(weight)}
    images = load_mnist()
    inputs, labels = images.test_images[:, None] / 255.0, images.test_labels.long()
    with torch.no_grad():
        return {"accuracy": float((model(inputs).argmax(1) == labels).float().mean())}
