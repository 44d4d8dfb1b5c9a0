"""Results as runs would leave them, without running anything."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from reproduction.paper.figure2 import InitialStepRun
from reproduction.paper.results.planned import Place, PlannedRun, Result, TrainingRun, columns, finals
from reproduction.paper.table2 import GridPoint

from dpfedexp.config import Settings

RANK = {"fedexp": 3.0, "scaffold": 1.0, "fedavg": 2.0, "fedadam": 1.5}


@dataclass(frozen=True)
class Counting:
    """A run that leaves a mark for every time it is made, and fails while a file says so."""

    name: str
    marks: str
    default: int = 1
    seed: ClassVar[int] = 0
    curves: ClassVar[tuple[str, ...]] = ("value",)

    needs_images: ClassVar[bool] = False
    cost: ClassVar[float] = 1.0

    @property
    def full_settings(self) -> dict[str, Any]:
        return {"counting": {"name": self.name, "default": self.default}}

    @property
    def problem(self) -> str:
        return self.name

    def run(self, place: Place) -> Result:
        folder = Path(self.marks)
        if (folder / f"{self.name}-fails").exists():
            raise RuntimeError("interrupted")
        with (folder / self.name).open("a") as file:
            file.write("x")
        return {"finals": {"default": self.default}, "curves": {"value": [self.name]}, "epsilon_total": 1.0}

    @property
    def times(self) -> int:
        path = Path(self.marks) / self.name
        return len(path.read_text()) if path.exists() else 0


class Fabricated:
    """Stands in for `Results`: FedEXP is always a little better than FedAvg, and both than SCAFFOLD."""

    on_mnist = True

    def __getitem__(self, run: PlannedRun) -> Result:
        if isinstance(run, InitialStepRun):
            m, wobble = float(run.clients), 1e-3
            values = {"naive": 50 * m, "proposed": m, "target": m}
            curves = {k: [v * (1 + wobble * i) for i in range(run.repetitions)] for k, v in values.items()}
            return {"finals": values, "curves": curves}
        assert isinstance(run, TrainingRun | GridPoint)
        return training(run.settings)

    def training(self, runs: list[Settings]) -> list[Result]:
        return [self[TrainingRun(settings)] for settings in runs]


def training(settings: Settings) -> Result:
    name = settings.algorithm.name
    better = next(rank for key, rank in RANK.items() if key in name)
    seed = settings.run.seed
    history = []
    for number in range(1, settings.run.rounds + 1):
        gain = better * number / settings.run.rounds + 0.01 * seed
        record = {"round": number, "eta_g": 9.0 / number, "clip": 0.3, "epsilon_total": 0.1 * number, "seconds": 0.5}
        if settings.data.kind == "mnist":
            record |= {"test_accuracy": 0.9 + 0.01 * gain, "test_loss": 1.0}
        else:
            loss = 20.0 - gain + abs(settings.local.lr - 0.001)
            record |= {"distance": 20.0 - gain, "nonprivate_training_loss": loss}
        history.append(record)
    promise = {"epsilon_round": 1.5, "epsilon_total": 15.4, "delta": 1e-5, "parameters": 10}
    result = {"finals": finals(history), "curves": columns(history), **promise}
    return result | {"privacy": "Promised & kept.", "seconds": 1.0}
