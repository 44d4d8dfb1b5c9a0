"""Support for `vmap`: random draws of modules (dropout, noise) from each client's own stream, and fused layers of torch.

A draw is a hash of (the client's key, step, call, row, place), so that loop and vectorized trainers see the same masks bit for bit,
and a recording can replay it. The hash is splitmix64: good statistics, not cryptographic. No privacy noise is drawn in this file.
"""

import math
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpfedexp.core.modules import Inputs, call, leaves
from dpfedexp.core.noise import Streams
from dpfedexp.errors import InputError
from dpfedexp.trainers.recording import in_range

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of splitmix64 as signed 64-bit numbers; products wrap around."""
_ALPHA = 1.7580993408473766
"""Minus the value by which alpha dropout replaces a dropped number: SELU's limit."""


def client_keys(
    streams: Streams, round: int, clients: Tensor, device: torch.device, purpose: str = "module masks"
) -> Tensor:
    """One key per client for its draws of a round, [n]; a function of the seed, the round and the client's number alone."""
    halves = (streams.at(purpose, round).uniform(clients, 2) * 2.0**32).long()
    return ((halves[:, 0] << 32) | halves[:, 1]).to(device)


def step_keys(keys: Tensor, step: Tensor) -> Tensor:
    """The clients' keys of one step, [n]."""
    return _mixed(keys + (step.long() + 1) * _SECOND)


def _mixed(z: Tensor) -> Tensor:
    """Mix 64 bits: a bijection in which every input bit changes about half of the output bits."""
    z = _scattered(z, 30, 27)
    return z ^ ((z >> 31) & (2**33 - 1))


def _scattered(z: Tensor, first: int, second: int) -> Tensor:
    """`_mixed` without its last shift; the high bits are as good. Changes `z` in place, because the tensors are large."""
    z = z.bitwise_xor_((z >> first).bitwise_and_(2 ** (64 - first) - 1)).mul_(_FIRST)
    return z.bitwise_xor_((z >> second).bitwise_and_(2 ** (64 - second) - 1)).mul_(_SECOND)


def words(key: Tensor, call: int, shape: Sequence[int], *, rows_last: bool = False) -> Tensor:
    """A signed 64-bit word, uniform, for each place of `shape` [rows, …]; a row's words do not depend on the number of rows.

    With `rows_last`, keys are [n] of many clients, and the result is [n, …, rows], the layout of fast programs.
    """
    count, places = (shape[0] if shape else 1), math.prod(shape[1:])
    own = _mixed(key + ((call + 1) * _FIRST + 2**63) % 2**64 - 2**63)
    rows = _mixed(own[..., None] + torch.arange(1, count + 1, device=key.device) * _GOLDEN)
    within = torch.arange(places, device=key.device) * _GOLDEN
    if rows_last:
        return _scattered(rows[:, None] + within[:, None], 32, 29).view(len(key), *shape[1:], count)
    return _scattered(rows[..., None] + within, 32, 29).view(tuple(shape))


def dropout_mask(
    key: Tensor, call: int, p: float, shape: Sequence[int], dtype: torch.dtype, *, rows_last: bool = False
) -> Tensor:
    """0 with probability p and 1 otherwise, for each place of `shape` (see `words`)."""
    kept = words(key, call, shape, rows_last=rows_last) >= min(round(p * 2.0**64), 2**64 - 1) - 2**63
    return kept.to(dtype) if p < 1 else torch.zeros_like(kept, dtype=dtype)


