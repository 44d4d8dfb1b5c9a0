"""GroupNorm and LayerNorm on a GPU, in two readings of the values each way; needs triton, which torch brings along on CUDA.

torch takes a pass over memory for each of the mean, the variance, the difference, the factor and the sums of the way back. Here one
program has all numbers that share a mean, [a, p] for a block of samples, reads them for their sums, and again for the result. All
sums are float32, in the same order on every run and for every client alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Numbers that a program holds at a time."""


class Form(NamedTuple):
    """How values lie in memory: [n, groups, a, p, s], one mean for every client, group and sample.

    Factors and shifts are per client and a, and with `own` per group as well.
    """

    n: int
    groups: int
    a: int
    p: int
    s: int
    own: bool


@triton.jit
def _forward(
    x, weight, bias, y, means, scales, G, PART, eps, A: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr,
    OWN: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    BA: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Outputs, means and 1/√(variance + ε) of one client and group, for a block of samples."""
    S = PART * EVEN
    line = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1) * BS + tl.arange(0, BS)
    across = sample[None, None, :]
    source = x + line * A * P * S
    # Differences from one of the numbers themselves: their squares cancel by at most how many they are.
    near = tl.load(source + sample, mask=sample < S, other=0.0).to(tl.float32)
    sums = tl.zeros((BA, BP, BS), tl.float32)
    squares = tl.zeros((BA, BP, BS), tl.float32)
    for first in range(0, A, BA):
        a = first + tl.arange(0, BA)[:, None, None]
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)[None, :, None]
            live = (a < A) & (p < P) & (across < S)
            value = tl.load(source + (a * P + p) * S + across, mask=live, other=0.0).to(tl.float32)
            off = tl.where(live, value - near[None, None, :], 0.0)
            sums += off
            squares += off * off
    off = tl.sum(tl.sum(sums, 0), 0) / (A * P)
    variance = tl.maximum(tl.sum(tl.sum(squares, 0), 0) / (A * P) - off * off, 0.0)
    mean = near + off
    scale = 1.0 / tl.sqrt(variance + eps)
    tl.store(means + line * S + sample, mean, mask=sample < S)
    tl.store(scales + line * S + sample, scale, mask=sample < S)
    of = line * A if OWN else line // G * A
    for first in range(0, A, BA):
        a = first + tl.arange(0, BA)[:, None, None]
        factor = tl.load(weight + of + a, mask=a < A, other=0.0).to(tl.float32) if WEIGHT else 1.0
        shift = tl.load(bias + of + a, mask=a < A, other=0.0).to(tl.float32) if BIAS else 0.0
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)[None, :, None]
            live = (a < A) & (p < P) & (across < S)
            at = (a * P + p) * S + across
            value = tl.load(source + at, mask=live, other=0.0).to(tl.float32)
            result = (value - mean[None, None, :]) * scale[None, None, :] * factor + shift
            if RELU:
                result = tl.maximum(result, 0.0)
            tl.store(y + line * A * P * S + at, result.to(y.dtype.element_ty), mask=live)


@triton.jit
def _backward(
    x, dy, weight, bias, means, scales, dx, of_weight, of_bias, G, PART, A: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr,
    OWN: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, WANTED: tl.constexpr,
    BA: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The input's gradient, and this block's part of the factors' and the shifts', [n, groups, blocks, a]."""
    S = PART * EVEN
    line = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1) * BS + tl.arange(0, BS)
    across = sample[None, None, :]
    here = line * A * P * S
    mean = tl.load(means + line * S + sample, mask=sample < S, other=0.0)[None, None, :]
    scale = tl.load(scales + line * S + sample, mask=sample < S, other=0.0)[None, None, :]
    of = line * A if OWN else line // G * A
    part = (line * tl.num_programs(1) + tl.program_id(1)) * A
    plain = tl.zeros((BS,), tl.float32)
    along = tl.zeros((BS,), tl.float32)
    for first in range(0, A, BA):
        a = first + tl.arange(0, BA)[:, None, None]
        factor = tl.load(weight + of + a, mask=a < A, other=0.0).to(tl.float32) if WEIGHT else 1.0
        shift = tl.load(bias + of + a, mask=a < A, other=0.0).to(tl.float32) if BIAS else 0.0
        sums = tl.zeros((BA, BP, BS), tl.float32)
        products = tl.zeros((BA, BP, BS), tl.float32)
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)[None, :, None]
            live = (a < A) & (p < P) & (across < S)
            at = here + (a * P + p) * S + across
            normal = (tl.load(x + at, mask=live, other=0.0).to(tl.float32) - mean) * scale
            gradient = tl.load(dy + at, mask=live, other=0.0).to(tl.float32)
            if RELU:
                gradient = tl.where(normal * factor + shift > 0, gradient, 0.0)
            sums += gradient
            products += gradient * normal
        rows = tl.sum(sums, 1)
        inner = tl.sum(products, 1)
        row = first + tl.arange(0, BA)
        if WEIGHT:
            tl.store(of_weight + part + row, tl.sum(inner, 1), mask=row < A)
            own = tl.load(weight + of + row, mask=row < A, other=0.0).to(tl.float32)[:, None]
            rows *= own
            inner *= own
        if BIAS:
            tl.store(of_bias + part + row, tl.sum(tl.sum(sums, 1), 1), mask=row < A)
        plain += tl.sum(rows, 0)
        along += tl.sum(inner, 0)
    if WANTED:
        level = (plain / (A * P))[None, None, :]
        slope = (along / (A * P))[None, None, :]
        for first in range(0, A, BA):
            a = first + tl.arange(0, BA)[:, None, None]
            factor = tl.load(weight + of + a, mask=a < A, other=0.0).to(tl.float32) if WEIGHT else 1.0
            shift = tl.load(bias + of + a, mask=a < A, other=0.0).to(tl.float32) if BIAS else 0.0
            for begin in range(0, P, BP):
                p = begin + tl.arange(0, BP)[None, :, None]
                live = (a < A) & (p < P) & (across < S)
                at = here + (a * P + p) * S + across
                normal = (tl.load(x + at, mask=live, other=0.0).to(tl.float32) - mean) * scale
                gradient = tl.load(dy + at, mask=live, other=0.0).to(tl.float32)
                if RELU:
                    gradient = tl.where(normal * factor + shift > 0, gradient, 0.0)
                result = (gradient * factor - level - normal * slope) * scale
                tl.store(dx + at, result.to(dx.dtype.element_ty), mask=live)


