"""The density-ratio check of PrivUnit: what a report reveals at most, from its densities alone.

A direction's density is constant on the cap {⟨v, u⟩ ≥ γ} and constant outside, so the largest ratio between two clients is the
ratio of these constants. The cap's mass is integrated here anew. The levels' probabilities are counted out over all pairs of
norms. That the sampler has these densities is measured: how often a direction falls into its cap.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import gammaln

from dpfedexp.accounting import PrivUnitEvent, Sampling
from dpfedexp.audit.bounds import rate_at_least, rate_at_most
from dpfedexp.audit.result import Result
from dpfedexp.clipping import Clipped
from dpfedexp.mechanisms import PrivUnit
from dpfedexp.simulation.random import Streams


def audit_density(mechanism: PrivUnit, samples: int, seed: int, confidence: float) -> list[Result]:
    """The exact ε of the densities beside the event's, and the cap's probability beside p."""
    event = mechanism.event(Sampling())
    assert isinstance(event, PrivUnitEvent)
    p, cap = mechanism.direction.p, cap_mass(mechanism.dimension, mechanism.direction.gamma)
    direction = abs(math.log(p / cap) - math.log((1 - p) / (1 - cap)))
    exact = direction + level_epsilon(mechanism)
    name = f"PrivUnit, {mechanism.gamma} γ, d = {mechanism.dimension}"
    low, high = cap_rate(mechanism, samples, seed, confidence)
    off = max(0.0, low - p, p - high)
    return [
        Result("density", name, "ε at δ = 0", exact, event.epsilon, 1.0, "largest ratio"),
        Result(
            "density",
            name,
            "cap's rate off p",
            off,
            0.0,
            confidence,
            f"rate {low:.4f} to {high:.4f}, p {p:.4f}",
        ),
    ]


def cap_mass(dimension: int, gamma: float) -> float:
    """P(⟨V, u⟩ ≥ γ) for uniform V: the integral of the density of a coordinate, B·(1 − t²)^((d−3)/2)."""
    log_constant = gammaln(dimension / 2) - gammaln((dimension - 1) / 2) - 0.5 * math.log(math.pi)
    # In the angle, t = sin a, the density is smooth at every dimension.
    value, _ = quad(
        lambda a: math.exp(log_constant + (dimension - 2) * math.log(max(math.cos(a), 1e-300))),
        math.asin(gamma),
        min(math.pi / 2, math.asin(gamma) + 60 / math.sqrt(dimension)),
        epsabs=0.0,
        epsrel=1e-12,
        limit=500,
    )
    return value


def level_epsilon(mechanism: PrivUnit) -> float:
    """The largest log ratio of a level's probability between two norms."""
    scalar = mechanism.scalar
    kept = math.exp(scalar.epsilon2) / (math.exp(scalar.epsilon2) + scalar.k)
    other = (1 - kept) / scalar.k
    rows = []
    for scaled in np.linspace(0.0, scalar.k, 8 * scalar.k + 1):
        floor = min(math.floor(scaled), scalar.k - 1)
        true = np.zeros(scalar.k + 1)
        true[floor], true[floor + 1] = floor + 1 - scaled, scaled - floor
        rows.append(true * kept + (1 - true) * other)
    table = np.array(rows)
    return float(np.log(table.max(0) / table.min(0)).max())


def cap_rate(mechanism: PrivUnit, samples: int, seed: int, confidence: float) -> tuple[float, float]:
    """How often a direction falls into its client's own cap: an interval."""
    u = torch.zeros(1, mechanism.dimension)
    u[0, -1] = mechanism.clip
    clipped = Clipped(u.expand(samples, -1), torch.ones(samples, dtype=torch.bool))
    report = mechanism.randomize(clipped, torch.arange(samples), Streams(seed).at("local noise", 1))
    inside = np.array(float((report.vector[:, -1].double() >= mechanism.direction.gamma).sum()))
    failure = (1.0 - confidence) / 2.0
    return float(rate_at_least(inside, samples, failure)), float(rate_at_most(inside, samples, failure))
