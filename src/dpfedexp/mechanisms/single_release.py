"""Local privacy for one vector, outside of a run."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import Event, Sampling
from dpfedexp.core import clipping
from dpfedexp.core.noise import Streams, SystemStreams
from dpfedexp.errors import InputError, checked, is_count, is_number, require
from dpfedexp.mechanisms.base import MechanismSpec
from dpfedexp.mechanisms.registry import mechanism_class

SHORT = {"gaussian": "local-gaussian"}


@checked
@dataclass(frozen=True)
class PrivateVector:
    """A privatized vector, and what it cost.

    Attributes:
        vector: the unbiased estimate of the clipped vector, with the shape and type of the input.
        epsilon: ε of this single report, at `delta`.
        delta: δ of `epsilon`.
        event: the event to charge to a `Ledger`.
    """

    vector: Any
    epsilon: float
    delta: float
    event: Event

    def __repr__(self) -> str:
        return f"Private(a vector of shape {tuple(self.vector.shape)}, ε = {self.epsilon:.4g} at δ = {self.delta:g})"


@checked
def privatize(
    vector: Tensor | np.ndarray | list[float],
    *,
    clip: float,
    epsilon: float | None = None,
    delta: float = 1e-5,
    mechanism: str = "gaussian",
    noise_multiplier: float | None = None,
    times: int = 1,
    seed: int | None = None,
) -> PrivateVector:
    """Clip and randomize one vector with a local mechanism. The result is unbiased for the clipped vector.

    Formal guarantee: the report is (ε, δ)-indistinguishable from the report of any other vector; without a seed
    its noise lies on a lattice and comes from the operating system, so the low bits of the result reveal nothing about the vector.

    Args:
        vector: the vector of one person, of any shape: a tensor, a NumPy array or a list of numbers.
        clip: C, the norm to which a longer vector is scaled down; a public number.
        epsilon: the ε of `times` reports of this person together; pass this or `noise_multiplier`.
        delta: δ of `epsilon`. PrivUnit has δ = 0.
        mechanism: "gaussian" or "privunit", or the name of any local mechanism.
        noise_multiplier: the standard deviation of Gaussian noise divided by C, instead of `epsilon`.
        times: the number of reports that `epsilon` is for.
        seed: for simulations only: noise from a seed gives no privacy.

    Returns:
        The privatized vector, with the ε of this single report.

    Example:
        >>> import torch
        >>> from dpfedexp.mechanisms import privatize
        >>> privatize(torch.randn(1000), clip=1.0, epsilon=8.0, mechanism="privunit")
        Private(a vector of shape (1000,), ε = 8 at δ = 0)
    """
    if isinstance(vector, np.ndarray) and vector.dtype.kind not in "fiub":
        raise InputError(f"vector is an array of {vector.dtype}; it must hold numbers.")
    try:
        values = torch.as_tensor(vector)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"vector is a {type(vector).__name__}; it must be a tensor, an array or a list of numbers."
        ) from None
    kind = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
    row = values.to(kind).reshape(1, -1)
    require(row.numel() > 0, "vector is empty; it must hold at least one number.")
    require(is_number(clip), f"clip is {clip!r}; it must be a positive number.")
    clipping.check_radius("clip", clip)
    require(is_count(times), f"times is {times!r}; it must be a positive whole number.")
    require((epsilon is None) != (noise_multiplier is None), "pass exactly one of epsilon and noise_multiplier.")
    family = mechanism_class(SHORT.get(mechanism, mechanism))
    require(
        family.is_local and family.kind != "none",
        f"mechanism is {mechanism!r}, which protects a sum and not one vector; take 'gaussian' or 'privunit'.",
    )
    spec = MechanismSpec(
        clip=clip,
        noise_multiplier=noise_multiplier,
        target_epsilon=epsilon,
        delta=delta,
        dimension=row.numel(),
        rounds=times,
        secure=seed is None,
    )
    family.check_spec(spec)
    bound = family.bound(spec)
    noise = SystemStreams().at("report", 0) if seed is None else Streams(seed).at("report", 0)
    report = bound.randomize(clipping.clip(row, clip), torch.zeros(1, dtype=torch.int64), noise)
    shown = bound.estimate(report).reshape(values.shape).to(kind)
    event = bound.event(Sampling())
    at = 0.0 if event.family == "report" else delta
    one = compose([(event, 1)], at).epsilon
    return PrivateVector(shown.numpy() if isinstance(vector, np.ndarray) else shown, one, at, event)
