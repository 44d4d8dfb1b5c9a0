"""triton's convolutions against patches and products, on a GPU; `TRITON_INTERPRET=1` runs the float32 ones without."""

from __future__ import annotations

import os

import pytest
import torch

from dpfedexp.trainers.fast.convolution import ContractAndPool, Patches, Window

pytest.importorskip("triton", reason="triton's kernels need triton, which torch brings along on CUDA")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="triton's kernels need a GPU")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = [
    (Window((4, 4)), (2, 2), 1, 4, 28, 28),
    (Window((4, 4)), (2, 2), 4, 8, 12, 12),
    (Window((4, 4)), (2, 2), 2, 1, 12, 12),
    (Window((3, 2), (2, 1), (0, 0), (1, 2)), (3, 2), 3, 5, 17, 13),
    (Window((3, 3)), (1, 1), 2, 3, 9, 8),
]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("rounded", "dtype", "tolerance"),
    [
        (False, torch.float32, 1e-6),
        (False, torch.bfloat16, 0.01),
        (True, torch.float32, 2e-3),
        pytest.param(True, torch.bfloat16, 0.01, marks=pytest.mark.skipif(INTERPRETED, reason="not interpreted")),
    ],
)
def test_outputs_and_gradients_are_those_of_patches_and_products(layer, rounded, dtype, tolerance):
    from dpfedexp.trainers.fast.kernels import ConvolveAndPool
    from dpfedexp.trainers.fast.matrix_units import RoundedConvolveAndPool

    window, pool, channels, filters, height, width = layer
    draws = torch.Generator().manual_seed(0)
    x, kernel, bias = (
        torch.randn(shape, generator=draws).to(dtype).to(DEVICE)
        for shape in ((3, channels, height, width, 7), (3, filters, channels, *window.size), (3, filters))
    )
    exact = [kernel.float(), bias.float()]
    cut, product = Patches(window.pooled(pool)), ContractAndPool(window, pool, True)
    patches, shape = cut.forward((), x.float())
    y, saved = product.forward(exact, patches)
    dy = torch.randn(y.shape, generator=draws).to(dtype).to(DEVICE)
    of_params, (of_patches,) = product.backward(exact, saved, dy.float(), True)
    (dx,) = cut.backward((), shape, of_patches, True)[1]

    op = (RoundedConvolveAndPool if rounded else ConvolveAndPool)(window, pool, True)
    found, kept = op.forward([kernel, bias], x)
    found_params, (found_dx,) = op.backward([kernel, bias], kept, dy, True)
    for mine, theirs in [(found, y), (found_dx, dx), *zip(found_params, of_params, strict=True)]:
        # A position that wins by less than the rounding sends a whole gradient elsewhere, so tf32's sums are held less tightly.
        off = float((mine.float() - theirs).norm() / theirs.norm())
        assert off < (0.05 if rounded and dtype == torch.float32 and mine is not found else tolerance)
