"""Models of `transformers` whose masks are made without a look at their values, so that `vmap` can trace them."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

BLIND = "dpfedexp"
"""The name under which `transformers` knows this attention."""


def with_blind_masks(module: nn.Module) -> nn.Module:
    """The module itself. Its models of `transformers` that use torch's attention build every mask that they are given.

    By default they leave out a mask of ones, and warn of padding without a mask. That means asking what the rows of one client
    hold: `vmap` can't, and the numbers are the same. A model that brings another kind of attention stays as it is.

    Args:
        module: a copy that only trains.
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
        model.warn_if_padding_and_no_attention_mask = _silent
    return module


def _silent(*args: Any) -> None:
    """The model that the caller holds goes on warning, where it is measured."""


def _register(attention: Any, masks: Any) -> None:
    made, attend = masks()["sdpa"], attention()["sdpa"]

    def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        if attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return made(*args, attention_mask=attention_mask, **options)

    attention.register(BLIND, attend)
    masks.register(BLIND, mask)