def kept_share(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1 else 0.0


class Drawing(TorchFunctionMode):
    """A mode in which the functions in `_RULES` draw from the key of a client's step, also under `vmap`.

    Other draws use torch's generator, which `vmap` refuses and the loop seeds for each client. Without a key only fused layers
    are replaced.
    """

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key, self.calls, self.fused = key, 0, False

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            # torch disables a mode while it handles a call; enable it again for the calls inside this function.
            with self:
                return _multi_head(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.fused = True
            return attention(*args, **kwargs, drop=F.dropout if self.key is None else self.dropped)
        if func in (F.embedding, torch.embedding):
            self.fused = True
            return (_own_words if func is F.embedding else _own_table)(*args, **kwargs)
        if whole(func, args):
            self.fused = True
            layers, p, train = args[4:7]
            # torch would run this call for the clients of `vmap` one after the other.
            many = any(batched(part) for part in (args[0], *_states(args[1]), *args[2]))
            if many or (self.key is not None and train and p > 0 and layers > 1):
                return recurrent(CELLS[func], *args, drop=self.dropped)
        rule = None if self.key is None else _RULES.get(func)
        # A call with a generator or an output tensor of its own is left to torch.
        explicit = kwargs.get("generator") is not None or kwargs.get("out") is not None
        found = NotImplemented if rule is None or explicit else rule(self, *args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    def mask(self, p: float, shape: Sequence[int], like: Tensor) -> Tensor:
        return dropout_mask(self._next(), self.calls, p, shape, like.dtype)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        """Draw uniform numbers on [0, 1), with torch's resolution: 24 bits, or 53 in float64."""
        kind = dtype or torch.get_default_dtype()
        bits = 53 if kind == torch.float64 else 24
        whole = (words(self._next(), self.calls, shape) >> (64 - bits)) & (2**bits - 1)
        share: Tensor = whole.double() * 2.0**-bits
        return share.to(kind)

    def _next(self) -> Tensor:
        if self.key is None:
            raise InputError("a module draws random numbers where none were expected; train it with trainer='loop'.")
        self.calls += 1
        return self.key

    def dropped(self, x: Tensor, p: float) -> Tensor:
        return x * (self.mask(p, x.shape, x) * kept_share(p))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    drop: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` in operations that `vmap` supports; 0 where everything is masked."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~past, -torch.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
        nothing = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    else:
        weights = torch.softmax(scores, -1)
    return (drop(weights, dropout_p) if dropout_p > 0 else weights) @ value


_multi_head = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _dropping(shape_of: Callable[[Tensor], Sequence[int]], *, alpha: bool = False) -> Callable[..., Any]:
    """The rule of a dropout function, with one draw for each place of `shape_of(input)`."""

    def rule(mode: Drawing, input: Tensor, p: float = 0.5, training: bool = not alpha, inplace: bool = False) -> Any:
        if not training or not 0 < p <= 1 or (alpha and p == 1):
            return NotImplemented
        mask = mode.mask(p, shape_of(input), input)
        if alpha:
            a = 1.0 / math.sqrt((_ALPHA**2 * p + 1.0) * (1.0 - p))
            found = input * (mask * a) + ((mask - 1.0) * (_ALPHA * a) + _ALPHA * a * p)
        else:
            found = input * (mask * kept_share(p))
        return input.copy_(found) if inplace else found

    return rule


def _channels(spatial: int) -> Callable[[Tensor], Sequence[int]]:
    """A function from a tensor to the shape of a mask over whole channels, which `spatial` dimensions follow."""

    def shape(x: Tensor) -> Sequence[int]:
        # An unbatched example begins with its channels. dropout2d treats three dimensions as a batch, as torch does.
        lead = 1 if spatial != 2 and x.dim() == spatial + 1 else 2
        return (*x.shape[:lead], *[1] * (x.dim() - lead))

    return shape


_dropout = _dropping(lambda x: x.shape)


def _shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _normal(mode: Drawing, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Draw standard normal numbers by the Box-Muller method; log1p(−u) is finite because u < 1."""
    one, two = (mode.uniform(shape, torch.float64) for _ in range(2))
    normal = torch.sqrt(-2.0 * torch.log1p(-one)) * torch.cos(2.0 * math.pi * two)
    return normal.to(dtype or torch.get_default_dtype())


def _like(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda mode, input, *, dtype=None, **options: draw(mode, input.shape, dtype or input.dtype)


def _sized(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(mode: Drawing, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
        return draw(mode, _shape_of((options["size"],) if "size" in options else size), dtype).to(device)

    return rule


def _bernoulli(mode: Drawing, input: Tensor, *args: Any, **options: Any) -> Any:
    if args or options:
        return NotImplemented
    return (mode.uniform(input.shape, torch.float64) < input).to(input.dtype)


def _whole(mode: Drawing, given: Sequence[Any], shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Draw whole numbers below the given one, or between the two given, as uniform as a double allows."""
    low, high = map(int, given if len(given) == 2 else (0, *given))
    share = mode.uniform(shape, torch.float64)
    return (low + (share * (high - low)).long()).clamp_max(high - 1).to(dtype or torch.int64)


def _randint(mode: Drawing, *args: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    first = [options["low"]] if "low" in options else []
    *numbers, size = [*first, *args, *(options[name] for name in ("high", "size") if name in options)]
    return _whole(mode, numbers, _shape_of((size,)), dtype).to(device)


def _randint_like(mode: Drawing, input: Tensor, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    numbers = [*args, *(options[name] for name in ("low", "high") if name in options)]
    return _whole(mode, numbers, input.shape, dtype or input.dtype)


def _random_in(mode: Drawing, input: Tensor, *args: int, **options: int) -> Tensor:
    numbers = [*args, *(options[name] for name in ("from", "to") if name in options)]
    most = 2**24 if input.is_floating_point() else 2**31
    return _whole(mode, numbers or [most], input.shape, input.dtype)


def _randperm(mode: Drawing, n: int, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    return mode.uniform((n,), torch.float64).argsort().to(device, dtype or torch.int64)


def _torch_normal(mode: Drawing, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Any:
    like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
    if (size is None) == (like is None):
        return NotImplemented
    shape = size if like is None else torch.broadcast_shapes(*(torch.as_tensor(part).shape for part in (mean, std)))
    return mean + std * _normal(mode, shape, options.get("dtype") or (None if like is None else like.dtype))


def _filled(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    """The rule of a tensor method that fills the tensor with draws."""

    def rule(mode: Drawing, input: Tensor, *args: Any, generator: None = None, **options: Any) -> Any:
        return input.copy_(draw(mode, input, *args, **options))

    return rule


def _uniform_in(mode: Drawing, input: Tensor, low: float = 0.0, high: float = 1.0, **options: float) -> Tensor:
    low, high = options.get("from", low), options.get("to", high)
    return low + (high - low) * mode.uniform(input.shape, input.dtype)


def _rrelu(mode: Drawing, input: Tensor, lower: float, upper: float, training: bool, inplace: bool) -> Any:
    if not training:
        return NotImplemented
    slope = lower + (upper - lower) * mode.uniform(input.shape, input.dtype)
    found = torch.where(input < 0, slope * input, input)
    return input.copy_(found) if inplace else found


def _fractional_pool(function: Callable[..., Any], spatial: int) -> Callable[..., Any]:
    """The rule of a pool whose windows begin at random places: torch draws them internally, where no mode sees it."""

    def rule(mode: Drawing, input: Tensor, *args: Any, _random_samples: Tensor | None = None, **options: Any) -> Any:
        if _random_samples is None:
            lead = input.shape[:2] if input.dim() == spatial + 2 else (1, input.shape[0])
            _random_samples = mode.uniform((*lead, spatial), input.dtype)
        return function(input, *args, _random_samples=_random_samples, **options)

    return rule


_RULES: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda mode, input, p, train: _dropout(mode, input, p, train),
    F.dropout1d: _dropping(_channels(1)),
    F.dropout2d: _dropping(_channels(2)),
    F.dropout3d: _dropping(_channels(3)),
    F.alpha_dropout: _dropping(lambda x: x.shape, alpha=True),
    F.feature_alpha_dropout: _dropping(_channels(2), alpha=True),
    torch.rand: _sized(Drawing.uniform),
    torch.rand_like: _like(Drawing.uniform),
    torch.randn: _sized(_normal),
    torch.randn_like: _like(_normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _torch_normal,
    Tensor.random_: _filled(_random_in),
    Tensor.uniform_: _filled(_uniform_in),
    Tensor.normal_: _filled(lambda mode, x, mean=0.0, std=1.0: mean + std * _normal(mode, x.shape, x.dtype)),
    Tensor.bernoulli_: _filled(lambda mode, x, p=0.5: mode.uniform(x.shape, torch.float64) < p),
    F.rrelu: _rrelu,
    F.fractional_max_pool2d: _fractional_pool(F.fractional_max_pool2d, 2),
    F.fractional_max_pool3d: _fractional_pool(F.fractional_max_pool3d, 3),
}


def _own_words(input: Tensor, weight: Tensor, *options: Any, **more: Any) -> Tensor:
    """An embedding whose gradient stays within the client: `vmap` would add the gradient of an unknown word to another client.

    Outputs and update of a client with an unknown word are NaN, and its update counts as 0. Without `vmap` torch raises its error.
    """
    if not batched(input) and not batched(weight):
        return F.embedding(input, weight, *options, **more)
    known = input.clamp(0, len(weight) - 1)
    strange = torch.where((known != input).any(), torch.nan, 0.0).to(weight.dtype)
    with in_range():
        return F.embedding(known, weight, *options, **more) + strange


def _own_table(weight: Tensor, indices: Tensor, padding_idx: int = -1, *options: bool, **more: bool) -> Tensor:
    """`torch.embedding`: the same as `F.embedding` with another order of arguments."""
    given = dict(zip(("scale_grad_by_freq", "sparse"), options, strict=False)) | more
    return _own_words(indices, weight, None if padding_idx < 0 else padding_idx, **given)


@dataclass(frozen=True)
class ModuleTraits:
    """Whether a module draws random numbers, and whether it calls torch's attention, recurrent layers or embeddings."""

    draws: bool
    fused: bool


def module_traits(module: nn.Module, x: Inputs) -> ModuleTraits:
    """Find the traits of a module in one forward pass in training mode; both are True if the pass fails."""
    mode = Drawing(torch.zeros((), dtype=torch.int64, device=leaves(x)[0].device))
    try:
        with torch.no_grad(), mode:
            call(module, x)
    except Exception:
        return ModuleTraits(True, True)
    return ModuleTraits(mode.calls > 0, mode.fused)


T = TypeVar("T")
_ONE_STATE = threading.RLock()
"""A process has one global state of each generator, so threads must take turns."""


@contextmanager
def seeded_generators(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python, and restore their states afterwards. Threads take turns."""
    with _ONE_STATE, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed, python, legacy = seed % 2**63, random.getstate(), np.random.get_state()
        # torch.manual_seed would also seed other kinds of devices, which takes longer than everything else here.
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


def check_draws(model: nn.Module, x: Inputs) -> None:
    """Raise `InputError` if the model draws from NumPy or Python: clients would share the draws, and recordings repeat them."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            _, drawn = watching_draws(lambda: call(model, x))
    except Exception:
        return
    if drawn:
        raise InputError(
            "the model draws random numbers from NumPy or Python's random while it runs, which all clients would share; draw with "
            "torch.rand, torch.randn or dropout, which each client takes from its own key."
        )


def watching_draws(work: Callable[[], T]) -> tuple[T, bool]:
    """Return the result of `work`, and whether it drew from NumPy's or Python's global generators."""
    # Another thread of the process may draw meanwhile, such as Flower's heartbeat; work that draws does so in every attempt.
    for _ in range(3):
        before = generator_states()
        found = work()
        drawn = generator_states() != before
        if not drawn or threading.active_count() == 1:
            break
    return found, drawn


def generator_states() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return bytes(numpy[1]), numpy[2:], random.getstate()


CellState = tuple[Tensor, ...]
Cell = Callable[[Tensor, CellState, Sequence[Tensor]], CellState]
"""From the input's part of the gates, the state and the recurrent weights to the next state, whose first part is the output."""


def _recurred(h: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """U h, plus the bias if there is one."""
    product = h @ weights[0].transpose(-2, -1)
    return product + weights[1] if len(weights) > 1 else product


def _lstm(given: Tensor, state: CellState, weights: Sequence[Tensor]) -> CellState:
    h, c = state
    i, f, g, o = (given + _recurred(h, weights)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(given: Tensor, state: CellState, weights: Sequence[Tensor]) -> CellState:
    (h,) = state
    recurred = _recurred(h, weights)
    size = h.shape[-1]
    r, z = torch.sigmoid(given[..., : 2 * size] + recurred[..., : 2 * size]).chunk(2, -1)
    n = torch.tanh(given[..., 2 * size :] + r * recurred[..., 2 * size :])
    return (n + z * (h - n),)


def _plain(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda given, state, weights: (activation(given + _recurred(state[0], weights)),)


CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _plain(torch.tanh),
    torch.rnn_relu: _plain(torch.relu),
}


def without_flat_weights(module: nn.Module) -> nn.Module:
    """Return the module, whose recurrent layers no longer check where their weights are in memory: `vmap` has no such address."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters = _nothing  # type: ignore[method-assign]
    return module


def _nothing(*args: Any) -> None: ...


def whole(func: Any, args: Sequence[Any]) -> bool:
    """Whether `recurrent` supports this call: no packed sequences of different lengths, and no LSTM with projections."""
    if func not in CELLS or not isinstance(args[3], bool):
        return False
    return len({part.shape[-1] for part in _states(args[1])}) == 1


def _states(given: Tensor | Sequence[Tensor]) -> CellState:
    return (given,) if isinstance(given, Tensor) else tuple(given)


def batched(x: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def recurrent(
    cell: Cell,
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    rows_first: bool,
    *,
    drop: Callable[[Tensor, float], Tensor],
) -> tuple[Tensor, ...]:
    """`torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`, computed cell by cell, with torch's order of arguments.

    x is [t, rows, features], or [rows, t, features] with `rows_first`.
    """
    first, ways, each = _states(state), 1 + both_ways, 4 if biases else 2
    values, last = x.transpose(0, 1) if rows_first else x, list[CellState]()
    for layer in range(layers):
        if layer and train and dropout > 0:
            values = drop(values, dropout)
        outputs = []
        for way in range(ways):
            at = layer * ways + way
            mine = weights[at * each : (at + 1) * each]
            given = values @ mine[0].transpose(-2, -1)
            if biases:
                given = given + mine[2]
            now = tuple(part[at] for part in first)
            found = []
            steps = given.unbind(0)
            for step in reversed(steps) if way else steps:
                now = cell(step, now, mine[1::2])
                found.append(now[0])
            outputs.append(torch.stack(found[::-1] if way else found))
            last.append(now)
        values = torch.cat(outputs, -1) if both_ways else outputs[0]
    ends = (torch.stack(parts) for parts in zip(*last, strict=True))
    return (values.transpose(0, 1) if rows_first else values, *ends)


EXPLICIT_MASKS = "dpfedexp"
"""The name under which `transformers` knows torch's attention with masks that are always built."""


def with_explicit_masks(module: nn.Module) -> nn.Module:
    """Return the module, whose `transformers` models with torch's attention build every mask that they get.

    By default they test whether a mask is all ones, which `vmap` can't. The results are the same.
    """
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    interfaces = [getattr(transformers, name, None) for name in ("AttentionInterface", "AttentionMaskInterface")]
    if kind is None or None in interfaces:
        return module
    parts = (part for part in module.modules() if isinstance(part, kind))
    models = [part for part in parts if part.config._attn_implementation == "sdpa"]
    if models:
        _register(*interfaces)
    for model in models:
        model.set_attn_implementation(EXPLICIT_MASKS)
        model.warn_if_padding_and_no_attention_mask = _nothing
    return module


def _register(attention: Any, masks: Any) -> None:
    made, attend = masks()["sdpa"], attention()["sdpa"]

    def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        if attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return made(*args, attention_mask=attention_mask, **options)

    attention.register(EXPLICIT_MASKS, attend)
    masks.register(EXPLICIT_MASKS, mask)
