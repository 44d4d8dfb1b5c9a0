"""PrivUnit's law: what a report reveals at most, from its densities alone, and that the sampler has these densities.

A direction's density is constant on the cap {⟨v, u⟩ ≥ γ} and constant outside, so the largest ratio between two clients is the
ratio of these constants. The cap's mass is integrated here anew. The levels' probabilities are counted out over all pairs of
norms. Measured are how often a direction falls into its cap, the law of its height inside and outside of it (a shell that no
direction falls into would be an ε of infinity), and that it points nowhere else in particular.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import betainc, betaincc, gammaln

from dpfedexp.accounting import Sampling
from dpfedexp.audit.bounds import Floats, Power, distance, distance_limit, interval, rare
from dpfedexp.audit.result import Result
from dpfedexp.core.clipping import Clipped
from dpfedexp.core.noise.streams import Streams
from dpfedexp.errors import checked
from dpfedexp.mechanisms import PrivUnit


@checked
def audit_density(mechanism: PrivUnit, samples: int, seed: int, confidence: float) -> list[Result]:
    """The exact ε of the densities beside the event's; then the sampler's cap, height and rest beside theirs."""
    event = mechanism.event(Sampling())
    p, cap = mechanism.direction.p, cap_mass(mechanism.dimension, mechanism.direction.gamma)
    direction = abs(math.log(p / cap) - math.log((1 - p) / (1 - cap)))
    exact = direction + level_epsilon(mechanism)
    name = f"PrivUnit, {mechanism.gamma} γ, d = {mechanism.dimension}"
    height, across = drawn_heights(mechanism, samples, seed)
    failure = rare(confidence)
    inside = height >= mechanism.direction.gamma
    low, high = interval(float(inside.sum()), len(height), failure)
    power, off = Power(event.epsilon, 0.999 * event.epsilon), max(0.0, low - p, p - high)

    def result(unit: str, off: float, limit: float, detail: str, least: float) -> Result:
        return Result("density", name, unit, off, limit, 1.0 - failure, detail, sees=f"≥ {least:.3f}")

    found = [
        Result("density", name, "ε at δ = 0", exact, event.epsilon, 1.0, "largest ratio", power=power),
        result("cap's rate off p", off, 0.0, f"rate {low:.4f} to {high:.4f}, p {p:.4f}", high - low),
    ]
    half = (mechanism.dimension - 1) / 2
    laws = {
        "height inside the cap": _upper_tail(height[inside], half) / cap,
        "height outside the cap": (1.0 - _upper_tail(height[~inside], half)) / (1 - cap),
    }
    if mechanism.dimension > 2:
        laws["direction across"] = _upper_tail(across, (mechanism.dimension - 2) / 2)
    for what, uniforms in laws.items():
        limit = distance_limit(len(uniforms), failure)
        found.append(result(f"law of the {what}", distance(uniforms), limit, f"{len(uniforms)} reports", 2 * limit))
    return found


def _upper_tail(height: Floats, half: float) -> Floats:
    """P(T ≥ t) of a coordinate of a uniform direction, whose square has the law Beta(½, (d − 1)/2)."""
    square = np.minimum(1.0, height * height)
    tail: Floats = np.where(height >= 0, 0.5 * betaincc(0.5, half, square), 0.5 + 0.5 * betainc(0.5, half, square))
    return tail


def cap_mass(dimension: int, gamma: float) -> float:
    """P(⟨V, u⟩ ≥ γ) for uniform V: the integral of the density of a coordinate, B·(1 − t²)^((d−3)/2)."""
    log_constant = gammaln(dimension / 2) - gammaln((dimension - 1) / 2) - 0.5 * math.log(math.pi)
    # In the angle, t = sin a, the density is smooth at every dimension.
    mass: float = quad(
        lambda a: math.exp(log_constant + (dimension - 2) * math.log(max(math.cos(a), 1e-300))),
        math.asin(gamma),
        min(math.pi / 2, math.asin(gamma) + 60 / math.sqrt(dimension)),
        epsabs=0.0,
        epsrel=1e-12,
        limit=500,
    )[0]
    return mass


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


def drawn_heights(mechanism: PrivUnit, samples: int, seed: int) -> tuple[Floats, Floats]:
    """Of many reports: ⟨V, u⟩, and the rest's part along one direction across u, as a share of the rest's length."""
    u = torch.zeros(1, mechanism.dimension)
    u[0, -1] = mechanism.clip
    clipped = Clipped(u.expand(samples, -1), torch.ones(samples, dtype=torch.bool))
    report = mechanism.randomize(clipped, torch.arange(samples), Streams(seed).at("local noise", 1))
    vectors = report.vector.double().numpy()
    height = vectors[:, -1]
    rest = np.sqrt(np.maximum(1e-300, np.square(vectors[:, :-1]).sum(1)))
    return height, vectors[:, 0] / rest
