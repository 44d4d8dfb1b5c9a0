"""The quick version keeps the noise on the mean update."""

from __future__ import annotations

import math

import pytest
from reproduction.paper.experiments import experiment, vary
from reproduction.paper.results.size import QUICK_CLIENTS, Size, shrink


def test_central_noise_on_the_mean_is_that_of_the_full_run():
    full = experiment("mnist-cdp-fedexp")
    small = shrink(full)
    assert small.data.clients == QUICK_CLIENTS
    assert small.algorithm.noise_multiplier / small.data.clients == pytest.approx(5.0 / 1000)


def test_local_noise_on_the_mean_is_that_of_the_full_run():
    small = shrink(experiment("mnist-ldp-gaussian-fedexp"))
    assert small.algorithm.noise_multiplier / math.sqrt(small.data.clients) == pytest.approx(0.7 / math.sqrt(1000))


def test_a_target_epsilon_becomes_the_noise_that_it_needs_in_full():
    """ε = 15.4562 over 50 rounds is what z = 5 costs, so the small run gets the small run's share of 5."""
    full = vary(
        experiment("mnist-cdp-fedexp"), {"algorithm.noise_multiplier": None, "algorithm.target_epsilon": 15.4562}
    )
    small = shrink(full)
    assert small.algorithm.target_epsilon is None
    assert small.algorithm.noise_multiplier == pytest.approx(5.0 * QUICK_CLIENTS / 1000, rel=1e-4)


def test_only_images_are_shrunk_and_seeds_are_counted():
    size = Size(seeds=3, quick=True)
    synthetic = size.runs(experiment("synthetic-cdp-fedexp"))
    assert [s.run.seed for s in synthetic] == [0, 1, 2]
    assert synthetic[0].data.clients == 1000
    assert len(size.runs(experiment("mnist-cdp-fedexp"), 2)) == 2
    assert "--quick" in size.command("mnist")
