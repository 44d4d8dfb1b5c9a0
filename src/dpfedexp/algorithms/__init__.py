"""The paper's algorithms by name, one per file. Each combines a mechanism, a clip, a step-size rule and a server optimizer."""

from collections.abc import Callable

from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.algorithms.cdp_fedexp import cdp_fedexp
from dpfedexp.algorithms.dp_fedadam import dp_fedadam
from dpfedexp.algorithms.dp_fedavg import dp_fedavg
from dpfedexp.algorithms.dp_scaffold import dp_scaffold
from dpfedexp.algorithms.fedexp import fedavg, fedexp
from dpfedexp.algorithms.ldp_fedexp import ldp_fedexp

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
