"""Made-up federations with a dial from "all clients share one optimum" to "every client has its own"."""

from __future__ import annotations

import numpy as np

from dpfedexp import models
from dpfedexp.data import Federation
from dpfedexp.data.partition import generator
from reproduction.suite.problem import Loaded

CLIENTS = 1000
ROWS = 20
TEST_ROWS = 2000
DIMENSION = 50
CLASSES = 10
INPUTS = 20
SEPARATION = 0.8
TEST_NOISE = 0.3


def regression(spread: float, seed: int, clients: int = CLIENTS) -> Loaded:
    """Linear regression: client i has the optimum w* + spread·g_i, with w* and g_i ~ N(0, I/50) in 50 dimensions.

    Inputs are standard normal and the clients' targets are exact. The test set asks for the least-squares solution over all
    clients' rows; noise of standard deviation 0.3 on its targets keeps the test loss above 0.045, so that a few per cent of it
    mean something.
    """
    rng = generator(seed)
    optima = (rng.standard_normal(DIMENSION) + spread * rng.standard_normal((clients, DIMENSION))) / DIMENSION**0.5
    inputs = rng.standard_normal((clients, ROWS, DIMENSION)).astype(np.float32)
    targets = np.einsum("crd,cd->cr", inputs, optima).astype(np.float32).reshape(-1)
    inputs = inputs.reshape(-1, DIMENSION)
    common = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    held_out = rng.standard_normal((TEST_ROWS, DIMENSION)).astype(np.float32)
    answers = held_out @ common + TEST_NOISE * rng.standard_normal(TEST_ROWS)
    federation = Federation.from_arrays(inputs, targets, np.repeat(np.arange(clients), ROWS))
    model = models.build("linear_regression", seed, dimension=DIMENSION)
    return Loaded(model, federation, (held_out, answers.astype(np.float32)))


def classification(spread: float, seed: int, clients: int = CLIENTS) -> Loaded:
    """Ten Gaussian classes in 20 dimensions and a small network: client i's class means are μ_c + spread·δ_ic.

    μ_c and δ_ic are normal with standard deviation 0.8 and the noise around a mean is standard normal. A client's class mix is
    Dirichlet(0.3). The test set has equal classes around μ_c itself, the middle of all clients.
    """
    rng = generator(seed)
    centres = SEPARATION * rng.standard_normal((CLASSES, INPUTS))
    mixes = rng.dirichlet(np.full(CLASSES, 0.3), size=clients)
    labels = np.stack([rng.choice(CLASSES, size=ROWS, p=mix) for mix in mixes])
    own = spread * SEPARATION * rng.standard_normal((clients, CLASSES, INPUTS))
    means = centres[labels] + np.take_along_axis(own, labels[..., None], axis=1)
    inputs = (means + rng.standard_normal(means.shape)).astype(np.float32)
    asked = np.arange(TEST_ROWS) % CLASSES
    held_out = (centres[asked] + rng.standard_normal((TEST_ROWS, INPUTS))).astype(np.float32)
    owners = np.repeat(np.arange(clients), ROWS)
    federation = Federation.from_arrays(inputs.reshape(-1, INPUTS), labels.reshape(-1).astype(np.uint8), owners)
    model = models.build("mlp", seed, inputs=INPUTS, hidden=32, classes=CLASSES)
    return Loaded(model, federation, (held_out, asked.astype(np.uint8)))
