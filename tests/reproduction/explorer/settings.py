"""Settings of the explorer drawn at random, and what the library says of them."""

from __future__ import annotations

import math
import random
from typing import Any

from dpfedexp import Full, cdp_fedexp, dp_fedavg
from dpfedexp.engine.plan import Plan

Setting = dict[str, Any]


def settings(count: int, seed: int = 0) -> list[Setting]:
    """Wider than the sliders: z from 0.01 to 10⁵, δ from 10⁻³⁰ to ½, up to 10⁵ rounds."""
    rng = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    return [
        {
            "mode": "noise",
            "who": rng.choice(("central", "central", "local")),
            "adjacency": rng.choice(("replace-one", "add-remove")),
            "step": rng.choice(("free", "paper")),
            "clients": round(between(1, 1e7)),
            "dimension": round(between(1, 1e10)),
            "rounds": round(between(1, 1e5)),
            "delta": between(1e-30, 0.5),
            "z": between(0.01, 1e5),
            "epsilon": between(1e-3, 1e4),
        }
        for _ in range(count)
    ]


def plan(setting: Setting, z: float) -> Plan:
    """The setting with noise z as a run has it: an algorithm, its mechanism, what that charges, what the preflight says."""
    common: dict[str, Any] = {"clip": 1.0, "noise_multiplier": z, "delta": setting["delta"]}
    if setting["who"] == "local":
        algorithm = dp_fedavg(mechanism="local-gaussian", **common)
    elif setting["step"] == "paper":
        algorithm = cdp_fedexp(numerator="paper", adjacency=setting["adjacency"], **common)
    else:
        algorithm = dp_fedavg(adjacency=setting["adjacency"], **common)
    return Plan.of(algorithm, Full(), setting["clients"], setting["dimension"], setting["rounds"])
