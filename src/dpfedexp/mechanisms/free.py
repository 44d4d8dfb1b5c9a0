"""The step size for free: one more coordinate that carries ‖Δ‖² inside the same ball.

With x = ‖Δ‖/C, the vector u = (Δ, (C² − ‖Δ‖²)/C) has ‖u‖²/C² = x² + (1 − x²)² ≤ 1. Whatever mechanism is private for vectors of
norm at most C therefore releases u at the same price as Δ, and C² − C·(last coordinate of the mean) is an unbiased mean of ‖Δ_i‖².
The principle for second moments is related to Kalinin, Upadhyay and Lampert, arXiv:2502.06597.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpfedexp.core.clipping import clip, row_norms


def lift(delta: Tensor, radius: float) -> Tensor:
    """u for each row of Δ, clipped once more so that rounding can't push ‖u‖ over C."""
    norms = row_norms(delta).cpu()
    last = ((radius * radius - norms.square()).clamp_min(0.0) / radius).to(delta.dtype)
    lifted = torch.cat([delta, last.to(delta.device)[:, None]], dim=1)
    # Not torch.hypot, whose last bit depends on a number's place among the others.
    longer = (norms.square() + last.double().square()).sqrt()
    return clip(lifted, radius, reuse=True, norms=longer).vectors
