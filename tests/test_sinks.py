"""Sinks send every round's released numbers, at its step, and nothing that depends on the clients without noise."""

import inspect
import sys

import pytest

from dpfedexp import InputError, sinks
from dpfedexp.engine.outlets import OUTLETS
from dpfedexp.sinks import MLflow, Sink, TensorBoard, WandB
from tests.engine.small import ROUNDS, small_run

SENT = {"test_loss", "test_mae", "test_rmse", "test_r2", "eta_g", "clip", "update_norm", "epsilon_total"}


class FakeWandB:
    """What a W&B run is asked for."""

    def __init__(self):
        self.logged, self.config, self.summary = [], {}, {}

    def log(self, values, step):
        self.logged.append((step, values))


def test_wandb_gets_released_values_and_the_promise():
    fake = FakeWandB()
    run = small_run(on_round=WandB(fake), diagnostics=True)
    assert [step for step, _ in fake.logged] == list(range(1, ROUNDS + 1))
    assert all(values.keys() == SENT for _, values in fake.logged)
    assert any(name.startswith("nonprivate_") for name in run.history[0])
    assert fake.logged[-1][1]["test_loss"] == run.history[-1]["test_loss"]
    assert fake.config["clients"] == 12
    assert fake.summary["privacy"] == repr(run.privacy)


def test_tensorboard_writes_event_files_that_its_own_reader_reads(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = small_run(on_round=TensorBoard(tmp_path), diagnostics=True)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == SENT
    assert [event.step for event in events.Scalars("test_loss")] == list(range(1, ROUNDS + 1))
    # A wall time would tell how long a round took: the differences were 0.5 s or 1.1 s with one client's rows.
    assert [event.wall_time for event in events.Scalars("test_loss")] == list(range(1, ROUNDS + 1))
    assert [event.wall_time for event in events.Tensors("privacy/text_summary")] == [ROUNDS]
    # Event files hold single precision.
    assert events.Scalars("test_loss")[-1].value == pytest.approx(run.history[-1]["test_loss"], rel=1e-6)
    assert events.Tags()["tensors"] == ["privacy/text_summary"]


def test_mlflow_holds_metrics_facts_and_the_statement(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sink = MLflow(tracking_uri=(tmp_path / "mlruns").as_uri())
    run = small_run(on_round=sink, diagnostics=True)
    client = mlflow.MlflowClient()
    kept = client.get_run(sink.run_id)
    assert set(kept.data.metrics) == SENT
    logged = client.get_metric_history(sink.run_id, "test_loss")
    assert [one.step for one in logged] == [one.timestamp for one in logged] == list(range(1, ROUNDS + 1))
    assert kept.data.params["parameters"] == "4"
    assert kept.info.status == "FINISHED"
    assert mlflow.artifacts.load_text(f"{kept.info.artifact_uri}/privacy.txt") == run.privacy.text
    assert mlflow.active_run() is None


@pytest.mark.parametrize(
    ("make", "module"),
    [(lambda: TensorBoard("x"), "tensorboard"), (MLflow, "mlflow"), (lambda: WandB(project="x"), "wandb")],
)
def test_a_package_that_is_missing_is_one_sentence_with_the_fix(make, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"is not installed; install it with: pip install 'dpfedexp\[{module}\]'"):
        make()


def test_a_secure_run_is_sent_as_a_whole_after_its_last_round():
    """A service that gets each round at once has its own clock."""
    fake, seen = FakeWandB(), []
    small_run(on_round=[WandB(fake), lambda record: seen.append(len(fake.logged))], secure=True)
    assert seen == [0] * ROUNDS
    assert [step for step, _ in fake.logged] == list(range(1, ROUNDS + 1))
    small_run(on_round=[WandB(fake), lambda record: seen.append(len(fake.logged))])
    assert seen[ROUNDS:] == list(range(ROUNDS + 1, 2 * ROUNDS + 1))


def test_a_secure_runs_event_file_and_mlflow_run_are_begun_after_its_last_round(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    logs, seen = tmp_path / "logs", []
    small_run(on_round=[TensorBoard(logs), lambda record: seen.append(logs.exists())], secure=True)
    assert seen == [False] * ROUNDS
    assert len(list(logs.iterdir())) == 1
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sink, seen = MLflow(tracking_uri=(tmp_path / "mlruns").as_uri()), []
    run = small_run(on_round=[sink, lambda record: seen.append(sink.run_id)], secure=True)
    assert seen == [None] * ROUNDS
    assert mlflow.MlflowClient().get_run(sink.run_id).data.tags["privacy"] == repr(run.privacy)


def test_every_sink_sends_through_the_list_of_what_may_leave():
    """Its rounds, facts and times: a sink says where its values go, and not which."""
    for name in sinks.__all__:
        sink = getattr(sinks, name)
        assert issubclass(sink, Sink), name
        assert sink.outlet in OUTLETS, name
        own = set(vars(inspect.unwrap(sink)))
        assert not own & {"__call__", "on_train_begin", "on_train_end", "_open_once"}, name
        source = inspect.getsource(inspect.unwrap(sink))
        assert "run.history[" not in source
        assert "run.facts" not in source
