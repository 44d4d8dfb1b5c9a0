from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dpfedexp.data import Federation
from dpfedexp.data.readers import stack_dataset
from dpfedexp.errors import InputError

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10) % 3
WHOLE = TensorDataset(X, Y)


class Rows(Dataset):
    """Counts how often a row is read."""

    def __init__(self, *rows: int) -> None:
        self.rows, self.reads = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return X[self.rows[index]], int(Y[self.rows[index]])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from (Rows(0, 4, 2)[at] for at in range(3))


def rows_of(client: object) -> list[float]:
    """The first feature of every row, which tells rows apart."""
    return Federation.from_clients([client]).client(0)[0][:, 0].tolist()


@pytest.mark.parametrize(
    "client",
    [
        Rows(0, 4, 2),
        Subset(WHOLE, [0, 4, 2]),
        Subset(Subset(WHOLE, [4, 2, 0]), [2, 0, 1]),
        Subset(Rows(2, 4, 0), torch.tensor([2, 1, 0])),
        ConcatDataset([Rows(0), Rows(4, 2)]),
        Stream(),
        DataLoader(Rows(0, 4, 2), batch_size=2),
        DataLoader(Rows(0, 4, 2), batch_size=2, shuffle=True),
        DataLoader(Rows(0, 4, 2), batch_size=None),
        DataLoader(Stream(), batch_size=2),
        DataLoader(Stream(), batch_size=None),
    ],
)
def test_a_client_may_be_a_data_set_or_a_loader_and_rows_keep_their_order(client) -> None:
    assert rows_of(client) == [0.0, 8.0, 4.0]
    assert Federation.from_loaders([client]).client(0)[1].tolist() == [0, 1, 2]


def test_a_shuffling_loader_makes_the_same_federation_every_time_and_draws_nothing() -> None:
    loader = DataLoader(WHOLE, batch_size=3, shuffle=True)
    before = torch.get_rng_state()
    assert rows_of(loader) == X[:, 0].tolist() == rows_of(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_a_collate_function_is_respected() -> None:
    def collate(items):
        return torch.stack([x for x, _ in items]) + 100, torch.tensor([y for _, y in items])

    before = torch.get_rng_state()
    assert rows_of(DataLoader(Rows(0, 4, 2), batch_size=2, shuffle=True, collate_fn=collate)) == [100.0, 108.0, 104.0]
    by_row = DataLoader(Rows(0, 4), batch_size=None, collate_fn=lambda item: (item[0] + 1, item[1]))
    assert rows_of(by_row) == [1.0, 9.0]
    assert torch.equal(before, torch.get_rng_state())


def test_every_row_is_read_once() -> None:
    rows = Rows(0, 4, 2)
    Federation.from_clients([rows])
    assert rows.reads == 3
    spent = (pair for pair in [(X[0], 0), (X[1], 1)])
    assert Federation.from_clients([spent]).sizes.tolist() == [2]
    assert list(spent) == []


def test_clients_may_come_from_a_generator_and_be_unequal_empty_or_of_one_row() -> None:
    made = Federation.from_clients(Rows(*range(size)) for size in (3, 0, 1))
    assert made.sizes.tolist() == [3, 0, 1]
    mixed = Federation.from_clients([(X[:2], Y[:2]), Rows(), ([], []), DataLoader(Rows(5)), Subset(WHOLE, [])])
    assert mixed.sizes.tolist() == [2, 0, 0, 1, 0]


def test_a_list_of_two_rows_is_two_rows() -> None:
    made = Federation.from_loaders([[(1.0, 0), (2.0, 1)]])
    assert made.client(0)[0].tolist() == [1.0, 2.0]
    assert made.client(0)[1].tolist() == [0, 1]


def test_a_dict_of_clients_names_them() -> None:
    assert Federation.from_clients({"zoe": Rows(1), "al": (X[:2], Y[:2])}).names == ("zoe", "al")
    assert Federation.from_loaders({7: Rows(1), 3: Rows(2)}).names == (7, 3)


class Shifted(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.tensors[0][index] + 1, self.tensors[1][index]


def test_tensors_are_read_at_once_unless_their_data_set_makes_something_of_them() -> None:
    x, y = stack_dataset(Subset(WHOLE, np.array([3, 1])))
    assert torch.equal(x, X[[3, 1]])
    assert torch.equal(y, Y[[3, 1]])
    assert torch.equal(stack_dataset(Shifted(X, Y))[0], X + 1)
    assert torch.equal(stack_dataset(Subset(Shifted(X, Y), [3, 1]))[0], X[[3, 1]] + 1)


class Dicts(Rows):
    def __getitem__(self, index: int) -> dict:
        return {"image": X[index], "label": 0}


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([DataLoader(WHOLE, sampler=SubsetRandomSampler([1]), batch_size=None)], "a sampler of its own"),
        ([DataLoader(WHOLE, sampler=RandomSampler(WHOLE, replacement=True))], "a sampler of its own"),
        ([DataLoader(WHOLE, batch_sampler=[[0, 1], [2]])], "a sampler of its own"),
        (
            [DataLoader(Rows(0, 1, 2), batch_size=2, drop_last=True)],
            r"drop_last=True, which loses rows; give its dataset",
        ),
        ([DataLoader(WHOLE, sampler=WeightedRandomSampler([1.0] * 10, 5))], r"a sampler of its own.*Subset\("),
        (
            [DataLoader(Dicts(0, 1))],
            r"clients\[0\]\[0\] is a dict with 'image', 'label'; it must be a pair .*collate_fn",
        ),
        (
            [DataLoader(Dicts(0, 1), collate_fn=lambda items: items[0])],
            r"a dict with 'image', 'label'; it must be a pair",
        ),
        ([Rows(0), Dicts(0)], r"clients\[1\]\[0\] is a dict"),
        (DataLoader(WHOLE), "clients is one DataLoader; give a list with one per client, or deal its rows out"),
        (WHOLE, "clients is one Dataset; give a list with one per client"),
        ([TensorDataset(X)], r"clients\[0\] has 1 tensors; it must have two"),
        ([iter([(X[0], 0), (X[0, :1], 0)])], r"clients\[0\]\[1\] input is float32 of shape \(1,\)"),
        ([[(X[0], 0), (X[1], 1), (X[2], 0)]], r"clients\[0\] is a list; .*from_loaders takes lists of rows"),
        ([Rows()], "clients hold no data at all"),
        (iter([]), "clients is empty; there must be at least one client"),
    ],
)
def test_clients_that_cannot_be_read_get_a_sentence_with_the_fix(clients, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_clients(clients)


@pytest.mark.parametrize(
    ("loaders", "sentence"),
    [
        ([3], r"loaders\[0\] is a int; it must be a DataLoader, a Dataset or rows"),
        ([X], r"loaders\[0\] is a Tensor"),
        ([["row"]], r"loaders\[0\]\[0\] is a str; it must be a pair"),
        (DataLoader(WHOLE), "clients is one DataLoader"),
    ],
)
def test_loaders_that_are_none_get_a_sentence(loaders, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_loaders(loaders)


def test_batches_of_different_shapes_are_refused() -> None:
    def pad(items):
        widest = 1 + int(max(x[0] for x, _ in items))
        return torch.zeros(len(items), widest), torch.zeros(len(items))

    with pytest.raises(InputError, match="pad or crop all to one public shape in collate_fn"):
        Federation.from_clients([DataLoader(Rows(0, 1, 2), batch_size=2, collate_fn=pad)])
