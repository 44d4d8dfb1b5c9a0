"""How a run is computed is one value, checked when it is made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfedexp import Execution, InputError
from dpfedexp.trainers.execution import execution_on


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"chunk_size": 0}, "chunk_size is 0; it must be a positive whole number"),
        ({"chunk_size": True}, "chunk_size is True"),
        ({"precision": "fp16"}, "precision is 'fp16'; it must be 'fp32', 'tf32' or 'bf16'"),
        ({"memory": "4 apples"}, "memory is '4 apples'"),
    ],
)
def test_a_field_that_can_not_be_is_a_sentence(given, words):
    with pytest.raises(InputError, match=words):
        Execution(**given)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", 3.5])
def test_a_device_that_does_not_exist_is_a_sentence(device):
    with pytest.raises(InputError, match=r"device is .*; it must be a torch device such as 'cpu'"):
        _ = Execution(device=device).place


def test_a_device_beside_an_execution_is_the_same_or_an_error():
    assert execution_on("cpu", None) == Execution(device="cpu")
    assert execution_on(None, Execution(device="cpu", chunk_size=3)) == Execution(device="cpu", chunk_size=3)
    assert execution_on("cpu", Execution(chunk_size=3)) == Execution(device="cpu", chunk_size=3)
    assert execution_on(torch.device("cpu"), Execution(device="cpu")).place == torch.device("cpu")
    with pytest.raises(InputError, match=r"device is 'cpu' and execution\.device is 'cuda'; give one of them"):
        execution_on("cpu", Execution(device="cuda"))
    with pytest.raises(InputError, match="execution is a dict; it must be an Execution"):
        execution_on(None, {"chunk_size": 3})


def test_counts_may_be_numpys():
    assert Execution(chunk_size=np.int64(8)).chunk_size == 8
