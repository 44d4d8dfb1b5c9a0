"""The local rate of a deployment, which must be a number."""

from __future__ import annotations

from dpfedexp.errors import InputError
from dpfedexp.local import LocalOptimiser


def check_rate(local: LocalOptimiser) -> None:
    """One sentence for a rate that would have to set itself, which takes votes before the first round."""
    if local.automatic:
        raise InputError(
            "local.lr is 'auto', which is for simulations; a deployment needs a number: take the one that `dpfedexp fit` or "
            'lr = "auto" chose in a simulation of the federation, such as lr = 0.1.'
        )
