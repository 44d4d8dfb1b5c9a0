"""The caller's own code applied to one client at a time: the federation's transform, and a local optimizer of the caller's.

Both could mix the clients of a chunk. Here each client goes through alone, as a row of `vmap` or as a call of its own, with draws
from its own key. In a run that protects data the code itself is recorded on synthetic values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from dpfedexp.core.layout import Params
from dpfedexp.core.local import AdamW, Clock, LocalOptimiser, Moments, Sgd
from dpfedexp.errors import InputError
from dpfedexp.inputs import Inputs, each, leaves, shape_of
from dpfedexp.trainers.checks.application import generator_states
from dpfedexp.trainers.checks.module_state import drawing_alike
from dpfedexp.trainers.forward.draws import Drawing
from dpfedexp.trainers.recording import Recorded, Unrecordable, refusal
from dpfedexp.trainers.synthetic import Synthetic


class ClientTransform:
    """The federation's transform, applied to each client's batch alone, with draws from that client's key.

    Args:
        transform: from a batch of inputs [s, …] to what the model takes.
        synthetic: what it is recorded on in a run that protects data; None in a simulation, where it runs on the clients' rows.
    """

    def __init__(self, transform: Callable[[Any], Any], synthetic: Synthetic | None) -> None:
        self.transform, self.synthetic = transform, synthetic
        recorded = None if synthetic is None else synthetic.like

        def own(inputs: tuple[Any, ...]) -> list[Tensor]:
            return leaves(inputs[0])

        self.together = Recorded(vmap(self._one), recorded, own, batched=True, keep=0)
        self.alone = Recorded(self._one, recorded, own, keep=0)
        self.can_vectorise: bool | None = None

    def __call__(self, x: Inputs, keys: Tensor) -> Inputs:
        """From inputs [n, s, …] and the clients' keys of a step [n] to transformed inputs [n, s, …]."""
        if self.can_vectorise is None:
            self.can_vectorise = self._tried(x, keys)
        try:
            if self.can_vectorise:
                return self.together(x, keys)
            parts = [self._seeded(each(lambda value, at=at: value[at], x), key) for at, key in enumerate(keys)]  # type: ignore[misc]
        except Unrecordable as reason:
            raise refusal("the federation's transform", reason) from None
        return tree_map(lambda *values: torch.stack(values), *parts)

    def _tried(self, x: Inputs, keys: Tensor) -> bool:
        """Whether `vmap` takes the transform. If not, or if it draws from NumPy or Python, it is called for each client."""
        before = generator_states()
        try:
            if self.synthetic is None:
                self.together.program(x, keys)
            else:
                self.together.record(self.synthetic.like((x, keys)))
        except Exception:
            return False
        return generator_states() == before

    def _seeded(self, x: Inputs, key: Tensor) -> Inputs:
        if self.synthetic is not None:
            return self.alone(x, key)
        # What draws without a key, in torch, NumPy or Python, draws from a state that is the client's own.
        with drawing_alike(key.device, int(key)):
            return self._one(x, key)

    def _one(self, x: Inputs, key: Tensor) -> Inputs:
        with Drawing(key):
            found = self.transform(x)
        rows = {len(value) if isinstance(value, Tensor) and value.dim() else -1 for value in leaves(found)}
        if rows != {len(leaves(x)[0])}:
            raise InputError(
                f"the federation's transform makes {shape_of(found)} of {shape_of(x)}; it must keep one row per example."
            )
        return found


class ClientOptimiser:
    """A caller's own optimizer, asked for one client at a time, on operations that were recorded on synthetic values.

    The optimizers of this package are used as they are: each of their operations acts on a client's own row.
    """

    def __init__(self, local: LocalOptimiser, synthetic: Synthetic) -> None:
        self.local = local
        self._direction = Recorded(
            vmap(self._one, in_dims=(0, 0, 0, None, 0)),
            synthetic.like,
            lambda inputs: list(inputs[2].values()),
            batched=True,
        )
        self._joined = Recorded(vmap(self._join), synthetic.like, batched=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        found, after = self._direction(w, gradient, moments, clock.step, clock.steps)
        for name, value in after.items():
            moments[name].copy_(value)
        direction: Tensor = found
        return direction

    def joined(self, gradients: Params) -> Params:
        found: Params = self._joined(gradients)
        return found

    def _one(
        self, w: Tensor, gradient: Tensor, moments: Moments, step: Tensor, steps: Tensor
    ) -> tuple[Tensor, Moments]:
        own = {name: value[None] for name, value in moments.items()}
        found = self.local.direction(w[None], gradient[None], own, Clock(step, steps[None]))
        return found[0], {name: value[0] for name, value in own.items()}

    def _join(self, gradients: Params) -> Params:
        joined = self.local.joined({name: value[None] for name, value in gradients.items()})
        return {name: value[0] for name, value in joined.items()}


def optimiser_apart(local: LocalOptimiser, synthetic: Synthetic | None) -> LocalOptimiser:
    """The optimizer as a trainer may use it: a caller's own is kept to one client at a time in a run that protects data."""
    if synthetic is None or type(local) in (Sgd, AdamW):
        return local
    return ClientOptimiser(local, synthetic)  # type: ignore[return-value]
