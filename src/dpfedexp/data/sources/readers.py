"""The rows of one client, from whatever holds them: a pair of arrays, a `Dataset`, a `DataLoader`, an iterator of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import default_collate

from dpfedexp.data.arrays import as_tensor
from dpfedexp.data.sources.stacking import stack_dataset, wrong_item
from dpfedexp.errors import InputError, require


def pairs(clients: Iterable[Any]) -> Iterator[Any]:
    """(inputs, targets) of each client; what holds rows in another way is read, what is a pair already passes."""
    _refuse_one(clients)
    for number, client in enumerate(clients):
        holds_rows = isinstance(client, DataLoader | Dataset | Iterator)
        yield read_rows(f"clients[{number}]", client) if holds_rows else client


def row_pairs(clients: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The same where every client is rows, so that a list of two rows is never a pair of arrays."""
    _refuse_one(clients)
    for number, client in enumerate(clients):
        require(
            isinstance(client, Iterable | Dataset) and not isinstance(client, Tensor | str | bytes | dict),
            f"loaders[{number}] is a {type(client).__name__}; it must be a DataLoader, a Dataset or rows (input, target).",
        )
        yield read_rows(f"loaders[{number}]", client)


def read_rows(field: str, client: Any) -> tuple[Any, Any]:
    """Every row once, in the order of the data set; a client without rows has empty arrays."""
    if isinstance(client, DataLoader):
        return _of_loader(field, client)
    if isinstance(client, IterableDataset) or not hasattr(client, "__getitem__") or not hasattr(client, "__len__"):
        client = list(client)
    return stack_dataset(client, field) if len(client) else ([], [])


def _of_loader(field: str, loader: DataLoader[Any]) -> tuple[Any, Any]:
    """Read in order and whole: shuffled rows would make another federation of the same data each time."""
    require(
        not loader.drop_last,
        f"{field} is a DataLoader with drop_last=True, which loses rows; give its dataset, or drop_last=False "
        "(batches are made by the local optimiser's batch_size).",
    )
    if not isinstance(loader.dataset, IterableDataset):
        _check_sampler(field, loader)
        if loader.collate_fn is default_collate:
            return read_rows(field, loader.dataset)
        # A generator of its own: a loader draws a number from torch's whenever it is read.
        own = torch.Generator()
        loader = DataLoader(loader.dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn, generator=own)
    return read_rows(field, list(loader)) if loader.batch_size is None else _of_batches(field, loader)


def _check_sampler(field: str, loader: DataLoader[Any]) -> None:
    """Only an order of all the rows can be undone."""
    sampler = loader.sampler
    whole = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    require(
        whole and (loader.batch_size is not None or loader.batch_sampler is None),
        f"{field} is a DataLoader with a sampler of its own, which draws rows when it is read; give the rows that the client "
        "holds, such as torch.utils.data.Subset(dataset, indices).",
    )


def _of_batches(field: str, batches: Iterable[Any]) -> tuple[Any, Any]:
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for number, batch in enumerate(batches):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputError(f"{field}[{number}] is {wrong_item(batch)}")
        for parts, name, value in ((inputs, "inputs", batch[0]), (targets, "targets", batch[1])):
            parts.append(as_tensor(f"{field}[{number}] {name}", value))
            require(
                parts[-1].shape[1:] == parts[0].shape[1:],
                f"{field}[{number}] {name} has rows of shape {tuple(parts[-1].shape[1:])}, while the first batch has "
                f"{tuple(parts[0].shape[1:])}; pad or crop all to one public shape in collate_fn.",
            )
    return (torch.cat(inputs), torch.cat(targets)) if inputs else ([], [])


def _refuse_one(clients: Any) -> None:
    """One loader or data set for everybody would make a client of every batch or row."""
    if isinstance(clients, DataLoader | Dataset):
        what = "DataLoader" if isinstance(clients, DataLoader) else "Dataset"
        raise InputError(
            f"clients is one {what}; give a list with one per client, or deal its rows out with "
            "Federation.from_dataset(dataset, …)."
        )
