"""Runs are found by all of their settings, made once, and recorded with what made them."""

import json
import subprocess
from dataclasses import fields, replace

import pytest
from reproduction.paper.experiments import experiment, vary
from reproduction.paper.results import full_settings
from reproduction.paper.results import record as recording
from reproduction.paper.results.collected import Cache, Results, all_records, file_of, key_of, missing
from reproduction.paper.results.full_settings import differences, in_full
from reproduction.paper.results.planned import Place, TrainingRun
from reproduction.paper.results.record import Record, key

import dpfedexp
from dpfedexp import algorithms
from dpfedexp.errors import InputError
from tests.reproduction.fabricated import Counting

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


@pytest.mark.parametrize("line", ["{", '{"section": "synthetic"}', "[1]"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "runs.jsonl").write_text(RECORD.to_line() + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 2 of .*runs.jsonl' is not the record of a run"):
        recording.read(tmp_path / "runs.jsonl")


def test_the_commit_is_recorded_and_whether_the_source_differs_from_it(tmp_path, monkeypatch):
    def imported(folder: str) -> tuple[str | None, bool | None]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
        monkeypatch.setattr(dpfedexp, "__file__", str(tmp_path / folder / "__init__.py"))
        recording.commit.cache_clear()
        return recording.commit()

    def git(*arguments):
        named = ("git", "-c", "user.name=n", "-c", "user.email=e@example.com")
        return subprocess.run([*named, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    try:
        assert imported("src/dpfedexp") == (None, None)
        git("init", "-q")
        git("add", "-A")
        git("commit", "-qm", "one")
        (tmp_path / "results.json").write_text("results are no source")
        head = git("rev-parse", "HEAD").strip()
        assert imported("src/dpfedexp") == (head, False)
        assert imported("lib/site-packages/dpfedexp") == (None, None), "a wheel in another project's repository"
        (tmp_path / "src" / "dpfedexp" / "new.py").touch()
        assert imported("src/dpfedexp") == (head, True)
    finally:
        recording.commit.cache_clear()


ONE = Place("cpu", jobs=1)


def test_a_run_that_two_sections_share_is_made_once_and_recorded_by_both(tmp_path):
    a, b, c = (Counting(name, str(tmp_path)) for name in "abc")
    done = all_records({"one": [a, b, a], "two": [b, c]}, tmp_path, None, ONE)
    assert [run.times for run in (a, b, c)] == [1, 1, 1]
    assert [record.name for record in done["one"]] == ["a", "b"]
    assert [record.section for record in recording.read(file_of(tmp_path, "two"))] == ["two", "two"]


def test_a_missing_run_names_the_field_that_sets_it_apart():
    results = Results([replace(RECORD, settings=TrainingRun(RUN.settings.with_seed(1)).full_settings), RECORD], None)
    local = RUN.settings.local.model_copy(update={"lr": 0.5})
    other = TrainingRun(RUN.settings.model_copy(update={"local": local}), "other", RUN.curves)
    assert missing([other, RUN, other], results) == [other]
    nearest = "the nearest record is 'a run, seed 0', but local.lr is 0.5 now and was 0.001"
    assert results.why_missing(other) == f"'other': {nearest}"


def test_a_training_run_keeps_finals_curves_promise_and_what_made_it(tmp_path):
    small = {"data.clients": 12, "data.dimension": 5, "run.rounds": 3, "local.steps": 2}
    run = TrainingRun(vary(experiment("synthetic-cdp-fedexp"), small), "tiny", ("round", "distance"))
    cache, key = Cache(tmp_path / "cache"), key_of(run, None)
    cache.run({key: run}, "images", ONE)
    record = cache.load(key)
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


def test_whatever_the_result_depends_on_counts_and_where_it_happens_does_not():
    settings = experiment("synthetic-cdp-fedexp")
    ours = in_full(settings)
    for change in ({"run.device": "cpu"}, {"run.chunk_size": 7}, {"data.path": "somewhere"}):
        assert in_full(vary(settings, change)) == ours
    changes = {"run.seed": 1, "algorithm.clip": 0.31, "data.clients": 13, "run.precision": "tf32"}
    for change in (*changes.items(), ("algorithm.numerator", "free")):
        assert key(in_full(vary(settings, dict([change]))), None) != key(ours, None)


def test_a_default_of_an_algorithm_that_changes_is_another_run(monkeypatch):
    settings = vary(experiment("mnist-cdp-fedexp"), {"algorithm.numerator": None})
    before = in_full(settings)
    free = algorithms.ALGORITHMS["cdp_fedexp"]

    def cdp_fedexp(*, numerator="paper", average_last=3, clip, noise_multiplier, delta=1e-5, step="safe", **more):
        given = {"clip": clip, "noise_multiplier": noise_multiplier, "delta": delta, "step": step}
        return free(numerator=numerator, average_last=average_last, **given, **more)

    monkeypatch.setitem(algorithms.ALGORITHMS, "cdp_fedexp", cdp_fedexp)
    assert differences(in_full(settings), before) == [
        "algorithm.numerator is 'paper' now and was 'free'",
        "algorithm.average_last is 3 now and was 2",
    ]


def test_a_field_that_is_new_sets_old_records_apart_until_it_is_declared(monkeypatch):
    old = {"local": {"lr": 0.1}}
    new = {"local": {"lr": 0.1, "schedule": "flat"}}
    assert differences(new, old) == ["local.schedule is 'flat' now and was not recorded"]
    monkeypatch.setattr(full_settings, "ADDED_SINCE", {"local.schedule": "flat"})
    assert differences(new, old) == []
    changed = {"local": {"lr": 0.1, "schedule": "cosine"}}
    assert differences(changed, old) == ["local.schedule is 'cosine' now and was 'flat'"]
    assert key(new, None) == key(old, None) != key(changed, None)
