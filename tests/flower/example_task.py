"""The task of apps in tests: the paper's regression, whose rows depend on the node's number alone."""

from flwr.app import Context
from torch import Tensor, nn

from dpfedexp.data import Federation, synthetic_regression
from dpfedexp.models import linear_regression

DIMENSION = 20
LOSS = None


def build_model() -> nn.Module:
    return linear_regression(DIMENSION)


def test_set() -> None:
    """The server has no test data."""


def data_of(context: Context) -> tuple[Tensor, Tensor] | Federation:
    """A node's rows, or all of its clients where it has several."""
    node, each = context.node_config, int(context.run_config.get("federation.clients_per_node", 1))
    all_, first = example(int(node["num-partitions"]) * each), int(node["partition-id"]) * each
    return all_.client(first) if each == 1 else Federation.from_clients([all_.client(first + n) for n in range(each)])


def example(clients: int) -> Federation:
    return synthetic_regression(clients, DIMENSION).federation
