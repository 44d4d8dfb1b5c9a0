"""A finished cell is never run twice, and an interrupted command goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpfedexp.paper import store as store_module
from dpfedexp.paper.cells import Place, TrainingCell
from dpfedexp.paper.experiments import experiment, vary
from dpfedexp.paper.store import Results, Store
from tests.paper.fabricated import Counting

TINY = {"data.clients": 12, "data.dimension": 5, "run.rounds": 3, "local.steps": 2}


def tiny() -> TrainingCell:
    return TrainingCell(vary(experiment("synthetic-cdp-fedexp"), TINY))


def counting(folder: Path, *names: str) -> list[Counting]:
    return [Counting(name, str(folder)) for name in names]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cells", Place("cpu", jobs=1))


def test_a_finished_cell_is_never_run_twice(store, tmp_path):
    both = counting(tmp_path, "a", "b")
    store.run([*both, *both], "cells")
    store.run(both, "cells")
    assert [cell.times for cell in both] == [1, 1]
    assert Results(store)[both[0]] == {"value": "a"}


def test_an_interrupted_run_keeps_what_was_finished_and_goes_on(store, tmp_path):
    three = counting(tmp_path, "a", "b", "c")
    (tmp_path / "b-fails").touch()
    with pytest.raises(RuntimeError, match="interrupted"):
        store.run(three, "cells")
    assert [cell.times for cell in three] == [1, 0, 0]
    (tmp_path / "b-fails").unlink()
    store.run(three, "cells")
    assert [cell.times for cell in three] == [1, 1, 1]


def test_workers_save_their_own_cells(tmp_path):
    four = counting(tmp_path, *"abcd")
    Store(tmp_path / "cells", Place("cpu", jobs=2)).run(four, "cells")
    assert [cell.times for cell in four] == [1, 1, 1, 1]
    assert len(list((tmp_path / "cells").glob("*.json"))) == 4


def test_a_damaged_file_counts_as_not_run(store, tmp_path):
    (one,) = counting(tmp_path, "a")
    store.run([one], "cells")
    store.path(one).write_text('{"version": 1, "resu')
    assert store.load(one) is None
    store.run([one], "cells")
    assert one.times == 2
    assert store.load(one) == {"value": "a"}


def test_nothing_half_written_is_left_behind(store, tmp_path):
    store.run(counting(tmp_path, "a", "b"), "cells")
    assert all(path.suffix == ".json" for path in store.folder.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"run.seed": 1},
        {"algorithm.clip": 0.31},
        {"local.lr": 0.002},
        {"data.clients": 13},
        {"algorithm.numerator": "free"},
    ],
)
def test_the_key_changes_with_what_the_result_depends_on(store, change):
    cell = tiny()
    assert store.path(cell) != store.path(TrainingCell(vary(cell.settings, change)))


@pytest.mark.parametrize("change", [{"run.device": "cpu"}, {"run.chunk_size": 7}, {"data.path": "somewhere"}])
def test_the_key_does_not_change_with_where_it_runs(store, change):
    cell = tiny()
    assert store.path(cell) == store.path(TrainingCell(vary(cell.settings, change)))


def test_a_new_version_of_the_results_is_another_key(store, monkeypatch):
    before = store.path(tiny())
    monkeypatch.setattr(store_module, "RESULTS_VERSION", store_module.RESULTS_VERSION + 1)
    assert store.path(tiny()) != before


def test_other_images_are_another_key(tmp_path, monkeypatch):
    cell = TrainingCell(experiment("mnist-cdp-fedexp"))
    paths = set()
    for fingerprint in ("one", "two"):
        store = Store(tmp_path, Place("cpu"))
        monkeypatch.setattr(store, "_images", fingerprint)
        paths.add(store.path(cell))
    assert len(paths) == 2


def test_a_training_cell_keeps_history_privacy_and_the_training_loss(store):
    cell = tiny()
    store.run([cell], "cells")
    saved = json.loads(store.path(cell).read_text())
    result = saved["result"]
    assert saved["training"]["data"]["clients"] == 12
    assert [record["round"] for record in result["history"]] == [1, 2, 3]
    assert result["history"][-1]["distance"] > 0
    assert result["history"][-1]["nonprivate_training_loss"] > 0
    assert result["epsilon_total"] > result["epsilon_round"] > 0
    assert "differential privacy" in result["privacy"].lower() or "privacy" in result["privacy"].lower()


def test_a_run_that_diverges_is_kept_without_infinities(store):
    cell = TrainingCell(vary(tiny().settings, {"local.lr": 50.0, "algorithm.clip": 1e19}))
    store.run([cell], "cells")
    json.loads(store.path(cell).read_text(), parse_constant=lambda name: pytest.fail(name))


def test_one_process_on_an_accelerator_and_a_process_to_a_core_elsewhere():
    assert Place("cuda:1").workers == 1
    assert Place("cpu").workers is None
    assert Place("cuda", jobs=3).workers == 3
