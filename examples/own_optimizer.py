"""A local optimizer of your own: one class, and every trainer takes it, a thousand clients to one tensor program.

python examples/own_optimizer.py
"""

import sys
from dataclasses import dataclass

import torch

from dpfedexp import Federation, cdp_fedexp, train
from dpfedexp.core.local_optimizer import LocalOptimizer, Sgd


@dataclass(frozen=True)
class SignDescent(LocalOptimizer):
    """w ← w − η·sign(v), v a running mean of gradients (Signum, Bernstein et al. 2018)."""

    memory: float = 0.9

    @property
    def moment_names(self):
        return ("v",)

    def direction(self, w, gradient, moments, clock):
        return moments["v"].mul_(self.memory).add_(gradient, alpha=1 - self.memory).sign()


def main(small: bool = False) -> dict[str, float]:
    torch.manual_seed(0)
    truth, count = torch.randn(20), 200 if small else 1000
    inputs = torch.randn(count, 10, 20)
    clients = Federation.from_clients([(x, x @ truth) for x in inputs])
    test = torch.randn(500, 20)
    model = torch.nn.Sequential(torch.nn.Linear(20, 1), torch.nn.Flatten(0))
    losses = {}
    for local in (Sgd(lr=0.05, steps=10), SignDescent(lr=0.02, steps=10)):
        algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0)
        run = train(model, clients, algorithm, local=local, rounds=5 if small else 30, evaluate=(test, test @ truth))
        losses[type(local).__name__] = run.history[-1]["test_loss"]
        print(
            f"{type(local).__name__:12} test loss {losses[type(local).__name__]:.4f}, ε = {run.privacy.epsilon_total:.3f}"
        )
    return losses


if __name__ == "__main__":
    main(small="--small" in sys.argv)
