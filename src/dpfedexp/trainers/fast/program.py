"""A network as a list of operations, and the gradients of many clients through it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfedexp.core import losses
from dpfedexp.trainers.fast.ops import INPUT, KEYS, Gradient, Op, Saved
from dpfedexp.trainers.recording import Recorded, Synthetic

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ProgramStep:
    """One operation of a program: values[output] = op(values[inputs]) with the named parameters."""

    op: Op
    inputs: tuple[int, ...]
    output: int
    params: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """The steps in order, the index of the network's output, and its frozen parameters and buffers, shared by all clients.

    Every trained parameter belongs to one step, so its gradient is complete after the backward pass of that step.
    """

    steps: tuple[ProgramStep, ...]
    output: int
    frozen: Mapping[str, Tensor] = field(default_factory=dict)

    def rounded(self) -> Self:
        low = {name: value.bfloat16() if value.is_floating_point() else value for name, value in self.frozen.items()}
        return replace(self, frozen=low)

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """The values that depend on trained parameters: only they have gradients."""
        return self._behind(lambda step: any(name not in self.frozen for name in step.params))

    @cached_property
    def trained(self) -> frozenset[int]:
        """The values that depend on trained parameters or on random draws: all others are computed once for constant data."""
        return self._behind(lambda step: step.output in self.differentiated or KEYS in step.inputs)

    def _behind(self, begins: Callable[[ProgramStep], bool]) -> frozenset[int]:
        found: set[int] = set()
        for step in self.steps:
            if begins(step) or any(i in found for i in step.inputs):
                found.add(step.output)
        return frozenset(found)

    @cached_property
    def active(self) -> tuple[ProgramStep, ...]:
        return tuple(step for step in self.steps if step.output in self.trained)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The fixed values that active steps read; the keys of random draws are passed with every step."""
        read = (i for step in self.active for i in step.inputs if i not in self.trained and i != KEYS)
        return tuple(dict.fromkeys(read))

    @cached_property
    def _last_uses(self) -> dict[int, tuple[int, ...]]:
        """For each step, by the index of its output: the values to free after it; never its output and those in `kept`."""
        seen, found = {self.output, *self.kept}, {}
        for step in reversed(self.steps):
            gone = tuple(i for i in dict.fromkeys(step.inputs) if i not in seen)
            seen.update(gone)
            found[step.output] = gone
        return found

    def prepare(self, x: Tensor) -> dict[int, Tensor]:
        """Compute the values that depend on the data alone, from inputs [n, s, …]; returns those that active steps read."""
        values = {INPUT: x.movedim(1, -1).contiguous()}
        for step in self.steps:
            if step.output not in self.trained:
                self._apply(step, {}, values, len(x))
        return {i: values[i] for i in self.kept}

    def _apply(self, step: ProgramStep, params: Mapping[str, Tensor], values: dict[int, Tensor], count: int) -> Saved:
        """Apply one step to the values; returns what its backward pass needs, None if it has none."""
        given = self._given(step, params, count)
        values[step.output], saved = step.op.forward(given, *(values[i] for i in step.inputs))
        for i in self._last_uses[step.output]:
            del values[i]
        return saved if step.output in self.differentiated else None

    def _given(self, step: ProgramStep, params: Mapping[str, Tensor], count: int) -> list[Tensor]:
        """The step's parameters, [n, …] each; a frozen parameter is one tensor, expanded to all clients."""
        frozen = self.frozen
        return [params[n] if n in params else frozen[n].expand(count, *frozen[n].shape) for n in step.params]

    def descend(
        self,
        params: Mapping[str, Tensor],
        fixed: Mapping[int, Tensor],
        targets: Tensor,
        weights: Tensor,
        start: Objective,
        take: Callable[[str, Gradient], None],
    ) -> None:
        """Pass every parameter's gradient to `take` as soon as it is complete; this step does not read the parameter afterwards."""
        values, count = dict(fixed), len(next(iter(params.values())))
        saved = [self._apply(step, params, values, count) for step in self.active]
        outputs = values[self.output]
        gradients = {self.output: start(outputs, targets, weights).to(outputs.dtype)}
        for step in reversed(self.active):
            kept = saved.pop()
            if step.output not in self.differentiated:
                continue
            wanted = any(i in self.differentiated for i in step.inputs)
            given = self._given(step, params, count)
            of_params, of_inputs = step.op.backward(given, kept, gradients.pop(step.output), wanted)
            for i, gradient in zip(step.inputs, of_inputs, strict=True):
                if i in self.differentiated and gradient is not None:
                    gradients[i] = gradients[i] + gradient if i in gradients else gradient
            for name, of_param in zip(step.params, of_params, strict=True):
                if name in params:
                    take(name, of_param)


def objective(loss: losses.Loss, synthetic: Synthetic | None = None) -> Objective:
    """A function (outputs [n, …, s], targets [n, s, …], weights [n, s]) → gradient of Σ weight·loss in the outputs, in float32.

    A custom loss is recorded on synthetic values if `synthetic` is given.
    """
    by_hand: dict[losses.Loss, Objective] = {
        losses.cross_entropy: _cross_entropy,
        losses.half_squared_error: _half_squared_error,
        losses.mean_squared_error: _mean_squared_error,
        losses.binary_cross_entropy: _binary_cross_entropy,
    }
    known, anything = by_hand.get(losses.plain(loss)), _differentiated(loss, synthetic)

    def start(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        gradient = anything if known is None or outputs.dim() > 3 else known
        return gradient(outputs.float(), targets, weights)

    return start


def _cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    p = torch.softmax(outputs, dim=1)
    if targets.is_floating_point():
        total = targets.sum(-1).unsqueeze(1)
        return p.mul_(total).sub_(targets.transpose(1, 2)).mul_(weights.unsqueeze(1))
    counts = targets != losses.IGNORED
    labels = torch.where(counts, targets, 0)
    p.scatter_add_(1, labels.unsqueeze(1), torch.full_like(weights, -1.0).unsqueeze(1))
    return p.mul_((weights * counts).unsqueeze(1))


def _half_squared_error(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (outputs - _placed(targets, outputs)).mul_(weights if outputs.dim() == 2 else weights.unsqueeze(1))


def _mean_squared_error(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return _half_squared_error(outputs, targets, weights * (2.0 if outputs.dim() == 2 else 2.0 / outputs.shape[1]))


def _binary_cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    p = torch.sigmoid(outputs) - _placed(targets, outputs)
    return p.mul_(weights) if outputs.dim() == 2 else p.mul_(weights.unsqueeze(1) / outputs.shape[1])


def _placed(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets [n, s, …] in the layout of the outputs, [n, …, s]; single numbers may have a dimension of size 1 or none."""
    if outputs.dim() == 2:
        return targets.reshape(outputs.shape)
    return targets.reshape(len(targets), targets.shape[1], outputs.shape[1]).transpose(1, 2)


def _differentiated(loss: losses.Loss, synthetic: Synthetic | None = None) -> Objective:
    """The objective of any loss. It gets each client's batch separately, so a loss that mixes a batch's examples is correct too."""

    def total(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (loss(outputs, targets) * weights).sum()

    per_client: Callable[..., Tensor] = vmap(grad(total))
    if synthetic is not None:
        per_client = Recorded(per_client, synthetic.like, batched=True)
    return lambda o, t, w: per_client(o.movedim(-1, 1), t, w).movedim(1, -1)
