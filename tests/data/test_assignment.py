from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfedexp.data.partition import Assignment, as_assignment
from dpfedexp.errors import InputError


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_client_numbers_may_come_in_any_container(kind) -> None:
    rows, offsets = as_assignment(kind([1, 0, -1, 1]), 4)
    assert rows.tolist() == [1, 0, 3]
    assert offsets.tolist() == [0, 1, 3]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_row_indices_may_come_in_any_container(kind) -> None:
    rows, offsets = as_assignment([kind([2, 0]), kind([1])], 3)
    assert rows.tolist() == [2, 0, 1]
    assert offsets.tolist() == [0, 2, 3]


def test_clients_without_rows_are_kept() -> None:
    assert as_assignment([[], [0], []], 1).offsets.tolist() == [0, 0, 1, 1]
    assert as_assignment(np.array([2, 0]), 2).offsets.tolist() == [0, 1, 1, 2]


def test_a_ready_assignment_passes_through() -> None:
    split = Assignment(np.array([0, 1]), np.array([0, 1, 2]))
    assert as_assignment(split, 2) is split


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ([[0, 10]], "assignment holds row 10; inputs has rows 0 to 9"),
        ([[-1, 2]], "assignment holds row -1"),
        (Assignment(np.array([10]), np.array([0, 1])), "assignment holds row 10"),
        (Assignment(np.array([0, 1]), np.array([0, 1])), "offsets that do not rise from 0 to its 2 rows"),
        (Assignment(np.array([0, 1]), np.array([0, 2, 1, 2])), "offsets that do not rise"),
        (Assignment(np.array([], dtype=int), np.array([0])), "offsets that do not rise"),
        ([[0.5]], r"assignment\[0\] has dtype float64; it must hold whole numbers"),
        ([[0], [[1]]], r"assignment\[1\] has shape \(1, 1\)"),
        ([], "assignment is empty"),
        (7, "assignment is a int"),
        ("iid", "assignment is a str"),
        (np.zeros(9, dtype=int), "assignment has 9 client numbers and inputs has 10 rows"),
        (np.full(10, -2), "assignment holds the client number -2"),
        (np.full(10, -1), "assignment gives no row to any client"),
        (np.full(10, 10**12), "assignment holds the client number 1000000000000 for 10 rows"),
        (np.zeros(10), "assignment has dtype float64"),
        (np.zeros(10, dtype=bool), "assignment has dtype bool"),
    ],
)
def test_what_names_no_rows_is_refused(assignment: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        as_assignment(assignment, 10)


def test_clients_without_rows_count_where_their_number_is_given():
    split = as_assignment(np.array([0, 1, 0]), 3, clients=4)
    assert np.diff(split.offsets).tolist() == [2, 1, 0, 0]
    with pytest.raises(InputError, match="clients is 1"):
        as_assignment(np.array([0, 1, 0]), 3, clients=1)
