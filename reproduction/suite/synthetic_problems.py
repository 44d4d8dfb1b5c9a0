"""Made-up federations: with a dial from "all clients share one optimum" to "every client has its own", and of harder kinds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

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
SYMBOLS, CONTEXT, WIDTH = 27, 8, 16


def power_law(rng: np.random.Generator, clients: int) -> np.ndarray:
    """Sizes n of clients from 1 to 1000, with density ~ n^(−3/2)."""
    smallest = 1000.0**-0.5
    return np.asarray(np.floor((1.0 - rng.random(clients) * (1.0 - smallest)) ** -2.0).astype(np.int64))


def regression(spread: float, seed: int, clients: int = CLIENTS, *, uneven: bool = False) -> Loaded:
    """Linear regression: client i has the optimum w* + spread·g_i, with w* and g_i ~ N(0, I/50) in 50 dimensions.

    Inputs are standard normal and the clients' targets are exact. The test set asks for the least-squares solution over all
    clients' rows; noise of standard deviation 0.3 on its targets keeps the test loss above 0.045, so that a few percent of it
    mean something.
    """
    rng = generator(seed)
    optima = (rng.standard_normal(DIMENSION) + spread * rng.standard_normal((clients, DIMENSION))) / DIMENSION**0.5
    owners = np.repeat(np.arange(clients), power_law(rng, clients) if uneven else ROWS)
    inputs = rng.standard_normal((len(owners), DIMENSION)).astype(np.float32)
    targets = np.einsum("rd,rd->r", inputs, optima[owners]).astype(np.float32)
    common = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    held_out = rng.standard_normal((TEST_ROWS, DIMENSION)).astype(np.float32)
    answers = held_out @ common + TEST_NOISE * rng.standard_normal(TEST_ROWS)
    federation = Federation.from_arrays(inputs, targets, owners)
    model = models.build("linear_regression", seed, dimension=DIMENSION)
    return Loaded(model, federation, (held_out, answers.astype(np.float32)))


def heavy_regression(seed: int, clients: int = CLIENTS) -> Loaded:
    """Linear regression with heavy tails: noise on targets is Student's t with 2 degrees of freedom, which has no variance.

    Clients' inputs differ in scale, by e^(g/2) with g ~ N(0, 1), and their optima spread by 0.5. The test set has inputs of scale 1
    and normal noise of standard deviation 0.3 around the middle of all optima.
    """
    rng = generator(seed)
    middle = rng.standard_normal(DIMENSION) / DIMENSION**0.5
    optima = middle + 0.5 * rng.standard_normal((clients, DIMENSION)) / DIMENSION**0.5
    scales = np.exp(0.5 * rng.standard_normal((clients, 1, 1)))
    inputs = (scales * rng.standard_normal((clients, ROWS, DIMENSION))).astype(np.float32)
    targets = np.einsum("crd,cd->cr", inputs, optima) + 0.5 * rng.standard_t(2.0, (clients, ROWS))
    held_out = rng.standard_normal((TEST_ROWS, DIMENSION)).astype(np.float32)
    answers = held_out @ middle + TEST_NOISE * rng.standard_normal(TEST_ROWS)
    owners = np.repeat(np.arange(clients), ROWS)
    federation = Federation.from_arrays(inputs.reshape(-1, DIMENSION), targets.reshape(-1).astype(np.float32), owners)
    model = models.build("linear_regression", seed, dimension=DIMENSION)
    return Loaded(model, federation, (held_out, answers.astype(np.float32)))


class Transformer(nn.Module):
    """One transformer block over eight symbols; the last place predicts the next symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.hidden, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.next = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, text: Tensor) -> Tensor:
        x = self.symbols(text) + self.places
        query, key, value = self.attention(self.before(x)).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.transpose(-1, -2) / WIDTH**0.5, dim=-1)
        x = x + self.mixed(weights @ value)
        x = x + self.out(torch.relu(self.hidden(self.after(x))))
        made: Tensor = self.next(x[..., -1, :])
        return made


def text(seed: int, clients: int = CLIENTS) -> Loaded:
    """Text of 27 symbols from a source in which the next one depends on the two before it; a small transformer predicts it.

    The source mixes a matrix for the last symbol and one for the symbol before it. Each client writes with a matrix of its own in
    a fifth of the places. Rows of the matrices are Dirichlet(0.1), so that a few symbols are likely. Tested on the common source.
    """
    rng = generator(seed)
    last, earlier = rng.dirichlet(np.full(SYMBOLS, 0.1), size=(2, SYMBOLS))
    own = rng.dirichlet(np.full(SYMBOLS, 0.1), size=clients)
    length = CONTEXT + ROWS

    def written(writers: int, habits: np.ndarray | None) -> np.ndarray:
        symbols = rng.integers(SYMBOLS, size=(writers, length))
        for place in range(2, length):
            odds = 0.6 * last[symbols[:, place - 1]] + 0.4 * earlier[symbols[:, place - 2]]
            odds = odds if habits is None else 0.8 * odds + 0.2 * habits
            draws = rng.random((writers, 1))
            symbols[:, place] = np.minimum((odds.cumsum(1) < draws).sum(1), SYMBOLS - 1)
        return np.lib.stride_tricks.sliding_window_view(symbols, CONTEXT + 1, axis=1)

    windows, asked = written(clients, own).reshape(-1, CONTEXT + 1), written(TEST_ROWS // ROWS, None)
    asked = asked.reshape(-1, CONTEXT + 1)
    federation = Federation.from_arrays(
        windows[:, :-1], windows[:, -1].astype(np.uint8), np.repeat(np.arange(clients), ROWS), dtype=torch.int64
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer()
    return Loaded(model, federation, (asked[:, :-1], asked[:, -1].astype(np.uint8)))


def classification(
    spread: float, seed: int, clients: int = CLIENTS, rows: int = ROWS, *, uneven: bool = False
) -> Loaded:
    """Ten Gaussian classes in 20 dimensions and a small network: client i's class means are μ_c + spread·δ_ic.

    μ_c and δ_ic are normal with standard deviation 0.8 and the noise around a mean is standard normal. A client's class mix is
    Dirichlet(0.3). The test set has equal classes around μ_c itself, the middle of all clients.
    """
    rng = generator(seed)
    centers = SEPARATION * rng.standard_normal((CLASSES, INPUTS))
    mixes = rng.dirichlet(np.full(CLASSES, 0.3), size=clients)
    sizes = power_law(rng, clients) if uneven else np.full(clients, rows)
    labels = np.concatenate([rng.choice(CLASSES, size=size, p=mix) for size, mix in zip(sizes, mixes, strict=True)])
    own = spread * SEPARATION * rng.standard_normal((clients, CLASSES, INPUTS))
    owners = np.repeat(np.arange(clients), sizes)
    means = centers[labels] + own[owners, labels]
    inputs = (means + rng.standard_normal(means.shape)).astype(np.float32)
    asked = np.arange(TEST_ROWS) % CLASSES
    held_out = (centers[asked] + rng.standard_normal((TEST_ROWS, INPUTS))).astype(np.float32)
    federation = Federation.from_arrays(inputs, labels.astype(np.uint8), owners)
    model = models.build("mlp", seed, inputs=INPUTS, hidden=32, classes=CLASSES)
    return Loaded(model, federation, (held_out, asked.astype(np.uint8)))
