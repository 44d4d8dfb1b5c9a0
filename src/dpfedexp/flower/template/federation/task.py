"""The model and the data: the one file to change for a problem of your own."""

import os

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor, nn

from dpfedexp.data import Federation, Generated, load_mnist, mnist_federation, synthetic_regression
from dpfedexp.models import linear_regression, mnist_cdp_net

MNIST = bool(os.environ.get("DPFEDEXP_DATA"))
DIMENSION = 20
LOSS = None  # the usual one for the targets; or a name such as "mse", or a function (outputs, targets) -> loss per row


def build_model() -> nn.Module:
    """The same start for everyone."""
    torch.manual_seed(0)
    return mnist_cdp_net() if MNIST else linear_regression(DIMENSION)


def data_of(context: Context) -> tuple[Tensor, Tensor] | Federation:
    """This node's own rows: those of the file that its setting `data` names, with arrays inputs and targets, or its example's."""
    node, hosted = context.node_config, int(context.run_config.get("federation.clients_per_node", 1))
    if "data" in node:
        if context.run_config["task.example"]:
            raise ValueError(
                "this node has data of its own, so set task.example to false: its scores are not of this problem"
            )
        rows = np.load(str(node["data"]), allow_pickle=False)
        return torch.from_numpy(rows["inputs"]).float(), torch.from_numpy(rows["targets"])
    all_, first = example(int(node["num-partitions"]) * hosted), int(node["partition-id"]) * hosted
    return (
        all_.client(first) if hosted == 1 else Federation.from_clients([all_.client(first + n) for n in range(hosted)])
    )


def evaluate(model: nn.Module, clients: int) -> dict[str, float]:
    """A score on data that the server may see: a public test set, never the clients' data."""
    if not MNIST:
        weight = next(iter(model.parameters())).detach()
        return {"distance": synthetic_regression(clients, DIMENSION).distance(weight)}
    images = load_mnist()
    inputs, labels = images.test_images[:, None] / 255.0, images.test_labels.long()
    with torch.no_grad():
        return {"accuracy": float((model(inputs).argmax(1) == labels).float().mean())}


def example(clients: int) -> Federation | Generated:
    """All clients of the example. In a real federation every node loads its own rows only."""
    return mnist_federation(load_mnist(), clients) if MNIST else synthetic_regression(clients, DIMENSION).federation
