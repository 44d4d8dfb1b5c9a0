from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dpfedexp.data.readers import concatenate_clients, stack_dataset
from dpfedexp.errors import InputError


def test_integer_labels_of_different_widths_may_be_mixed() -> None:
    inputs, targets, sizes = concatenate_clients(
        [(np.zeros((1, 2)), np.array([1], dtype=np.int32)), (torch.ones(2, 2), [2, 3])]
    )
    assert inputs.shape == (3, 2)
    assert targets.tolist() == [1, 2, 3]
    assert sizes == [1, 2]


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([], "clients is empty"),
        ([([], [])], "clients hold no data at all"),
        ([([[1.0]], [1, 2])], r"clients\[0\] has 1 inputs and 2 targets"),
        ([([[1.0]], [1]), ([[1.0, 2.0]], [1])], r"clients\[1\] inputs is float64 of shape \(2,\) per row"),
        ([([], []), (np.zeros((1, 2), np.uint8), [1]), (np.zeros((1, 2)), [1])], r"clients\[2\] inputs is float64"),
        ([np.zeros((2, 2))], r"clients\[0\] is a ndarray; it must be a pair"),
        ([([["a"]], [1])], r"clients\[0\] inputs has dtype <U1"),
    ],
)
def test_clients_that_do_not_fit_together_are_named(clients: list, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        concatenate_clients(clients)


@pytest.mark.parametrize(
    ("item", "target"), [(torch.ones(2), 1), (np.ones(2), np.int64(1)), ([1.0, 1.0], torch.tensor(1)), (1.0, 1)]
)
def test_items_may_be_tensors_arrays_lists_or_numbers(item: object, target: object) -> None:
    inputs, targets = stack_dataset([(item, target)] * 3)
    assert torch.equal(inputs, torch.ones_like(inputs))
    assert inputs.shape[0] == 3
    assert targets.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (3, "dataset is a int"),
        ([], "dataset is empty"),
        ([(1.0, 1), 7], r"dataset\[1\] is a int; it must be a pair"),
        ([(object(), 1)], r"dataset\[0\] input is a object.*transform that makes tensors"),
        ([(torch.ones(2), 1), (torch.ones(3), 1)], r"dataset\[1\] input is float32 of shape \(3,\)"),
        ([(1.0, 1), (1.0, 0.5)], r"dataset\[1\] target is float64"),
        (TensorDataset(torch.ones(2)), "dataset has 1 tensors"),
    ],
)
def test_datasets_that_cannot_be_stacked_are_named(dataset: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        stack_dataset(dataset)
