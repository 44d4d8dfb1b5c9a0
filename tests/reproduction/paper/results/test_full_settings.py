"""Full settings leave nothing to a default, so a default that changes changes them."""

from __future__ import annotations

import pytest
from reproduction.paper.experiments import experiment, names, vary
from reproduction.paper.results.full_settings import differences, flat, in_full
from reproduction.paper.results.record import key

from dpfedexp import algorithms
from dpfedexp.config import settings as configuration
from reproduction.paper.results import full_settings

GIVEN = {"data", "model", "algorithm", "local", "participation", "run"}


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


def test_every_field_of_the_configuration_is_there_but_where_it_runs():
    tree = in_full(experiment("mnist-cdp-fedexp"))
    assert set(tree) == GIVEN
    for section in GIVEN:
        kind = configuration.Settings.model_fields[section].annotation
        elsewhere = {"data": {"path"}, "run": {"device", "chunk_size"}}.get(section, set())
        assert set(tree[section]) == set(kind.model_fields) - elsewhere


@pytest.mark.parametrize("change", [{"run.device": "cpu"}, {"run.chunk_size": 7}, {"data.path": "somewhere"}])
def test_where_a_run_happens_does_not_count(change):
    settings = experiment("synthetic-cdp-fedexp")
    assert in_full(settings) == in_full(vary(settings, change))


@pytest.mark.parametrize(
    "change",
    [
        {"run.seed": 1},
        {"algorithm.clip": 0.31},
        {"local.lr": 0.002},
        {"data.clients": 13},
        {"algorithm.numerator": "free"},
        {"run.precision": "tf32"},
    ],
)
def test_whatever_the_result_depends_on_counts(change):
    settings = experiment("synthetic-cdp-fedexp")
    assert key(in_full(settings), None) != key(in_full(vary(settings, change)), None)


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


def test_a_field_that_went_away_sets_apart_too():
    assert differences({"run": {"seed": 0}}, {"run": {"seed": 0, "speed": 2}}) == [
        "run.speed was 2 and does not exist any more"
    ]


def test_the_order_of_fields_does_not_count():
    assert key({"run": {"a": 1, "b": 2}}, None) == key({"run": {"b": 2, "a": 1}}, None)
    assert flat({"x": {"y": {"z": 1}, "w": {}}}) == {"x.y.z": 1, "x.w": {}}
