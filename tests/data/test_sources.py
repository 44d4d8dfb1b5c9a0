"""Federations from tables, folders, data sets and loaders: what is read, and what is refused with the fix."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from dpfedexp.data import Federation
from dpfedexp.errors import InputError

TABLE = {
    "user": ["b", "a", "b", "c"],
    "age": np.array([31, 54, 31, 300], dtype=np.int64),
    "member": [True, False, True, True],
    "score": np.array([0.5, 1.5, 2.5, 3.5]),
    "color": ["red", "blue", "red", "green"],
    "y": [0, 1, 1, 0],
}
NUMBERS = ["age", "member", "score"]


def federation(table=None, **options) -> Federation:
    given = {"by": "user", "target": "y", "features": NUMBERS, **options}
    return Federation.from_pandas(TABLE if table is None else table, **given)


def test_rows_go_to_their_client_with_numbers_and_booleans_as_they_are() -> None:
    assert federation(by=["user", "color"]).names == (("a", "blue"), ("b", "red"), ("c", "green"))
    table = {name: TABLE[name] for name in ("user", "score", "age", "y")}
    assert federation(table, features=None).client(0)[0].tolist() == [[1.5, 54.0]]
    made = federation()
    assert made.names == ("a", "b", "c")
    inputs, targets = made.client(1)
    assert inputs.tolist() == [[31.0, 1.0, 0.5], [31.0, 1.0, 2.5]]
    assert (inputs.dtype, targets.dtype, targets.tolist()) == (torch.float32, torch.int64, [0, 1])


def test_whole_numbers_are_amounts_not_pixels_and_stay_whole_for_an_embedding() -> None:
    made = federation(TABLE | {"age": np.array([31, 54, 31, 200], dtype=np.uint8)}, features="age")
    assert made.client(2)[0].tolist() == [[200.0]]
    large = 2**24 + 1  # the first whole number that float32 does not hold
    table = TABLE | {"age": [31, large, 31, 300]}
    assert federation(table, features=["age", "member"], dtype=torch.int64).client(0)[0].tolist() == [[large, 0]]
    with pytest.raises(InputError, match="column 'score' holds fractions, and dtype is"):
        federation(dtype=torch.int64)


def test_several_targets_are_columns_of_one_array() -> None:
    _, targets = federation(target=["score", "y"], features="age").client(1)
    assert targets.tolist() == [[0.5, 0.0], [2.5, 1.0]]
    assert federation(target=["y", "member"], features="age").client(0)[1].tolist() == [[1, 0]]
    assert federation(target=["y"], features="age").targets.shape == (4, 1)


def test_public_categories_become_one_input_each_and_one_more_client_changes_no_column_of_the_others() -> None:
    """Whatever were learned from the rows would: a category more, another mean."""
    listed = {"color": ["blue", "green", "red"]}
    assert federation(features=["age", "color"], categories=listed).client(1)[0].tolist() == [[31, 0, 0, 1]] * 2
    assert federation(target="color", features="age", categories=listed).client(2)[1].tolist() == [1]
    fewer = {name: values[:3] for name, values in TABLE.items()}
    features = [*NUMBERS, "color"]
    some, more = (federation(t, features=features, categories=listed) for t in (fewer, TABLE))
    assert torch.equal(some.client(0)[0], more.client(0)[0])
    assert torch.equal(some.client(1)[0], more.client(1)[0])


def test_a_column_of_arrays_gives_inputs_of_their_shape_and_type() -> None:
    images = [np.full((2, 2), value, dtype=np.uint8) for value in (0, 51, 102, 255)]
    made = federation(TABLE | {"image": images}, features="image")
    assert made.inputs.dtype == torch.uint8
    assert made.client(2)[0].tolist() == [[[1.0, 1.0], [1.0, 1.0]]]
    assert federation(TABLE | {"image": images, "words": torch.ones(4, 3)}, features="words").inputs.shape == (4, 3)


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ([1, 2], {}, "the table is a list; pass a DataFrame"),
        (dict.fromkeys(TABLE, ()), {}, "all clients are empty"),
        ({}, {"target": "label"}, "target names the column 'label', which is not there. Known: age, color"),
        ({}, {"features": ["aged"]}, "features names the column 'aged', which is not there. Did you mean 'age'?"),
        ({}, {"features": ["age", "y"]}, "column 'y' is a target and a feature; take it out"),
        ({}, {"features": []}, "features is empty; name at least one column"),
        ({}, {"target": []}, "target is empty; name the column"),
        ({"score": [1.0, float("inf"), 2.0, 3.0]}, {}, r"inputs is not finite .* first in row 1"),
        ({"age": [1, "2", 3, 4]}, {}, "column 'age' holds text"),
        ({"age": np.array(["2026-01-01"] * 4, dtype="M8[D]")}, {}, "column 'age' has dtype datetime64"),
        ({"age": [1j, 1, 1, 1]}, {}, "column 'age' holds a complex; it must hold numbers"),
        ({"age": [[1], [1, 2], [1], [1]]}, {"features": "age"}, "has rows of different shapes; pad or crop"),
        ({"age": [[1, 2]] * 4}, {}, r"column 'age' has rows of shape \(2,\); give it alone: features='age'"),
        ({"age": [1, 2, 3]}, {}, r"the columns have \[3, 4\] rows; they must have equally many"),
        ({"user": ["a", None, "b", "b"]}, {}, "by has no id in row 1"),
        ({}, {"categories": {"color": ["red"]}}, "categories has 'color', which is neither a target nor a feature"),
        ({}, {"features": "color", "categories": {"color": "red"}}, "is 'red'; give a list of different values"),
    ],
)
def test_tables_that_do_not_fit_get_a_sentence_with_the_fix(changes, options, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        federation(TABLE | changes if isinstance(changes, dict) else changes, **options)


def test_many_clients_need_no_loop_over_them() -> None:
    """Far fewer function calls than clients; comparing all ids with each client's would take one for each."""
    rng, calls = np.random.default_rng(0), []
    ids = rng.permutation(np.repeat(np.arange(4_000) * 7919 + 10**12, 10))
    table = {"user": ids, "x": (ids % 1000).astype(np.float32), "y": ids % 2}
    sys.setprofile(lambda frame, event, given: calls.append(event))
    try:
        made = Federation.from_pandas(table, by="user", target="y")
    finally:
        sys.setprofile(None)
    assert sum("call" in event for event in calls) < 2_000
    assert made.client(777)[0].tolist() == [[made.names[777] % 1000]] * 10


