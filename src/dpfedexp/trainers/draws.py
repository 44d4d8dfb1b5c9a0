"""What a module draws while it trains (dropout, noise), each client from its own stream, many clients at once.

torch draws from one generator for a whole tensor, so a client's draws would depend on its neighbours. Here a draw is a hash of
(the client's key, step, call, row, place): nothing has to be kept in order, loop and vectorised trainers see the same masks bit
for bit, and a recording can replay it, because key and step are tensors. The hash is splitmix64's. It is good statistics and no
cryptography: no privacy noise comes from here.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpfedexp.core.noise.streams import Streams
from dpfedexp.errors import InputError
from dpfedexp.inputs import Inputs, call, leaves
from dpfedexp.trainers.recording import in_range
from dpfedexp.trainers.recurrence import CELLS, batched, one_by_one, recurrent, whole

CONSTANTS = _GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""splitmix64's constants, as signed numbers of 64 bits; products wrap around."""
_ALPHA = 1.7580993408473766
"""Minus the value that alpha dropout puts in the place of what it drops: SELU's limit."""


def client_keys(
    streams: Streams, round: int, clients: Tensor, device: torch.device, purpose: str = "module masks"
) -> Tensor:
    """One key for each client's draws of a round, [n]: from the seed, the round and the client's number alone."""
    halves = (streams.at(purpose, round).uniform(clients, 2) * 2.0**32).long()
    return ((halves[:, 0] << 32) | halves[:, 1]).to(device)


def step_keys(keys: Tensor, step: Tensor) -> Tensor:
    """The keys of one step, [n]."""
    return _mixed(keys + (step.long() + 1) * _SECOND)


def _mixed(z: Tensor) -> Tensor:
    """A bijection of 64 bits in which every bit of the input moves about half of the output's."""
    z = _scattered(z, 30, 27)
    return z ^ ((z >> 31) & (2**33 - 1))


def _wrapped(number: int) -> int:
    """A whole number modulo 2⁶⁴, as a signed one."""
    return (number + 2**63) % 2**64 - 2**63


def _scattered(z: Tensor, first: int, second: int) -> Tensor:
    """The same without the last turn: its high bits are as good. Changes `z`, in memory that the tensors' size makes precious."""
    z = z.bitwise_xor_((z >> first).bitwise_and_(2 ** (64 - first) - 1)).mul_(_FIRST)
    return z.bitwise_xor_((z >> second).bitwise_and_(2 ** (64 - second) - 1)).mul_(_SECOND)


def row_words(key: Tensor, call: int, count: int) -> Tensor:
    """What the words of a row's places are made from, one for each of `count` rows."""
    own = _mixed(key + _wrapped((call + 1) * _FIRST))
    return _mixed(own[..., None] + torch.arange(1, count + 1, device=key.device) * _GOLDEN)


def words(key: Tensor, call: int, shape: Sequence[int], *, rows_last: bool = False) -> Tensor:
    """A whole number for each place of `shape`, uniform over 64 bits, signed.

    A place's number depends on its row and its place in the row, so that rows which only fill a batch change no other's.

    Args:
        key: of a client's step, without dimensions; or [n] of many with `rows_last`.
        call: which of the draws of a pass this is.
        shape: [rows, …], as one client's module sees it.
        rows_last: whether the result is [n, …, rows], as fast programs hold their values, and not [rows, …].
    """
    count, places = (shape[0] if shape else 1), math.prod(shape[1:])
    rows = row_words(key, call, count)
    within = torch.arange(places, device=key.device) * _GOLDEN
    if rows_last:
        return _scattered(rows[:, None] + within[:, None], 32, 29).view(len(key), *shape[1:], count)
    return _scattered(rows[..., None] + within, 32, 29).view(tuple(shape))


