"""What an interrupted command has finished is not run again, and what it keeps is a whole record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reproduction.paper.experiments import experiment, vary
from reproduction.paper.results.collected import Cache, key_of
from reproduction.paper.results.planned import DIVERGED, Place, TrainingRun, points

from tests.reproduction.paper.fabricated import Counting

TINY = {"data.clients": 12, "data.dimension": 5, "run.rounds": 3, "local.steps": 2}
ONE = Place("cpu", jobs=1)


def tiny(**changes) -> TrainingRun:
    return TrainingRun(vary(experiment("synthetic-cdp-fedexp"), TINY | changes), "tiny", ("round", "distance"))


def by_key(*runs) -> dict:
    return {key_of(run, None): run for run in runs}


def counting(folder: Path, *names: str) -> dict:
    return by_key(*(Counting(name, str(folder)) for name in names))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_a_failure_keeps_what_was_finished(cache, tmp_path):
    runs = counting(tmp_path, *"abc")
    (tmp_path / "b-fails").touch()
    with pytest.raises(RuntimeError, match="interrupted"):
        cache.run(runs, None, ONE)
    assert [cache.load(key) is not None for key in runs] == [True, False, False]


def test_workers_keep_their_own_runs(cache, tmp_path):
    runs = counting(tmp_path, *"abcd")
    cache.run(runs, None, Place("cpu", jobs=2))
    assert [run.times for run in runs.values()] == [1, 1, 1, 1]
    assert all(cache.load(key).curves == {"value": [run.name]} for key, run in runs.items())


def test_a_damaged_file_counts_as_not_run(cache, tmp_path):
    runs = counting(tmp_path, "a")
    cache.run(runs, None, ONE)
    (key,) = runs
    cache.path(key).write_text('{"section": "", "na')
    assert cache.load(key) is None


def test_nothing_half_written_is_left_behind_and_dropping_all_takes_the_folder_away(cache, tmp_path):
    runs = counting(tmp_path, "a", "b")
    cache.run(runs, None, ONE)
    assert all(path.suffix == ".json" for path in cache.folder.iterdir())
    cache.drop(runs)
    assert not cache.folder.exists()


def test_a_training_run_keeps_finals_curves_promise_and_what_made_it(cache):
    run = tiny()
    cache.run(by_key(run), "images", ONE)
    record = cache.load(key_of(run, "images"))
    assert record.settings["data"]["clients"] == 12
    assert record.curves["round"] == [1, 2, 3]
    assert record.finals["distance"] == pytest.approx(sum(record.curves["distance"]) / 3)
    assert record.finals["nonprivate_training_loss"] > 0
    assert record.promise["epsilon_total"] > record.promise["epsilon_round"] > 0
    assert "epsilon" in record.promise["privacy"]
    assert record.images is None, "a synthetic run sees no images"
    assert (record.seed, record.recorded_in) == (0, None)
    assert record.seconds > 0
    assert record.versions["torch"]
    assert record.device.startswith("cpu")


def test_a_run_that_diverges_is_kept_without_infinities(cache):
    run = tiny(**{"local.lr": 50.0, "algorithm.clip": 1e19})
    cache.run(by_key(run), None, ONE)
    json.loads(cache.path(key_of(run, None)).read_text(), parse_constant=lambda name: pytest.fail(name))


def test_curves_tell_a_round_that_was_not_evaluated_from_one_that_diverged():
    result = {"curves": {"round": [1, 2, 3], "distance": [None, 2.5, DIVERGED]}}
    assert points(result, "distance") == [(2, 2.5), (3, None)]


def test_one_process_on_an_accelerator_and_a_process_to_a_core_elsewhere():
    assert Place("cuda:1").workers == 1
    assert Place("cpu").workers is None
    assert Place("cuda", jobs=3).workers == 3
