"""Runs are found by all of their settings, made once, and recorded beside what their file already held."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reproduction.paper.experiments import experiment
from reproduction.paper.results.collected import Results, all_records, file_of, images_of, missing
from reproduction.paper.results.planned import Place, TrainingRun
from reproduction.paper.results.record import MNIST

from reproduction.paper.results import record as recording
from tests.reproduction.paper.fabricated import Counting
from tests.reproduction.paper.results.test_record import RECORD, RUN

ONE = Place("cpu", jobs=1)


def counting(folder, *names, **more) -> list[Counting]:
    return [Counting(name, str(folder), **more) for name in names]


def test_a_run_that_two_sections_share_is_made_once_and_recorded_by_both(tmp_path):
    a, b, c = counting(tmp_path, *"abc")
    done = all_records({"one": [a, b, a], "two": [b, c]}, tmp_path, None, ONE)
    assert [run.times for run in (a, b, c)] == [1, 1, 1]
    assert [record.name for record in done["one"]] == ["a", "b"]
    assert [record.section for record in recording.read(file_of(tmp_path, "two"))] == ["two", "two"]


def test_a_later_section_finds_the_records_of_an_earlier_one(tmp_path):
    (a,) = counting(tmp_path, "a")
    all_records({"one": [a]}, tmp_path, None, ONE)
    all_records({"two": [a]}, tmp_path, None, ONE)
    assert a.times == 1
    assert len(recording.read(file_of(tmp_path, "two"))) == 1


def test_lines_that_are_not_asked_for_stay_in_their_file(tmp_path):
    a, b = counting(tmp_path, "a", "b")
    all_records({"one": [a, b]}, tmp_path, None, ONE)
    (changed,) = counting(tmp_path, "a", default=2)
    all_records({"one": [changed]}, tmp_path, None, ONE)
    records = recording.read(file_of(tmp_path, "one"))
    assert [(record.name, record.finals["default"]) for record in records] == [("a", 1), ("b", 1), ("a", 2)]


def test_a_missing_run_names_the_field_that_sets_it_apart():
    results = Results([replace(RECORD, settings=TrainingRun(RUN.settings.with_seed(1)).full_settings), RECORD], None)
    local = RUN.settings.local.model_copy(update={"lr": 0.5})
    other = TrainingRun(RUN.settings.model_copy(update={"local": local}), "other", RUN.curves)
    assert missing([other, RUN, other], results) == [other]
    assert results.why_missing(other) == (
        "'other': the nearest record is 'a run, seed 0', but local.lr is 0.5 now and was 0.001"
    )


def test_a_missing_run_names_curves_images_or_the_version_where_these_set_it_apart():
    more = TrainingRun(RUN.settings, "more", ("clip", "distance"))
    assert Results([RECORD], None).why_missing(more).endswith("its record keeps no curve of clip")
    assert "results_version is 1 now and was 0" in Results([replace(RECORD, results_version=0)], None).why_missing(RUN)
    mnist = TrainingRun(experiment("mnist-cdp-fedexp"), "mnist")
    record = replace(RECORD, settings=mnist.full_settings, images="others")
    assert Results([record], MNIST).why_missing(mnist).endswith("the images are others")
    assert Results([], None).why_missing(RUN).endswith("nothing is recorded")


def test_a_section_that_asks_for_what_it_did_not_plan_fails():
    with pytest.raises(KeyError, match="did not plan"):
        Results([], None)[RUN]


def test_the_images_are_those_of_most_records():
    assert images_of([RECORD]) is None
    assert images_of([RECORD, *(replace(RECORD, images=name) for name in ("x", "y", "y"))]) == "y"
    assert Results([], MNIST).on_mnist
    assert not Results([], "y").on_mnist
