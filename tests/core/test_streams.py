import numpy as np
import pytest
import torch

from dpfedexp.core.noise import streams as random
from dpfedexp.core.noise.streams import Streams

CLIENTS = torch.tensor([3, 8])
CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_row_does_not_depend_on_threads_and_consists_of_pieces(monkeypatch, threads):
    monkeypatch.setattr(random, "_PIECE", 1000)
    noise = Streams(5).at("local noise", 2)
    again = noise.normal(CLIENTS, 4100, CPU, torch.float64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        drawn = noise.normal(CLIENTS, 4100, CPU, torch.float64)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn, again)
    assert torch.equal(drawn[:, :1000], noise.normal(CLIENTS, 1000, CPU, torch.float64))
    assert len(drawn.unique()) == drawn.numel(), "pieces must not repeat each other"


def test_a_generator_that_jumps_draws_what_a_client_s_own_would():
    """Whatever the client before drew, and wherever it stopped within a block."""
    noise = Streams(7).at("batches", 3)
    of = noise.generators()
    for client, drawn in ((4, 1), (0, 3), (4, 2), (9, 5)):
        jumped = of(client)
        jumped.integers(2**16, size=drawn, dtype=np.uint32)
        own = noise.generator(client)
        own.integers(2**16, size=drawn, dtype=np.uint32)
        assert np.array_equal(jumped.permutation(50), own.permutation(50))
