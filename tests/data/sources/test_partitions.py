"""Hugging Face data sets and partitioners, by what they can do rather than by what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfedexp.data import Federation
from dpfedexp.errors import InputError

ROWS = {"user": ["b", "a", "b"], "image": np.arange(12, dtype=np.uint8).reshape(3, 2, 2), "label": [0, 1, 1]}


class LazyColumn:
    """What indexing a data set by a name returns: read when it is sliced."""

    def __init__(self, values) -> None:
        self.values = values

    def __getitem__(self, at):
        return self.values[at]


class Table:
    """The part of `datasets.Dataset` that is needed."""

    def __init__(self, columns: dict, form: str | None = None) -> None:
        self.columns_, self.form, self.column_names = columns, form, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns_.values())))

    def with_format(self, form: str) -> Table:
        return Table(self.columns_, form)

    def __getitem__(self, name: str) -> LazyColumn:
        assert self.form == "numpy"
        return LazyColumn(self.columns_[name])


class Partitioner:
    num_partitions = 3

    def load_partition(self, partition_id: int) -> Table:
        return Table({name: values[:partition_id] for name, values in ROWS.items()})


class WithoutNumber:
    load_partition = Partitioner.load_partition


def test_rows_go_to_the_client_that_a_column_names() -> None:
    made = Federation.from_datasets(Table(ROWS), by="user", target="label", features="image")
    assert made.names == ("a", "b")
    inputs, targets = made.client(1)
    assert torch.equal(inputs, torch.from_numpy(ROWS["image"][[0, 2]]).float() / 255)
    assert targets.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (Partitioner(), {}),
        (WithoutNumber(), {"clients": 3}),
        ([Partitioner().load_partition(number) for number in range(3)], {}),
    ],
)
def test_a_partition_is_a_client_and_may_be_empty(source, options) -> None:
    made = Federation.from_datasets(source, target="label", features="image", **options)
    assert made.sizes.tolist() == [0, 1, 2]
    assert made.client(2)[1].tolist() == [0, 1]


def test_a_client_without_rows_has_no_say_in_types_and_shapes() -> None:
    nobody = Table({name: np.zeros(0) for name in ROWS})
    made = Federation.from_datasets([nobody, Table(ROWS)], target="label", features="image")
    assert (made.inputs.dtype, made.targets.dtype) == (torch.uint8, torch.int64)
    assert made.sizes.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (Table(ROWS), {}, "by is missing; name the column"),
        (Partitioner(), {"by": "user"}, "by is 'user', but every client has a data set of its own; leave by out"),
        (WithoutNumber(), {}, "does not say how many partitions it has; give their number, such as clients=100"),
        (Partitioner(), {"clients": 2}, "clients is 2, but the assignment numbers 3"),
        ([], {}, "there is no client at all"),
        (
            [Table(ROWS), Table({"image": ROWS["image"]})],
            {},
            "client 1 lacks the column 'label', which the others have",
        ),
        (
            [Table(ROWS), Table(ROWS | {"image": np.zeros((3, 5))})],
            {},
            r"shapes \[\(2, 2\), \(5,\)\]; all clients must agree",
        ),
        (
            [Table(ROWS), Table(ROWS | {"label": [0, None, 1]})],
            {},
            "column 'label' of client 1 has no value in 1 of 3 rows",
        ),
        ([3], {}, "the table is a int"),
    ],
)
def test_sources_that_do_not_fit_get_a_sentence(source, options, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_datasets(source, **{"target": "label", "features": "image"} | options)


def test_splits_and_streams_get_a_sentence() -> None:
    class Splits(dict):
        column_names = {"train": ["label"]}  # noqa: RUF012

    class Streamed:
        column_names = ("user", "label")

        def __getitem__(self, name: str) -> None: ...

    with pytest.raises(InputError, match=r"the splits 'train'; give one of them, such as dataset\['train'\]"):
        Federation.from_datasets(Splits(train=Table(ROWS)), by="user", target="label")
    with pytest.raises(InputError, match="is streamed; load it without streaming=True"):
        Federation.from_datasets(Streamed(), by="user", target="label")


def test_a_hugging_face_data_set_is_read() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"user": ["b", "a", "b"], "x": [0.5, 1.5, 2.5], "y": [0, 1, 1]})
    made = Federation.from_datasets(rows, by="user", target="y")
    assert made.names == ("a", "b")
    assert made.client(1)[0].tolist() == [[0.5], [2.5]]
    with pytest.raises(InputError, match="the splits 'train'"):
        Federation.from_datasets(datasets.DatasetDict(train=rows), by="user", target="y")
    with pytest.raises(InputError, match="is streamed"):
        Federation.from_datasets(rows.to_iterable_dataset(), by="user", target="y")


def test_a_partitioner_of_flwr_datasets_is_read() -> None:
    datasets, partitioner = pytest.importorskip("datasets"), pytest.importorskip("flwr_datasets.partitioner")
    split = partitioner.IidPartitioner(num_partitions=2)
    split.dataset = datasets.Dataset.from_dict({"x": [0.5, 1.5, 2.5], "y": [0, 1, 1]})
    made = Federation.from_datasets(split, target="y")
    assert sorted(made.sizes.tolist()) == [1, 2]
