"""`runs.jsonl`: lines that say everything, survive their file, and are complete or not written."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from reproduction.paper.experiments import experiment
from reproduction.paper.results.planned import TrainingRun
from reproduction.paper.results.record import Record

from dpfedexp.errors import InputError
from reproduction.paper.results import record as recording

RUN = TrainingRun(experiment("synthetic-cdp-fedexp"), "a run, seed 0", ("round", "distance"))
RECORD = Record(
    section="synthetic",
    name="a run, seed 0",
    settings=RUN.full_settings,
    seed=0,
    images=None,
    results_version=recording.RESULTS_VERSION,
    finals={"distance": 1.5, "test_loss": None},
    curves={"round": [1, 2], "distance": [2.0, 1.0], "eta_g": [3.0, "diverged"]},
    promise={"epsilon_total": 15.4, "privacy": "ε ≤ 15.4"},
    commit="c" * 40,
    dirty=False,
    versions={"torch": "2"},
    device="cpu (x86_64)",
    seconds=1.25,
    recorded_in=None,
)


def test_a_record_survives_its_file(tmp_path):
    path = tmp_path / "synthetic" / "runs.jsonl"
    recording.write(path, [RECORD, replace(RECORD, seed=1)])
    assert recording.read(path) == [RECORD, replace(RECORD, seed=1)]
    assert set(json.loads(path.read_text(encoding="utf-8").splitlines()[0])) == {f.name for f in fields(Record)}


def test_a_file_that_is_not_there_holds_no_records(tmp_path):
    assert recording.read(tmp_path / "runs.jsonl") == []


@pytest.mark.parametrize("line", ["{", '{"section": "synthetic"}', "[1]"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "runs.jsonl").write_text(RECORD.to_line() + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 2 of .*runs.jsonl' is not the record of a run"):
        recording.read(tmp_path / "runs.jsonl")


def test_a_section_keeps_the_curves_that_it_shows():
    kept = RECORD.kept_for("figure", RUN)
    assert (kept.section, set(kept.curves)) == ("figure", {"round", "distance"})
    assert kept.promise == RECORD.promise
    assert kept.key == RECORD.key
    bare = RECORD.kept_for("grid", TrainingRun(RUN.settings, "bare"))
    assert (bare.curves, bare.promise["privacy"]) == ({}, None)
    assert not bare.serves(RUN)
    assert kept.serves(RUN)


def test_other_images_and_a_corrected_formula_are_other_runs():
    keys = {one.key for one in (RECORD, replace(RECORD, images="x"), replace(RECORD, results_version=99))}
    assert len(keys) == 3