def test_a_data_frame_is_read_like_a_dict_of_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(TABLE)
    assert torch.equal(federation(frame).inputs, federation().inputs)
    assert federation(frame.astype({"user": "category"})).names == ("a", "b", "c")
    nullable = frame.astype({"age": "Int64", "member": "boolean"})
    assert torch.equal(federation(nullable).inputs, federation().inputs)
    with pytest.raises(InputError, match="column 'age' has no value in 1 of 4 rows"):
        federation(nullable.assign(age=pandas.array([1, None, 2, 3], dtype="Int64")))
    with pytest.raises(InputError, match="column 'age' holds categories; give its public list"):
        federation(frame.astype({"age": "category"}))
    with pytest.raises(InputError, match="the column 'y' is there twice"):
        federation(pandas.concat([frame, frame[["y"]]], axis=1))


PIXELS, ANSWERS = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 1, 0])


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def test_npz_and_safetensors_files_are_clients_by_name(tmp_path) -> None:
    np.savez(tmp_path / "zoe.npz", inputs=PIXELS[:3], targets=ANSWERS[:3])
    np.savez(tmp_path / "bo.npz", inputs=PIXELS[:0], targets=ANSWERS[:0])
    last = {"inputs": torch.from_numpy(PIXELS[3:].copy()), "targets": torch.from_numpy(ANSWERS[3:].copy())}
    save_file(last, tmp_path / "al.safetensors")
    for path in (tmp_path, str(tmp_path)):
        made = Federation.from_folder(path)
        assert made.names == ("al", "bo", "zoe")
        assert made.sizes.tolist() == [1, 0, 3]
        assert np.array_equal(made.client(0)[0], PIXELS[3:])
        assert np.array_equal(made.client(2)[0], PIXELS[:3])