@dataclass(frozen=True)
class Kept:
    """What the way back asks for: the inputs, and the means and 1/√(variance + ε), [n, groups, s]."""

    x: Tensor
    form: Form
    means: Tensor
    scales: Tensor


def normalised(
    x: Tensor, form: Form, weight: Tensor | None, bias: Tensor | None, eps: float, *, relu: bool = False
) -> tuple[Tensor, Kept]:
    """What lies in the memory of x, normalised, shifted and with `relu` cut at 0."""
    y = torch.empty_like(x)
    kept = Kept(x, form, *(x.new_empty((form.n, form.groups, form.s), dtype=torch.float32) for _ in range(2)))
    blocks, grid, even = _blocks(form)
    options = (form.own, weight is not None, bias is not None, relu)
    factors = (_or(weight, x), _or(bias, x))
    _forward[grid](
        x,
        *factors,
        y,
        kept.means,
        kept.scales,
        form.groups,
        form.s // even,
        eps,
        form.a,
        form.p,
        even,
        *options,
        *blocks,
    )
    return y, kept


def gradients(
    dy: Tensor, kept: Kept, weight: Tensor | None, bias: Tensor | None, *, relu: bool = False, wanted: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Of the inputs, where it is wanted, of the factors and of the shifts; dy lies in memory as the inputs do."""
    x, form = kept.x, kept.form
    blocks, grid, even = _blocks(form)
    dx = torch.empty_like(x) if wanted else x
    sums = [x.new_empty((form.n, form.groups, grid[1], form.a), dtype=torch.float32) for _ in range(2)]
    options = (form.own, weight is not None, bias is not None, relu, wanted)
    factors = (_or(weight, x), _or(bias, x))
    _backward[grid](
        x,
        dy,
        *factors,
        kept.means,
        kept.scales,
        dx,
        *sums,
        form.groups,
        form.s // even,
        form.a,
        form.p,
        even,
        *options,
        *blocks,
    )
    over = (2,) if form.own else (1, 2)
    of_weight, of_bias = (part.sum(over).view(form.n, -1) for part in sums)
    return dx if wanted else None, of_weight, of_bias


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor.contiguous()


def _blocks(form: Form) -> tuple[tuple[int, int, int], tuple[int, int], int]:
    """The tile of a program, how many programs there are, and a power of two that divides s: so many samples move together."""
    samples = min(64, triton.next_power_of_2(form.s))
    places = min(TILE // samples, triton.next_power_of_2(form.p))
    rows = min(TILE // (samples * places), triton.next_power_of_2(form.a))
    return (rows, places, samples), (form.n * form.groups, triton.cdiv(form.s, samples)), math.gcd(form.s, 16)
