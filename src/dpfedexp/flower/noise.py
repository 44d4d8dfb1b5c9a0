"""How a deployment runs a mechanism: its noise comes from the operating system, never from a seed, and lies on a grid."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.participation import Participation
from dpfedexp.core.noise import Noise
from dpfedexp.core.noise.chacha import ChaChaNoise
from dpfedexp.core.votes import Ask
from dpfedexp.engine.rounds import LONG, Ahead
from dpfedexp.errors import require
from dpfedexp.mechanisms import Mechanism


def deployment_noise() -> Noise:
    """A fresh source for one purpose of one round: every call has entropy of its own, so no two sources are related."""
    return ChaChaNoise()


def begun(make: Callable[[], Noise], mechanism: Mechanism, width: int) -> Noise:
    """A fresh source, whose draw for a sum of so many numbers is under way where the server draws one: nodes take longer."""
    central = mechanism.is_private and not mechanism.is_local and not mechanism.needs_helper
    if central and mechanism.noise_kind != "strict" and width >= LONG:
        return Ahead(make(), width, torch.device("cpu"))
    return make()


def deployed(mechanism: Mechanism) -> Mechanism:
    """The mechanism on the grid, so that no low bit of a release tells what it was added to.

    Formal guarantee: plain noise never leaves this function. A mechanism whose `secure` says so and whose noise stays plain is
    refused.
    """
    if not mechanism.is_private:
        return mechanism
    secure = mechanism.secure()
    require(
        bool(secure.noise_kind),
        f"the mechanism {mechanism.kind!r} draws plain noise where a deployment asked for secure noise; its secure() must return "
        "a variant whose noise_kind is True or 'strict'.",
    )
    return secure


def bind(
    algorithm: Algorithm,
    participation: Participation,
    dimension: int,
    clients: int,
    rounds: int,
    votes: tuple[Ask, ...] = (),
) -> Mechanism:
    """The mechanism of the first round: the server's, and the one that a node finds announced in the same settings."""
    sampling, cohort = participation.sampling(clients), participation.expected(clients)
    return algorithm.bind(dimension, cohort, sampling, rounds, secure=algorithm.private, votes=votes)
