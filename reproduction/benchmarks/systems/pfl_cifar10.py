"""pfl's CIFAR-10 benchmark by pfl's own code: `python pfl_cifar10.py ARRAYS.npz '{…}'`; prints one JSON line.

The arrays hold every client's images and labels and the test set, so that data, partition and start are those of the other system.
Started by torchrun it splits the clients over its processes, which is pfl's own way. pfl wants a GPU for each process; that several
share one is our help to it, with sums through gloo, because NCCL refuses two processes there.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import shared
import torch

if torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > torch.cuda.device_count():
    os.environ["LOCAL_RANK"] = "0"
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend: start(backend="gloo")

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
    """Seconds of every iteration, with the GPU's work done, and the accuracy now and then, which is not in the seconds."""

    def __init__(self, every: int, accuracy: Callable[[], float]) -> None:
        self.every = every
        self.accuracy = accuracy
        self.seconds: list[float] = []
        self.accuracies: list[tuple[int, float]] = []
        self.began = time.perf_counter()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        if len(self.seconds) % self.every == 0:
            self.accuracies.append((len(self.seconds), self.accuracy()))
        self.began = time.perf_counter()
        return False, Metrics()


def accuracy(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    module.eval()
    with torch.no_grad():
        right = [
            (module(part).argmax(1) == labels).sum() for part, labels in zip(x.split(1000), y.split(1000), strict=True)
        ]
    module.train()
    return float(sum(right)) / len(y)


def main() -> None:
    given = json.loads(sys.argv[2])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.set_num_threads(1)
    if given["precision"] == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = given["device"]
    arrays = np.load(sys.argv[1])
    x, y, test_x, test_y = (torch.from_numpy(arrays[name]) for name in ("x", "y", "test_x", "test_y"))
    x, test_x = (part.to(device).float().div_(255) for part in (x, test_x))
    y, test_y = (part.to(device).long() for part in (y, test_y))
    networks = shared.networks()
    module = networks.build("pfl_cifar_net", given["seed"]).to(device)
    module.loss = lambda inputs, targets: F.cross_entropy(module(inputs), targets)
    module.metrics = lambda inputs, targets: {}
    torch.manual_seed(given["seed"])
    np.random.seed(given["seed"])
    sampler = get_user_sampler("random", list(range(len(x))))
    users = FederatedDataset(lambda i: Dataset(raw_data=[x[i], y[i]]), sampler)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    postprocessors = []
    if given["noise_multiplier"]:
        # pfl's own way to simulate a larger cohort: the noise on the sum is scaled down by cohort over noise cohort.
        noise = given["noise_multiplier"] * given["cohort"] / given["noise_cohort"]
        postprocessors = [CentrallyAppliedPrivacyMechanism(GaussianMechanism(given["clip"], noise))]
    backend = SimulatedBackend(training_data=users, val_data=users, postprocessors=postprocessors)
    clock = Clock(given["evaluate_every"], lambda: accuracy(module, test_x, test_y))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=given["rounds"],
            evaluation_frequency=10**6,
            train_cohort_size=given["cohort"],
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    if int(os.environ.get("RANK", "0")) == 0:
        row = {
            "rounds": len(clock.seconds),
            "seconds_per_round": statistics.median(clock.seconds[1:] or clock.seconds),
            "seconds": sum(clock.seconds),
            "accuracy": accuracy(module, test_x, test_y),
            "accuracies": clock.accuracies,
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
