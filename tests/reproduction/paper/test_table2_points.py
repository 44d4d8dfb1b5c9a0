"""A point of the search: means over its seeds, with each seed beside them."""

from __future__ import annotations

import pytest
from reproduction.paper.experiments import experiment, vary
from reproduction.paper.results.planned import Place, TrainingRun
from reproduction.paper.table2 import GridPoint

from reproduction.paper import table2

TINY = {"data.clients": 12, "data.dimension": 5, "run.rounds": 3, "local.steps": 2}
SETTINGS = vary(experiment("synthetic-cdp-fedexp"), TINY)


def test_a_point_holds_the_mean_over_its_seeds_and_every_seed():
    finals = GridPoint(SETTINGS, 2).run(Place("cpu"))["finals"]
    single = [TrainingRun(SETTINGS.with_seed(s)).run(Place("cpu"))["finals"]["distance"] for s in range(2)]
    assert [finals["distance, seed 0"], finals["distance, seed 1"]] == single
    assert finals["distance"] == pytest.approx(sum(single) / 2)


def test_one_seed_that_diverges_makes_the_point_diverge(monkeypatch):
    values = iter([1.0, None])

    class Stub(TrainingRun):
        def run(self, place):
            return {"finals": {"distance": next(values)}, "curves": {"round": [1]}}

    monkeypatch.setattr(table2, "TrainingRun", Stub)
    result = GridPoint(SETTINGS, 2).run(Place("cpu"))
    assert result == {"finals": {"distance": None, "distance, seed 0": 1.0, "distance, seed 1": None}, "curves": {}}


def test_the_number_of_seeds_counts_and_the_first_seed_does_not():
    assert GridPoint(SETTINGS, 2).full_settings != GridPoint(SETTINGS, 3).full_settings
    assert GridPoint(SETTINGS, 2).full_settings == GridPoint(SETTINGS.with_seed(4), 2).full_settings
