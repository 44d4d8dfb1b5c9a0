"""A round of pfl's own FedAvg with central DP: `python pfl_round.py WORKLOAD CLIENTS ROUNDS [--no-onednn]`; prints one JSON line.

Started by torchrun it splits the clients over its processes, which is pfl's own way.
"""

from __future__ import annotations

import json
import os
import sys
import time

import shared
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch.nn import functional as F


class Clock(TrainingProcessCallback):
    def __init__(self) -> None:
        self.wall, self.cpu = [time.perf_counter()], [time.process_time()]

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        return False, Metrics()


def main() -> None:
    name, clients, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if "--no-onednn" in sys.argv:
        torch.backends.mkldnn.set_flags(False)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.set_num_threads(1)
    work = shared.load(name)
    module = work.build()
    module.loss = lambda x, y: F.cross_entropy(module(x), y)
    module.metrics = lambda x, y: {}
    x, y = work.data(clients)
    users = FederatedDataset(
        lambda i: Dataset(raw_data=[x[i], y[i]]), get_user_sampler("minimize_reuse", list(range(clients)))
    )
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    privacy = CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.3, 5.0))
    backend = SimulatedBackend(training_data=users, val_data=users, postprocessors=[privacy])
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 1, evaluation_frequency=10**6, train_cohort_size=clients, val_cohort_size=0
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.steps, local_learning_rate=work.lr, local_batch_size=None
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    if int(os.environ.get("RANK", "0")) == 0:
        wall = [b - a for a, b in zip(clock.wall, clock.wall[1:], strict=False)]
        cpu = [b - a for a, b in zip(clock.cpu, clock.cpu[1:], strict=False)]
        world = int(os.environ.get("WORLD_SIZE", "1"))
        parameters = sum(p.numel() for p in module.parameters())
        print(
            json.dumps(
                {
                    "workload": name,
                    "cohort": clients,
                    "parameters": parameters,
                    "device": "cpu",
                    "seconds_per_round": min(wall[1:]),
                    "cpu_seconds_per_round": world * min(cpu[1:]),
                    "peak_memory_bytes": world * shared.peak_memory(),
                }
            )
        )


if __name__ == "__main__":
    main()
