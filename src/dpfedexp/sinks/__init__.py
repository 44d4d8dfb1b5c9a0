"""Where a run's rounds can be sent while it goes on: TensorBoard, MLflow and Weights & Biases, each given as `on_round`.

Formal guarantee: a sink sends what was released, what is public and what the server measured on data of its own. Durations and
diagnostics, which depend on the clients' data without noise, are not sent, in simulations either. A secure run is sent as a whole
after its last round, so that no service learns how long a round took (`sent.Sink`).
"""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

if TYPE_CHECKING:
    from dpfedexp.sinks.event_files import TensorBoard as TensorBoard
    from dpfedexp.sinks.tracking_server import MLflow as MLflow
    from dpfedexp.sinks.wandb_project import WandB as WandB
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
