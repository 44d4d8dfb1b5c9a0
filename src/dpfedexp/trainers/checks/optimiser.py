"""A local optimiser tried on synthetic gradients, before a round is paid for."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfedexp.core.local import Clock, LocalOptimiser, Sgd
from dpfedexp.errors import InputError, require
from dpfedexp.trainers.task import first_line

_STEPS = 64


def check_optimiser(local: LocalOptimiser) -> None:
    """Raises `InputError` where an optimiser does not keep the contract of `LocalOptimiser.direction`.

    Three synthetic clients take their steps together, and each alone: a client's steps may depend on its own gradients only, and
    on no client that was trained before it. Rounding may differ between the two (1e-5); a secure run compares every bit.
    """
    if type(local) is Sgd:
        return
    name, steps = type(local).__name__, min(local.steps or _STEPS, _STEPS)
    gradients = torch.randn(steps, 3, 2, 3, generator=torch.Generator().manual_seed(0))

    def way(clients: list[int]) -> Tensor:
        w = torch.zeros(len(clients), 2, 3)
        moments = {moment: torch.zeros_like(w) for moment in local.moment_names}
        counts = torch.full((len(clients),), steps)
        for step in range(steps):
            gradient = gradients[step, clients]
            if local.needs_all_gradients:
                gradient = local.joined({"w": gradient})["w"]
            before, clock = gradient.clone(), Clock(torch.tensor(float(step), dtype=torch.float64), counts)
            direction = local.direction(w, gradient, moments, clock)
            require(
                isinstance(direction, Tensor) and direction.shape == w.shape,
                f"the local optimiser {name} must give a direction of the parameters' shape {tuple(w.shape)}.",
            )
            require(torch.equal(gradient, before), f"the local optimiser {name} must not change the gradient in place.")
            w = w - (1.0 if local.automatic else local.rate) * direction
        return w

    try:
        together, alone, again = way([0, 1, 2]), torch.cat([way([client]) for client in range(3)]), way([0])
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the local optimiser {name} fails on synthetic gradients: {first_line(error)}") from error
    require(
        torch.allclose(together, alone, rtol=1e-5, atol=1e-6),
        f"the local optimiser {name} mixes clients: a client's direction must follow from its own gradients alone.",
    )
    require(
        torch.equal(alone[:1], again),
        f"the local optimiser {name} remembers: a client's direction must not depend on whoever was trained before it.",
    )
