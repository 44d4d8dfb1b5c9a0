"""One point (η_l, C) of the paper's search: the same run for a few seeds, and the mean of its metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

from dpfedexp.config import Settings
from dpfedexp.files import finite
from reproduction.paper.results.full_settings import in_full
from reproduction.paper.results.planned import Place, Result, TrainingRun
from reproduction.paper.results.spread import final


@dataclass(frozen=True)
class GridPoint:
    """A configuration for the seeds 0 … `seeds` − 1. Its record keeps the means and what each seed gave, and no curves."""

    settings: Settings
    seeds: int
    name: str = field(default="", compare=False)

    curves: ClassVar[tuple[str, ...]] = ()
    seed: ClassVar[None] = None

    @property
    def full_settings(self) -> dict[str, Any]:
        return in_full(self.settings.with_seed(0)) | {"grid_point": {"seeds": self.seeds}}

    @property
    def needs_images(self) -> bool:
        return self._first.needs_images

    @property
    def cost(self) -> float:
        return self._first.cost * self.seeds

    @property
    def problem(self) -> str:
        return self._first.problem

    @property
    def _first(self) -> TrainingRun:
        return TrainingRun(self.settings.with_seed(0))

    def run(self, place: Place) -> Result:
        results = [TrainingRun(self.settings.with_seed(seed)).run(place) for seed in range(self.seeds)]
        finals: dict[str, float | None] = {}
        for metric in results[0]["finals"]:
            values = [final(result, metric) for result in results]
            finals[metric] = finite(fmean(values)) if all(map(math.isfinite, values)) else None
            finals |= {f"{metric}, seed {seed}": finite(value) for seed, value in enumerate(values)}
        return {**results[0], "finals": finals, "curves": {}}
