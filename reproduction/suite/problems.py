"""The suite: its federations by name, and the half that each is in (`split.toml`)."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import nn

from dpfedexp import models
from dpfedexp.data import Federation, Standardize
from dpfedexp.data.data_sets import DATA_SETS
from dpfedexp.data.partition import generator
from dpfedexp.errors import InputError
from reproduction.suite import shakespeare as roles
from reproduction.suite import stored, synthetic_problems
from reproduction.suite.problem import Folders, Kind, Loaded, Metric, Problem


def _images(kind: str, network: str, standardize: bool, folders: Folders, seed: int) -> Loaded:
    """The paper's split of an image set: 1000 equal clients, class mix ~ Dirichlet(0.3)."""
    entry = DATA_SETS[kind]
    examples = entry.load(None if folders.data is None else str(folders.data))
    transform = Standardize(*entry.standard) if standardize and entry.standard else None
    clients = Federation.dirichlet(
        examples.inputs, examples.targets, clients=1000, alpha=0.3, seed=seed, transform=transform
    )
    if examples.test is None:
        raise RuntimeError(f"the data set {kind!r} came without a test set")
    return Loaded(models.build(network, seed), clients, examples.test)


ROWS = 20
"""Rows of a client of the smaller image problems."""


def _few_images(
    network: Callable[[], nn.Module], clients: int, alpha: float, uneven: bool, folders: Folders, seed: int
) -> Loaded:
    """MNIST with 20 rows a client, class mix ~ Dirichlet(alpha); uneven, with sizes from a power law.

    Sizes n from 1 to 1000 have density ~ n^(−3/2). A client's rows are drawn from its classes, and no row is drawn twice.
    """
    entry = DATA_SETS["mnist"]
    examples = entry.load(None if folders.data is None else str(folders.data))
    rng, labels = generator(seed), np.asarray(examples.targets)
    sizes = synthetic_problems.power_law(rng, clients) if uneven else np.full(clients, ROWS)
    pools = [list(rng.permutation(np.flatnonzero(labels == label))) for label in range(10)]
    held = []
    for size in sizes:
        mix = rng.dirichlet(np.full(10, alpha))
        wanted = rng.multinomial(size, mix)
        held.append([pools[label].pop() for label in range(10) for _ in range(min(wanted[label], len(pools[label])))])
    owners = np.repeat(np.arange(clients), [len(rows) for rows in held])
    rows = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in held])
    federation = Federation.from_arrays(examples.inputs[rows], examples.targets[rows], owners)
    if examples.test is None:
        raise RuntimeError("MNIST came without a test set")
    return Loaded(_started(network, seed), federation, examples.test)


