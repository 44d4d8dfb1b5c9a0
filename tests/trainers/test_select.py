"""Trainers by name, the choice among them, and the steps that they share: tiles, threads and recordings."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfedexp import Execution, InputError, Sgd, fedavg, train
from dpfedexp.core.batches import schedule
from dpfedexp.trainers import select as tune
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.select import trainer_again
from dpfedexp.trainers.steps import ByVmap, Parallel, Recordings, Steps
from dpfedexp.trainers.vectorised import Vectorised
from tests.trainers.test_fast import LOCAL, NETWORKS, Activated, bound, features, federation, updates


@pytest.mark.parametrize(("local", "core"), [(LOCAL, "program"), (Sgd(lr=0.1, epochs=2, batch_size=2), "vmap")])
def test_a_recorded_step_over_memory_that_stays_gives_the_same_updates(local, core):
    """What a CUDA graph replays, with a recording that merely calls: a second round and other clients reuse the memory."""
    clients = federation()
    simulation = bound(NETWORKS["paper"], clients, local)
    task = simulation.task
    how = simulation.trainer._trainer().core if core == "program" else ByVmap(Vectorised(task).gradients.program)
    recorded = Steps(task, "recorded", how, record=True, capture=lambda function: function)
    d = task.layout.dimension
    for correction in (None, torch.full((4, d), 0.01), torch.full((4, d), 0.02)):
        expected = updates(simulation, correction=correction)
        for _ in range(3):
            assert torch.allclose(updates(simulation, recorded, correction), expected, atol=1e-6)
    assert recorded.recordings.held


def test_cohorts_whose_size_keeps_changing_share_recordings():
    clients = federation(sizes=[4] * 40)
    simulation = bound(NETWORKS["paper"], clients)
    how = simulation.trainer._trainer().core
    recorded = Steps(simulation.task, "recorded", how, record=True, capture=lambda function: function)
    w, shuffles = simulation.task.layout.read(simulation.task.model).float(), simulation.streams.at("batches", 1)
    for count in (30, 31, 29, 27, 26, 28, 25):
        some = torch.arange(count) + 2
        plan = schedule(LOCAL, clients.sizes[some], lambda row: shuffles.generator(row))
        expected = simulation.trainer(w, some, plan, 1)
        assert torch.allclose(recorded(w, some, plan, 1), expected, atol=1e-6)
    assert {key[0] for key in recorded.recordings.seen} == {30, 31, 29, 32}


def test_recordings_make_room():
    held = Recordings(lambda: None, capture=None, keep=2)
    for _ in range(2):
        for key in (1, 2, 3):
            held.stepper(key)
    assert list(held.held) == [2, 3]


@pytest.mark.parametrize(
    ("tile", "threads", "network"), [(1, 3, "paper"), (2, 1, "norms"), (3, 3, "norms"), (100, 1, "paper")]
)
def test_tiles_and_threads_change_nothing_but_rounding(tile, threads, network):
    clients = federation(sizes=[3, 5, 1, 4, 4, 2, 6])
    simulation = bound(NETWORKS[network], clients)
    task = simulation.task
    expected = updates(simulation, Vectorised(task))
    makers = [lambda: simulation.trainer._trainer(), lambda: Vectorised(task.apart(), record=False),
              lambda: Loop(task.apart(), simulation.streams)]  # fmt: skip
    for make in makers:
        found = updates(simulation, Parallel("tiles", make, tile, threads))
        assert torch.allclose(found, expected, atol=1e-6)
    assert torch.get_num_threads() >= 1


def test_long_runs_choose_by_measurement_and_short_ones_do_not_ask(monkeypatch):
    clients = federation()
    asked = []

    def timed(task, trainer, *rest, warm=False):
        if not warm:
            asked.append(trainer.name)
        return {"fast": 1.0, "library": 2.0, "tiled-vectorised": 1.5, "tiled-loop": 9.0}[trainer.name]

    monkeypatch.setattr(tune, "_time", timed)
    monkeypatch.setattr(tune, "_remembered", {})
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "vectorised"
    assert not asked
    monkeypatch.setattr(tune, "WORTH_MEASURING", 0)
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "fast"
    assert asked == ["fast", "library", "tiled-vectorised", "tiled-loop"]
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "fast"
    assert len(asked) == 4


def test_the_quickest_is_chosen_and_the_preferred_one_only_where_they_are_alike(monkeypatch):
    clients, chosen = federation(), []
    monkeypatch.setattr(tune, "WORTH_MEASURING", 0)
    for loop in (0.9, 0.96):
        seconds = {"fast": 1.0, "library": 3.0, "tiled-vectorised": 5.0, "tiled-loop": loop}
        monkeypatch.setattr(tune, "_time", lambda task, trainer, *rest, warm=False, s=seconds: s[trainer.name])
        monkeypatch.setattr(tune, "_remembered", {})
        chosen.append(bound(NETWORKS["paper"], clients, trainer="auto").trainer.name)
    assert chosen == ["tiled-loop", "fast"]


def test_a_resumed_run_keeps_the_trainer_that_was_chosen(tmp_path, monkeypatch):
    options = {"local": LOCAL, "rounds": 2, "progress": False, "device": "cpu", "checkpoint": tmp_path}

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            NETWORKS["paper"],
            federation(),
            fedavg(),
            execution=Execution(trainer="tiled-vectorised"),
            on_round=stop,
            **options,
        )
    monkeypatch.setattr(tune, "_time", lambda *_: pytest.fail("a resumed run does not choose again"))
    assert train(NETWORKS["paper"], federation(), fedavg(), resume=True, **options).trainer == "tiled-vectorised"
    assert trainer_again("tiled-loop", "cuda") == "auto"
    assert trainer_again("fused", "cpu") == "auto"


def test_every_trainer_by_name_trains_alike():
    clients = federation()
    runs = [
        train(
            NETWORKS["paper"],
            clients,
            fedavg(),
            local=LOCAL,
            rounds=2,
            progress=False,
            execution=Execution(device="cpu", trainer=name),
        )
        for name in ("fast", "library", "vectorised", "tiled-vectorised", "loop", "tiled-loop")
    ]
    for run in runs[1:]:
        assert torch.allclose(run.model[0].weight, runs[0].model[0].weight, atol=1e-6)
    with pytest.raises(InputError, match="Did you mean 'fast'"):
        bound(NETWORKS["paper"], clients, trainer="fasst")
    with pytest.raises(InputError, match="does not have"):
        bound(NETWORKS["paper"], clients, trainer="fused")


def test_bf16_trains_to_about_the_same_model_and_other_names_are_refused():
    clients = federation()
    full, half = (bound(NETWORKS["paper"], clients, precision=p) for p in ("fp32", "bf16"))
    a, b = updates(full), updates(half)
    assert 0 < float((a - b).norm()) < 0.05 * float(a.norm())
    loop = updates(half, Loop(half.task, half.streams))
    assert 0 < float((loop - a).norm()) < 0.05 * float(a.norm())
    with pytest.raises(InputError, match="precision is 'fp16'"):
        bound(NETWORKS["paper"], clients, precision="fp16")


def test_a_choice_of_before_that_no_longer_fits_is_made_again(monkeypatch):
    monkeypatch.setattr(tune, "WORTH_MEASURING", 0)
    monkeypatch.setattr(tune, "_remembered", {})
    monkeypatch.setattr(
        tune, "_compared", lambda task, makers, *_: {name: 0.1 for name in makers if tune._made(makers[name])}
    )
    first, second = (
        bound(Activated(f), federation(features), trainer="auto").trainer.name for f in (F.relu, F.softplus)
    )
    assert first == "fast"
    assert second != "fast"


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("trainer", ["vectorised", "tiled-vectorised"])
def test_a_parameter_may_be_a_single_number(trainer):
    torch.manual_seed(0)
    model = Scaled()
    found, alone = (updates(bound(model, federation(features), trainer=name)) for name in (trainer, "loop"))
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    assert float(alone[:, -1].abs().min()) > 0
