from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from dpfedexp.data import Federation
from dpfedexp.errors import InputError

TABLE = {
    "user": ["b", "a", "b", "c"],
    "age": np.array([31, 54, 31, 300], dtype=np.int64),
    "member": [True, False, True, True],
    "score": np.array([0.5, 1.5, 2.5, 3.5]),
    "colour": ["red", "blue", "red", "green"],
    "y": [0, 1, 1, 0],
}
NUMBERS = ["age", "member", "score"]


def federation(table=None, **options) -> Federation:
    return Federation.from_pandas(
        TABLE if table is None else table, **{"by": "user", "target": "y", "features": NUMBERS} | options
    )


def test_rows_go_to_their_client_with_numbers_and_booleans_as_they_are() -> None:
    made = federation()
    assert made.names == ("a", "b", "c")
    inputs, targets = made.client(1)
    assert inputs.tolist() == [[31.0, 1.0, 0.5], [31.0, 1.0, 2.5]]
    assert (inputs.dtype, targets.dtype, targets.tolist()) == (torch.float32, torch.int64, [0, 1])


def test_whole_numbers_and_bytes_are_amounts_not_pixels_or_tokens() -> None:
    made = federation(TABLE | {"age": np.array([31, 54, 31, 200], dtype=np.uint8)}, features="age")
    assert made.client(2)[0].tolist() == [[200.0]]


def test_whole_numbers_stay_whole_for_an_embedding() -> None:
    large = 2**24 + 1  # the first whole number that float32 does not hold
    table = TABLE | {"age": [31, large, 31, 300]}
    assert federation(table, features=["age", "member"], dtype=torch.int64).client(0)[0].tolist() == [[large, 0]]
    with pytest.raises(InputError, match="column 'score' holds fractions and dtype is"):
        federation(dtype=torch.int64)


def test_all_the_other_columns_are_features_by_default() -> None:
    table = {name: TABLE[name] for name in ("user", "score", "age", "y")}
    assert Federation.from_pandas(table, by="user", target="y").client(0)[0].tolist() == [[1.5, 54.0]]


def test_several_targets_are_columns_of_one_array() -> None:
    _, targets = federation(target=["score", "y"], features="age").client(1)
    assert targets.tolist() == [[0.5, 0.0], [2.5, 1.0]]
    assert federation(target=["y", "member"], features="age").client(0)[1].tolist() == [[1, 0]]
    assert federation(target=["y"], features="age").targets.shape == (4, 1)


def test_public_categories_become_one_input_each_and_a_target_its_place() -> None:
    listed = {"colour": ["blue", "green", "red"]}
    assert federation(features=["age", "colour"], categories=listed).client(1)[0].tolist() == [[31, 0, 0, 1]] * 2
    assert federation(target="colour", features="age", categories=listed).client(2)[1].tolist() == [1]


def test_one_more_client_changes_no_column_of_the_others() -> None:
    """Whatever were learned from the rows would: a category more, another mean."""
    listed = {"colour": ["blue", "green", "red"]}
    fewer = {name: values[:3] for name, values in TABLE.items()}
    features = [*NUMBERS, "colour"]
    some, more = (federation(t, features=features, categories=listed) for t in (fewer, TABLE))
    assert torch.equal(some.client(0)[0], more.client(0)[0])
    assert torch.equal(some.client(1)[0], more.client(1)[0])


def test_a_column_of_arrays_gives_inputs_of_their_shape_and_type() -> None:
    images = [np.full((2, 2), value, dtype=np.uint8) for value in (0, 51, 102, 255)]
    made = federation(TABLE | {"image": images}, features="image")
    assert made.inputs.dtype == torch.uint8
    assert made.client(2)[0].tolist() == [[[1.0, 1.0], [1.0, 1.0]]]
    assert federation(TABLE | {"image": images, "words": torch.ones(4, 3)}, features="words").inputs.shape == (4, 3)


def test_several_columns_of_ids_are_tuples() -> None:
    assert federation(by=["user", "colour"]).names == (("a", "blue"), ("b", "red"), ("c", "green"))


