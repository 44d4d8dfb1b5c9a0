"""PrivUnit inside Apple's pfl: a postprocessor that makes every user's statistics private before they leave the device.

    pip install pfl && python examples/pfl_postprocessor.py

Put `PrivateUpdates` into the list `postprocessors` of a pfl backend, as the last one. Here it is called as a backend calls it.
"""

import sys

import numpy as np
from pfl.context import UserContext
from pfl.metrics import Metrics, StringMetricName
from pfl.postprocessor.base import Postprocessor
from pfl.stats import MappedVectorStatistics

from dpfedexp.mechanisms import privatize


class PrivateUpdates(Postprocessor):
    """All of a user's vectors together through one mechanism, with the ε that it cost among the metrics."""

    def __init__(self, clip: float, epsilon: float, mechanism: str = "privunit", delta: float = 1e-5) -> None:
        self.how = {"clip": clip, "epsilon": epsilon, "mechanism": mechanism, "delta": delta}

    def postprocess_one_user(self, *, stats, user_context):
        names = list(stats.keys())
        flat = np.concatenate([np.ravel(stats[name]) for name in names])
        # A weight tells how much a user holds: everybody counts as one.
        report = privatize(flat, **self.how)
        parts = np.split(report.vector, np.cumsum([np.size(stats[name]) for name in names])[:-1])
        shaped = {name: part.reshape(np.shape(stats[name])) for name, part in zip(names, parts, strict=True)}
        metrics = Metrics([(StringMetricName("epsilon of a report"), report.epsilon)])
        return MappedVectorStatistics(shaped, weight=1), metrics


def main(small: bool = False) -> float:
    rng = np.random.default_rng(0)
    private = PrivateUpdates(clip=1.0, epsilon=4.0)
    total, users = None, 500 if small else 5000
    for number in range(users):
        stats = MappedVectorStatistics({"w": np.full((2, 3), 0.3), "b": np.full(2, -0.2)}, weight=7)
        shown, metrics = private.postprocess_one_user(
            stats=stats, user_context=UserContext(num_datapoints=7, seed=number, user_id=str(rng.integers(1000)))
        )
        total = shown if total is None else total + shown
    total.average()
    error = float(max(np.abs(total["w"] - 0.3).max(), np.abs(total["b"] + 0.2).max()))
    print(f"mean of {users} private reports: off by at most {error:.3f}; {metrics}")
    return error


if __name__ == "__main__":
    main(small="--small" in sys.argv)
