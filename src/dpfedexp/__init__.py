"""Client-level differentially private federated learning whose server step size sets itself (DP-FedEXP, ICML 2025)."""

from dpfedexp.algorithms import (
    Algorithm,
    cdp_fedexp,
    dp_fedadam,
    dp_fedavg,
    dp_scaffold,
    fedavg,
    fedexp,
    ldp_fedexp,
    naive_ldp_fedexp,
)
from dpfedexp.clipping import AdaptiveClip
from dpfedexp.data import Federation
from dpfedexp.errors import BudgetExceeded, InputError
from dpfedexp.local import FedProx, LocalOptimiser, Sgd
from dpfedexp.participation import FixedSize, Full, Poisson
from dpfedexp.server import ServerOptimiser
from dpfedexp.simulation.train import Run, train

__version__ = "0.1.0"

__all__ = [
    "AdaptiveClip",
    "Algorithm",
    "BudgetExceeded",
    "FedProx",
    "Federation",
    "FixedSize",
    "Full",
    "InputError",
    "LocalOptimiser",
    "Poisson",
    "Run",
    "ServerOptimiser",
    "Sgd",
    "__version__",
    "cdp_fedexp",
    "dp_fedadam",
    "dp_fedavg",
    "dp_scaffold",
    "fedavg",
    "fedexp",
    "ldp_fedexp",
    "naive_ldp_fedexp",
    "train",
]
