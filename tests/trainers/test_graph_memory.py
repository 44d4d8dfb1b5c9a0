"""The memory that recorded steps share lives as long as a graph that uses it: torch refuses the handle of one that it gave up."""

from __future__ import annotations

import gc
from itertools import count

import pytest
import torch

from dpfedexp.trainers.steps import _Pools


class Graph:
    """In the place of a `torch.cuda.CUDAGraph`, which needs a GPU."""


def test_a_memory_is_shared_until_its_last_graph_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    pools = _Pools()
    graphs = [Graph(), Graph()]
    for graph in graphs:
        assert pools.handle(0) == 0
        pools.users[0].add(graph)  # type: ignore[arg-type]
    assert pools.handle(1) == 1, "another device has a memory of its own"
    graphs.pop()
    gc.collect()
    del graph
    assert pools.handle(0) == 0
    graphs.clear()
    gc.collect()
    assert pools.handle(0) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_are_recorded_again_after_all_recordings_are_gone() -> None:
    from dpfedexp.trainers.steps import cuda_graph

    value = torch.zeros((), device="cuda")
    for _ in range(3):
        replay = cuda_graph(lambda: value.add_(torch.ones((), device="cuda")))
        value.zero_()
        replay()
        assert value.item() == 1
        del replay
        gc.collect()
