"""The paper's separate scalar query, released jointly with the vector (replace-one, full participation).

One client changes from Δ to Δ', both in the ball of radius C, and moves the sum of vectors by Δ − Δ' and the sum of
squared norms by ‖Δ‖² − ‖Δ'‖². Composing the two queries separately charges for both worst cases at once, but the
vector moves furthest (2C) exactly where the norms agree and the scalar does not move at all. The joint shift is what
an observer can use.
"""

from __future__ import annotations

import math

from dpfedexp.errors import checked, require

FREE_THRESHOLD = (11.0 + 5.0 * math.sqrt(5.0)) / 8.0
"""The scalar costs nothing iff (C·σ_v/σ_s)² is at most this, 2.7725."""


@checked
def joint_mu(clip: float, vector_noise: float, scalar_noise: float) -> float:
    """sup over Δ, Δ' of √(‖Δ−Δ'‖²/σ_v² + (‖Δ‖²−‖Δ'‖²)²/σ_s²), with the noise stds σ_v, σ_s on the *sums*.

    Exact, in closed form. Antiparallel vectors maximise the first term at no cost to the second, and scaling both
    until the longer has norm C increases both terms, so with b the other norm over C and ρ = (C·σ_v/σ_s)² it is
    (C/σ_v)·√max h(b) for h(b) = (1+b)²(1 + ρ(1−b)²). Its derivative vanishes where 2ρ·b(1−b) = 1: the smaller root is
    the only maximum inside (0, 1), and h(1) = 4 is the vector alone. They are equal at ρ = (11+5√5)/8.
    """
    for name, value in (("clip", clip), ("vector_noise", vector_noise), ("scalar_noise", scalar_noise)):
        require(value >= 0.0, f"{name} is {value}; it must be zero or more.")
    if clip == 0.0:
        return 0.0
    if vector_noise == 0.0 or scalar_noise == 0.0:
        return math.inf
    rho = (clip * (vector_noise / scalar_noise)) ** 2
    if rho <= FREE_THRESHOLD:
        return 2.0 * clip / vector_noise
    b = 1.0 / (rho * (1.0 + math.sqrt(1.0 - 2.0 / rho)))
    return (clip / vector_noise) * (1.0 + b) * math.sqrt(1.0 + rho * (1.0 - b) ** 2)
