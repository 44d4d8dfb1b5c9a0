"""Other programs for the same network on a GPU: small pooled convolutions without patches, large ones without scattered sums."""

from __future__ import annotations

import importlib.util
from collections import Counter

from dpfedexp.layout import Layout
from dpfedexp.trainers.fast.convolution import Contract, ContractAndPool, Convolve, Patches, Window
from dpfedexp.trainers.fast.program import Program, Step
from dpfedexp.trainers.precision import Precision


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def without_patches(program: Program, layout: Layout, precision: Precision = "fp32") -> Program | None:
    """The program with triton's kernels in place of patches and products, None where no layer suits them."""
    from dpfedexp.trainers.fast import kernels, matrix_units

    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    readers = Counter(i for step in program.steps for i in step.inputs)
    made_by = {step.output: step for step in program.steps}
    gone: set[int] = set()
    steps: list[Step] = []
    for step in program.steps:
        source = made_by.get(step.inputs[0])
        if isinstance(step.op, ContractAndPool) and source is not None and isinstance(source.op, Patches):
            outputs, channels = shapes[step.params[0]][:2]
            asked = (step.op.window, step.op.pool, outputs, channels)
            found: type[kernels.ConvolveAndPool] | None = None
            if precision != "fp32" and matrix_units.suits(*asked):
                found = matrix_units.RoundedConvolveAndPool
            elif kernels.suits(*asked):
                found = kernels.ConvolveAndPool
            if found is not None and readers[source.output] == 1:
                gone.add(source.output)
                op = found(step.op.window, step.op.pool, step.op.bias)
                step = Step(op, source.inputs, step.output, step.params)
        steps.append(step)
    if not gone:
        return None
    return Program(tuple(step for step in steps if step.output not in gone), program.output)


def without_scatter(program: Program, *, again: bool) -> Program:
    """The program with `Convolve` for all convolutions that move by one and whose input is trained.

    Args:
        program: of any network.
        again: whether patches are made again on the way back instead of being kept.
    """
    readers = Counter(i for step in program.steps for i in step.inputs)
    made_by = {step.output: step for step in program.steps}
    gone: set[int] = set()
    steps: list[Step] = []
    for step in program.steps:
        source = made_by.get(step.inputs[0])
        if (
            isinstance(step.op, Contract)
            and source is not None
            and isinstance(source.op, Patches)
            and _moves_by_one(source.op.window)
            and readers[source.output] == 1
            and source.output in program.trained
        ):
            gone.add(source.output)
            step = Step(Convolve(source.op.window, step.op.bias, again), source.inputs, step.output, step.params)
        steps.append(step)
    return Program(tuple(step for step in steps if step.output not in gone), program.output)


def _moves_by_one(window: Window) -> bool:
    inside = all(pad < size for pad, size in zip(window.padding, window.size, strict=True))
    return window.stride == window.dilation == (1, 1) and window.size != (1, 1) and inside
