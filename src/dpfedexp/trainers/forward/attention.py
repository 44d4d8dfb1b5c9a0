"""Attention out of products that `vmap` knows: torch's fused kernels have no batching rule, and would take clients one by one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


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
    """What `torch.nn.functional.scaled_dot_product_attention` says that it computes.

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
