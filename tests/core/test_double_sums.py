"""Sums in double precision by triton's kernels, on a GPU; `TRITON_INTERPRET=1` runs them without."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton's kernels need triton, which torch brings along on CUDA")

from dpfedexp.core.double_sums import column_sums, squared_norms

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="triton's kernels need a GPU"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("n", [5, 16, 17, 33])
@pytest.mark.parametrize("d", [1, 1000, 2**16, 2**16 * 3 + 5])
def test_norms_and_sums_are_exact_to_double_precision(d, n):
    x = torch.randn(n, d + 3, generator=torch.Generator().manual_seed(0))[:, :d].to(DEVICE)
    wide = x.double()
    assert torch.allclose(squared_norms(x), wide.square().sum(1), rtol=1e-14, atol=0)
    assert torch.allclose(column_sums(x), wide.sum(0), rtol=1e-14, atol=1e-14)


def test_a_rows_norm_has_the_same_bits_alone_and_among_others():
    x = torch.randn(7, 70_001, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    together = squared_norms(x)
    assert all(torch.equal(squared_norms(x[i : i + 1]), together[i : i + 1]) for i in range(7))


def test_what_is_not_finite_shows_and_the_largest_numbers_do_not_overflow():
    x = torch.zeros(3, 50)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    x[2] = torch.finfo(torch.float32).max
    found = squared_norms(x.to(DEVICE)).cpu()
    assert torch.isinf(found[0])
    assert torch.isnan(found[1])
    assert torch.equal(found[2:], (x[2].double() ** 2).sum()[None])
