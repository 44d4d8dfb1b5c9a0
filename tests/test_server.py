"""The server optimisers against their equations, written out by hand over several rounds."""

import dataclasses
import math

import pytest
import torch

from dpfedexp.errors import InputError
from dpfedexp.server import Adam, Extrapolate, Momentum

W = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
MEANS = [
    torch.tensor(row, dtype=torch.float64)
    for row in ([0.3, -0.2, 0.0], [-0.1, 0.4, 0.5], [0.7, 0.1, -0.6], [0.2, 0.2, 0.2])
]


def follow(server, eta_g=1.0):
    """The iterates after each of the means."""
    w, state, iterates = W, server.init(W), []
    for mean in MEANS:
        w, state = server.step(w, mean, eta_g, state)
        iterates.append(w)
    return iterates


def test_fedadam_follows_its_equations_over_four_rounds():
    # Reddi et al. 2021: m ← β₁m + (1−β₁)Δ, v ← β₂v + (1−β₂)Δ², x ← x + ηm/(√v + τ), with v₀ = τ² and no bias correction.
    lr, beta1, beta2, tau = 0.07, 0.8, 0.95, 0.02
    iterates = follow(Adam(lr=lr, beta1=beta1, beta2=beta2, eps=tau), eta_g=17.0)
    for coordinate in range(3):
        x, m, v = float(W[coordinate]), 0.0, tau * tau
        for mean, w in zip(MEANS, iterates, strict=True):
            step = float(mean[coordinate])
            m = beta1 * m + (1.0 - beta1) * step
            v = beta2 * v + (1.0 - beta2) * step * step
            x = x + lr * m / (math.sqrt(v) + tau)
            assert float(w[coordinate]) == pytest.approx(
                x, rel=1e-14, abs=1e-15
            )  # the same double-precision operations


def test_fedadam_has_the_defaults_of_its_paper():
    assert dataclasses.asdict(Adam()) == {"lr": 0.03, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3}


def test_momentum_follows_its_equations_over_four_rounds():
    iterates = follow(Momentum(lr=0.3, beta=0.6), eta_g=17.0)
    v, w = torch.zeros(3, dtype=torch.float64), W
    for mean, iterate in zip(MEANS, iterates, strict=True):
        v = 0.6 * v + mean
        w = w + 0.3 * v
        torch.testing.assert_close(iterate, w, rtol=1e-14, atol=1e-15)
    assert dataclasses.asdict(Momentum()) == {"lr": 1.0, "beta": 0.9}


def test_extrapolation_is_the_step_size_times_the_mean_and_has_no_state():
    assert Extrapolate().init(W) == {}
    w, state = Extrapolate().step(W, MEANS[0], 2.5, {})
    torch.testing.assert_close(w, W + 2.5 * MEANS[0], rtol=1e-15, atol=0.0)
    assert state == {}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Momentum(lr=0.0), "server rate"),
        (lambda: Momentum(beta=1.0), "server momentum"),
        (lambda: Momentum(beta=-0.1), "server momentum"),
        (lambda: Adam(lr=0.0), "server rate"),
        (lambda: Adam(eps=0.0), "server eps"),
        (lambda: Adam(beta1=1.0), "server beta1"),
        (lambda: Adam(beta2=1.0), "server beta2"),
        (lambda: Adam(beta2=-0.1), "server beta2"),
    ],
)
def test_a_setting_outside_its_range_is_one_sentence(make, named):
    with pytest.raises(InputError, match=named):
        make()


def test_the_ends_of_the_ranges_are_inside():
    assert Momentum(beta=0.0).beta == 0.0
    assert Adam(beta1=0.0, beta2=0.0).beta1 == 0.0
    assert Momentum(lr=0.5).lr == Adam(lr=0.5, eps=0.5).lr == 0.5
