"""A run of a few milliseconds, for tests of what becomes of it."""

import torch
from torch import nn

from dpfedexp import Federation, Sgd, cdp_fedexp, train

ALGORITHM = cdp_fedexp(clip=0.3, noise_multiplier=4.0)
ROUNDS = 6


def federation():
    draws = torch.Generator().manual_seed(1)
    w = torch.tensor([1.0, -2.0, 0.5])
    inputs = [torch.randn(5, 3, generator=draws) for _ in range(12)]
    return Federation.from_clients([(x, x @ w) for x in inputs])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def small_run(**options):
    test = (torch.eye(3), torch.tensor([1.0, -2.0, 0.5]))
    usual = {"local": Sgd(lr=0.05, steps=2), "rounds": ROUNDS, "progress": False, "device": "cpu", "test": test}
    algorithm = options.pop("algorithm", ALGORITHM)
    return train(network(), federation(), algorithm, **(usual | options))
