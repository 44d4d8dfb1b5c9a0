"""What a round does after its release: the step size, the server's move, the next clip. Post-processing, shared by all runtimes.

The simulator and a deployment differ in who computes the local updates and in where noise comes from; from the release on they are
the same function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfedexp.algorithms import Algorithm
from dpfedexp.clipping import AdaptiveClip
from dpfedexp.mechanisms import Mechanism, Release
from dpfedexp.server import State as ServerState


@dataclass(frozen=True)
class State:
    """Everything that one round hands to the next. Vectors are float64 on the run's device.

    recent    the last iterates that the reported model averages, newest last
    radius    the clip C in force
    control   SCAFFOLD's server control variate c, and the clients' own c_i, one row each (None without SCAFFOLD)
    """

    round: int
    w: Tensor
    recent: tuple[Tensor, ...]
    radius: float
    server: ServerState
    control: Tensor | None = None
    client_controls: Tensor | None = None

    @property
    def reported(self) -> Tensor:
        """The average of the last iterates: post-processing that damps FedEXP's oscillation."""
        return torch.stack(self.recent).mean(0) if len(self.recent) > 1 else self.w


def at_radius(mechanism: Mechanism, radius: float) -> Mechanism:
    """The mechanism with the clip that is in force, which adaptive clipping moves."""
    return mechanism if radius == mechanism.clip else replace(mechanism, clip=radius)  # type: ignore[type-var]


def advance(
    algorithm: Algorithm,
    mechanism: Mechanism,
    release: Release,
    state: State,
    *,
    share: float = 1.0,
    travel: float | None = None,
) -> tuple[State, float]:
    """The next state and η_g.

    SCAFFOLD's control variate asks for two public numbers: the expected `share` of the clients that took part, and `travel` = τη_l,
    how far a client goes per unit of gradient.
    """
    eta_g = algorithm.rule(release)
    w, server = algorithm.server.step(state.w, release.c_bar, eta_g, state.server)
    radius = state.radius
    if isinstance(algorithm.clip, AdaptiveClip):
        assert release.within is not None
        radius = algorithm.clip.update(radius, release.within)
    control = state.control
    if control is not None:
        assert travel is not None
        control = (1 - share) * control - share * release.c_bar / travel
    recent = (*state.recent, w)[-algorithm.average_last :]
    return State(state.round + 1, w, recent, radius, server, control, state.client_controls), eta_g
