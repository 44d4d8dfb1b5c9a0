"""What transformers need at every position: self-attention and LayerNorm over the features, on rows as `ops.as_rows` has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.trainers.fast.normalise import LayerNorm
from dpfedexp.trainers.fast.ops import Gradient, Gradients, Later, Saved, Unsupported, as_rows, aten, from_rows
from dpfedexp.trainers.forward.draws import dropout_mask, kept_share


@dataclass(frozen=True)
class DroppedWeights:
    """Dropout of the attention's weights, drawn as `trainers/forward/draws.py` draws for the module.

    Args:
        p: the share that is dropped.
        call: which of the draws of a pass this is.
        by_head: whether the module draws a row for each head of a sample, as torch does where it returns the weights.
    """

    p: float
    call: int
    by_head: bool

    def mask(self, keys: Tensor, weights: Tensor, s: int) -> Tensor:
        """For weights [heads, n·s, l, l]."""
        heads, _, length, _ = weights.shape
        rows = (s * heads, length, length) if self.by_head else (s, heads, length, length)
        mask = dropout_mask(keys, self.call, self.p, rows, weights.dtype, rows_last=True)
        by_place = mask.unflatten(-1, (s, heads)).movedim(-1, 1) if self.by_head else mask
        return by_place.permute(1, 0, 4, 2, 3).reshape(weights.shape).mul_(kept_share(self.p))


@dataclass(frozen=True, eq=False)
class Attention:
    """softmax(q·kᵀ/√d + bias)·v by heads: from q, k and v beside each other, [n, l, 3·width, s], to [n, l, width, s].

    Clients have nothing of their own in here, so that one product takes a head of all clients and samples. It reads the head where
    it lies, among the others, and nothing is copied.

    Args:
        heads: how many.
        bias: added to the scores, [l, l]; -inf where a position must not look.
        dropped: dropout of the weights, for which the keys of the step are the second input.
    """

    heads: int
    bias: Tensor | None = None
    dropped: DroppedWeights | None = None

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        x = inputs[0]
        if x.dim() != 4 or x.shape[2] % (3 * self.heads):
            raise Unsupported("attention on values that are not at positions")
        s, length = x.shape[3], x.shape[1]
        packed = as_rows(x).reshape(-1, length, x.shape[2])
        if self.bias is not None and self.bias.shape != (length, length):
            raise Unsupported("a mask of another shape than one sequence's")
        queries, keys, values = self._parts(packed)
        scores = packed.new_empty(self.heads, len(packed), length, length)
        for score, query, key in zip(scores, queries, keys, strict=True):
            _multiply(query, key.transpose(1, 2), score, self._scale(packed))
        if self.bias is not None:
            scores.add_(self.bias)
        weights = torch.softmax(scores, -1)
        mask = None if self.dropped is None else self.dropped.mask(inputs[1], weights, s)
        used = weights if mask is None else weights * mask
        y = packed.new_empty(len(packed), length, packed.shape[2] // 3)
        for out, weight, value in zip(self._heads(y), used, values, strict=True):
            _multiply(weight, value, out)
        return from_rows(y.view(len(x), -1, y.shape[2]), s), (packed, weights, mask, used)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        packed, weights, mask, used = saved
        given = as_rows(dy).reshape(*packed.shape[:2], -1)
        queries, keys, values = self._parts(packed)
        dpacked = torch.empty_like(packed)
        dqueries, dkeys, dvalues = self._parts(dpacked)
        dweights = torch.empty_like(weights)
        for dweight, dvalue, own, weight, value in zip(
            dweights, dvalues, self._heads(given), used, values, strict=True
        ):
            _multiply(own, value.transpose(1, 2), dweight)
            _multiply(weight.transpose(1, 2), own, dvalue)
        if mask is not None:
            dweights.mul_(mask)
        dscores = aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
        for dquery, dkey, dscore, query, key in zip(dqueries, dkeys, dscores, queries, keys, strict=True):
            _multiply(dscore, key, dquery, self._scale(packed))
            _multiply(dscore.transpose(1, 2), query, dkey, self._scale(packed))
        dx = from_rows(dpacked.view(len(dy), -1, packed.shape[2]), dy.shape[3])
        return (), (dx, *([] if self.dropped is None else [None]))

    def _scale(self, packed: Tensor) -> float:
        return 1 / math.sqrt(packed.shape[2] // (3 * self.heads))

    def _parts(self, packed: Tensor) -> list[Sequence[Tensor]]:
        """Queries, keys and values, [n·s, l, width/heads] of each head."""
        return [self._heads(part) for part in packed.chunk(3, 2)]

    def _heads(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.chunk(self.heads, 2)


def _multiply(left: Tensor, right: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """out ← factor·left·right. A CPU's product into memory with gaps goes matrix by matrix, so that a copy is quicker there."""
    if out.is_cuda or out.is_contiguous():
        out.baddbmm_(left, right, beta=0, alpha=factor)
    else:
        torch.mul(torch.bmm(left, right), factor, out=out)


@dataclass(frozen=True)
class FeatureNorm:
    """A LayerNorm over the last dimension: by torch's own kernels at positions, where features lie together in memory."""

    plain: LayerNorm

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        if x.dim() != 4 or x.shape[2:3] != self.plain.shape:
            return self.plain.forward(params, x)
        rows = as_rows(x)
        normal, mean, scale = torch.native_layer_norm(rows, self.plain.shape, None, None, self.plain.eps)
        y = normal
        if self.plain.bias:
            y = torch.addcmul(params[1].unsqueeze(1), normal, params[0].unsqueeze(1))
        elif self.plain.affine:
            y = normal * params[0].unsqueeze(1)
        return from_rows(y, x.shape[3]), (rows, normal, mean, scale)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        if dy.dim() != 4:
            return self.plain.backward(params, saved, dy, wanted)
        rows, normal, mean, scale = saved
        given = as_rows(dy)
        grads: list[Gradient] = []
        if self.plain.affine:
            grads.append(Later(lambda: (given * normal).sum(1)))
        if self.plain.bias:
            grads.append(Later(lambda: given.sum(1)))
        if not wanted:
            return grads, (None,)
        inner = given * params[0].unsqueeze(1) if self.plain.affine else given
        dx = aten.native_layer_norm_backward(
            inner, rows, self.plain.shape, mean, scale, None, None, (True, False, False)
        )
        return grads, (from_rows(dx[0], dy.shape[3]),)
