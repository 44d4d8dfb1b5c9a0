"""triton's kernels against torch's operations, on a GPU; `TRITON_INTERPRET=1` runs the float32 ones without."""

import os

import pytest
import torch

from dpfedexp.trainers.fast import ops
from dpfedexp.trainers.fast.convolution import ContractAndPool, Patches, Window
from dpfedexp.trainers.fast.ops import GroupNorm

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


def relative_error(found, expected):
    return float((found.to(expected.device).float() - expected).norm() / expected.norm())


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
    from dpfedexp.trainers.fast.pooled_kernels import ConvolveAndPool, RoundedConvolveAndPool

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
        assert relative_error(mine, theirs) < (
            0.05 if rounded and dtype == torch.float32 and mine is not found else tolerance
        )


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
    from dpfedexp.trainers.fast.kernels import folded, unfolded, unfolds

    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, height, width, s, generator=draws).to(dtype)
    patches, shape = Patches(window).forward((), x)
    dy = torch.randn(patches.shape, generator=draws).to(dtype)
    (dx,) = Patches(window).backward((), shape, dy.float(), True)[1]
    assert unfolds(window, height, width, s)
    assert torch.equal(unfolded(x.to(DEVICE), window).cpu(), patches)
    found = folded(dy.to(DEVICE), window, height, width)
    assert relative_error(found, dx) < (1e-6 if dtype == torch.float32 else 0.01)


def _by_kernels(op, params, x, dy, monkeypatch):
    """The operation as on a GPU, also where triton's interpreter stands in for one."""
    with monkeypatch.context() as patched:
        patched.setattr(ops, "_has_kernels", lambda x: True)
        y, kept = op.forward(params, x)
        return y, op.backward(params, kept, dy, True), op.backward(params, kept, dy, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "shape"), [(4, (8, 5, 7, 6)), (1, (3, 2, 2, 70)), (2, (6, 9)), (2, (6, 40, 1))])
def test_group_norm_is_that_of_torch(groups, shape, dtype, monkeypatch):
    draws = torch.Generator().manual_seed(0)
    x, dy = ((torch.randn(3, *shape, generator=draws) * 2 + 5).to(dtype) for _ in range(2))
    affine = [torch.randn(3, shape[0], generator=draws).to(dtype) for _ in range(2)]
    for params in (affine, []):
        exact = GroupNorm(groups, 1e-5)
        y, saved = exact.forward([p.float() for p in params], x.float())
        grads, (dx,) = exact.backward([p.float() for p in params], saved, dy.float(), True)
        given = [p.to(DEVICE) for p in params], x.to(DEVICE), dy.to(DEVICE)
        mine, (my_grads, (my_dx,)), (alone, nothing) = _by_kernels(exact, *given, monkeypatch)
        assert len(my_grads) == len(params)
        assert nothing == (None,)
        pairs = [*zip(my_grads, grads, strict=True), *zip(alone, grads, strict=True)]
        for found, expected in [(mine, y), (my_dx, dx), *pairs]:
            assert relative_error(found, expected) < (1e-5 if dtype == torch.float32 else 0.01)


def test_a_mean_far_from_zero_leaves_the_variance_whole(monkeypatch):
    x = 1000 + torch.randn(2, 4, 64, 3, generator=torch.Generator().manual_seed(0))
    op = GroupNorm(2, 1e-5)
    y, _, _ = _by_kernels(op, [], x.to(DEVICE), x.to(DEVICE), monkeypatch)
    assert float((y.cpu() - op.forward([], x.double())[0]).abs().max()) < 1e-3
