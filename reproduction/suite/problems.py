"""The suite: fifteen federations by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from dpfedexp import models
from dpfedexp.data import Federation, Standardise
from dpfedexp.data.data_sets import DATA_SETS
from reproduction.suite import made_up, roles, stored
from reproduction.suite.problem import Folders, Kind, Loaded, Metric, Problem


def _images(kind: str, network: str, standardise: bool, folders: Folders, seed: int) -> Loaded:
    """The paper's split of an image set: 1000 equal clients, class mix ~ Dirichlet(0.3)."""
    entry = DATA_SETS[kind]
    examples = entry.load(None if folders.data is None else str(folders.data))
    transform = Standardise(*entry.standard) if standardise and entry.standard else None
    clients = Federation.dirichlet(
        examples.inputs, examples.targets, clients=1000, alpha=0.3, seed=seed, transform=transform
    )
    if examples.test is None:
        raise RuntimeError(f"the data set {kind!r} came without a test set")
    return Loaded(models.build(network, seed), clients, examples.test)


def _made_up(problem: Callable[[float, int], Loaded], spread: float, folders: Folders, seed: int) -> Loaded:
    return problem(spread, seed)


def _natural(name: str, network: Callable[[int], nn.Module], folders: Folders, seed: int) -> Loaded:
    arrays = stored.read(name, folders.suite)
    dtype = torch.int64 if arrays["inputs"].dtype.kind == "u" else None
    clients = Federation.from_arrays(arrays["inputs"], arrays["targets"], arrays["client"], dtype=dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network(arrays["inputs"].shape[1])
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
    name: str, summary: str, kind: Kind, centre: float, metric: Metric, network: Callable[[int], nn.Module]
) -> Problem:
    return Problem(name, summary, kind, True, partial(_natural, name, network), centre, metric, stored=name)


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
            partial(_made_up, made_up.regression, spread),
            0.03,
            "loss",
            made_up=True,
        )
        for spread in (0.0, 0.5, 2.0)
    ),
    *(
        Problem(
            f"classes-{spread:g}",
            f"made up: ten Gaussian classes, 1000 clients whose class means spread by {spread:g}; 32 hidden units",
            "classification",
            False,
            partial(_made_up, made_up.classification, spread),
            0.1,
            "accuracy",
            made_up=True,
        )
        for spread in (0.0, 0.5, 2.0)
    ),
)

PROBLEMS: dict[str, Problem] = {problem.name: problem for problem in _ALL}
