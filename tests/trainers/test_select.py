"""How a run is computed: trainers by name, the choice among them, and the tiles, threads and recordings that they share."""

import gc
from contextlib import suppress
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from reproduction.benchmarks.trainers import task_of
from torch import nn
from torch.nn import functional as F

from dpfedexp import Execution, InputError, fedavg, train
from dpfedexp.trainers import select as tune
from dpfedexp.trainers.execution import as_execution
from dpfedexp.trainers.select import makers, trainer_again
from dpfedexp.trainers.steps import Loop, Parallel, Recordings, Vectorized, _pool, cuda_graph
from tests.trainers.shared import Made, recorded, updates
from tests.trainers.test_fast import LOCAL, NETWORKS, activated, bound, features, federation


def test_cohorts_whose_size_keeps_changing_share_recordings():
    simulation = bound(NETWORKS["paper"], federation(sizes=[4] * 40))
    steps = recorded(simulation, simulation.trainer._trainer().core)
    for cohort in (30, 31, 29, 27, 26, 28, 25):
        some = torch.arange(cohort) + 2
        assert torch.allclose(updates(simulation, steps, who=some), updates(simulation, who=some), atol=1e-6)
    assert {key[0] for key in steps.recordings.seen} == {30, 31, 29, 32}


def test_recordings_make_room():
    held = Recordings(lambda: None, capture=None, keep=2)
    for _ in range(2):
        for key in (1, 2, 3):
            held.stepper(key)
    assert list(held.held) == [2, 3]


@pytest.mark.parametrize(("tile", "threads", "network"), [(1, 3, "paper"), (3, 3, "norms"), (100, 1, "paper")])
def test_tiles_and_threads_change_nothing_but_rounding(tile, threads, network):
    clients = federation(sizes=[3, 5, 1, 4, 4, 2, 6])
    simulation = bound(NETWORKS[network], clients)
    task = simulation.task
    expected = updates(simulation, Vectorized(task))
    program = simulation.trainer._trainer()
    for make in (
        lambda: program,
        lambda: Vectorized(task.copy_for_thread(), record=False),
        lambda: Loop(task.copy_for_thread(), simulation.streams),
    ):
        assert torch.allclose(updates(simulation, Parallel("tiles", make, tile, threads)), expected, atol=1e-6)


def test_long_runs_choose_by_measurement_and_short_ones_do_not_ask(monkeypatch):
    clients, asked = federation(), []
    seconds = {"fast": 1.0, "tiled-vectorized": 1.5, "tiled-loop": 9.0}

    def timed(task, trainer, *rest, warm=False):
        if not warm:
            asked.append(trainer.name)
        return seconds[trainer.name]

    monkeypatch.setattr(tune, "_time", timed)
    monkeypatch.setattr(tune, "_remembered", {})
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "vectorized"
    assert not asked
    monkeypatch.setattr(tune, "WORTH_MEASURING", 0)
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "fast"
    assert asked == ["fast", "tiled-vectorized", "tiled-loop"]
    assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == "fast"
    assert len(asked) == 3
    # The quickest, and the preferred one where they are alike.
    for loop, chosen in ((0.9, "tiled-loop"), (0.96, "fast")):
        seconds["tiled-loop"] = loop
        monkeypatch.setattr(tune, "_remembered", {})
        assert bound(NETWORKS["paper"], clients, trainer="auto").trainer.name == chosen


def test_the_benchmark_of_trainers_can_build_them():
    """It did not know of a field of `TrainerParts`."""
    _, _, parts = task_of("mlp-8", 2, "cpu", "fp32")
    assert {make().name for make in makers(parts).values()} == {"fast", "tiled-vectorized", "tiled-loop", "vectorized"}


def test_a_resumed_run_keeps_the_trainer_that_was_chosen(tmp_path, monkeypatch):
    options = {"local": LOCAL, "rounds": 2, "out": tmp_path}

    stop = Mock(side_effect=KeyboardInterrupt)
    execution = Execution(trainer="tiled-vectorized", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train(NETWORKS["paper"], federation(), fedavg(), execution=execution, on_round=stop, **options)
    monkeypatch.setattr(tune, "_time", lambda *_: pytest.fail("a resumed run does not choose again"))
    assert train(NETWORKS["paper"], federation(), fedavg(), execution="cpu", **options).trainer == "tiled-vectorized"
    assert trainer_again("tiled-loop", "cuda") == "auto"
    assert trainer_again("fused", "cpu") == "auto"


def test_a_parameter_may_be_a_single_number():
    torch.manual_seed(0)
    scale = nn.Parameter(torch.tensor(2.0))
    model = Made(lambda self, x: self.layer(x) * self.scale, layer=nn.Linear(4, 2), scale=scale)
    found, other = (updates(bound(model, federation(features), trainer=name)) for name in ("vectorized", "loop"))
    torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)
    assert bool((found != 0).any(1).all())


def test_bf16_trains_to_about_the_same_model_and_other_names_are_refused():
    clients = federation()
    with pytest.raises(InputError, match="does not have"):
        bound(NETWORKS["paper"], clients, trainer="fused")
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

    def compared(task, makers, *_):
        times = {}
        for name, make in makers.items():
            with suppress(InputError):
                make()
                times[name] = 0.1
        return times

    monkeypatch.setattr(tune, "_compared", compared)
    made = (bound(activated(f), federation(features), trainer="auto") for f in (F.relu, F.softplus))
    first, second = (one.trainer.name for one in made)
    assert first == "fast"
    assert second != "fast"


def test_a_device_beside_an_execution_is_the_same_or_an_error():
    assert Execution(chunk_size=np.int64(8)).chunk_size == 8
    for given in ({"chunk_size": 0}, {"memory": "4 apples"}):
        with pytest.raises(InputError, match=f"{next(iter(given))} is "):
            Execution(**given)
    assert as_execution("cpu") == Execution(device="cpu")
    assert as_execution(Execution(device="cpu", chunk_size=3)) == Execution(device="cpu", chunk_size=3)
    assert as_execution(torch.device("cpu")).place == torch.device("cpu")
    with pytest.raises(InputError, match="execution is a dict; give a device such as 'cuda', or Execution"):
        as_execution({"chunk_size": 3})


def test_a_memory_is_shared_until_its_last_graph_is_gone(monkeypatch):
    """torch refuses the handle of a memory that it gave up."""
    handles = count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr("dpfedexp.trainers.steps._pools", {})
    graphs = [Mock(), Mock()]
    for graph in graphs:
        handle, users = _pool(0)
        assert handle == 0
        users.add(graph)
    assert _pool(1)[0] == 1, "another device has a memory of its own"
    graphs.pop()
    gc.collect()
    del graph
    assert _pool(0)[0] == 0
    graphs.clear()
    gc.collect()
    assert _pool(0)[0] == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_are_recorded_again_after_all_recordings_are_gone():
    value = torch.zeros((), device="cuda")
    for _ in range(3):
        replay = cuda_graph(lambda: value.add_(torch.ones((), device="cuda")))
        value.zero_()
        replay()
        assert value.item() == 1
        del replay
        gc.collect()
