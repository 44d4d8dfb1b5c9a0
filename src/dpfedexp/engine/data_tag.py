"""A keyed hash of everything that the clients hold, by which a resumed run knows its data again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dpfedexp.trainers.task import Clients

_SAMPLE, _PIECE = 64, 4096


def data_tag(clients: Clients, key: bytes) -> str:
    """A hash under `key` of everything that all the clients hold, and of the first rows as they are gathered."""
    digest = hashlib.blake2b(key=key, digest_size=32)
    contents = getattr(clients, "contents", None)
    _update(digest, [clients.sizes])
    _update(digest, contents() if contents is not None else _rows(clients))
    holders = torch.nonzero(clients.sizes > 0).flatten()[:_SAMPLE]
    if len(holders):
        _update(digest, _gathered(clients, holders, torch.zeros((len(holders), 1), dtype=torch.int64)))
    return digest.hexdigest()


def parameter_tag(tensor: torch.Tensor) -> str:
    """A short hash of public numbers: the parameters that a run starts from."""
    digest = hashlib.sha256()
    _update(digest, [tensor])
    return digest.hexdigest()[:16]


def _rows(clients: Clients) -> Iterator[torch.Tensor]:
    """Every row of every client, some thousand at a time; clients of one size are asked for together."""
    for size in torch.unique(clients.sizes[clients.sizes > 0]).tolist():
        alike = torch.nonzero(clients.sizes == size).flatten()
        for start in range(0, size, _PIECE):
            positions = torch.arange(start, min(start + _PIECE, size))
            for part in alike.split(max(1, _PIECE // len(positions))):
                yield from _gathered(clients, part, positions.expand(len(part), -1))


def _gathered(clients: Clients, some: torch.Tensor, positions: torch.Tensor) -> Iterable[torch.Tensor]:
    """Their rows, or their numbers where a client's rows can't be read, which is private: it counts as zero in its rounds."""
    try:
        return tree_leaves(clients.gather(some, positions, torch.device("cpu")))
    except Exception:
        return [some]


def _update(digest: Any, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
