"""Per-client application of the federation's transform and of custom local optimizers.

Both could mix the clients of a chunk. So each client is a row of `vmap` or a separate call, with draws from its own key.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from dpfedexp.core.local_optimizer import Clock, LocalOptimizer, Moments, Sgd
from dpfedexp.core.modules import Inputs, Params, each, leaves, shape_of
from dpfedexp.errors import InputError, first_line, require
from dpfedexp.trainers.draws import Drawing, generator_states, seeded_generators
from dpfedexp.trainers.recording import Recorded, Synthetic, Unrecordable, refusal


class ClientTransform:
    """The federation's transform, applied to each client's batch [s, …] alone, with draws from that client's key."""

    def __init__(self, transform: Callable[[Any], Any], synthetic: Synthetic | None) -> None:
        self.transform, self.synthetic = transform, synthetic
        recorded = None if synthetic is None else synthetic.like
        self.together = Recorded(vmap(self._one), recorded, lambda given: leaves(given[0]), batched=True, keep=0)
        self.alone = Recorded(self._one, recorded, lambda given: leaves(given[0]), keep=0)
        self.can_vectorize: bool | None = None

    def __call__(self, x: Inputs, keys: Tensor) -> Inputs:
        """Transform inputs [n, s, …], with the clients' keys of a step [n]; returns inputs [n, s, …]."""
        if self.can_vectorize is None:
            self.can_vectorize = self._tried(x, keys)
        try:
            if self.can_vectorize:
                return self.together(x, keys)
            parts = [self._seeded(each(lambda value, at=at: value[at], x), key) for at, key in enumerate(keys)]  # type: ignore[misc]
        except Unrecordable as reason:
            raise refusal("the federation's transform", reason) from None
        return tree_map(lambda *values: torch.stack(values), *parts)

    def _tried(self, x: Inputs, keys: Tensor) -> bool:
        """Whether `vmap` supports the transform. If not, or if it draws from NumPy or Python, it is called once per client."""
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
        # In a simulation, draws without a key, in torch, NumPy or Python, come from a state that is the client's own.
        with seeded_generators(key.device, int(key)) if self.synthetic is None else nullcontext():
            return self.alone(x, key)

    def _one(self, x: Inputs, key: Tensor) -> Inputs:
        with Drawing(key):
            found = self.transform(x)
        rows = {len(value) if isinstance(value, Tensor) and value.dim() else -1 for value in leaves(found)}
        if rows != {len(leaves(x)[0])}:
            shapes = f"{shape_of(found)} for {shape_of(x)}"
            raise InputError(f"the federation's transform returned {shapes}; it must keep one row per example.")
        return found


class ClientOptimizer:
    """A custom optimizer, applied to one client at a time by operations that were recorded on synthetic values."""

    def __init__(self, local: LocalOptimizer, synthetic: Synthetic) -> None:
        self.local = local
        one = vmap(self._one, in_dims=(0, 0, 0, None, 0))
        self._direction = Recorded(one, synthetic.like, lambda inputs: list(inputs[2].values()), batched=True)
        self._joined = Recorded(vmap(self._join), synthetic.like, batched=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def direction(self, w: Tensor, gradient: Tensor, moments: Moments, clock: Clock) -> Tensor:
        found: tuple[Tensor, Moments] = self._direction(w, gradient, moments, clock.step, clock.steps)
        for name, value in found[1].items():
            moments[name].copy_(value)
        return found[0]

    def combine_gradients(self, gradients: Params) -> Params:
        return cast(Params, self._joined(gradients))

    def _one(
        self, w: Tensor, gradient: Tensor, moments: Moments, step: Tensor, steps: Tensor
    ) -> tuple[Tensor, Moments]:
        own = {name: value[None] for name, value in moments.items()}
        found = self.local.direction(w[None], gradient[None], own, Clock(step, steps[None]))
        return found[0], {name: value[0] for name, value in own.items()}

    def _join(self, gradients: Params) -> Params:
        combined = self.local.combine_gradients({name: value[None] for name, value in gradients.items()})
        return {name: value[0] for name, value in combined.items()}


_OF_ONE_CLIENT = ("direction", "combine_gradients", "moment_names", "needs_all_gradients", "tau_eta_l")
"""What a custom optimizer may define in an isolated run. The rest of `LocalOptimizer` gets the sizes of several clients at once."""


def check_isolated_optimizer(local: LocalOptimizer) -> None:
    """Raise `InputError` if an optimizer has code of its own that decides about the steps or batches of several clients."""
    kind = type(local)

    def own(name: str, base: Any) -> bool:
        found = inspect.getattr_static(kind, name)
        return found is not base and (callable(base) or hasattr(base, "__get__") or hasattr(found, "__get__"))

    bases = {name: base for name, base in vars(LocalOptimizer).items() if not name.startswith("_")}
    changed = [name for name, base in bases.items() if name not in _OF_ONE_CLIENT and own(name, base)]
    changed += [name for name in vars(local) if name in bases and callable(bases[name])]
    hooks = ("__getattr__", "__getattribute__")
    changed += [name for name in hooks if getattr(kind, name, None) not in (None, object.__getattribute__)]
    require(
        not changed,
        f"the local optimizer {kind.__name__} defines {', '.join(changed)}. A secure run accepts only {', '.join(_OF_ONE_CLIENT)}: "
        "all else gets the numbers of rows of several clients. Set steps, epochs, batch_size and max_examples instead.",
    )


def check_optimizer(local: LocalOptimizer) -> None:
    """Raise `InputError` if an optimizer violates the contract of `LocalOptimizer.direction`.

    Three synthetic clients take their steps together, and each alone: a client's steps may depend on its own gradients only, and
    not on clients that were trained before. Rounding may differ between the two (1e-5); a secure run compares every bit.
    """
    if type(local) is Sgd:
        return
    name, steps = type(local).__name__, min(local.steps or 64, 64)
    gradients = torch.randn(steps, 3, 2, 3, generator=torch.Generator().manual_seed(0))

    def way(clients: list[int]) -> Tensor:
        w = torch.zeros(len(clients), 2, 3)
        moments = {moment: torch.zeros_like(w) for moment in local.moment_names}
        counts = torch.full((len(clients),), steps)
        for step in range(steps):
            gradient = gradients[step, clients]
            if local.needs_all_gradients:
                gradient = local.combine_gradients({"w": gradient})["w"]
            before, clock = gradient.clone(), Clock(torch.tensor(float(step), dtype=torch.float64), counts)
            direction = local.direction(w, gradient, moments, clock)
            right = isinstance(direction, Tensor) and direction.shape == w.shape
            require(right, f"the local optimizer {name} must give a direction of the shape of w, {tuple(w.shape)}.")
            require(torch.equal(gradient, before), f"the local optimizer {name} must not change the gradient in place.")
            w = w - (1.0 if local.automatic else local.rate) * direction
        return w

    try:
        together, alone, again = way([0, 1, 2]), torch.cat([way([client]) for client in range(3)]), way([0])
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the local optimizer {name} fails on synthetic gradients: {first_line(error)}") from error
    apart = torch.allclose(together, alone, rtol=1e-5, atol=1e-6)
    require(apart, f"the local optimizer {name} mixes clients: a direction must depend on its own client alone.")
    alike = torch.equal(alone[:1], again)
    require(alike, f"the local optimizer {name} keeps state: a direction must not depend on clients trained before.")
