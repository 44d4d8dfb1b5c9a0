from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfedexp.data import Generated
from dpfedexp.errors import InputError


def make(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row r of client i is (i, r), labelled i + r."""
    rows = np.broadcast_to(np.arange(3), (len(ids), 3))
    owners = np.broadcast_to(ids[:, None], (len(ids), 3))
    return np.stack([owners, rows], axis=-1).astype(np.float64), owners + rows


def test_gather_returns_the_rows_asked_for() -> None:
    inputs, targets = Generated(100, 3, make).gather(torch.tensor([7, 2]), torch.tensor([[2, 0], [1, 1]]))
    assert inputs.tolist() == [[[7, 2], [7, 0]], [[2, 1], [2, 1]]]
    assert targets.tolist() == [[9, 7], [3, 3]]
    assert inputs.dtype == torch.float32


def test_gather_of_all_rows_equals_client() -> None:
    federation = Generated(100, 3, make, transform=lambda x: -x)
    inputs, targets = federation.gather([5], torch.arange(3)[None])
    assert torch.equal(-inputs[0], federation.client(5)[0])
    assert torch.equal(targets[0], federation.client(5)[1])
    assert inputs[0, 2].tolist() == [5, 2]


def test_a_million_clients_take_no_memory() -> None:
    federation = Generated(10**6, 3, make)
    assert len(federation) == 10**6
    assert federation.sizes.shape == (10**6,)
    assert federation.sizes.untyped_storage().nbytes() == 8
    assert federation.summary()["examples"] == 3 * 10**6
    assert repr(federation) == "Generated(1000000 clients, 3 rows each)"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Generated(0, 3, make), "clients is 0"),
        (lambda: Generated(1, 0, make), "size is 0"),
        (lambda: Generated(5, 3, make).gather([0], torch.tensor([[3]])), "positions reach outside.*0 to 2"),
        (lambda: Generated(5, 3, make).gather([5], torch.tensor([[0]])), "clients holds a number outside 0 to 4"),
        (lambda: Generated(5, 3, make).client(-1), "clients holds a number outside 0 to 4"),
        (lambda: Generated(5, 4, make).client(0), r"make returned inputs of shape \(1, 3, 2\)"),
    ],
)
def test_what_cannot_be_generated_gets_a_sentence(call, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call()
