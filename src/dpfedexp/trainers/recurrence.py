"""Modules that `vmap` can trace: recurrent layers out of products that it knows, and masks made without a look at values."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Sequence[Tensor]], State]
"""From the input's part of the gates, the state and the weights that act on it to the next state; its first part is the output."""
Drop = Callable[[Tensor, float], Tensor]


def _recurred(h: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """U h + b, where there is a b."""
    product = h @ weights[0].transpose(-2, -1)
    return product + weights[1] if len(weights) > 1 else product


def _lstm(given: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    h, c = state
    i, f, g, o = (given + _recurred(h, weights)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(given: Tensor, state: State, weights: Sequence[Tensor]) -> State:
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


def with_loose_weights(module: nn.Module) -> nn.Module:
    """The module itself, a copy that only trains, without its recurrent layers moving their weights together in a GPU's memory.

    They ask where the weights lie, which those that `vmap` hands over can't say.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters = _nothing  # type: ignore[method-assign]
    return module


def _nothing(*args: Any) -> None: ...


def one_by_one(func: Any, args: Sequence[Any]) -> bool:
    """Whether torch would go through the clients of `vmap` in turn at this call of a recurrent layer."""
    return whole(func, args) and any(batched(part) for part in (args[0], *_states(args[1]), *args[2]))


def whole(func: Any, args: Sequence[Any]) -> bool:
    """Whether `recurrent` knows this call: not packed sequences of different lengths, nor an LSTM that projects its outputs."""
    if func not in CELLS or not isinstance(args[3], bool):
        return False
    return len({part.shape[-1] for part in _states(args[1])}) == 1


def _states(given: Tensor | Sequence[Tensor]) -> State:
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
    drop: Drop,
) -> tuple[Tensor, ...]:
    """What `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` say that they compute, in their order of arguments.

    x is [t, rows, features], or [rows, t, features] with `rows_first`. There are weights for each layer and way: the input's, the
    state's, and with `biases` a bias of each.
    """
    first, ways, each = _states(state), 1 + both_ways, 4 if biases else 2
    values, last = x.transpose(0, 1) if rows_first else x, list[State]()
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


BLIND = "dpfedexp"
"""The name under which `transformers` knows this attention."""


def with_blind_masks(module: nn.Module) -> nn.Module:
    """The module itself, a copy that only trains. Its `transformers` models with torch's attention build every mask they are given.

    By default they leave out a mask of ones, and warn of padding without a mask. That means asking what the rows of one client
    hold: `vmap` can't, and the numbers are the same. A model that brings another kind of attention stays as it is.
    """
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    interfaces = [getattr(transformers, name, None) for name in ("AttentionInterface", "AttentionMaskInterface")]
    if kind is None or None in interfaces:
        return module
    models = [
        part for part in module.modules() if isinstance(part, kind) and part.config._attn_implementation == "sdpa"
    ]
    if models:
        _register(*interfaces)
    for model in models:
        model.set_attn_implementation(BLIND)
        # The model that the caller holds goes on warning, where it is measured.
        model.warn_if_padding_and_no_attention_mask = _nothing
    return module


def _register(attention: Any, masks: Any) -> None:
    made, attend = masks()["sdpa"], attention()["sdpa"]

    def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        if attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return made(*args, attention_mask=attention_mask, **options)

    attention.register(BLIND, attend)
    masks.register(BLIND, mask)