def _digits(
    network: Callable[[], nn.Module], scale: float, clients: int, rows: int, folders: Folders, seed: int
) -> Loaded:
    """The 8×8 digits of scikit-learn, pixels 0 to 16 over `scale`: clients of equal size, class mix ~ Dirichlet(1)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(f"the digits come with scikit-learn, which can't be imported ({error}).") from None
    found: Any = load_digits()
    inputs, targets = (found.data / scale).astype(np.float32), found.target.astype(np.uint8)
    order = generator(0).permutation(len(inputs))
    train, test = order[:1300], order[1300:]
    federation = Federation.dirichlet(
        inputs[train], targets[train], clients=clients, alpha=1.0, seed=seed, samples_per_client=rows
    )
    return Loaded(_started(network, seed), federation, (inputs[test], targets[test]))


def _started(network: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return network()


def _small_images(*hidden: int) -> nn.Module:
    """Images pooled to 14×14, then linear layers with ReLU between them."""
    return nn.Sequential(nn.AvgPool2d(2), models.mlp(196, hidden, 10))


def _seeded(problem: Callable[[int], Loaded], folders: Folders, seed: int) -> Loaded:
    return problem(seed)


def _synthetic(problem: Callable[[float, int], Loaded], spread: float, folders: Folders, seed: int) -> Loaded:
    return problem(spread, seed)


def _natural(name: str, network: Callable[[int], nn.Module], folders: Folders, seed: int) -> Loaded:
    arrays = stored.read(name, folders.suite)
    dtype = torch.int64 if arrays["inputs"].dtype.kind == "u" else None
    clients = Federation.from_arrays(arrays["inputs"], arrays["targets"], arrays["client"], dtype=dtype)
    model = _started(partial(network, arrays["inputs"].shape[1]), seed)
    return Loaded(model, clients, (arrays["test_inputs"], arrays["test_targets"]))


def _regressor(hidden: int, inputs: int) -> nn.Module:
    """One number per row; without hidden units it is linear."""
    if hidden == 0:
        return nn.Sequential(nn.Linear(inputs, 1), nn.Flatten(0))
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0))


def _classifier(classes: int, inputs: int) -> nn.Module:
    return nn.Linear(inputs, classes)


def _writer(inputs: int) -> nn.Module:
    symbols = len(roles.SYMBOLS)
    return nn.Sequential(
        nn.Embedding(symbols, 8), nn.Flatten(), nn.Linear(8 * inputs, 32), nn.ReLU(), nn.Linear(32, symbols)
    )


def _of_clients(
    name: str, summary: str, kind: Kind, center: float, metric: Metric, network: Callable[[int], nn.Module]
) -> Problem:
    return Problem(name, summary, kind, True, partial(_natural, name, network), center, metric, stored=name)


def _dealt(
    name: str,
    summary: str,
    make: Callable[[Folders, int], Loaded],
    *,
    kind: Kind = "classification",
    synthetic: bool = False,
) -> Problem:
    """A problem of classes whose clients are dealt out or made up."""
    return Problem(name, summary, kind, False, make, 0.1, "accuracy", synthetic=synthetic)


_ALL = (
    Problem(
        "mnist",
        "MNIST, 1000 clients of Dirichlet(0.3), the paper's network for central privacy (d = 5046)",
        "classification",
        False,
        partial(_images, "mnist", "mnist_cdp_net", False),
        0.1,
        "accuracy",
    ),
    Problem(
        "mnist-small",
        "MNIST, 1000 clients of Dirichlet(0.3), the paper's network for local privacy (d = 237)",
        "classification",
        False,
        partial(_images, "mnist", "mnist_ldp_net", False),
        0.1,
        "accuracy",
    ),
    Problem(
        "cifar10",
        "CIFAR-10, 1000 clients of Dirichlet(0.3), two convolutions and two linear layers (d = 16,986)",
        "classification",
        False,
        partial(_images, "cifar10", "cifar_net", True),
        0.1,
        "accuracy",
    ),
    _of_clients(
        "movielens",
        "537 users; whether a film gets 4 stars or more, from film and earlier ratings; linear",
        "recommendation",
        0.3,
        "accuracy",
        partial(_classifier, 2),
    ),
    _of_clients(
        "insteval",
        "2378 students; their rating of a lecture, 5 classes, from department and semester; linear",
        "classification",
        0.3,
        "loss",
        partial(_classifier, 5),
    ),
    _of_clients(
        "randhie",
        "4792 insured persons; log of a year's visits to the doctor, from plan and health; 16 hidden units",
        "regression",
        0.1,
        "loss",
        partial(_regressor, 16),
    ),
    _of_clients(
        "nlswork",
        "3769 women; log wage in a year, from schooling, experience, industry; linear",
        "regression",
        0.03,
        "loss",
        partial(_regressor, 0),
    ),
    _of_clients(
        "chem97",
        "1928 schools; pupils' A-level score, from GCSE mean, age and gender; 16 hidden units",
        "regression",
        0.1,
        "loss",
        partial(_regressor, 16),
    ),
    _of_clients(
        "shakespeare",
        "737 roles of the plays; the next character from the eight before it; embedding and 32 hidden units",
        "text",
        0.1,
        "accuracy",
        _writer,
    ),
    *(
        Problem(
            f"regression-{spread:g}",
            f"made up: linear regression, d = 50, 1000 clients whose optima spread by {spread:g}",
            "regression",
            False,
            partial(_synthetic, synthetic_problems.regression, spread),
            0.03,
            "loss",
            synthetic=True,
        )
        for spread in (0.0, 0.5, 2.0)
    ),
    *(
        Problem(
            f"classes-{spread:g}",
            f"made up: ten Gaussian classes, 1000 clients whose class means spread by {spread:g}; 32 hidden units",
            "classification",
            False,
            partial(_synthetic, synthetic_problems.classification, spread),
            0.1,
            "accuracy",
            synthetic=True,
        )
        for spread in (0.0, 0.5, 2.0)
    ),
    _dealt(
        "mnist-relu",
        "MNIST, 1000 clients of 20 rows, Dirichlet(0.3), two convolutions with ReLU (d = 5046)",
        partial(_few_images, models.mnist_relu_net, 1000, 0.3, False),
    ),
    _dealt(
        "mnist-deep",
        "MNIST at 14×14, 1000 clients of 20 rows, Dirichlet(0.3), five hidden layers of 32 with ReLU (d = 10,858)",
        partial(_few_images, partial(_small_images, 32, 32, 32, 32, 32), 1000, 0.3, False),
    ),
    _dealt(
        "mnist-skew",
        "MNIST at 14×14, 1000 clients of 20 rows, Dirichlet(0.1), 32 hidden units (d = 6634)",
        partial(_few_images, partial(_small_images, 32), 1000, 0.1, False),
    ),
    _dealt(
        "mnist-uneven",
        "MNIST at 14×14, 1000 clients of 1 to 1000 rows by a power law, Dirichlet(0.3), 32 hidden units (d = 6634)",
        partial(_few_images, partial(_small_images, 32), 1000, 0.3, True),
    ),
    _dealt(
        "mnist-300",
        "MNIST at 14×14, 300 clients of 20 rows, Dirichlet(0.3), 16 hidden units (d = 3322)",
        partial(_few_images, partial(_small_images, 16), 300, 0.3, False),
    ),
    _dealt(
        "digits-300",
        "digits of scikit-learn, 300 clients of 4 rows, Dirichlet(1), linear (d = 650)",
        partial(_digits, partial(models.linear, 64, 10), 16.0, 300, 4),
    ),
    _dealt(
        "digits-unscaled",
        "the same digits with pixels from 0 to 16, 32 hidden units (d = 2410)",
        partial(_digits, partial(models.mlp, 64, 32, 10), 1.0, 300, 4),
    ),
    _dealt(
        "mnist-200",
        "MNIST at 14×14, 200 clients of 20 rows, Dirichlet(0.3), linear (d = 1970)",
        partial(_few_images, _small_images, 200, 0.3, False),
    ),
    _dealt(
        "digits-100",
        "digits of scikit-learn, 100 clients of 13 rows, Dirichlet(1), linear (d = 650)",
        partial(_digits, partial(models.linear, 64, 10), 16.0, 100, 13),
    ),
    _dealt(
        "classes-200",
        "made up: ten Gaussian classes, 200 clients whose class means spread by 0.5; 32 hidden units",
        partial(_seeded, partial(synthetic_problems.classification, 0.5, clients=200)),
        synthetic=True,
    ),
    _dealt(
        "classes-300",
        "made up: ten Gaussian classes, 300 clients whose class means spread by 0.5; 32 hidden units",
        partial(_seeded, partial(synthetic_problems.classification, 0.5, clients=300)),
        synthetic=True,
    ),
    _dealt(
        "classes-20000",
        "made up: ten Gaussian classes, 20,000 clients of 5 rows whose class means spread by 0.5; 32 hidden units",
        partial(_seeded, partial(synthetic_problems.classification, 0.5, clients=20_000, rows=5)),
        synthetic=True,
    ),
    _dealt(
        "classes-powerlaw",
        "made up: ten Gaussian classes, 1000 clients of 1 to 1000 rows whose class means spread by 0.5; 32 hidden units",
        partial(_seeded, partial(synthetic_problems.classification, 0.5, uneven=True)),
        synthetic=True,
    ),
    _dealt(
        "mnist-powerlaw",
        "MNIST at 14×14, 1000 clients of 1 to 1000 rows by a power law, Dirichlet(1), 16 hidden units (d = 3322)",
        partial(_few_images, partial(_small_images, 16), 1000, 1.0, True),
    ),
    Problem(
        "regression-powerlaw",
        "made up: linear regression, d = 50, 1000 clients of 1 to 1000 rows whose optima spread by 0.5",
        "regression",
        False,
        partial(_seeded, partial(synthetic_problems.regression, 0.5, uneven=True)),
        0.03,
        "loss",
        synthetic=True,
    ),
    _dealt(
        "text",
        "made up: 1000 writers; the next of 27 symbols from the eight before it; a transformer block (d = 3243)",
        partial(_seeded, synthetic_problems.text),
        kind="text",
        synthetic=True,
    ),
    Problem(
        "regression-heavy",
        "made up: linear regression, d = 50, 1000 clients of unequal scale, noise of Student's t with 2 degrees of freedom",
        "regression",
        False,
        partial(_seeded, synthetic_problems.heavy_regression),
        0.03,
        "loss",
        synthetic=True,
    ),
)

PROBLEMS: dict[str, Problem] = {problem.name: problem for problem in _ALL}

HALVES: dict[str, str] = {
    name: half
    for half, names in tomllib.loads(files(__package__).joinpath("split.toml").read_text("utf-8")).items()
    for name in names
}
"""Problem → its half."""


def coin(name: str) -> str:
    """The half of a problem by its name alone. It was tossed once, before anything was measured; `split.toml` has the result."""
    return "tuning" if hashlib.sha256(f"dpfedexp suite, {name}".encode()).digest()[0] % 2 == 0 else "held-out"