def test_csv_files_are_tables_whose_column_types_all_clients_share(tmp_path) -> None:
    write(tmp_path, a="age,ok,y\n3,true,1\n4,false,2\n", b="age,ok,y\n5,True,2.5\n", c="age,ok,y\n")
    (tmp_path / ".DS_Store").write_text("")
    made = Federation.from_folder(tmp_path, target="y")
    assert made.sizes.tolist() == [2, 1, 0]
    assert made.client(0)[0].tolist() == [[3.0, 1.0], [4.0, 0.0]]
    assert made.targets.dtype == torch.float32
    write(tmp_path, a="color,y\nred,1\n", b="color,y\nblue,0\n", c="color,y\n")
    made = Federation.from_folder(tmp_path, target="y", categories={"color": ["blue", "red"]})
    assert made.client(0)[0].tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "where no file is called"),
        ({"a": "x,y\n1,1\n", "b": "x\n1\n"}, "client 'b' lacks the column 'y', which the others have"),
        ({"a": "x,y\n1,1\n", "b": "x,y\n1,1\n,0\n"}, "column 'x' of client 'b' has no value in 1 of 2 rows, .* row 1"),
        ({"a": "x,y\n1,1\n2\n"}, "'a.csv' has 1 values in row 1; give one per column"),
        ({"a": ""}, "'a.csv' is empty; its first line must name the columns"),
        ({"a": "y,y\n1,1\n"}, "'a.csv' names a column twice"),
        ({"a": "x,label\n1,1\n"}, "target names the column 'y', which is not there"),
        ({"a": "x,y\n1_0,1\n"}, "column 'x' holds text"),
    ],
)
def test_csv_files_that_do_not_fit_get_a_sentence(tmp_path, files, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_folder(write(tmp_path, **files), target="y")


def test_folders_and_files_that_cannot_be_read_get_a_sentence(tmp_path) -> None:
    for name, sentence in {
        "notes.txt": r"'notes.txt' in .* is no file of a client .* files='\*.csv'",
        "a.safetensors": r"'a.safetensors' can't be read as .safetensors: ",
        "a.npz": r"'a.npz' can't be read as .npz: .*; rewrite it or move it",
    }.items():
        (tmp_path / name).write_bytes(b"neither")
        with pytest.raises(InputError, match=sentence):
            Federation.from_folder(tmp_path)
        (tmp_path / name).unlink()
    np.savez(tmp_path / "a.npz", inputs=PIXELS, targets=ANSWERS)
    save_file({"inputs": torch.from_numpy(PIXELS), "targets": torch.from_numpy(ANSWERS)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="the client 'a' has several files; give one per client"):
        Federation.from_folder(tmp_path)


class Intruder:
    def __reduce__(self):
        return (Path.touch, (Path("intruder"),))


def test_a_file_cannot_run_code(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    torch.save({"inputs": Intruder()}, tmp_path / "files" / "a.pt")
    with pytest.raises(InputError, match=r"'a.pt' in .* is no file of a client .*pickles may run code"):
        Federation.from_folder(tmp_path / "files")
    np.savez(tmp_path / "files" / "a.npz", inputs=np.array([Intruder()], dtype=object))
    (tmp_path / "files" / "a.pt").unlink()
    with pytest.raises(InputError, match=r"'a.npz' can't be read as .npz"):
        Federation.from_folder(tmp_path / "files")
    assert not (tmp_path / "intruder").exists()


ROWS = {"user": ["b", "a", "b"], "image": np.arange(12, dtype=np.uint8).reshape(3, 2, 2), "label": [0, 1, 1]}


class LazyColumn:
    """What indexing a data set by a name returns: read when it is sliced."""

    def __init__(self, values) -> None:
        self.values = values

    def __getitem__(self, at):
        return self.values[at]


class Table(dict):
    """The part of `datasets.Dataset` that is needed."""

    column_names = property(list)

    def with_format(self, form: str) -> dict[str, LazyColumn]:
        assert form == "numpy"
        return {name: LazyColumn(values) for name, values in self.items()}


class Partitioner:
    num_partitions = 3

    def load_partition(self, partition_id: int) -> Table:
        return Table({name: values[:partition_id] for name, values in ROWS.items()})


class WithoutNumber:
    load_partition = Partitioner.load_partition


def test_rows_go_to_the_client_that_a_column_names_and_who_has_none_has_no_say_in_types() -> None:
    empty = Table({name: np.zeros(0) for name in ROWS})
    made = Federation.from_datasets([empty, Table(ROWS)], target="label", features="image")
    assert (made.inputs.dtype, made.targets.dtype) == (torch.uint8, torch.int64)
    assert made.sizes.tolist() == [0, 3]
    made = Federation.from_datasets(Table(ROWS), by="user", target="label", features="image")
    assert made.names == ("a", "b")
    inputs, targets = made.client(1)
    assert torch.equal(inputs, torch.from_numpy(ROWS["image"][[0, 2]]).float() / 255)
    assert targets.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("source", "options"),
    [(Partitioner(), {}), (WithoutNumber(), {"clients": 3}), ([*map(Partitioner().load_partition, range(3))], {})],
)
def test_a_partition_is_a_client_and_may_be_empty(source, options) -> None:
    made = Federation.from_datasets(source, target="label", features="image", **options)
    assert made.sizes.tolist() == [0, 1, 2]
    assert made.client(2)[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (Table(ROWS), {}, "by is missing; name the column"),
        (Partitioner(), {"by": "user"}, "by is 'user', but there is one data set per client; leave by out"),
        (WithoutNumber(), {}, "does not say how many partitions it has; give their number, clients=100"),
        (Partitioner(), {"clients": 2}, "clients is 2, but there are 3 already"),
        (
            SimpleNamespace(column_names={"train": ["label"]}, __len__=None),
            {"by": "user"},
            "one split of a Hugging Face",
        ),
        (
            SimpleNamespace(column_names=["user", "label"]),
            {"by": "user"},
            "a Hugging Face data set that is not streamed",
        ),
        ([], {}, "there are no clients"),
        ([Table(ROWS), Table({"image": ROWS["image"]})], {}, "client 1 lacks the column 'label', which the others"),
        ([Table(ROWS), Table(ROWS | {"image": np.zeros((3, 5))})], {}, r"shapes \[\(2, 2\), \(5,\)\]; all clients"),
        ([Table(ROWS), Table(ROWS | {"label": [0, None, 1]})], {}, "'label' of client 1 has no value in 1 of 3"),
    ],
)
def test_sources_that_do_not_fit_get_a_sentence(source, options, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_datasets(source, **{"target": "label", "features": "image"} | options)


def test_a_hugging_face_data_set_is_read() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"user": ["b", "a", "b"], "x": [0.5, 1.5, 2.5], "y": [0, 1, 1]})
    made = Federation.from_datasets(rows, by="user", target="y")
    assert made.names == ("a", "b")
    assert made.client(1)[0].tolist() == [[0.5], [2.5]]


