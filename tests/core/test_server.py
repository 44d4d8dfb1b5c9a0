"""The server optimizers against their equations, written out by hand over several rounds."""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch

from dpfedexp.algorithms import cdp_fedexp, dp_fedavg
from dpfedexp.algorithms.round import State, advance
from dpfedexp.core.step_size import Adam, Extrapolate, Momentum
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Release

W = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
ROWS = [0.3, -0.2, 0.0], [-0.1, 0.4, 0.5], [0.7, 0.1, -0.6], [0.2, 0.2, 0.2]
MEANS = [torch.tensor(row, dtype=torch.float64) for row in ROWS]


def follow(server, eta_g=1.0):
    """The iterates of `advance` after each of the means."""
    algorithm = replace(dp_fedavg(clip=1.0, noise_multiplier=2.0), server=server, rule=lambda release: eta_g)
    state, iterates = State(0, W, (W,), 1.0, server.init(W)), []
    for mean in MEANS:
        state, taken = advance(algorithm, Release(mean, 0.5, {}, 1.0), state)
        assert taken == eta_g
        iterates.append(state.w)
    return iterates


@pytest.mark.parametrize("eta_g", [1.0, 17.0])
def test_fedadam_follows_its_equations_over_four_rounds(eta_g):
    # Reddi et al. 2021: m ← β₁m + (1−β₁)Δ, v ← β₂v + (1−β₂)Δ², x ← x + ηm/(√v + τ), with v₀ = τ² and no bias correction.
    lr, beta1, beta2, tau = 0.07, 0.8, 0.95, 0.02
    iterates = follow(Adam(lr=lr, beta1=beta1, beta2=beta2, eps=tau), eta_g)
    for coordinate in range(3):
        x, m, v = float(W[coordinate]), 0.0, tau * tau
        for mean, w in zip(MEANS, iterates, strict=True):
            step = float(mean[coordinate])
            m = beta1 * m + (1.0 - beta1) * step
            v = beta2 * v + (1.0 - beta2) * step * step
            x = x + eta_g * (lr * m / (math.sqrt(v) + tau))
            # The same double-precision operations, but for fused multiplications.
            assert float(w[coordinate]) == pytest.approx(x, rel=1e-13, abs=1e-14)


@pytest.mark.parametrize("eta_g", [1.0, 17.0])
def test_momentum_follows_its_equations_over_four_rounds(eta_g):
    iterates = follow(Momentum(lr=0.3, beta=0.6), eta_g)
    v, w = torch.zeros(3, dtype=torch.float64), W
    for mean, iterate in zip(MEANS, iterates, strict=True):
        v = 0.6 * v + mean
        w = w + eta_g * 0.3 * v
        torch.testing.assert_close(iterate, w, rtol=1e-13, atol=1e-14)
    assert dataclasses.asdict(Momentum()) == {"lr": 1.0, "beta": 0.9}
    assert dataclasses.asdict(Adam()) == {"lr": 0.03, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3}


def test_extrapolation_is_the_step_size_times_the_mean_and_remembers_nothing():
    assert Extrapolate().init(W) == {}
    assert Extrapolate().direction(MEANS[0], {}) == (MEANS[0], {})
    torch.testing.assert_close(follow(Extrapolate(), 2.5)[0], W + 2.5 * MEANS[0], rtol=1e-15, atol=0.0)


def test_momentum_in_the_place_of_fedexps_server_takes_fedexps_step_size():
    """`replace(cdp_fedexp(…), server=Momentum())`: η_g comes from the release, and the move is η_g·lr·v."""
    algorithm = replace(cdp_fedexp(clip=1.0, noise_multiplier=2.0, step="paper"), server=Momentum(lr=0.5, beta=0.9))
    state = State(0, W, (W,), 1.0, algorithm.server.init(W))
    velocity, taken = torch.zeros_like(W), []
    for mean, last in zip(MEANS, (0.0, -0.5, 0.2, 0.7), strict=True):
        before = state.w
        state, eta_g = advance(algorithm, Release(mean, last, {}, 1.0), state)
        velocity = 0.9 * velocity + mean
        torch.testing.assert_close(state.w, before + eta_g * 0.5 * velocity, rtol=1e-13, atol=1e-14)
        taken.append(eta_g)
    assert max(taken) > 5, "the release asks for steps far from 1, so leaving them out would show"


def test_a_setting_outside_its_range_is_one_sentence_and_the_ends_are_inside():
    for kind, field, value, named in (
        (Momentum, "lr", 0.0, "server rate"),
        (Momentum, "beta", 1.0, "server momentum"),
        (Momentum, "beta", -0.1, "server momentum"),
        (Adam, "lr", 0.0, "server rate"),
        (Adam, "eps", 0.0, "server eps"),
        (Adam, "beta1", 1.0, "server beta1"),
        (Adam, "beta2", 1.0, "server beta2"),
        (Adam, "beta2", -0.1, "server beta2"),
    ):
        with pytest.raises(InputError, match=named):
            kind(**{field: value})
    assert Momentum(beta=0.0).beta == 0.0
    assert Adam(beta1=0.0, beta2=0.0).beta1 == 0.0
    assert Momentum(lr=0.5).lr == Adam(lr=0.5, eps=0.5).lr == 0.5


@pytest.mark.parametrize(
    "server",
    [
        3,
        type("NoPair", (), {"init": lambda s, w: {}, "direction": lambda s, c, m: c})(),
        type("Short", (), {"init": lambda s, w: {}, "direction": lambda s, c, m: (c[:1], m)})(),
        type("OtherNames", (), {"init": lambda s, w: {}, "direction": lambda s, c, m: (c, {"v": c})})(),
        type("NoTensor", (), {"init": lambda s, w: {"n": 0}, "direction": lambda s, c, m: (c, m)})(),
    ],
    ids=lambda server: type(server).__name__,
)
def test_what_is_no_server_optimizer_is_refused_when_the_algorithm_is_made(server):
    with pytest.raises(InputError, match="server"):
        replace(dp_fedavg(clip=1.0, noise_multiplier=2.0), server=server)
