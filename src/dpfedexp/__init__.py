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
from dpfedexp.local import FedProx, Sgd
from dpfedexp.participation import FixedSize, Full, Poisson
from dpfedexp.runs.run import Run
from dpfedexp.simulation.train import train
from dpfedexp.trainers.execution import Execution

__version__ = "0.1.0"

__all__ = [
    "AdaptiveClip",
    "Algorithm",
    "BudgetExceeded",
    "Execution",
    "FedProx",
    "Federation",
    "FixedSize",
    "Full",
    "InputError",
    "Poisson",
    "Run",
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
