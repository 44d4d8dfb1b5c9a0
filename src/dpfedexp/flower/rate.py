"""The local rate of a deployment, which must be a number in every round, and what SCAFFOLD makes of it."""

from __future__ import annotations

from flwr.app import Message

from dpfedexp.algorithms import Algorithm
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.errors import InputError, require
from dpfedexp.flower.messages import Request


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


def tau_eta_l_of(algorithm: Algorithm, local: LocalOptimiser | None, clients_per_node: int) -> float | None:
    """τη_l, which SCAFFOLD's control variates divide by; None without SCAFFOLD."""
    if not algorithm.scaffold:
        return None
    require(algorithm.scaffold == "update", "control is 'report', which is for simulations; use 'update'.")
    require(clients_per_node == 1, "dp_scaffold keeps a control variate per client: use one client per node.")
    if local is None or local.steps is None:
        raise InputError("dp_scaffold needs the clients' local steps: pass local=Sgd(lr=…, steps=…) to DpFedExp.")
    return local.tau_eta_l(local.steps)
