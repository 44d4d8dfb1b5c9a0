"""Client-level differentially private federated learning with an adaptive server step size (DP-FedEXP, ICML 2025).

Importing the package does not import torch or any other slow package: a public name is loaded when it is first used.
To add a public name, add a line to the imports below.
"""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from dpfedexp.algorithms.algorithm import Algorithm as Algorithm
    from dpfedexp.algorithms.paper import cdp_fedexp as cdp_fedexp
    from dpfedexp.algorithms.paper import dp_fedadam as dp_fedadam
    from dpfedexp.algorithms.paper import dp_fedavg as dp_fedavg
    from dpfedexp.algorithms.paper import dp_scaffold as dp_scaffold
    from dpfedexp.algorithms.paper import fedavg as fedavg
    from dpfedexp.algorithms.paper import fedexp as fedexp
    from dpfedexp.algorithms.paper import ldp_fedexp as ldp_fedexp
    from dpfedexp.algorithms.round import FixedSize as FixedSize
    from dpfedexp.algorithms.round import Full as Full
    from dpfedexp.algorithms.round import LargerCohort as LargerCohort
    from dpfedexp.algorithms.round import Poisson as Poisson
    from dpfedexp.core.clipping import AdaptiveClip as AdaptiveClip
    from dpfedexp.core.local_optimizer import AdamW as AdamW
    from dpfedexp.core.local_optimizer import CosineRate as CosineRate
    from dpfedexp.core.local_optimizer import LocalOptimizer as LocalOptimizer
    from dpfedexp.core.local_optimizer import RateSchedule as RateSchedule
    from dpfedexp.core.local_optimizer import Sgd as Sgd
    from dpfedexp.core.local_optimizer import StepRate as StepRate
    from dpfedexp.core.step_size import ServerOptimizer as ServerOptimizer
    from dpfedexp.data.federation import Federation as Federation
    from dpfedexp.engine.fit import fit as fit
    from dpfedexp.engine.run import Run as Run
    from dpfedexp.engine.stopping import EarlyStopping as EarlyStopping
    from dpfedexp.engine.stopping import OnAdvice as OnAdvice
    from dpfedexp.engine.stopping import Stop as Stop
    from dpfedexp.engine.tournament import Candidate as Candidate
    from dpfedexp.engine.train import train as train
    from dpfedexp.errors import BudgetExceeded as BudgetExceeded
    from dpfedexp.errors import InputError as InputError
    from dpfedexp.evaluation import Evaluation as Evaluation
    from dpfedexp.report.compare import compare as compare
    from dpfedexp.report.compare import plan as plan
    from dpfedexp.trainers.execution import Execution as Execution
else:
    # Hidden from type checkers, for which a module `__getattr__` would make every misspelt name an Any.
    __getattr__, __dir__, __all__ = lazy_names(__name__, "__version__")
