"""Runs compared from Python, and plans of runs from Python."""

import pytest
import torch
from torch import nn

from dpfedexp import Federation, InputError, Poisson, Sgd, cdp_fedexp, compare, dp_fedavg, fit, plan
from dpfedexp.errors import AdviceWarning
from tests.engine.small import federation, network, small_run


def test_runs_are_named_by_the_settings_in_which_they_differ(tmp_path):
    first = small_run(out=tmp_path / "first")
    other = small_run(algorithm=dp_fedavg(clip=0.3, noise_multiplier=4.0), local=Sgd(lr=0.1, steps=2))
    both = compare([tmp_path / "first", other])
    assert [row[0] for row in both.tables[0].rows] == ["cdp_fedexp, lr=0.05", "dp_fedavg, lr=0.1"]
    assert f"{first.privacy.epsilon_total:.3f}" in str(both)
    assert [row[0] for row in compare({"one": first, "two": first}).tables[0].rows] == ["one", "two"]
    assert [row[0] for row in compare([first, first]).tables[0].rows] == ["run (1)", "run (2)"]
    assert [row[0] for row in compare([first, tmp_path / "first"]).tables[0].rows] == ["run", "first"]


def test_the_plot_is_over_rounds_or_epsilon_and_its_legend_covers_no_axis():
    runs = [small_run(), small_run(local=Sgd(lr=0.1, steps=2))]
    for over, key in (("round", "round"), ("epsilon", "epsilon_total")):
        figure = compare(runs, "test_loss", over=over).plot()
        (axis,), (legend,) = figure.axes, figure.legends
        assert list(axis.lines[1].get_xdata()) == [record[key] for record in runs[1].history]
        assert list(axis.lines[1].get_ydata()) == [record["test_loss"] for record in runs[1].history]
        assert [text.get_text() for text in legend.get_texts()] == ["lr=0.05", "lr=0.1"]
        figure.draw_without_rendering()
        assert not legend.get_window_extent().overlaps(axis.get_tightbbox())
        page, shown = figure.bbox, legend.get_window_extent()
        assert min(shown.x0 - page.x0, page.x1 - shown.x1, shown.y0 - page.y0) >= 0


@pytest.mark.parametrize(
    ("runs", "options", "words"),
    [
        ([], {}, "pass a list of runs or of their folders"),
        ("runs/first", {}, "pass a list of runs or of their folders"),
        (["nowhere"], {}, "the folder 'nowhere' does not exist"),
        (None, {"metric": "test_los"}, "which the runs did not measure. Did you mean 'test_loss'?"),
        (None, {"over": "time"}, "over is 'time'; it must be 'round' or 'epsilon'"),
    ],
)
def test_what_can_not_be_compared_is_answered_by_a_sentence(runs, options, words):
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        compare([small_run()] if runs is None else runs, **options)


def test_a_plan_has_the_noise_and_the_advice_of_the_run():
    options = {"epsilon": 2.0, "rounds": 20, "execution": "cpu"}
    found = plan(network(), federation(), **options)
    with pytest.warns(AdviceWarning, match="12 clients"):
        run = fit(network(), federation(), **options)
    assert [one["code"] for one in found.data["advice"]] == ["few-clients", "rate-by-default"]
    # The sentences hold the noise multiplier and ratios of signal to noise.
    assert {one["sentence"] for one in found.data["advice"]} <= {one.sentence for one in run.advice}
    assert {(row["epsilon"], row["rounds"]) for row in found.data["rows"]} >= {(2.0, 20), (16.0, 200)}
    text = str(found)
    assert "12 clients, 4 parameters, δ = 1e-05, central-gaussian" in text
    assert "At ε = 2 over 20 rounds with all clients in each:" in text
    assert found.data == plan(4, 12, **options).data


def test_a_plan_of_train_takes_its_algorithm_and_participation(monkeypatch):
    # Calibrating the noise of sampled rounds takes a second for each ε.
    monkeypatch.setattr("dpfedexp.report.compare.EPSILONS", ())
    algorithm = cdp_fedexp(clip=0.3, target_epsilon=4.0)
    found = plan(1000, 5000, algorithm, local=Sgd(lr=0.1, steps=2), rounds=30, participation=Poisson(0.5))
    assert {(row["cohort"], row["rounds"]) for row in found.data["rows"]} == {(2500.0, 30)}
    with pytest.raises(InputError, match="plan has no argument 'round'"):
        plan(1000, 5000, round=3)
    with pytest.raises(InputError, match="epsilon or delta is given with it"):
        plan(1000, 5000, algorithm, epsilon=3.0)
    with pytest.raises(InputError, match="population is 'many'; it must be a positive whole number"):
        plan(1000, "many")
    plan(10, 100, loss=None, out=None, evaluate=None)


def classes(share: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.eye(10), (torch.arange(10) >= 10 * share).long()


@pytest.mark.parametrize(("model", "loss"), [(nn.Linear(10, 2), None), (nn.Linear(10, 1), "bce")])
def test_accuracy_stands_beside_that_of_the_most_frequent_class(model, loss, tmp_path):
    clients = Federation.from_clients([classes(0.5)] * 30)
    run = fit(model, clients, rounds=2, loss=loss, evaluate=classes(0.7), out=tmp_path / "run")
    assert run.facts.baselines == {"test_accuracy": 0.7}
    assert f"test_accuracy {run.history[-1]['test_accuracy']:g} (always the most frequent class: 0.7)" in repr(run)
    assert "(always the most frequent class: 0.7)" in run._repr_html_()
    without = fit(model, clients, rounds=2, loss=loss, evaluate="clients")
    assert without.facts.baselines == {}
