"""A run that ends early is a whole run: returned, charged for what it made, and stated with what decided its end."""

import json

import pytest

from dpfedexp import EarlyStopping, InputError, Stop
from dpfedexp.engine.engine import Engine
from dpfedexp.engine.stopping import Interrupted
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.report.page import read_run, run_section
from tests.engine.small import ROUNDS, crash_after, crash_in, small_run


def returns(record):
    return Stop("enough", source="public") if record["round"] == 2 else None


@pytest.mark.parametrize(
    ("on_round", "reason", "source"),
    [
        (crash_after(2, Stop("enough", source="private")), "enough", "private"),
        (crash_after(2, Stop), "on_round stopped it", "unknown"),
        (crash_after(2, Stop("low enough")), "low enough", "unknown"),
        ([lambda record: None, returns], "enough", "public"),
    ],
)
def test_a_callback_ends_the_run_and_loses_nothing(on_round, reason, source, tmp_path):
    run = small_run(on_round=on_round, out=tmp_path / "run")
    assert (len(run.history), len(run.ledger), run.stopped) == (2, 2, reason)
    assert (run.privacy.rounds, run.privacy.planned_rounds, run.privacy.stopping) == (2, ROUNDS, source)
    assert f"2 of {ROUNDS} planned rounds ran." in run.privacy.text
    assert outcome(verify_run(tmp_path / "run")) == "holds"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["stopped"] == reason


def test_the_statement_of_a_run_that_stopped_itself_has_the_cost_of_the_whole_plan(tmp_path):
    """When it stops depends on what was released, so no figure but the plan's holds however that was decided."""
    whole, short = small_run(), small_run(on_round=returns, out=tmp_path / "run")
    assert short.privacy.epsilon_total == pytest.approx(whole.privacy.epsilon_total, rel=1e-12)
    assert short.privacy.attack_success == whole.privacy.attack_success
    assert short.privacy.epsilon_total > short.history[-1]["epsilon_total"]
    assert "the figures are those of all the rounds that were planned" in short.privacy.text
    assert "Stopped early" not in whole.privacy.text
    assert f"stopped early, epsilon of all {ROUNDS} planned" in repr(short.privacy)
    page = read_run(tmp_path / "run")
    assert f"ε = {short.privacy.epsilon_total:.3f}" in page.title()
    assert f"(of all {ROUNDS} planned rounds)" in page.title()
    assert "Stopped early: enough" in run_section(page).text
    # A statement that claims the rounds that ran alone is found out.
    path = tmp_path / "run" / "privacy.json"
    claim = json.loads(path.read_text())
    claim["epsilon_total"] = short.history[-1]["epsilon_total"]
    path.write_text(json.dumps(claim))
    assert outcome(verify_run(tmp_path / "run")) == "false"


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_of_a_callback_costs_the_whole_plan_as_a_stop_does(error, tmp_path):
    """It can be the same decision by the same private values; ε was that of the rounds that ran."""
    with pytest.raises(error):
        small_run(on_round=crash_after(2, error), out=tmp_path / "run")
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    stopped = small_run(on_round=crash_after(2, Stop)).privacy
    assert (claim["stopping"], claim["epsilon_total"]) == ("unknown", pytest.approx(stopped.epsilon_total, rel=1e-12))
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"
    assert outcome(verify_run(tmp_path / "run")) == "holds"


def test_patience_counts_measurements_and_a_nan_is_no_improvement():
    stop = EarlyStopping("test_loss", patience=2)
    values = {1: 3.0, 2: float("nan"), 3: 2.0, 6: float("nan"), 7: 2.0}
    *before, last = (stop({"round": t} | ({"test_loss": values[t]} if t in values else {})) for t in range(1, 8))
    assert before == [None] * 6
    assert "has not improved on 2 (round 3) for 2 measurements" in last.reason


