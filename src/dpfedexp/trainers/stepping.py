"""The parameters of a tile of clients while they take their steps: in place, or as a recording that a GPU replays."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfedexp.layout import Layout, Params
from dpfedexp.local import Sgd

Take = Callable[[str, Tensor], None]
INPUT = 0
"""The number of the value that the data are, among those that a core has prepared."""


class Core(Protocol):
    """Gradients of a tile, however they are computed."""

    def prepare(self, x: Tensor) -> dict[int, Tensor]:
        """What depends on the data alone."""
        ...

    def descend(
        self, params: Mapping[str, Tensor], fixed: Mapping[int, Tensor], targets: Tensor, weights: Tensor, take: Take
    ) -> None:
        """Hands every parameter's gradient to `take`, after which the parameter may change."""
        ...


@dataclass(frozen=True)
class Batch:
    """Data of one step: what the core has prepared, targets [n, s, …] and weights [n, s]."""

    fixed: dict[int, Tensor]
    targets: Tensor
    weights: Tensor

    def tensors(self) -> list[Tensor]:
        return [*self.fixed.values(), self.targets, self.weights]


@dataclass
class Stepper:
    """w⁽ᵗ'ᵏ⁾ of n clients; `step` does what `local.descend` does, in place and parameter by parameter."""

    core: Core
    layout: Layout
    local: Sgd
    start: Params = field(default_factory=dict)
    params: Params = field(default_factory=dict)
    correction: Params | None = None

    def begin(self, w: Tensor, n: int, correction: Tensor | None, into: Tensor | None = None) -> None:
        """From w; with `into` [n, d] the parameters live there."""
        self.start = self.layout.unflatten(w)
        if into is None:
            self.params = {name: value.expand(n, *value.shape).clone() for name, value in self.start.items()}
        else:
            self.params = self.layout.unflatten(into.copy_(w))
        self.correction = None if correction is None else self.layout.unflatten(correction)

    def step(self, batch: Batch, going: Tensor | None) -> None:
        """One gradient step; `going` [n] is 0 for clients that have taken all of theirs."""

        def take(name: str, gradient: Tensor) -> None:
            value = self.params[name]
            direction = gradient
            if self.local.proximal:
                direction = direction + self.local.proximal * (value - self.start[name])
            if self.correction is not None:
                direction = direction + self.correction[name]
            if going is not None:
                stays = going.view(-1, *[1] * (value.dim() - 1)) == 0
                direction = torch.where(stays, torch.zeros_like(value), direction)
            value.add_(direction, alpha=-self.local.lr)

        self.core.descend(self.params, batch.fixed, batch.targets, batch.weights, take)

    def moved(self) -> Tensor:
        """w⁽ᵗ'ᵏ⁾ − w⁽ᵗ⁾, [n, d]."""
        return torch.cat([(self.params[name] - self.start[name]).flatten(1) for name in self.layout.names], dim=1)


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""From a function without arguments to one that does the same to the same memory, with less overhead."""


def cuda_graph(function: Callable[[], None]) -> Callable[[], None]:
    """Launches that took the processor longer than the GPU's own work become one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # An old graph that the collector frees during the capture would end it.
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            function()
    finally:
        gc.enable()
    return graph.replay


class Recording:
    """A `Stepper` over memory that stays, so that its step can be recorded once per shape and replayed."""

    def __init__(self, inner: Stepper, capture: Capture = cuda_graph) -> None:
        self.inner, self.capture = inner, capture
        self.replay: Callable[[], None] | None = None
        self.batch: Batch | None = None
        self.loaded: Batch | None = None
        self.going: Tensor | None = None
        self.flat: Tensor | None = None
        self.flat_correction: Tensor | None = None

    def begin(self, w: Tensor, n: int, correction: Tensor | None) -> None:
        self.loaded = None
        if self.flat is None:
            self.flat = w.clone()
            self.flat_correction = None if correction is None else correction.clone()
            self.inner.begin(self.flat, n, self.flat_correction)
            return
        self.flat.copy_(w)
        if self.flat_correction is not None and correction is not None:
            self.flat_correction.copy_(correction)
        for name, value in self.inner.params.items():
            value.copy_(self.inner.start[name].expand_as(value))

    def step(self, batch: Batch, going: Tensor | None) -> None:
        if self.batch is None:
            self.batch = Batch(
                {i: v.clone() for i, v in batch.fixed.items()}, batch.targets.clone(), batch.weights.clone()
            )
            self.going = None if going is None else going.clone()
            self._record()
        if batch is not self.loaded:
            for mine, given in zip(self.batch.tensors(), batch.tensors(), strict=True):
                mine.copy_(given)
            self.loaded = batch
        if self.going is not None and going is not None:
            self.going.copy_(going)
        assert self.replay is not None
        self.replay()

    def moved(self) -> Tensor:
        return self.inner.moved()

    def _record(self) -> None:
        """Recording runs the step, so the parameters are put back."""
        before = {name: value.clone() for name, value in self.inner.params.items()}
        batch, going = self.batch, self.going
        assert batch is not None
        self.replay = self.capture(lambda: self.inner.step(batch, going))
        for name, value in self.inner.params.items():
            value.copy_(before[name])


class Recordings:
    """Recordings by shape: a shape is recorded when it comes the second time, and the oldest makes room."""

    def __init__(self, fresh: Callable[[], Stepper], capture: Capture = cuda_graph, keep: int = 4) -> None:
        self.fresh, self.capture, self.keep = fresh, capture, keep
        self.seen: set[Any] = set()
        self.held: dict[Any, Recording] = {}

    def stepper(self, key: Any) -> Stepper | Recording:
        if key in self.held:
            return self.held[key]
        if key not in self.seen:
            self.seen.add(key)
            return self.fresh()
        if len(self.held) >= self.keep:
            del self.held[next(iter(self.held))]
        self.held[key] = Recording(self.fresh(), self.capture)
        return self.held[key]
