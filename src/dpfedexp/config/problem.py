"""Build the clients, the initial model and the evaluation of a run from its settings."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import nn

from dpfedexp import models
from dpfedexp.config import DataSettings, Settings
from dpfedexp.data import Federation, Standardize, synthetic_regression
from dpfedexp.data.data_sets import DATA_SETS
from dpfedexp.errors import InputError, nearest, require
from dpfedexp.evaluation import Evaluate


@dataclass(frozen=True)
class Problem:
    """The clients, the initial model, and the evaluation by the server: a test set or a function."""

    federation: Any
    model: nn.Module
    test: tuple[Any, Any] | None = None
    evaluate: Evaluate | None = None


def build(settings: Settings, data: str | None = None) -> Problem:
    """Build the problem of a run; `data` is the folder of `--data`, which overrides `data.path` of the settings."""
    given = settings.data
    seed = settings.run.seed if given.seed is None else given.seed
    if given.kind == "synthetic":
        problem = synthetic_regression(given.clients, given.dimension, seed)
        model = _model(settings, "linear_regression", {"dimension": given.dimension})

        def distance(trained: nn.Module) -> dict[str, float]:
            return {"distance": problem.distance(next(iter(trained.parameters())))}

        comparable = sum(p.numel() for p in model.parameters()) == given.dimension
        return Problem(problem.federation, model, evaluate=distance if comparable else None)
    if given.kind == "factory":
        federation, test = _import("data.factory", given.factory)(seed=seed)
        return Problem(federation, _model(settings), test)
    if given.kind == "npz":
        return _npz(settings, seed)
    entry = DATA_SETS[given.kind]
    require(
        not given.standardize or entry.standard is not None,
        f"data.standardize is true, but kind {given.kind!r} has no published mean and deviation; leave standardize out.",
    )
    transform = Standardize(*entry.standard) if given.standardize and entry.standard else None
    examples = entry.load(data or given.path)
    federation = _partition(given, examples.inputs, examples.targets, seed, transform)
    return Problem(federation, _model(settings, entry.model), examples.test)


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """Read an .npz file with `inputs`, `targets` and optionally `client` (who holds each row), `test_inputs`, `test_targets`."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise InputError(f"data.path is {path!r}, which does not exist.") from None
    except (ValueError, OSError, EOFError, AttributeError):
        raise InputError(
            f"data.path is {path!r}, which is not a readable .npz file of arrays; write one with np.savez(path, inputs=…, "
            "targets=…, client=…), or read a table in Python: Federation.from_pandas (docs/data.md)."
        ) from None
    for name in ("inputs", "targets"):
        require(name in arrays, f"data.path is {path!r}, which has no array {name!r}.{nearest(name, arrays)}")
    return arrays


def _npz(settings: Settings, seed: int) -> Problem:
    if settings.data.path is None:
        raise InputError("data.path is missing; kind 'npz' needs a file with arrays inputs and targets.")
    arrays = read_arrays(settings.data.path)
    x, y = arrays["inputs"], arrays["targets"]
    transform = Standardize() if settings.data.standardize else None
    if "client" in arrays:
        population = settings.participation.population
        # Clients without rows count too. If clients were counted from the rows, a last client without rows would change every mean.
        require(
            not settings.run.secure or population is not None,
            "participation.population is missing: in a secure run the number of clients is declared, not counted from the array "
            "'client'; write population = 1000, say, under [participation].",
        )
        elsewhere = settings.algorithm.adjacency == "add-remove" or settings.participation.noise_cohort is not None
        count = None if elsewhere else population
        federation = Federation.from_arrays(x, y, arrays["client"], clients=count, transform=transform)
    else:
        federation = _partition(settings.data, x, y, seed, transform)
    test = (arrays["test_inputs"], arrays["test_targets"]) if {"test_inputs", "test_targets"} <= set(arrays) else None
    return Problem(federation, _model(settings), test)


def _partition(given: DataSettings, x: Any, y: Any, seed: int, transform: Any) -> Federation:
    deal: Callable[..., Federation] = getattr(Federation, given.partition.replace("-", "_"))
    takes = inspect.signature(deal).parameters
    names = ("clients", "alpha", "samples_per_client", "shards_per_client")
    return deal(x, y, seed=seed, transform=transform, **{name: getattr(given, name) for name in names if name in takes})


def _model(settings: Settings, default: str | None = None, options: dict[str, Any] | None = None) -> nn.Module:
    chosen = settings.model
    seed = settings.run.seed if chosen.seed is None else chosen.seed
    if chosen.factory is not None:
        return cast(nn.Module, _import("model.factory", chosen.factory)(**chosen.options))
    name = chosen.name or default
    if name is None:
        raise InputError(f"model.name is missing; name a network or a factory.{nearest('', models.MODELS)}")
    return models.build(name, seed, **((options or {}) if chosen.name in (None, default) else {}) | chosen.options)


def _import(field: str, target: str | None) -> Callable[..., Any]:
    module, colon, name = (target or "").partition(":")
    require(bool(colon), f"{field} is {target!r}; it must look like 'package.module:function'.")
    try:
        return cast(Callable[..., Any], getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise InputError(f"{field} is {target!r}, which can't be imported: {error}.") from None
