"""A Flower project of your own, with Flower's own FedAvg, and updates that are private before they leave the client.

    python examples/plain_flower.py

`PrivateClient` is an ordinary NumPyClient: put it into your ClientApp as it is. Here the strategy is called by hand, so that the
example needs no network.
"""

import sys

import numpy as np
from flwr.client import NumPyClient
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg

from dpfedexp.accounting import Ledger
from dpfedexp.mechanisms import privatize

CLIP, EPSILON = 0.5, 4.0


class PrivateClient(NumPyClient):
    """Least squares on its own rows. What it returns has been through PrivUnit, and its own ledger says what that cost."""

    def __init__(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        self.inputs, self.targets = inputs, targets
        self.ledger = Ledger.in_memory()

    def fit(self, parameters, config):
        w = parameters[0].copy()
        for _ in range(10):
            w -= 0.1 * self.inputs.T @ (self.inputs @ w - self.targets) / len(self.targets)
        report = privatize(w - parameters[0], clip=CLIP, epsilon=EPSILON, mechanism="privunit")
        self.ledger.charge(config["round"], report.event)
        return [parameters[0] + report.vector], 1, {}


def main(small: bool = False) -> float:
    rng, d = np.random.default_rng(0), 10
    truth = rng.normal(size=d)
    clients = []
    for _ in range(100 if small else 500):
        inputs = rng.normal(size=(20, d))
        clients.append(PrivateClient(inputs, inputs @ truth))
    strategy, w = FedAvg(), np.zeros(d)
    for number in range(1, (4 if small else 10) + 1):
        answers = []
        for client in clients:
            arrays, examples, metrics = client.fit([w], {"round": number})
            answers.append((None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), examples, metrics)))
        combined, _ = strategy.aggregate_fit(number, answers, [])
        w = parameters_to_ndarrays(combined)[0]
    distance = float(np.linalg.norm(w - truth) / np.linalg.norm(truth))
    spent = clients[0].ledger.guarantee(0.0).epsilon
    print(
        f"relative distance to the truth {distance:.3f}; each client has spent ε = {spent:.1f} against the server itself"
    )
    return distance


if __name__ == "__main__":
    main(small="--small" in sys.argv)
