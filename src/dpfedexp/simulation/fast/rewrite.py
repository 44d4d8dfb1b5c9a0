"""Another program for the same network: on a GPU, small pooled convolutions without patches in memory."""

from __future__ import annotations

import importlib.util
from collections import Counter

from dpfedexp.simulation.fast.convolution import ContractAndPool, Patches
from dpfedexp.simulation.fast.program import Program, Step
from dpfedexp.simulation.flat import Layout


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def without_patches(program: Program, layout: Layout) -> Program | None:
    """The program with triton's kernels in place of patches and products, None where no layer suits them."""
    from dpfedexp.simulation.fast.kernels import ConvolveAndPool, suits

    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    readers = Counter(i for step in program.steps for i in step.inputs)
    made_by = {step.output: step for step in program.steps}
    gone: set[int] = set()
    steps: list[Step] = []
    for step in program.steps:
        source = made_by.get(step.inputs[0])
        if isinstance(step.op, ContractAndPool) and source is not None and isinstance(source.op, Patches):
            outputs, channels = shapes[step.params[0]][:2]
            if readers[source.output] == 1 and suits(step.op.window, step.op.pool, outputs, channels):
                op = ConvolveAndPool(step.op.window, step.op.pool, step.op.bias)
                gone.add(source.output)
                step = Step(op, source.inputs, step.output, step.params)
        steps.append(step)
    if not gone:
        return None
    return Program(tuple(step for step in steps if step.output not in gone), program.output)