def test_what_is_better_follows_from_the_name_and_least_is_asked_for():
    for settings, values, stops in (
        ({"metric": "test_accuracy"}, (0.1, 0.2), False),
        ({"metric": "score", "better": "higher"}, (1.0, 2.0), False),
        ({"metric": "error"}, (2.0, 1.0), False),
        ({"metric": "test_loss", "min_delta": 0.5}, (2.0, 1.6), True),
    ):
        stop = EarlyStopping(patience=1, **settings)
        found = [stop({"round": t, settings["metric"]: v}) is not None for t, v in enumerate(values)]
        assert found == [False, stops]


def test_what_decided_is_known_from_the_metric():
    sources = {"update_norm": "private", "noisy_mean_loss": "private", "clients_loss": "private", "test_loss": "test"}
    sources |= {"nonprivate_x": "unknown"}
    assert {metric: EarlyStopping(metric).source for metric in sources} == sources


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": 0}, "patience is 0; it must be"),
        ({"min_delta": -1.0}, "min_delta is -1.0; it must be"),
        ({"better": "up"}, "better is 'up'; it must be"),
        ({"source": "secret"}, "source is 'secret'; it must be one of"),
        ({"metric": "test_loss", "source": "private"}, "no mechanism releases 'test_loss'; write 'public' or 'test'"),
        ({"metric": "nonprivate_x", "source": "private"}, "no mechanism releases"),
        ({"patient": 3}, "Did you mean 'patience'"),
    ],
)
def test_wrong_settings_are_one_sentence(options, words):
    with pytest.raises(InputError, match=words):
        EarlyStopping(**options)


@pytest.mark.parametrize("on_round", [3, [print, 3], EarlyStopping])
def test_what_is_no_callback_is_refused(on_round):
    with pytest.raises(InputError, match="it must be a function of one record, or a list of such functions"):
        small_run(on_round=on_round)


def test_early_stopping_goes_on_counting_after_an_interrupt(tmp_path):
    def stopping():
        return EarlyStopping("test_loss", patience=3, min_delta=100.0, source="public")

    with pytest.raises(KeyboardInterrupt):
        small_run(out=tmp_path / "run", on_round=[stopping(), crash_after(2, KeyboardInterrupt)])
    resumed = small_run(out=tmp_path / "run", on_round=stopping())
    whole = small_run(on_round=stopping())
    assert len(resumed.history) == len(whole.history) == 4
    again = small_run(out=tmp_path / "run", on_round=stopping())
    assert (len(again.history), again.stopped) == (4, whole.stopped)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_an_interrupt_holds_the_run_so_far(checkpoint, tmp_path):
    options = {"out": tmp_path / "run"} if checkpoint else {}
    with pytest.raises(Interrupted, match=f"after 2 of {ROUNDS} rounds") as caught:
        small_run(on_round=crash_after(2, KeyboardInterrupt), **options)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert ("make the same call again to resume" in str(caught.value)) == checkpoint
    run = caught.value.run
    assert (len(run.history), len(run.ledger), run.privacy.rounds, run.privacy.stopping) == (2, 2, 2, "hand")


def test_an_interrupt_between_charge_and_release_pays_for_the_round_and_plans_no_more(monkeypatch):
    crash_in(monkeypatch, Engine, "_advance", 3, before=True, error=KeyboardInterrupt)
    with pytest.raises(Interrupted) as caught:
        small_run()
    statement = caught.value.run.privacy
    assert (len(caught.value.run.history), statement.rounds, statement.planned_rounds) == (2, 3, ROUNDS)


def test_every_callback_hears_of_the_last_round_and_stopping_after_it_stops_nothing():
    seen = []
    small_run(on_round=[returns, lambda record: seen.append(record["round"])])
    assert seen == [1, 2]
    run = small_run(on_round=lambda record: Stop() if record["round"] == ROUNDS else None)
    assert (run.stopped, run.privacy.stopping) == (None, "")
