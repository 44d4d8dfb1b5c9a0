"""The local rate of a deployment, which must be a number in every round."""

from __future__ import annotations

from flwr.app import Message

from dpfedexp.errors import InputError
from dpfedexp.flower.messages import Request
from dpfedexp.local import LocalOptimiser


def at_round(local: LocalOptimiser, message: Message | None) -> LocalOptimiser:
    """The optimiser at the rate of the round that a message asks for; as it is where its rate stays."""
    if local.schedule is None or message is None:
        return local
    return local.in_round(Request.from_message(message).round)


def check_rate(local: LocalOptimiser) -> None:
    """One sentence for a rate that would have to set itself, which takes votes before the first round."""
    if local.automatic:
        raise InputError(
            "local.lr is 'auto', which is for simulations; a deployment needs a number: take the one that `dpfedexp fit` or "
            'lr = "auto" chose in a simulation of the federation, such as lr = 0.1.'
        )
