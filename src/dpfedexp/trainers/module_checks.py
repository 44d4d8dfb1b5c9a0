"""What a module may not do: keep state beside its parameters, draw from generators that clients share, or fail on rows.

State that training changes is found by looking, not by a list of classes. Two copies of the module see different synthetic batches.
State that differs between the copies holds data; state that changes again with a second batch holds a count. Both are
refused. What both copies changed alike, once, is a cache of something public, and stays. State may also hide in the loss function,
in a closure, in a global: the losses of one synthetic batch must come out the same before and after others were seen. After every
round the modules that trained are looked at again.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dpfedexp.core.modules import Inputs, call, leaves, shape_of
from dpfedexp.errors import InputError

T = TypeVar("T")
_ATTEMPTS = 3
Batch = tuple[Inputs, Tensor]
Losses = Callable[[nn.Module, Inputs, Tensor], Tensor]
ModuleState = dict[str, Any]
_MACHINERY = frozenset(
    {"training", "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_flat_weights"}
)
_PLAIN: tuple[type, ...] = (int, float, complex, str, bytes, bool, type(None))
_DEPTH = 4
_LIKE = 1e-5
"""How far losses of one batch may differ by rounding: a GPU may add in another order."""


def state_of(module: nn.Module) -> ModuleState:
    """Every buffer, frozen parameter and plain attribute below a module, by its dotted name; tensors are not copied."""
    found: ModuleState = {}
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        held = {**part._buffers, **part._parameters}
        still = {name: value for name, value in held.items() if value is not None}
        found |= {f"{dot}{n}": v for n, v in still.items() if n in part._buffers or not v.requires_grad}
        for name, value in vars(part).items():
            if name not in _MACHINERY and not name.endswith("_hooks") and not name.endswith("_hooks_with_kwargs"):
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
    """Names whose values are not the same, bit for bit."""
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
    """The allowed state of a module: as it was given, or with caches as after one batch.

    `derived` are attributes that a layer computes from its parameters at every pass, such as the weight of a weight norm: they
    follow the parameters, and were seen not to follow the data. `probe` is a synthetic batch and `answer` its losses at the start.
    """

    before: ModuleState
    cached: ModuleState
    derived: frozenset[str]
    losses: Losses
    probe: Batch
    answer: Tensor

    @staticmethod
    def over(model: nn.Module, losses: Losses, batches: tuple[Batch, ...]) -> StateCheck:
        """Looks at copies' passes over three synthetic batches of one shape; raises `InputError` where they leave anything."""
        one, other = copy.deepcopy(model), copy.deepcopy(model)
        before = _kept(state_of(model))

        def see(module: nn.Module, batch: Batch) -> ModuleState:
            losses(module, *batch).sum().backward()
            return _kept(state_of(module))

        cached, apart = see(one, batches[0]), see(other, batches[1])
        again = see(one, batches[2])
        changed = sorted(differing(cached, apart)) + sorted(differing(cached, again))
        if changed:
            raise _refusal(model, changed[0])
        derived = {name for name, value in state_of(one).items() if isinstance(value, Tensor) and value.requires_grad}
        # The first pass fills caches; what the second one says must not change when the module has seen another batch.
        _answer(other, losses, batches[0])
        state_check = StateCheck(
            before, cached, frozenset(derived), losses, batches[0], _answer(other, losses, batches[0]).cpu()
        )
        _answer(other, losses, batches[2])
        state_check._judge(_answer(other, losses, batches[0]))
        return state_check

    def look(self, model: nn.Module) -> Callable[[], None]:
        """Asks a module that has trained; what comes back raises `InputError` if it holds anything else, and waits for a GPU."""
        now = state_of(model)
        names = sorted((now.keys() | self.before.keys() | self.cached.keys()) - self.derived)
        # Compared before the module is asked: what it writes then would hide what clients left.
        found = {
            name: [_unlike(now.get(name), then.get(name)) for then in (self.before, self.cached)] for name in names
        }
        answer = _answer(model, self.losses, self.probe)

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


def _answer(model: nn.Module, losses: Losses, batch: Batch) -> Tensor:
    """The losses of a batch, with seeded generators."""
    with torch.no_grad(), seeded_generators(batch[1].device):
        return losses(model, *batch).detach().double()


_ONE_STATE = threading.RLock()
"""There is one state of each generator in a process."""


@contextmanager
def seeded_generators(device: torch.device, seed: int = 0) -> Iterator[None]:
    """The generators that a program may draw from, seeded, and back where they were afterwards. Threads take turns."""
    with _ONE_STATE, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed, python, legacy = seed % 2**63, random.getstate(), np.random.get_state()
        # torch.manual_seed would also ask for other kinds of devices, which takes longer than all the rest.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def _refusal(model: nn.Module, name: str) -> InputError:
    """The sentence for the state `name`, with the remedy that fits its layer."""
    owner = next(
        (prefix for prefix, _ in reversed(list(model.named_modules())) if name.startswith(f"{prefix}.") and prefix), ""
    )
    part = model.get_submodule(owner)
    kind, where = type(part).__name__, f"layer {owner!r}" if owner else "the model itself"
    held = name.removeprefix("len(").removesuffix(")").removeprefix(f"{owner}." if owner else "")
    if getattr(part, "track_running_stats", False) or isinstance(part, nn.modules.batchnorm._NormBase):
        remedy = (
            f"Freeze it with model.train(); model.get_submodule({owner!r}).eval(), freeze all such layers with model.eval(), "
            "or use GroupNorm"
            if owner
            else "Use GroupNorm instead"
        )
    elif "spectral" in kind.lower() or "spectral" in name.lower():
        remedy = "Take the spectral norm off, or freeze that layer with .eval()"
    else:
        remedy = "Compute it from the batch alone, or freeze that layer with .eval() if it then stands still"
    return InputError(
        f"{where} ({kind}) keeps {held!r} from batch to batch: that would carry one client's data to others, or into a metric, "
        f"without noise. {remedy}."
    )


