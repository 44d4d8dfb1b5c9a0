"""State that a module keeps besides its parameters, which would carry one client's data to others.

State that training changes is found by a test, not by a list of classes. Two copies of the module see different synthetic batches.
State that differs between the copies holds data; state that changes again with a second batch holds a count. Both are refused.
State that both copies changed in the same way, once, is a cache of something public, and is allowed. State may also hide in the
loss function, in a closure, in a global: the losses of one synthetic batch must be the same before and after other batches. After
every round the modules that trained are checked again.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from dpfedexp.core.losses import Loss
from dpfedexp.core.modules import Inputs, call
from dpfedexp.errors import InputError
from dpfedexp.trainers.draws import seeded_generators

Batch = tuple[Inputs, Tensor]
ModuleState = dict[str, Any]
_MACHINERY = frozenset(
    {"training", "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_flat_weights"}
)
_PLAIN: tuple[type, ...] = (int, float, complex, str, bytes, bool, type(None))
_DEPTH = 4
"""How deep into nested lists, dicts and objects the attributes of a module are searched for state."""
_LIKE = 1e-5
"""How far losses of the same batch may differ by rounding: a GPU may add in another order."""


def state_of(module: nn.Module) -> ModuleState:
    """Every buffer, frozen parameter and plain attribute of a module and its submodules, by dotted name; tensors are not copied."""
    found: ModuleState = {}
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        held = {**part._buffers, **part._parameters}
        still = {name: value for name, value in held.items() if value is not None}
        found |= {f"{dot}{n}": v for n, v in still.items() if n in part._buffers or not v.requires_grad}
        for name, value in vars(part).items():
            if name not in _MACHINERY and not name.endswith(("_hooks", "_hooks_with_kwargs")):
                _collect(f"{dot}{name}", value, found, _DEPTH)
    return found


def _kept(state: ModuleState) -> ModuleState:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _collect(name: str, value: Any, found: ModuleState, depth: int) -> None:
    if isinstance(value, nn.Parameter | nn.Module) or depth == 0:
        return
    if isinstance(value, (Tensor, *_PLAIN)):
        found[name] = value
    elif isinstance(value, np.ndarray | np.generic):
        found[name] = (str(value.dtype), np.shape(value), np.asarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(f"{name}[{key!r}]", item, found, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        found[f"len({name})"] = len(value)
        for number, item in enumerate(value):
            _collect(f"{name}[{number}]", item, found, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for key, item in vars(value).items():
            _collect(f"{name}.{key}", item, found, depth - 1)


def differing(one: ModuleState, other: ModuleState) -> set[str]:
    return {name for name in one.keys() | other.keys() if bool(_unlike(one.get(name), other.get(name)))}


def _unlike(one: Any, other: Any) -> bool | Tensor:
    """Whether two values differ in any bit; for GPU tensors the result stays on the GPU."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        alike = not isinstance(one, Tensor) and type(one) is type(other)
        return not alike or not (one == other or (one != one and other != other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not one.is_cuda and torch.equal(one, other):
        return False
    return ~((one == other) | (one.isnan() & other.isnan())).all()


@dataclass(frozen=True)
class StateCheck:
    """The allowed states of a module: the initial one, and the one with the caches that a first batch fills.

    `derived` are attributes that a layer computes from its parameters in every pass, such as the weight of a weight norm. `probe`
    is a synthetic batch, and `answer` has its losses under the initial state.
    """

    before: ModuleState
    cached: ModuleState
    derived: frozenset[str]
    loss: Loss
    probe: Batch
    answer: Tensor

    @classmethod
    def over(cls, model: nn.Module, loss: Loss, batches: tuple[Batch, ...]) -> Self:
        """Build the check from passes of copies over three synthetic batches of one shape; raises `InputError` if state stays."""
        one, other = copy.deepcopy(model), copy.deepcopy(model)
        before = _kept(state_of(model))

        def see(module: nn.Module, batch: Batch) -> ModuleState:
            _losses(module, loss, batch).sum().backward()
            return _kept(state_of(module))

        cached, apart = see(one, batches[0]), see(other, batches[1])
        again = see(one, batches[2])
        changed = sorted(differing(cached, apart)) + sorted(differing(cached, again))
        if changed:
            raise _refusal(model, changed[0])
        derived = {name for name, value in state_of(one).items() if isinstance(value, Tensor) and value.requires_grad}
        # The first pass fills caches; the losses of the second must not change after the module has seen another batch.
        _answer(other, loss, batches[0])
        answer = _answer(other, loss, batches[0]).cpu()
        state_check = cls(before, cached, frozenset(derived), loss, batches[0], answer)
        _answer(other, loss, batches[2])
        state_check._judge(_answer(other, loss, batches[0]))
        return state_check

    def look(self, model: nn.Module) -> Callable[[], None]:
        """Check a module that has trained. The returned function waits for a GPU and raises `InputError` if state has changed."""
        now = state_of(model)
        names = sorted((now.keys() | self.before.keys() | self.cached.keys()) - self.derived)
        # Compared before the module runs again: what it writes then would overwrite what clients left.
        states = (self.before, self.cached)
        found = {name: [_unlike(now.get(name), then.get(name)) for then in states] for name in names}
        answer = _answer(model, self.loss, self.probe)

        def judge() -> None:
            changed = next((name for name, unlike in found.items() if all(map(bool, unlike))), None)
            if changed is not None:
                raise _refusal(model, changed)
            self._judge(answer)

        return judge

    def _judge(self, answer: Tensor) -> None:
        now, close = answer.cpu(), {"rtol": _LIKE, "atol": _LIKE}
        if now.shape != self.answer.shape or not torch.allclose(now, self.answer, **close, equal_nan=True):
            raise InputError(
                "the losses of one and the same batch change with what the model or the loss function has seen before: something "
                "outside the parameters would carry one client's data to others without noise. Compute both from the batch alone."
            )


def _losses(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    return loss(call(model, batch[0]), batch[1])


def _answer(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    with torch.no_grad(), seeded_generators(batch[1].device):
        return _losses(model, loss, batch).double()


def _refusal(model: nn.Module, name: str) -> InputError:
    owners = (prefix for prefix, _ in reversed(list(model.named_modules())) if prefix)
    owner = next((prefix for prefix in owners if name.startswith(f"{prefix}.")), "")
    part = model.get_submodule(owner)
    kind, where = type(part).__name__, f"layer {owner!r}" if owner else "the model itself"
    held = name.removeprefix("len(").removesuffix(")").removeprefix(f"{owner}." if owner else "")
    if getattr(part, "track_running_stats", False) or isinstance(part, nn.modules.batchnorm._NormBase):
        freeze = f"Freeze it with model.train(); model.get_submodule({owner!r}).eval(), or the model with model.eval()"
        remedy = f"{freeze}, or use GroupNorm" if owner else "Use GroupNorm instead"
    elif "spectral" in kind.lower() or "spectral" in name.lower():
        remedy = "Take the spectral norm off, or freeze that layer with .eval()"
    else:
        remedy = "Compute it from the batch alone, or freeze that layer with .eval() if it then stands still"
    return InputError(
        f"{where} ({kind}) keeps {held!r} from batch to batch: that would carry one client's data to others, or into a metric, "
        f"without noise. {remedy}."
    )
