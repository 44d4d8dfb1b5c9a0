"""What makes a run the run that it is: everything its result depends on, by name.

A checkpoint carries these settings, so that it is continued only by the run that made it, and a run that it is refused to is told
what differs. The device, the trainer, the size of the chunks and the budget are left out: they change where a run stops or how it
rounds, not what it computes. So are the clients' data: a hash of them would tell whoever guesses a value whether it is right. They
are known by `data_tag`, whose key and whose value never leave the run's private folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from dpfedexp.simulation.rounds import Simulation
from dpfedexp.trainers.task import Clients

Settings = dict[str, Any]
_SHOWN = 6
_SAMPLE, _PIECE = 64, 4096


def settings_of(simulation: Simulation, **more: Any) -> Settings:
    """Name → value, all of them JSON, of a bound simulation and whatever else the result depends on."""
    task = simulation.task
    return flatten(
        {
            "algorithm": simulation.algorithm,
            "mechanism": simulation.mechanism,
            "local": task.local,
            "participation": simulation.participation,
            # A secure run's shuffles come from a number that nobody may know, and are new whenever it goes on.
            "seed": None if simulation.system is not None else simulation.streams.seed,
            "loss": task.loss,
            "model": {
                "parameters": dict(zip(task.layout.names, map(list, task.layout.shapes), strict=True)),
                "start": _digest(task.layout.read(task.model).cpu()),
            },
            "clients": simulation.population,
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


def data_tag(clients: Clients, key: bytes) -> str:
    """A hash under `key` of everything that all the clients hold, and of the first rows as local training sees them."""
    digest = hashlib.blake2b(key=key, digest_size=32)
    contents = getattr(clients, "contents", None)
    _update(digest, [clients.sizes])
    _update(digest, contents() if contents is not None else _rows(clients))
    holders = torch.nonzero(clients.sizes > 0).flatten()[:_SAMPLE]
    if len(holders):
        _update(digest, clients.gather(holders, torch.zeros((len(holders), 1), dtype=torch.int64), torch.device("cpu")))
    return digest.hexdigest()


def _rows(clients: Clients) -> Iterator[torch.Tensor]:
    """Every row of every client, some thousand at a time; clients of one size are asked for together."""
    for size in torch.unique(clients.sizes[clients.sizes > 0]).tolist():
        alike = torch.nonzero(clients.sizes == size).flatten()
        for start in range(0, size, _PIECE):
            positions = torch.arange(start, min(start + _PIECE, size))
            for part in alike.split(max(1, _PIECE // len(positions))):
                yield from clients.gather(part, positions.expand(len(part), -1), torch.device("cpu"))


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    _update(digest, tensors)
    return digest.hexdigest()[:16]


def _update(digest: Any, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
