"""The algorithms by name. Each combines a mechanism, a clip, a step-size rule and a server optimizer."""

from collections.abc import Callable

from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.algorithms.paper import cdp_fedexp, dp_fedadam, dp_fedavg, dp_scaffold, fedavg, fedexp, ldp_fedexp

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    made.__name__: made for made in (fedavg, fedexp, dp_fedavg, dp_fedadam, cdp_fedexp, ldp_fedexp, dp_scaffold)
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "cdp_fedexp",
    "dp_fedadam",
    "dp_fedavg",
    "dp_scaffold",
    "fedavg",
    "fedexp",
    "ldp_fedexp",
]
