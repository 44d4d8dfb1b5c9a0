"""triton's convolutions against patches and products, on a GPU; `TRITON_INTERPRET=1` runs the float32 ones without."""

from __future__ import annotations

import os

import pytest
import torch

from dpfedexp.trainers.fast.convolution import ContractAndPool, Patches
from dpfedexp.trainers.fast.window import Window

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
    from dpfedexp.trainers.fast.triton_kernels.matrix_units import RoundedConvolveAndPool
    from dpfedexp.trainers.fast.triton_kernels.pooled import ConvolveAndPool

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


WINDOWS = [
    (Window((3, 3), padding=(1, 1)), 32, 32, 5),
    (Window((3, 3), (2, 2), (1, 1)), 9, 12, 3),
    (Window((4, 4), (2, 2)), 30, 30, 10),
    (Window((1, 1), (2, 2)), 7, 8, 4),
    (Window((3, 2), (2, 1), (1, 0), (1, 3)), 17, 13, 2),
    (Window((2, 3), (1, 2), (0, 1), (2, 1)), 11, 10, 1),
    (Window((5, 5), (3, 3), (4, 2)), 14, 10, 50),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "height", "width", "s"), WINDOWS)
def test_patches_and_their_gradient_are_those_of_torch(window, height, width, s, dtype):
    from dpfedexp.trainers.fast.triton_kernels.unfold import folded, suits, unfolded

    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, height, width, s, generator=draws).to(dtype)
    patches, shape = Patches(window).forward((), x)
    dy = torch.randn(patches.shape, generator=draws).to(dtype)
    (dx,) = Patches(window).backward((), shape, dy.float(), True)[1]
    assert suits(window, height, width, s)
    assert torch.equal(unfolded(x.to(DEVICE), window).cpu(), patches)
    found = folded(dy.to(DEVICE), window, height, width).cpu().float()
    assert float((found - dx).norm() / dx.norm()) < (1e-6 if dtype == torch.float32 else 0.01)