def applied(model: nn.Module, x: Inputs) -> Any:
    """The outputs of a model, a copy that is not trained; raises `InputError` with the layer that could not take its inputs."""
    inside: list[tuple[str, nn.Module, Any]] = []
    hooks = []
    for name, part in model.named_modules():
        if next(part.children(), None) is None:
            hooks.append(
                part.register_forward_pre_hook(lambda part, given, name=name: inside.append((name, part, given)))
            )
            hooks.append(part.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        return call(model, x)
    except Exception as error:
        first = first_line(error).removesuffix(".")
        why = f"{first}." if not inside else _why(*inside[-1], first)
        raise InputError(f"the model can't be applied to a batch of inputs of shape {shape_of(x)}: {why}") from error
    finally:
        for hook in hooks:
            hook.remove()


def check_draws(model: nn.Module, x: Inputs) -> None:
    """Raises `InputError` where a copy's pass draws from NumPy or Python: clients would share the draw, a recording repeat it."""

    def once() -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            call(model, x)

    try:
        _, drawn = watching_draws(once)
    except Exception:
        return
    if drawn:
        raise InputError(
            "the model draws random numbers from NumPy or Python's random while it runs, which all clients would share; draw with "
            "torch.rand, torch.randn or dropout, which each client takes from its own key."
        )


def watching_draws(work: Callable[[], T]) -> tuple[T, bool]:
    """What `work` returns, and whether it drew from NumPy's or Python's global generators.

    Another thread of the process may draw meanwhile, as Flower's heartbeat does: then the work is done again. What draws does so
    every time.
    """
    for _ in range(_ATTEMPTS):
        before = generator_states()
        found = work()
        drawn = generator_states() != before
        if not drawn or threading.active_count() == 1:
            break
    return found, drawn


def generator_states() -> tuple[Any, ...]:
    """The states of NumPy's and Python's global generators."""
    numpy: Any = np.random.get_state()
    return bytes(numpy[1]), numpy[2:], random.getstate()


def _why(name: str, part: nn.Module, given: Any, error: str) -> str:
    layer = f"layer {name!r} ({type(part).__name__})" if name else f"the {type(part).__name__}"
    x = given[0] if given and isinstance(given[0], Tensor) else None
    if x is None:
        return f"{layer}: {error}."
    weight = getattr(part, "weight", None)
    if isinstance(part, nn.Embedding | nn.EmbeddingBag):
        if x.is_floating_point():
            return f"{layer} looks up whole numbers and was given {_kind(x)}; give the inputs as whole numbers (int64)."
        low, high, words = int(x.min()), int(x.max()), part.num_embeddings
        if low < 0 or high >= words:
            return (
                f"{layer} knows the numbers from 0 to {words - 1} and was given numbers from {low} to {high}; number them from 0, "
                f"or build it with num_embeddings={high + 1}."
            )
    elif isinstance(weight, Tensor) and x.dtype != weight.dtype:
        if not x.is_floating_point() and not x.is_complex():
            return (
                f"{layer} computes in {_kind(weight)} and was given {_kind(x)}; give the inputs as floats, x.float()."
            )
        return f"{layer} has parameters in {_kind(weight)} and was given {_kind(x)}; train the model in float32, model.float()."
    if isinstance(part, nn.Linear) and x.shape[-1:] != (part.in_features,):
        return (
            f"{layer} takes {part.in_features} features and was given shape {tuple(x.shape)}; build it with "
            f"in_features={x.shape[-1] if x.dim() else 1}, or bring the rows to that length first (nn.Flatten() joins the others)."
        )
    if isinstance(part, nn.modules.conv._ConvNd):
        return (
            f"{layer} takes rows of {part.in_channels} channels, (b, {part.in_channels}, …), and was given shape {tuple(x.shape)}; "
            "for images without a dimension of channels give x[:, None], for channels last x.movedim(-1, 1)."
        )
    return f"{layer} was given shape {tuple(x.shape)}: {error}."


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def extreme_rows(inputs: Inputs) -> Tensor:
    """The numbers of the rows that hold the least and the highest whole number, which an embedding may not know."""
    rows = []
    for value in leaves(inputs):
        if not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool and value.numel():
            each = value.flatten(1) if value.dim() > 1 else value[:, None]
            rows += [int(each.amax(1).argmax()), int(each.amin(1).argmin())]
    return torch.tensor(rows, dtype=torch.int64)


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
