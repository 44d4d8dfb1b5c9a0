from __future__ import annotations

from datetime import date

import numpy as np
import pytest
import torch

from dpfedexp.data import Federation
from dpfedexp.data.partition import by_ids
from dpfedexp.errors import InputError


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (["b", "a", "b"], ("a", "b")),
        (np.array(["b", "a", "b"]), ("a", "b")),
        (np.array(["b", "a", "b"], dtype=object), ("a", "b")),
        (np.array([10**12, 7, 10**12]), (7, 10**12)),
        (torch.tensor([9, -5, 9]), (-5, 9)),
        ([torch.tensor(9), torch.tensor(5), torch.tensor(9)], (5, 9)),
        ([("x", 2), ("x", 1), ("x", 2)], (("x", 1), ("x", 2))),
        ([date(2026, 1, 2), date(2026, 1, 1), date(2026, 1, 2)], (date(2026, 1, 1), date(2026, 1, 2))),
    ],
)
def test_ids_of_any_kind_number_the_clients_in_sorted_order(ids, names) -> None:
    split, found = by_ids("client_ids", ids, 3)
    assert found == names
    assert split.rows.tolist() == [1, 0, 2]
    assert split.offsets.tolist() == [0, 1, 3]


def test_ids_that_cannot_be_sorted_are_numbered_as_they_appear() -> None:
    split, names = by_ids("client_ids", ["b", 3, "b", (1,)], 4)
    assert names == ("b", 3, (1,))
    assert split.rows.tolist() == [0, 2, 1, 3]


def test_the_order_of_the_rows_does_not_number_the_clients() -> None:
    ids, order = np.array(["c", "a", "b", "a", "c"]), np.array([3, 0, 4, 2, 1])
    assert by_ids("client_ids", ids, 5)[1] == by_ids("client_ids", ids[order], 5)[1]


def test_a_federation_by_ids_holds_the_rows_of_each_and_keeps_the_names() -> None:
    x, ids = np.arange(6.0)[:, None], ["zoe", "al", "zoe", "bo", "al", "zoe"]
    for federation in (
        Federation.from_arrays(x, np.zeros(6), client_ids=ids),
        Federation.from_arrays(x, np.zeros(6), ids),
        Federation.from_dataset(list(zip(x, [0] * 6, strict=True)), client_ids=ids),
    ):
        assert federation.names == ("al", "bo", "zoe")
        assert federation.client(2)[0].flatten().tolist() == [0.0, 2.0, 5.0]


def test_names_are_in_no_summary_and_no_repr() -> None:
    federation = Federation.from_arrays(np.ones((2, 1)), np.zeros(2), client_ids=["Zoe", "Al"])
    assert "Zoe" not in repr(federation) + str(federation.summary())


def test_declared_clients_without_rows_have_no_name() -> None:
    federation = Federation.from_arrays(np.ones((2, 1)), np.zeros(2), client_ids=["b", "a"], clients=4)
    assert federation.sizes.tolist() == [1, 1, 0, 0]
    assert federation.names == ("a", "b", None, None)


def test_client_numbers_keep_their_meaning_gaps_are_empty_clients() -> None:
    federation = Federation.from_arrays(np.ones((2, 1)), np.zeros(2), np.array([3, 0]))
    assert federation.sizes.tolist() == [1, 0, 0, 1]
    assert federation.names is None


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (["a", "b"], "client_ids has 2 ids and there are 3 rows; give one client id per row"),
        (np.zeros((3, 2)), r"client_ids has shape \(3, 2\); give one id per row"),
        (["a", None, "b"], "client_ids has no id in row 1; drop the rows"),
        (np.array([1.0, np.nan, 2.0]), "client_ids has no id in row 1"),
        ([["a"], ["b"], ["c"]], "client_ids holds an id that is no key .*; give strings, numbers or tuples"),
        ("abc", "client_ids is a str; give one client id per row"),
        ({"a": 1}, "client_ids is a dict"),
        (7, "client_ids is a int"),
    ],
)
def test_what_is_no_id_per_row_gets_a_sentence(ids, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_arrays(np.ones((3, 1)), np.zeros(3), client_ids=ids)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "give assignment or client_ids, one of them"),
        ({"assignment": [0, 0], "client_ids": ["a", "b"]}, "give assignment or client_ids, one of them"),
        ({"assignment": [0, 10**9]}, "give ids as client_ids="),
        ({"client_ids": ["a", "b"], "clients": 1}, "clients is 1, but client_ids holds 2 different ids"),
        ({"client_id": ["a", "b"]}, "Did you mean 'client_ids'"),
    ],
)
def test_ids_and_numbers_that_contradict_each_other_get_a_sentence(options, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_arrays(np.ones((2, 1)), np.zeros(2), **options)


def test_names_must_be_one_per_client() -> None:
    with pytest.raises(InputError, match="names has 1 entries and there are 2 clients"):
        Federation(np.ones((2, 1)), np.zeros(2), [[0], [1]], names=["a"])
