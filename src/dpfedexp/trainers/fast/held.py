"""An operation in another precision held, layer by layer, to the two exact ones that it stands for.

What rounding moves grows with every layer: the gradients of a deep network differ by their own size between one order of a sum and
another. So each operation is compared on exact values, and hands exact ones on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfedexp.trainers.fast.ops import Gradients, Op, Saved, Unsupported, multiplied
from dpfedexp.trainers.fast.program import Program, Step
from dpfedexp.trainers.precision import Precision

TOLERANCE: dict[Precision, float] = {"fp32": 0.01, "tf32": 0.1, "bf16": 0.2}
"""A wrong rule is off by the size of the result itself; rounding, and the places of near ties in a max-pool, are not."""


@dataclass(frozen=True)
class Held:
    """Computes by `first` and `second`, and raises `Unsupported` where `op`, in its precision, is far from them."""

    op: Op
    first: Op
    second: Op
    precision: Precision

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        between, of_first = self.first.forward((), *inputs)
        y, of_second = self.second.forward(params, between)
        found, saved = self.op.forward(self._low(params), *self._low(inputs))
        self._compare(found, y)
        return y, (of_first, of_second, saved)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        of_first, of_second, kept = saved
        of_params, (between,) = self.second.backward(params, of_second, dy, wanted)
        of_inputs = self.first.backward((), of_first, between, wanted)[1] if between is not None else (None,)
        own_params, own_inputs = self.op.backward(self._low(params), kept, self._low([dy])[0], wanted)
        for mine, exact in zip((*own_params, *own_inputs), (*of_params, *of_inputs), strict=True):
            if mine is not None and exact is not None:
                self._compare(multiplied(mine), multiplied(exact))
        return of_params, of_inputs

    def _low(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [value.bfloat16() if self.precision == "bf16" else value for value in values]

    def _compare(self, found: Tensor, exact: Tensor) -> None:
        off, scale = (float(torch.linalg.vector_norm(value)) for value in (found.float() - exact, exact))
        if not off <= TOLERANCE[self.precision] * scale + 1e-6:
            raise Unsupported(f"{type(self.op).__name__} gives something else than {type(self.second).__name__}")


def each_held(program: Program, plain: Program, precision: Precision) -> Program:
    """The program with every operation that stands for two of the plain one's held to them."""
    made_by = {step.output: step for step in plain.steps}

    def held(step: Step) -> Step:
        second = made_by[step.output]
        if step.op is second.op:
            return step
        return replace(step, op=Held(step.op, made_by[second.inputs[0]].op, second.op, precision))

    return replace(program, steps=tuple(held(step) for step in program.steps))