X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10) % 3
WHOLE = TensorDataset(X, Y)


class Rows(Dataset):
    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[self.rows[index]], int(Y[self.rows[index]])


class Shifted(TensorDataset):
    """Makes something of its tensors, so they are not read at once."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.tensors[0][index] + 1, self.tensors[1][index]


class Stream(data.IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from (Rows(0, 4, 2)[at] for at in range(3))


def rows_of(client: object) -> list[float]:
    """The first feature of every row, which tells rows apart."""
    return Federation.from_clients([client]).client(0)[0][:, 0].tolist()


@pytest.mark.parametrize(
    "client",
    [
        Rows(0, 4, 2),
        Subset(Subset(WHOLE, [4, 2, 0]), [2, 0, 1]),
        Subset(Rows(2, 4, 0), torch.tensor([2, 1, 0])),
        Subset(WHOLE, np.array([0, 4, 2])),
        Shifted(X[[0, 4, 2]] - 1, Y[:3]),
        Subset(Shifted(X - 1, Y), [0, 4, 2]),
        data.ConcatDataset([Rows(0), Rows(4, 2)]),
        Stream(),
        DataLoader(Rows(0, 4, 2), batch_size=2, shuffle=True),
        DataLoader(Rows(0, 4, 2), batch_size=None),
        DataLoader(Stream(), batch_size=2),
        DataLoader(Stream(), batch_size=None),
    ],
)
def test_a_client_may_be_a_data_set_or_a_loader_and_rows_keep_their_order(client) -> None:
    assert rows_of(client) == [0.0, 8.0, 4.0]


def test_a_shuffling_loader_makes_the_same_federation_every_time_and_draws_nothing() -> None:
    loader = DataLoader(WHOLE, batch_size=3, shuffle=True)
    before = torch.get_rng_state()
    assert rows_of(loader) == X[:, 0].tolist() == rows_of(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_clients_may_come_from_a_generator_and_be_unequal_empty_or_of_one_row() -> None:
    made = Federation.from_clients(Rows(*range(size)) for size in (3, 0, 1))
    assert made.sizes.tolist() == [3, 0, 1]
    mixed = Federation.from_clients([(X[:2], Y[:2]), Rows(), ([], []), DataLoader(Rows(5)), Subset(WHOLE, [])])
    assert mixed.sizes.tolist() == [2, 0, 0, 1, 0]
    assert Federation.from_clients([iter([(1.0, 0), (2.0, 1)])]).client(0)[1].tolist() == [0, 1]
    assert Federation.from_clients({"zoe": Rows(1), "al": (X[:2], Y[:2])}).names == ("zoe", "al")


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([DataLoader(WHOLE, sampler=data.SubsetRandomSampler([1]), batch_size=None)], "a custom sampler"),
        ([DataLoader(Rows(0, 1, 2), batch_size=2, drop_last=True)], "drop_last=True, which loses rows; give its data"),
        ([DataLoader(Rows(0, 1, 2), collate_fn=list)], r"a custom collate_fn; give a data set .* of one shape"),
        ([DataLoader(WHOLE, sampler=data.WeightedRandomSampler([1.0] * 10, 5))], r"a custom sampler.*Subset\("),
        ([iter([{"image": X[0], "label": 0}])], r"clients\[0\]\[0\] is a dict with 'image', 'label'; it must be"),
        (DataLoader(WHOLE), "clients is a single DataLoader; pass a list with one per client, or split its rows"),
        ([TensorDataset(X)], r"clients\[0\] has 1 tensors; it must have two"),
        ([iter([(X[0], 0), (X[0, :1], 0)])], r"clients\[0\]\[1\] input is float32 of shape \(1,\)"),
        ([[(X[0], 0), (X[1], 1), (X[2], 0)]], r"clients\[0\] is a list; .* an iterator of rows, such as iter\(rows\)"),
        ([iter([(object(), 1)])], r"clients\[0\]\[0\] input is a object; it must be a tensor.*transform"),
        ([iter([(1.0, 1), (1.0, 0.5)])], r"clients\[0\]\[1\] target is float64"),
        ([Rows()], "all clients are empty"),
        (iter([]), "clients is empty; there must be at least one client"),
        ([([[1.0]], [1, 2])], r"clients\[0\] has 1 inputs and 2 targets"),
        ([([], []), (np.zeros((1, 2), np.uint8), [1]), (np.zeros((1, 2)), [1])], r"clients\[2\] inputs is float64"),
    ],
)
def test_clients_that_cannot_be_read_get_a_sentence_with_the_fix(clients, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_clients(clients)
