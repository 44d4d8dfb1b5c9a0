"""Other programs for the same network: fewer operations, no patches or scattered sums on a GPU, torch's library on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from dpfedexp.core.layout import Layout
from dpfedexp.trainers.fast.convolution import Contract, ContractAndPool, Convolve, Patches
from dpfedexp.trainers.fast.library import LibraryConvolve
from dpfedexp.trainers.fast.normalise import GroupNorm
from dpfedexp.trainers.fast.ops import RELU, Op
from dpfedexp.trainers.fast.program import Program, Step
from dpfedexp.trainers.fast.window import Window
from dpfedexp.trainers.precision import Precision


def with_relu_inside(program: Program) -> Program:
    """The program with a ReLU taken into the GroupNorm that it alone reads."""

    def fused(step: Step, source: Step) -> Op | None:
        return replace(source.op, relu=True) if isinstance(source.op, GroupNorm) and step.op is RELU else None

    return _with_fused(program, fused)


def without_patches(program: Program, layout: Layout, precision: Precision = "fp32") -> Program | None:
    """The program with triton's kernels in place of patches and products, None where no layer suits them."""
    from dpfedexp.trainers.fast.triton_kernels import convolve, matrix_units, pooled

    shapes = dict(zip(layout.names, layout.shapes, strict=True))

    def fused(step: Step, source: Step) -> Op | None:
        if not isinstance(source.op, Patches):
            return None
        if isinstance(step.op, Contract):
            trained = precision == "bf16" and source.output in program.trained
            suits = trained and convolve.suits(shapes[step.params[0]][0])
            return convolve.RoundedConvolve(source.op.window, step.op.bias) if suits else None
        if not isinstance(step.op, ContractAndPool):
            return None
        asked = (step.op.window, step.op.pool, *shapes[step.params[0]][:2])
        if precision != "fp32" and matrix_units.suits(*asked):
            return matrix_units.RoundedConvolveAndPool(step.op.window, step.op.pool, step.op.bias)
        return pooled.ConvolveAndPool(step.op.window, step.op.pool, step.op.bias) if pooled.suits(*asked) else None

    made = _with_fused(program, fused)
    return made if len(made.steps) < len(program.steps) else None


def without_scatter(program: Program, *, again: bool) -> Program:
    """The program with `Convolve` for all convolutions that move by one and whose input is trained.

    Args:
        program: of any network.
        again: whether patches are made again on the way back instead of being kept.
    """

    def fused(step: Step, source: Step) -> Op | None:
        suits = isinstance(source.op, Patches) and _moves_by_one(source.op.window) and source.output in program.trained
        if not suits or not isinstance(step.op, Contract) or not isinstance(source.op, Patches):
            return None
        return Convolve(source.op.window, step.op.bias, again)

    return _with_fused(program, fused)


def by_library(program: Program) -> Program:
    """The program with `LibraryConvolve` for all convolutions whose input is trained; patches of the data are made once."""

    def fused(step: Step, source: Step) -> Op | None:
        if source.output not in program.trained or not isinstance(source.op, Patches):
            return None
        if isinstance(step.op, Contract):
            return LibraryConvolve(source.op.window, step.op.bias)
        if isinstance(step.op, ContractAndPool):
            return LibraryConvolve(step.op.window, step.op.bias, step.op.pool)
        return None

    return _with_fused(program, fused)


def _with_fused(program: Program, fused: Callable[[Step, Step], Op | None]) -> Program:
    """The program with one operation in place of two, of which the second alone reads the first, wherever `fused` has one."""
    readers = Counter(i for step in program.steps for i in step.inputs)
    made_by = {step.output: step for step in program.steps}
    gone: set[int] = set()
    steps: list[Step] = []
    for step in program.steps:
        source = made_by.get(step.inputs[0])
        if source is not None and readers[source.output] == 1:
            op = fused(step, source)
            if op is not None:
                gone.add(source.output)
                step = Step(op, source.inputs, step.output, source.params + step.params)
        steps.append(step)
    return replace(program, steps=tuple(step for step in steps if step.output not in gone))


def _moves_by_one(window: Window) -> bool:
    inside = all(pad < size for pad, size in zip(window.padding, window.size, strict=True))
    return window.stride == window.dilation == (1, 1) and window.size != (1, 1) and inside
