"""What the suite trains on: clients, a model, a fixed amount of local work, and one number that says how well it went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from dpfedexp.core.local_optimizer import Sgd
from dpfedexp.core.losses import Loss
from dpfedexp.data import Federation

Kind = Literal["classification", "regression", "text", "recommendation"]
Metric = Literal["accuracy", "loss"]


@dataclass(frozen=True)
class Loaded:
    """A problem in memory.

    Attributes:
        model: fresh, its start drawn from the seed.
        clients: who trains.
        test: (inputs, targets) that no client holds.
        loss: as `train` takes it; None for the usual one of the targets.
    """

    model: nn.Module
    clients: Federation
    test: tuple[Any, Any]
    loss: str | Loss | None = None


@dataclass(frozen=True)
class Folders:
    """Where data lie.

    Attributes:
        suite: the prepared natural problems; None for $DPFEDEXP_SUITE, or the user's cache.
        data: MNIST and CIFAR-10; None for $DPFEDEXP_DATA, or the user's cache.
    """

    suite: Path | str | None = None
    data: Path | str | None = None


@dataclass(frozen=True)
class Problem:
    """One federation of the suite. Local work is the same for all algorithms; only the local rate differs from run to run.

    Attributes:
        name: what `--problems` takes.
        summary: one line: who the clients are, what is predicted, and by what.
        kind: what sort of task it is.
        natural: whether the clients are people, schools or roles, and not dealt out or made up.
        make: from folders and a seed to the problem in memory; the seed decides the model's start and, where clients are dealt
            out or made up, who holds what. Who is tested on never depends on it for natural clients.
        center: the local rate in the middle of the grid.
        metric: what is compared: test accuracy, or test loss.
        rounds: rounds of a run.
        steps: full-batch local steps of a round.
        stored: the prepared file that it reads, None where nothing needs preparing.
        synthetic: whether its data follow from the seed and are read from nowhere.
    """

    name: str
    summary: str
    kind: Kind
    natural: bool
    make: Callable[[Folders, int], Loaded]
    center: float
    metric: Metric
    rounds: int = 50
    steps: int = 10
    stored: str | None = None
    synthetic: bool = False

    @property
    def rates(self) -> tuple[float, ...]:
        """Nine local rates over four decades, wide enough that both ends are bad."""
        return tuple(float(f"{self.center * 10 ** (step / 2):.3g}") for step in range(-4, 5))

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"

    def local(self, lr: float) -> Sgd:
        return Sgd(lr=lr, steps=self.steps)

    def load(self, folder: Path | str | None = None, *, seed: int = 0, data: Path | str | None = None) -> Loaded:
        """The problem in memory.

        Args:
            folder: the prepared natural problems; None for $DPFEDEXP_SUITE, or the user's cache.
            seed: of the model's start and of clients that are dealt out or made up.
            data: the folder of MNIST and CIFAR-10; None for $DPFEDEXP_DATA, or the user's cache.
        """
        return self.make(Folders(folder, data), seed)
