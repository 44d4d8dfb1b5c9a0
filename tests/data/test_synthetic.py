from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from dpfedexp.data import synthetic_regression, synthetic_regression_stream
from dpfedexp.data.synthetic import _keyed_normals
from dpfedexp.errors import InputError


def inputs_of(kind: str, clients: int, dimension: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = synthetic_regression if kind == "held" else synthetic_regression_stream
    problem = make(clients, dimension, seed)
    x, y = problem.federation.gather(torch.arange(clients), torch.zeros(clients, 1))
    assert x.dtype == y.dtype == problem.optimum.dtype == torch.float32
    assert x.shape == (clients, 1, dimension)
    assert y.shape == (clients, 1)
    return x[:, 0].double(), y[:, 0].double(), problem.optimum.double()


@pytest.mark.parametrize("kind", ["held", "stream"])
def test_targets_are_exact_at_the_optimum(kind: str) -> None:
    x, y, optimum = inputs_of(kind, 500, 100, 0)
    # y is one float32 rounding of x·w*.
    assert torch.allclose(x @ optimum, y, rtol=2**-23, atol=1e-6)


@pytest.mark.parametrize("kind", ["held", "stream"])
def test_inputs_have_the_papers_moments(kind: str) -> None:
    n, d = 4000, 50
    x, _, optimum = inputs_of(kind, n, d, 3)
    # x = u·1 + N(0, 2I), u ~ N(0, 0.01): coordinates have variance 2.01 and covariance 0.01, so that ‖x‖² ≈ 2.01 d.
    assert x.mean().abs() < 5 * np.sqrt((2 / d + 0.01) / n)
    assert x.square().mean() == pytest.approx(2.01, abs=5 * np.sqrt(2 * 2.01**2 / (n * d)))
    # A client's mean coordinate has variance 0.01 + 2/d; a missing u would give 2/d, 20% less.
    spread = x.mean(dim=1).square().mean()
    assert spread == pytest.approx(0.01 + 2 / d, rel=5 * np.sqrt(2 / n))
    assert optimum.square().mean() == pytest.approx(1.0, abs=5 * np.sqrt(2 / d))


@pytest.mark.parametrize("make", [synthetic_regression, synthetic_regression_stream])
def test_a_seed_decides_the_problem(make) -> None:
    first, again, other = make(20, 5, 1), make(20, 5, 1), make(20, 5, 2)
    assert torch.equal(first.optimum, again.optimum)
    assert torch.equal(first.federation.client(3)[0], again.federation.client(3)[0])
    assert not torch.equal(first.optimum, other.optimum)
    assert not torch.equal(first.federation.client(3)[0], other.federation.client(3)[0])


def test_the_papers_start_is_22_away() -> None:
    # ‖w*‖ ≈ sqrt(500) = 22.36 with a standard deviation of 0.71.
    assert synthetic_regression().distance(torch.zeros(500)) == pytest.approx(22.36, abs=3.6)
    problem = synthetic_regression(10, 4)
    assert problem.distance(problem.optimum[None] + torch.tensor([3.0, 0, 4.0, 0])) == pytest.approx(5.0, rel=1e-6)


def test_a_streamed_client_does_not_depend_on_who_else_is_asked_for() -> None:
    federation = synthetic_regression_stream(10**6, 7, seed=5).federation
    ids = torch.tensor([999_999, 0, 12, 500_000, 12])
    x, y = federation.gather(ids, torch.zeros(5, 1))
    for row, client in enumerate(ids.tolist()):
        assert torch.equal(x[row], federation.client(client)[0])
        assert torch.equal(y[row], federation.client(client)[1])
    assert not torch.equal(x[0], x[1])


def test_the_streams_of_neighbouring_clients_never_overlap() -> None:
    draws = _keyed_normals(0, np.arange(300), 200)
    # 60,000 draws of 52 random bits: one pair coincides by chance once in two million seeds.
    assert len(np.unique(draws)) == draws.size


def test_streamed_clients_are_independent_of_the_optimum() -> None:
    x, _, optimum = inputs_of("stream", 2000, 20, 0)
    # Projections on w* have variance of at most (2 + 0.01 d)·‖w*‖²; draws shared with the optimum's would stand out.
    assert (x @ optimum).abs().max() < 7 * np.sqrt(2.2) * optimum.norm()
    assert (x @ optimum).mean().abs() < 5 * np.sqrt(2.2 / 2000) * optimum.norm()


def test_streaming_is_fast_enough_for_a_million_clients() -> None:
    federation = synthetic_regression_stream(10**6, 100).federation
    start = time.process_time()
    federation.gather(torch.arange(5000), torch.zeros(5000, 1))
    # 0.03 to 0.05 s on a busy core; ten times that still makes a million in two minutes.
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("make", [synthetic_regression, synthetic_regression_stream])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"clients": 0, "dimension": 5}, "clients is 0"),
        ({"clients": 5, "dimension": 0}, "dimension is 0"),
        ({"clients": 5, "dimension": 5, "seed": -1}, "seed is -1"),
    ],
)
def test_impossible_problems_get_a_sentence(make, settings: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make(**settings)


def test_a_point_of_another_dimension_has_no_distance() -> None:
    with pytest.raises(InputError, match="w has 3 numbers; this problem has dimension 4"):
        synthetic_regression(10, 4).distance(torch.zeros(3))
