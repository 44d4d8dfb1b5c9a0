"""A network as a list of operations, and one gradient step of many clients through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from dpfedexp.trainers.fast.objective import Objective
from dpfedexp.trainers.fast.ops import Gradient, Op
from dpfedexp.trainers.stepping import INPUT, KEYS


@dataclass(frozen=True)
class Step:
    """values[output] = op(values[inputs]) with the named parameters."""

    op: Op
    inputs: tuple[int, ...]
    output: int
    params: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """Steps in order; every parameter belongs to one step, so its gradient is whole when that step has gone backward."""

    steps: tuple[Step, ...]
    output: int

    @cached_property
    def trained(self) -> frozenset[int]:
        """Values that depend on parameters or on what a step draws: the others are made once for data that stay."""
        found: set[int] = set()
        for step in self.steps:
            if step.params or any(i in found or i == KEYS for i in step.inputs):
                found.add(step.output)
        return frozenset(found)

    @cached_property
    def fixed(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.output not in self.trained)

    @cached_property
    def active(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.output in self.trained)

    @cached_property
    def last_use(self) -> tuple[tuple[int, ...], ...]:
        """For each active step, the values that no later step reads."""
        seen = {self.output}
        dead = []
        for step in reversed(self.active):
            gone = [i for i in dict.fromkeys(step.inputs) if i in self.trained and i not in seen]
            seen.update(gone)
            dead.append(tuple(gone))
        return tuple(reversed(dead))

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The fixed values that active steps read; the keys of what is drawn come with every step."""
        read = (i for step in self.active for i in step.inputs if i not in self.trained and i != KEYS)
        return tuple(dict.fromkeys(read))

    def prepare(self, x: Tensor) -> dict[int, Tensor]:
        """What depends on the data alone, from inputs [n, s, …]."""
        values = {INPUT: x.movedim(1, -1).contiguous()}
        for step in self.fixed:
            values[step.output] = step.op.forward((), *(values[i] for i in step.inputs))[0]
        return {i: values[i] for i in self.kept}

    def forward(self, params: Mapping[str, Tensor], fixed: Mapping[int, Tensor]) -> tuple[Tensor, list[object]]:
        values, saved = dict(fixed), []
        for step, gone in zip(self.active, self.last_use, strict=True):
            values[step.output], kept = step.op.forward(
                [params[name] for name in step.params], *(values[i] for i in step.inputs)
            )
            saved.append(kept)
            for i in gone:
                del values[i]
        return values[self.output], saved

    def descend(
        self,
        params: Mapping[str, Tensor],
        fixed: Mapping[int, Tensor],
        targets: Tensor,
        weights: Tensor,
        start: Objective,
        take: Callable[[str, Gradient], None],
    ) -> None:
        """Hands every parameter's gradient to `take` as soon as it is known; from then on this step reads the parameter no more."""
        outputs, saved = self.forward(params, fixed)
        gradients = {self.output: start(outputs, targets, weights).to(outputs.dtype)}
        for step in reversed(self.active):
            wanted = any(i in self.trained for i in step.inputs)
            of_params, of_inputs = step.op.backward(
                [params[name] for name in step.params], saved.pop(), gradients.pop(step.output), wanted
            )
            for i, gradient in zip(step.inputs, of_inputs, strict=True):
                if i in self.trained and gradient is not None:
                    gradients[i] = gradients[i] + gradient if i in gradients else gradient
            for name, of_param in zip(step.params, of_params, strict=True):
                take(name, of_param)
