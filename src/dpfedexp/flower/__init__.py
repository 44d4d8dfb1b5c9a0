"""The same algorithms as a real federation on Flower: `DpFedExp` on the server, `private_training` on the clients.

Flower is imported when one of these names is first used, so the rest of the library works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpfedexp.errors import InputError

if TYPE_CHECKING:
    from dpfedexp.flower.cohort import train_hosted
    from dpfedexp.flower.node.guard import Guard
    from dpfedexp.flower.node.mod import hosted_clients, private_training, privatize
    from dpfedexp.flower.noise import deployment_noise
    from dpfedexp.flower.server.strategy import DpFedExp
    from dpfedexp.flower.settings import local_from, round_timeout, strategy_from
    from dpfedexp.flower.training import train_local

_HOME = {
    "DpFedExp": "server.strategy",
    "Guard": "node.guard",
    "deployment_noise": "noise",
    "hosted_clients": "node.mod",
    "local_from": "settings",
    "private_training": "node.mod",
    "privatize": "node.mod",
    "round_timeout": "settings",
    "strategy_from": "settings",
    "train_hosted": "cohort",
    "train_local": "training",
}

__all__ = [
    "DpFedExp",
    "Guard",
    "deployment_noise",
    "hosted_clients",
    "local_from",
    "private_training",
    "privatize",
    "round_timeout",
    "strategy_from",
    "train_hosted",
    "train_local",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flwr":
            raise
        raise InputError("Flower is not installed; install it with: pip install 'dpfedexp[flower]'.") from None