def test_a_column_may_be_object_numbers() -> None:
    made = federation(TABLE | {"age": np.array([1, 2, 3, 4], dtype=object)}, features="age")
    assert made.client(2)[0].tolist() == [[4.0]]


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({}, {"by": "usr"}, "by names the column 'usr', which is not there. Did you mean 'user'?"),
        ({}, {"target": "label"}, "target names the column 'label', which is not there. Known: age, colour"),
        ({}, {"features": ["aged"]}, "features names the column 'aged', which is not there. Did you mean 'age'?"),
        ({}, {"features": None}, r"column 'colour' holds text; give its public list, categories=\{'colour'"),
        ({}, {"features": ["age", "y"]}, "column 'y' is a target and a feature; take it out"),
        ({}, {"features": []}, "features is empty; name at least one column"),
        ({}, {"target": []}, "target is empty; name the column"),
        ({}, {"by": []}, "by is empty; name the column"),
        (
            {"score": [1.0, float("nan"), 2.0, 3.0]},
            {},
            "column 'score' has no value in 1 of 4 rows, first in row 1; drop",
        ),
        ({"score": [1.0, None, 2.0, None]}, {}, "column 'score' has no value in 2 of 4 rows, first in row 1; drop"),
        ({"score": [1.0, float("inf"), 2.0, 3.0]}, {}, r"inputs is not finite .* first in row 1"),
        ({"age": [1, "2", 3, 4]}, {}, "column 'age' holds text"),
        (
            {"age": np.array(["2026-01-01"] * 4, dtype="M8[D]")},
            {},
            "column 'age' holds dates .* days since a public date",
        ),
        ({"age": [1j, 1, 1, 1]}, {}, "column 'age' holds a complex; it must hold numbers"),
        (
            {"age": [[1], [1, 2], [1], [1]]},
            {"features": "age"},
            "column 'age' has rows of different shapes; pad or crop",
        ),
        ({"age": [[1, 2]] * 4}, {}, r"column 'age' has rows of shape \(2,\); give it alone, as features='age'"),
        ({"age": [1, 2, 3]}, {}, "the columns have 3 and 4 rows; they must have equally many"),
        ({"user": ["a", "b"]}, {}, "by has 2 ids and there are 4 rows"),
        ({"user": ["a", None, "b", "b"]}, {}, "by has no id in row 1"),
        ({}, {"categories": {"colour": ["red"]}}, "categories has 'colour', which is neither a target nor a feature"),
        (
            {},
            {"features": "colour", "categories": {"colour": ["red"]}},
            "'blue' in row 1, which .* does not list; add it",
        ),
        ({}, {"features": "colour", "categories": {"colour": "red"}}, "is 'red'; give a list of different values"),
        ({}, {"clients": 2}, "clients is 2, but by holds 3 different ids"),
        ({}, {"feature": ["age"]}, "from_pandas has no argument 'feature'. Did you mean 'features'?"),
    ],
)
def test_tables_that_do_not_fit_get_a_sentence_with_the_fix(changes, options, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        federation(TABLE | changes, **options)


def test_what_is_no_table_gets_a_sentence() -> None:
    with pytest.raises(InputError, match="the table is a list; give a DataFrame"):
        federation([1, 2])
    with pytest.raises(InputError, match="hold no rows at all"):
        federation({name: values[:0] for name, values in TABLE.items()})


def test_nan_is_kept_where_that_is_said() -> None:
    made = federation(TABLE | {"score": [1.0, float("nan"), 2.0, 3.0]}, finite=False)
    assert torch.isnan(made.inputs).sum() == 1


def test_200000_clients_of_2_million_rows_need_no_loop_over_clients() -> None:
    """Some 1 s of processor time; comparing 2 million ids with each of 200,000 clients takes minutes."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(200_000) * 7919 + 10**12, 10))
    table = {"user": ids, "x": (ids % 1000).astype(np.float32), "y": ids % 2}
    start = time.process_time()
    made = Federation.from_pandas(table, by="user", target="y")
    assert time.process_time() - start < 20
    assert len(made) == 200_000
    assert made.sizes.unique().tolist() == [10]
    name = made.names[77_777]
    assert made.client(77_777)[0].unique().tolist() == [name % 1000]


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
    with pytest.raises(InputError, match=r"It is the index: give df.reset_index\(\)"):
        federation(frame.set_index("user"))
    with pytest.raises(InputError, match="the column 'y' is there twice"):
        federation(pandas.concat([frame, frame[["y"]]], axis=1))
