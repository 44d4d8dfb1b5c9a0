"""What makes a run the run that it is: everything its result depends on, by name.

A checkpoint carries these settings, so that it is continued only by the run that made it, and a run that it is refused to is told
what differs. The device, the trainer, the size of the chunks and the budget are left out: they change where a run stops or how it
rounds, not what it computes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from dpfedexp.simulation.engine import Simulation
from dpfedexp.simulation.vectorise import Clients

Settings = dict[str, Any]
_SHOWN = 6


def settings_of(simulation: Simulation, **more: Any) -> Settings:
    """Name → value, all of them JSON, of a bound simulation and whatever else the result depends on."""
    task = simulation.task
    return flatten(
        {
            "algorithm": simulation.algorithm,
            "mechanism": simulation.mechanism,
            "local": task.local,
            "participation": simulation.participation,
            "seed": simulation.streams.seed,
            "loss": task.loss,
            "model": {
                "parameters": dict(zip(task.layout.names, map(list, task.layout.shapes), strict=True)),
                "start": _digest(task.layout.read(task.model).cpu()),
            },
            "clients": simulation.population,
            "data": _fingerprint(task.clients),
            "diagnostics": simulation.diagnostics,
            **more,
        }
    )


def settings_hash(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(here: Settings, there: Settings) -> str:
    """'local.lr is 0.1 here and 0.2 there; …', empty where the two agree."""
    changed = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    shown = [f"{name} is {here.get(name)!r} here and {there.get(name)!r} there" for name in changed[:_SHOWN]]
    if len(changed) > _SHOWN:
        shown.append(f"{len(changed) - _SHOWN} more differ")
    return "; ".join(shown)


def flatten(value: Any, prefix: str = "") -> Settings:
    """Dataclasses and mappings as dotted names, functions by their own name."""
    if is_dataclass(value) and not isinstance(value, type):
        nested = {field.name: getattr(value, field.name) for field in fields(value)}
        return {prefix: type(value).__name__} | _join(nested, prefix)
    if isinstance(value, Mapping):
        return _join(value, prefix)
    if callable(value):
        return {prefix: getattr(value, "__qualname__", type(value).__qualname__)}
    if isinstance(value, float) and not math.isfinite(value):
        return {prefix: str(value)}
    if isinstance(value, list | tuple):
        return {prefix: [item if isinstance(item, int | float | str | None) else str(item) for item in value]}
    return {prefix: value if isinstance(value, int | float | str | None) else str(value)}


def _join(values: Mapping[str, Any], prefix: str) -> Settings:
    joined: Settings = {}
    for name, value in values.items():
        joined |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return joined


def _fingerprint(clients: Clients) -> str:
    """A hash of all the sizes and of the first row of up to 64 clients: enough to notice other data without reading all of them."""
    holders = torch.nonzero(clients.sizes > 0).flatten()
    some = holders[torch.linspace(0, len(holders) - 1, min(64, len(holders))).round().long()]
    x, y = clients.gather(some, torch.zeros((len(some), 1), dtype=torch.int64), torch.device("cpu"))
    return _digest(clients.sizes.cpu(), x, y)


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