def dropout_mask(
    key: Tensor, call: int, p: float, shape: Sequence[int], dtype: torch.dtype, *, rows_last: bool = False
) -> Tensor:
    """0 with probability p and 1 otherwise, for each place of `shape` (see `words`)."""
    kept = words(key, call, shape, rows_last=rows_last) >= dropped_below(p)
    return kept.to(dtype) if p < 1 else torch.zeros_like(kept, dtype=dtype)


def dropped_below(p: float) -> int:
    """A place with a word below this is dropped."""
    return min(round(p * 2.0**64), 2**64 - 1) - 2**63


def kept_share(p: float) -> float:
    """What dropout multiplies the kept values with."""
    return 1.0 / (1.0 - p) if p < 1 else 0.0


class Drawing(TorchFunctionMode):
    """While it lasts, one forward pass of one client's module draws from the client's key, also under `vmap`.

    Dropout of all kinds, attention's and recurrent layers' too, and torch.rand, randn, randint, randperm, normal, bernoulli and
    the methods that fill a tensor. Other draws go on drawing from torch's generator, which vmap refuses and the loop seeds for
    each client.

    Args:
        key: of the client's step, without dimensions; None where the module draws nothing, and only fused operations are looked
            after.
    """

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key, self.calls, self.fused = key, 0, False

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            # torch turns a mode off while it asks it: what this function calls in turn must be asked about too.
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
            if one_by_one(func, args) or (self.key is not None and _drops_between(*args)):
                return recurrent(CELLS[func], *args, drop=self.dropped)
        rule = None if self.key is None else _RULES.get(func)
        found = NotImplemented if rule is None or self._explicit(kwargs) else rule(self, *args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    @staticmethod
    def _explicit(kwargs: dict[str, Any]) -> bool:
        """Whether a call brings a generator or a place for the result, which are the caller's own."""
        return kwargs.get("generator") is not None or kwargs.get("out") is not None

    def mask(self, p: float, shape: Sequence[int], like: Tensor) -> Tensor:
        """0 with probability p and 1 otherwise, for the next call."""
        return dropout_mask(self._known, self._next(), p, shape, like.dtype)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        """Uniform on [0, 1), in steps as fine as torch's own: 24 bits, or 53 in float64."""
        kind = dtype or torch.get_default_dtype()
        bits = 53 if kind == torch.float64 else 24
        whole = (words(self._known, self._next(), shape) >> (64 - bits)) & (2**bits - 1)
        share: Tensor = whole.double() * 2.0**-bits
        return share.to(kind)

    @property
    def _known(self) -> Tensor:
        if self.key is None:
            raise InputError("a module draws random numbers where none were expected; train it with trainer='loop'.")
        return self.key

    def _next(self) -> int:
        self.calls += 1
        return self.calls

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
    """What `torch.nn.functional.scaled_dot_product_attention` says that it computes, out of products that `vmap` knows.

    torch's fused kernels have no batching rule: `vmap` would take clients one by one.

    Args:
        query: [..., l, e]; `key` and `value` are [..., s, e], and the other arguments are torch's.
        drop: what drops a share of the weights.

    Returns:
        The values' means by weight, [..., l, e]; 0 where all is masked, as torch has it.
    """
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


def _drops_between(
    x: Any, state: Any, weights: Any, biases: bool, layers: int, p: float, train: bool, *rest: Any
) -> bool:
    """Whether a recurrent layer, called like this, draws."""
    return train and p > 0 and layers > 1


def _placed(x: Tensor, found: Tensor, inplace: bool) -> Tensor:
    return x.copy_(found) if inplace else found


def _dropout(mode: Drawing, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or not 0 < p <= 1:
        return NotImplemented
    return _placed(input, mode.dropped(input, p), inplace)


def _channels(spatial: int | None) -> Callable[..., Any]:
    """Dropout of whole channels; `spatial` is how many dimensions follow them, None for torch.feature_dropout."""

    def rule(mode: Drawing, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or not 0 < p <= 1:
            return NotImplemented
        # A single example has no rows: its channels come first. dropout2d has always taken three dimensions for rows of two.
        single = spatial is not None and spatial != 2 and input.dim() == spatial + 1
        lead = 1 if single else 2
        shape = (*input.shape[:lead], *[1] * (input.dim() - lead))
        return _placed(input, input * (mode.mask(p, shape, input) * kept_share(p)), inplace)

    return rule


def _alpha(channels: bool) -> Callable[..., Any]:
    def rule(mode: Drawing, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
        if not training or not 0 < p < 1:
            return NotImplemented
        shape = (*input.shape[:2], *[1] * (input.dim() - 2)) if channels else input.shape
        mask, a = mode.mask(p, shape, input), 1.0 / math.sqrt((_ALPHA**2 * p + 1.0) * (1.0 - p))
        return _placed(input, input * (mask * a) + ((mask - 1.0) * (_ALPHA * a) + _ALPHA * a * p), inplace)

    return rule


def _shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _normal(mode: Drawing, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Box and Muller's, of which the first number is never 0."""
    one, two = (mode.uniform(shape, torch.float64) for _ in range(2))
    normal = torch.sqrt(-2.0 * torch.log1p(-one)) * torch.cos(2.0 * math.pi * two)
    return normal.to(dtype or torch.get_default_dtype())


def _like(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(mode: Drawing, input: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
        return draw(mode, input.shape, dtype or input.dtype)

    return rule


def _sized(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(mode: Drawing, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
        found = draw(mode, _shape_of((options["size"],) if "size" in options else size), dtype)
        return found if device is None else found.to(device)

    return rule


def _bernoulli(mode: Drawing, input: Tensor, *args: Any, **options: Any) -> Any:
    if args or options:
        return NotImplemented
    return (mode.uniform(input.shape, torch.float64) < input).to(input.dtype)


def _whole(mode: Drawing, low: int, high: int, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Whole numbers from `low` up to `high`, which is left out; as even as a double is fine."""
    share = mode.uniform(shape, torch.float64)
    return (low + (share * (high - low)).long()).clamp_max(high - 1).to(dtype or torch.int64)


def _randint(mode: Drawing, *args: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    numbers = [options["low"], *args] if "low" in options else list(args)
    numbers += [options[name] for name in ("high", "size") if name in options]
    low, high, size = numbers if len(numbers) == 3 else (0, *numbers)
    found = _whole(mode, int(low), int(high), _shape_of((size,)), dtype)
    return found if device is None else found.to(device)


def _randint_like(mode: Drawing, input: Tensor, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    numbers = [*args, *(options[name] for name in ("low", "high") if name in options)]
    low, high = numbers if len(numbers) == 2 else (0, *numbers)
    return _whole(mode, int(low), int(high), input.shape, dtype or input.dtype)


def _randperm(mode: Drawing, n: int, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    found = mode.uniform((n,), torch.float64).argsort().to(dtype or torch.int64)
    return found if device is None else found.to(device)


def _torch_normal(mode: Drawing, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Any:
    like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
    if (size is None) == (like is None):
        return NotImplemented
    shape = size if like is None else torch.broadcast_shapes(*(torch.as_tensor(part).shape for part in (mean, std)))
    return mean + std * _normal(mode, shape, options.get("dtype") or (None if like is None else like.dtype))


def _filled(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    """A method of a tensor that fills it with draws."""

    def rule(mode: Drawing, input: Tensor, *args: Any, generator: None = None, **options: Any) -> Any:
        return input.copy_(draw(mode, input, *args, **options))

    return rule


def _uniform_in(mode: Drawing, input: Tensor, low: float = 0.0, high: float = 1.0, **options: float) -> Tensor:
    low, high = options.get("from", low), options.get("to", high)
    return low + (high - low) * mode.uniform(input.shape, input.dtype)


def _normal_in(mode: Drawing, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * _normal(mode, input.shape, input.dtype)


def _bernoulli_in(mode: Drawing, input: Tensor, p: Any = 0.5) -> Tensor:
    kept: Tensor = mode.uniform(input.shape, torch.float64) < p
    return kept.to(input.dtype)


def _random_in(mode: Drawing, input: Tensor, *args: int, **options: int) -> Tensor:
    numbers = [*args, *(options[name] for name in ("from", "to") if name in options)]
    most = 2**24 if input.is_floating_point() else 2**31
    low, high = numbers if len(numbers) == 2 else (0, *(numbers or [most]))
    return _whole(mode, low, high, input.shape, input.dtype)


def _rrelu(
    mode: Drawing,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    if not training:
        return NotImplemented
    slope = lower + (upper - lower) * mode.uniform(input.shape, input.dtype)
    return _placed(input, torch.where(input < 0, slope * input, input), inplace)


def _fractional_pool(function: Callable[..., Any], spatial: int) -> Callable[..., Any]:
    """A pool whose windows begin at random places: torch draws them inside, where no mode is asked."""

    def rule(mode: Drawing, input: Tensor, *args: Any, _random_samples: Tensor | None = None, **options: Any) -> Any:
        if _random_samples is None:
            lead = input.shape[:2] if input.dim() == spatial + 2 else (1, input.shape[0])
            _random_samples = mode.uniform((*lead, spatial), input.dtype)
        return function(input, *args, _random_samples=_random_samples, **options)

    return rule


_RULES: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda mode, input, p, train: _dropout(mode, input, p, train),
    F.dropout1d: _channels(1),
    F.dropout2d: _channels(2),
    F.dropout3d: _channels(3),
    F.alpha_dropout: _alpha(channels=False),
    F.feature_alpha_dropout: _alpha(channels=True),
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
    Tensor.uniform_: _filled(_uniform_in),
    Tensor.normal_: _filled(_normal_in),
    Tensor.bernoulli_: _filled(_bernoulli_in),
    Tensor.random_: _filled(_random_in),
    F.rrelu: _rrelu,
    F.fractional_max_pool2d: _fractional_pool(F.fractional_max_pool2d, 2),
    F.fractional_max_pool3d: _fractional_pool(F.fractional_max_pool3d, 3),
}


def _own_words(input: Tensor, weight: Tensor, *options: Any, **more: Any) -> Tensor:
    """An embedding whose gradient stays with its client: `vmap` would add that of a word which does not exist to a neighbour's.

    Outputs of a client with such a word are not a number, and so is its update, which counts as 0. Alone, it has torch's error.
    """
    if not batched(input) and not batched(weight):
        return F.embedding(input, weight, *options, **more)
    known = input.clamp(0, len(weight) - 1)
    strange = torch.where((known != input).any(), torch.nan, 0.0).to(weight.dtype)
    with in_range():
        return F.embedding(known, weight, *options, **more) + strange


def _own_table(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """torch.embedding, the same as `F.embedding` with its arguments in another order."""
    padding = None if padding_idx < 0 else padding_idx
    return _own_words(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def drawing(key: Tensor | None, *, fused: bool = False) -> AbstractContextManager[Any]:
    """A client's draws while a pass lasts; nothing at all for a module that neither draws nor calls what `vmap` does not know."""
    return Drawing(key) if key is not None or fused else nullcontext()


@dataclass(frozen=True)
class Habits:
    """What a module does that a trainer must look after.

    Attributes:
        draws: whether it draws random numbers that `Drawing` gives.
        fused: whether it calls torch's attention, recurrent layers or embeddings, which `vmap` would take client by client or mix.
    """

    draws: bool
    fused: bool


def habits(module: nn.Module, x: Inputs) -> Habits:
    """The habits of a module, from one pass in the mode that it trains in; both where it fails on these inputs."""
    mode = Drawing(torch.zeros((), dtype=torch.int64, device=leaves(x)[0].device))
    try:
        with torch.no_grad(), mode:
            call(module, x)
    except Exception:
        return Habits(True, True)
    return Habits(mode.calls > 0, mode.fused)
