from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfedexp.data.arrays import as_tensor, cast_inputs, cast_targets, check_finite
from dpfedexp.errors import InputError


def test_bytes_become_exactly_x_over_255() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(cast_inputs(pixels), torch.arange(256, dtype=torch.float32) / 255)


def test_bytes_stay_tokens_when_integers_are_asked_for() -> None:
    tokens = torch.tensor([0, 7, 255], dtype=torch.uint8)
    assert torch.equal(cast_inputs(tokens, torch.int64), torch.tensor([0, 7, 255]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_tokens_keep_their_values_as_int64(dtype: torch.dtype) -> None:
    cast = cast_inputs(torch.tensor([0, 5, 100], dtype=dtype))
    assert cast.dtype == torch.int64
    assert cast.tolist() == [0, 5, 100]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.bool])
def test_other_inputs_become_float32_unless_double_is_asked_for(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1], dtype=dtype)
    assert cast_inputs(values).dtype == torch.float32
    assert cast_inputs(values, torch.float64).dtype == torch.float64


def test_labels_become_int64_and_real_targets_float32() -> None:
    assert cast_targets(torch.tensor([3], dtype=torch.uint8)).dtype == torch.int64
    assert cast_targets(torch.tensor([3], dtype=torch.uint8), torch.float64).dtype == torch.int64
    assert cast_targets(torch.tensor([0.5], dtype=torch.float64)).dtype == torch.float32
    assert cast_targets(torch.tensor([0.5]), torch.float64).dtype == torch.float64


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", ">i4", ">f4", "longdouble", "bool", "uint8"])
def test_numpy_values_survive_whatever_their_type(dtype: str) -> None:
    assert as_tensor("x", np.array([0, 1, 1], dtype=dtype)).tolist() == [0, 1, 1]


def test_a_numpy_array_is_shared_not_copied_even_when_it_is_read_only() -> None:
    for writeable in (True, False):
        array = np.zeros((4, 2), dtype=np.float32)
        array.flags.writeable = writeable
        assert as_tensor("x", array).data_ptr() == array.ctypes.data


@pytest.mark.filterwarnings("error")
def test_a_read_only_array_gives_no_warning() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    as_tensor("x", array)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (np.array(["a", "b"]), "x has dtype <U1"),
        (np.array([1, None], dtype=object), "x has dtype object"),
        (np.array([1j]), "x has dtype complex128"),
        (torch.tensor([1j]), "x has dtype complex64"),
        ([[1.0], [1.0, 2.0]], "x is ragged"),
        (3.0, "x is a single number"),
        (np.array([2**63], dtype=np.uint64), "x holds values of 2\\^63 or more"),
    ],
)
def test_what_is_not_an_array_of_numbers_is_refused(values: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        as_tensor("x", values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(10,), (10, 3), (10, 2, 2)])
def test_non_finite_rows_are_counted_and_the_first_is_named(bad: float, shape: tuple[int, ...]) -> None:
    values = torch.zeros(shape)
    values[4], values[7] = bad, bad
    with pytest.raises(InputError, match=r"inputs is not finite.*in 2 of 10 rows, first in row 4"):
        check_finite("inputs", values)


def test_a_bad_row_is_found_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfedexp.data.arrays._CHECK_ELEMENTS", 6)
    for row in range(10):
        values = torch.zeros(10, 3)
        values[row, row % 3] = torch.nan
        with pytest.raises(InputError, match=f"1 of 10 rows, first in row {row};"):
            check_finite("inputs", values)


def test_the_search_for_nan_never_looks_at_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    real = torch.isfinite
    monkeypatch.setattr("dpfedexp.data.arrays._CHECK_ELEMENTS", 1000)
    monkeypatch.setattr(torch, "isfinite", lambda x: looked_at.append(x.numel()) or real(x))
    check_finite("inputs", torch.zeros(5000, 3))
    assert max(looked_at) <= 1000
    assert sum(looked_at) == 15_000
