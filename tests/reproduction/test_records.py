"""Runs are found by all of their settings, made once, and recorded with what made them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
from reproduction.paper.experiments import experiment, names, vary
from reproduction.paper.results import full_settings
from reproduction.paper.results import record as recording
from reproduction.paper.results.collected import Cache, Results, all_records, file_of, key_of, missing
from reproduction.paper.results.full_settings import differences, in_full
from reproduction.paper.results.planned import Place, TrainingRun
from reproduction.paper.results.record import MNIST, Record, key
from reproduction.paper.results.size import QUICK_CLIENTS, shrink
from reproduction.paper.results.spread import paired

import dpfedexp
from dpfedexp import algorithms
from dpfedexp.config import settings as configuration
from dpfedexp.errors import InputError
from tests.reproduction.fabricated import Counting
from tests.sizes import long

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
        assert imported("lib/site-packages/dpfedexp") == (None, None), (
            "the repository around a wheel is somebody else's"
        )
        (tmp_path / "src" / "dpfedexp" / "new.py").touch()
        assert imported("src/dpfedexp") == (head, True)
    finally:
        recording.commit.cache_clear()


ONE = Place("cpu", jobs=1)


def counting(folder, *names, **more) -> list[Counting]:
    return [Counting(name, str(folder), **more) for name in names]


def test_a_run_that_two_sections_share_is_made_once_and_recorded_by_both(tmp_path):
    a, b, c = counting(tmp_path, *"abc")
    done = all_records({"one": [a, b, a], "two": [b, c]}, tmp_path, None, ONE)
    assert [run.times for run in (a, b, c)] == [1, 1, 1]
    assert [record.name for record in done["one"]] == ["a", "b"]
    assert [record.section for record in recording.read(file_of(tmp_path, "two"))] == ["two", "two"]


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


TINY = {"data.clients": 12, "data.dimension": 5, "run.rounds": 3, "local.steps": 2}


def tiny(**changes) -> TrainingRun:
    return TrainingRun(vary(experiment("synthetic-cdp-fedexp"), TINY | changes), "tiny", ("round", "distance"))


def by_key(*runs) -> dict:
    return {key_of(run, None): run for run in runs}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@long
def test_workers_keep_their_own_runs(cache, tmp_path):
    runs = by_key(*counting(tmp_path, *"abcd"))
    cache.run(runs, None, Place("cpu", jobs=2))
    assert [run.times for run in runs.values()] == [1, 1, 1, 1]
    assert all(cache.load(key).curves == {"value": [run.name]} for key, run in runs.items())


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


@pytest.mark.parametrize("name", names())
def test_every_choice_of_the_algorithm_is_spelled_out(name):
    algorithm = in_full(experiment(name))["algorithm"]
    for field in ("clip", "mechanism", "delta", "adjacency", "average_last"):
        assert algorithm[field] is not None, field
    if "privunit" in name:
        assert (algorithm["epsilon0"], algorithm["gamma"]) == (2.0, "paper")
    if "fedavg" in name:
        assert algorithm["server_rate"] == 1.0
    if "scaffold" in name:
        assert algorithm["control"] == "update"


@pytest.mark.parametrize("change", [{"run.device": "cpu"}, {"run.chunk_size": 7}, {"data.path": "somewhere"}])
def test_where_a_run_happens_does_not_count(change):
    settings = experiment("synthetic-cdp-fedexp")
    assert in_full(settings) == in_full(vary(settings, change))


CHANGES = {"run.seed": 1, "algorithm.clip": 0.31, "local.lr": 0.002, "data.clients": 13, "run.precision": "tf32"}


@pytest.mark.parametrize("change", [*CHANGES.items(), ("algorithm.numerator", "free")])
def test_whatever_the_result_depends_on_counts(change):
    settings = experiment("synthetic-cdp-fedexp")
    assert key(in_full(settings), None) != key(in_full(vary(settings, dict([change]))), None)


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


def test_a_record_without_a_step_had_the_papers_and_is_not_taken_for_a_safe_run():
    settings = experiment("mnist-cdp-fedexp")
    recorded = in_full(settings)
    del recorded["algorithm"]["step"]
    assert key(in_full(settings), None) == key(recorded, None)
    assert differences(in_full(vary(settings, {"algorithm.step": None})), recorded) == [
        "algorithm.step is 'safe' now and was 'paper'"
    ]
    average = in_full(experiment("mnist-cdp-fedavg"))
    assert average["algorithm"].pop("step") == "paper"
    assert key(average, None) == key(in_full(experiment("mnist-cdp-fedavg")), None)


def test_a_default_of_the_configuration_that_changes_is_another_run():
    """`alpha` is left out of this file, so only its default is in it."""
    tree = {"data": {"kind": "mnist"}, "algorithm": {"clip": 0.3, "noise_multiplier": 5.0}}
    before = in_full(configuration.parse(tree))
    kind = configuration.DataSettings
    old = kind.model_fields["alpha"].default
    try:
        kind.model_fields["alpha"].default = 0.5
        kind.model_rebuild(force=True)
        configuration.Settings.model_rebuild(force=True)
        after = in_full(configuration.parse(tree))
    finally:
        kind.model_fields["alpha"].default = old
        kind.model_rebuild(force=True)
        configuration.Settings.model_rebuild(force=True)
    assert differences(after, before) == ["data.alpha is 0.5 now and was 0.3"]
    assert in_full(configuration.parse(tree)) == before


def test_a_field_that_is_new_sets_old_records_apart_until_it_is_declared(monkeypatch):
    old = {"local": {"lr": 0.1}}
    new = {"local": {"lr": 0.1, "schedule": "flat"}}
    assert differences(new, old) == ["local.schedule is 'flat' now and was not recorded"]
    monkeypatch.setattr(full_settings, "ADDED_SINCE", {"local.schedule": "flat"})
    assert differences(new, old) == []
    changed = {"local": {"lr": 0.1, "schedule": "cosine"}}
    assert differences(changed, old) == ["local.schedule is 'cosine' now and was 'flat'"]
    assert key(new, None) == key(old, None) != key(changed, None)


def test_central_noise_on_the_mean_is_that_of_the_full_run():
    full = experiment("mnist-cdp-fedexp")
    small = shrink(full)
    assert small.data.clients == QUICK_CLIENTS
    assert small.algorithm.noise_multiplier / small.data.clients == pytest.approx(5.0 / 1000)


def test_a_target_epsilon_becomes_the_noise_that_it_needs_in_full():
    """ε = 15.4562 over 50 rounds is what z = 5 costs, so the small run gets the small run's share of 5."""
    full = vary(
        experiment("mnist-cdp-fedexp"), {"algorithm.noise_multiplier": None, "algorithm.target_epsilon": 15.4562}
    )
    small = shrink(full)
    assert small.algorithm.target_epsilon is None
    assert small.algorithm.noise_multiplier == pytest.approx(5.0 * QUICK_CLIENTS / 1000, rel=1e-4)


def test_five_wins_of_five_is_one_in_thirty_two():
    test = paired([2, 3, 4, 5, 6.5], [1, 2, 3, 4, 5], larger_is_better=True)
    assert (test.wins, test.n) == (5, 5)
    assert test.p_sign == pytest.approx(1 / 32)
    assert test.p_t is not None
    assert test.p_t < 1e-3
    assert test.gain == pytest.approx(1.1)
