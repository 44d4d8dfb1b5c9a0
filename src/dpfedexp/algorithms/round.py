"""What a round does after its release, in a simulator and a deployment alike: the step size, the server's move, the next clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from dpfedexp.algorithms import Algorithm
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.server import Moments
from dpfedexp.core.step_size import Memory, next_step
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Release

SHORT = 2**17
"""Up to this size the CPU is faster than a kernel launch."""


def server_device(dimension: int, device: torch.device) -> torch.device:
    """Where the server of a run on `device` holds its vectors."""
    return device if dimension > SHORT else torch.device("cpu")


@dataclass(frozen=True)
class State:
    """Everything that one round hands to the next. Vectors are float64 on the server's device.

    Attributes:
        round: how many rounds are complete.
        w: the model's parameters.
        recent: the last iterates that the reported model averages, newest last.
        radius: the clip C in force.
        server: what the server optimiser remembers.
        control: SCAFFOLD's server control variate c; None without SCAFFOLD.
        client_controls: the clients' own c_i, one row each; None without SCAFFOLD.
        memory: what the step-size rule remembers, and whatever else looks back, by name.
        candidate: which candidate of a tournament this is the state of; 0 without one.
        rivals: the states of the other candidates that are still compared, by number; empty without a tournament and after it.
    """

    round: int
    w: Tensor
    recent: tuple[Tensor, ...]
    radius: float
    server: Moments
    control: Tensor | None = None
    client_controls: Tensor | None = None
    memory: Memory = field(default_factory=dict)
    candidate: int = 0
    rivals: Mapping[int, State] = field(default_factory=dict)

    @property
    def players(self) -> dict[int, State]:
        """The states of all candidates that are still compared, in the order of their numbers."""
        everyone = {self.candidate: replace(self, rivals={}), **self.rivals}
        return dict(sorted(everyone.items()))

    @cached_property
    def reported(self) -> Tensor:
        """The average of the last iterates: post-processing that damps FedEXP's oscillation."""
        return sum(self.recent[1:], self.recent[0]) / len(self.recent) if len(self.recent) > 1 else self.w


def advance(
    algorithm: Algorithm, release: Release, state: State, *, share: float = 1.0, tau_eta_l: float | None = None
) -> tuple[State, float]:
    """The next state and η_g. The model moves here and nowhere else: w ← w + η_g·direction.

    Args:
        algorithm: says the step size, the server's optimiser and the next clip.
        release: what the round let out.
        state: before the round.
        share: for SCAFFOLD, the expected share of the clients that took part, which is public.
        tau_eta_l: for SCAFFOLD, τη_l: how far a client goes per unit of gradient, which is public too.

    Returns:
        The state after the round, and the step size η_g that was taken.
    """
    eta_g, memory = next_step(algorithm.rule, release, state.memory)
    direction, server = algorithm.server.direction(release.c_bar, state.server)
    w = torch.add(state.w, direction, alpha=eta_g)
    radius = state.radius
    if isinstance(algorithm.clip, AdaptiveClip):
        if release.within is None:
            raise InputError("the clip is adaptive, but the release has no count of the updates within it.")
        radius = algorithm.clip.update(radius, release.within)
    control = state.control
    if control is not None:
        if tau_eta_l is None:
            raise InputError("tau_eta_l is missing; SCAFFOLD's control variate is divided by it.")
        control = (1 - share) * control - share * release.c_bar / tau_eta_l
    recent = (*state.recent, w)[-algorithm.average_last :]
    known = (state.client_controls, memory, state.candidate)
    return State(state.round + 1, w, recent, radius, server, control, *known), eta_g
