"""A Flower client trains as the simulator's clients do: alone, with others on its node, and with every setting of the app."""

import copy
import importlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import nn

from dpfedexp import Federation, train
from dpfedexp.accounting import Sampling
from dpfedexp.core.local_optimizer import OPTIMIZERS, Sgd
from dpfedexp.core.noise import Streams
from dpfedexp.errors import InputError, RoundFailed
from dpfedexp.flower import answer, data_path, serve, strategy_from
from dpfedexp.flower import client as flower_client
from dpfedexp.flower.app import _app_config
from dpfedexp.flower.app_settings import read_settings
from dpfedexp.flower.messages import REQUEST, NodeRequest
from dpfedexp.mechanisms import CentralGaussian
from dpfedexp.models import linear_regression
from tests.optimizers import HeavyBall

from .app_folder import ALMOST_NO_NOISE, make_app
from .loopback import LoopbackGrid, flat

SIZES, DIMENSION = (7, 3, 5), 4
STEPS = {"schedule.kind": "step", "schedule.every": 1, "schedule.factor": 0.3}


def federation(sizes=SIZES, dimension=DIMENSION) -> Federation:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(n, dimension + 1, generator=generator) for n in sizes]
    return Federation.from_clients([(each[:, :-1], each[:, -1]) for each in rows])


@pytest.fixture
def template(tmp_path, monkeypatch):
    """The template's modules, as `flwr run` imports them, with clients of several rows in the place of the example's."""

    def load(**sections):
        folder = make_app(tmp_path / "app", **sections)
        monkeypatch.syspath_prepend(str(folder))
        task, client_app = (importlib.import_module(f"federation.{name}") for name in ("task", "client_app"))
        if not sections.get("own_task"):
            monkeypatch.setattr(task, "example", lambda clients: federation(SIZES, task.DIMENSION))
        return task, client_app.app, _app_config(folder)

    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] == "federation"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("algorithm", "local"),
    [
        ("dp_fedavg", {"steps": None, "epochs": 2, "batch_size": 2, "proximal": 0.5}),
        ("dp_fedavg", {"steps": 6, "batch_size": 2, "max_examples": 4}),
        ("dp_scaffold", {"steps": 4, "batch_size": 2}),
        ("dp_fedavg", {"optimizer": "heavy-ball", "steps": 4, "momentum": 0.7}),
        ("dp_fedavg", {"optimizer": "adamw", "steps": 4, "clip_gradient": 0.5, **STEPS}),
    ],
    ids=["epochs, batch_size, proximal", "max_examples", "scaffold", "an optimizer of one's own", "adamw, schedule"],
)
def test_rounds_of_the_templates_app_equal_the_simulators_whatever_its_local_section_says(
    algorithm, local, template, tmp_path, monkeypatch
):
    """Three rounds, because SCAFFOLD corrects nothing in the first; 2e-5 is float32 through messages."""
    monkeypatch.setitem(OPTIMIZERS, "heavy-ball", HeavyBall)
    task, app, config = template(
        federation={"rounds": 3, "folder": str(tmp_path / "out"), "node_timeout": 1.0},
        algorithm={"name": algorithm, "target_epsilon": None, "noise_multiplier": ALMOST_NO_NOISE},
        local=local,
    )
    calls = iter(range(9))

    def of_the_simulator():
        """Nodes are asked in their order, so the calls are those of clients 0, 1, 2 in round 1, then in round 2, …"""
        number, client = divmod(next(calls), 3)
        drawn = Streams(0).at("batches", number + 1)
        shuffles = SimpleNamespace(generators=lambda: lambda _: drawn.generator(client), generator=drawn.generator)
        return SimpleNamespace(at=lambda purpose, round: shuffles, seed=0)

    monkeypatch.setattr(flower_client, "fresh_streams", of_the_simulator)
    strategy, start = strategy_from(config), ArrayRecord(task.build_model().state_dict())
    strategy.start(LoopbackGrid(app, 3, run_config=config), start, timeout=5)
    assert next(calls, None) is None
    settings = read_settings(config)[1]
    run = train(
        linear_regression(task.DIMENSION),
        federation(SIZES, task.DIMENSION),
        settings.build_algorithm(),
        local=settings.build_local(),
        rounds=3,
        execution="cpu",
    )
    torch.testing.assert_close(strategy.state.w.float(), flat(run.model), rtol=0.0, atol=2e-5)
    assert float(flat(run.model).norm()) > 0.1


MANY = federation((4, 0, 5), 3)
MODEL = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def rows(*asked, local=Sgd(lr=0.1, steps=3), loss=None, clients=MANY) -> torch.Tensor:
    request = NodeRequest(1, "nonce", CentralGaussian(1.0, 1.0), Sampling(), asked)
    content = RecordDict({"arrays": ArrayRecord(MODEL.state_dict()), REQUEST: request.to_record()})
    message, context = Message(content, dst_node_id=1, message_type="train"), Context(1, 1, {}, RecordDict(), {})
    net = copy.deepcopy(MODEL)
    nn.init.zeros_(net[0].weight)
    reply = answer(message, context, net, clients, local=local, loss=loss)
    assert torch.equal(net[0].weight, MODEL[0].weight), "the app's model gets the server's parameters"
    return torch.from_numpy(reply.content.array_records["updates"]["rows"].numpy())


def test_a_model_that_does_not_fit_is_a_sentence():
    with pytest.raises(InputError, match="the model can't be applied to a batch of inputs of shape"):
        rows(clients=(torch.zeros(2, 5), torch.zeros(2)))


def test_batches_come_from_the_operating_system():
    """Two orders of 40 rows are alike less often than once in 10^40."""
    given, ends = {"local": Sgd(lr=0.5, steps=10, batch_size=4), "clients": federation((40,), 3).client(0)}, []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        ends.append(rows(**given))
    assert not torch.equal(*ends)


@pytest.mark.parametrize(
    ("local", "loss"),
    [(Sgd(lr=0.1, steps=3), lambda outputs, targets: (outputs - targets).abs()), (HeavyBall(lr=0.05, steps=4), None)],
    ids=["another loss", "heavy ball"],
)
def test_hosted_clients_train_as_each_does_alone_and_an_empty_one_sends_zero(local, loss):
    """They train apart, one tensor program or not: 1e-5 is float32 in another order."""
    for client, row in zip((2, 1, 0), rows(2, 1, 0, local=local, loss=loss), strict=True):
        alone = rows(clients=MANY.client(client), local=local, loss=loss)[0]
        torch.testing.assert_close(row, alone, rtol=0.0, atol=1e-5)
        assert (client == 1) == (float(row.norm()) == 0.0)
    assert loss is None or not torch.allclose(row, rows(0, local=local)[0], atol=1e-3)


def test_a_hosted_client_that_does_not_exist_is_refused_and_the_last_one_is_not():
    assert rows(2).shape == (1, 4)
    with pytest.raises(InputError, match="asks for client 3"):
        rows(0, 3)


@pytest.fixture
def serve_template(template, tmp_path):
    """The template's own app served to nodes with so many rows each; returns the run and what the nodes sent."""

    def run(rows: int, nodes: int, test=None, **settings):
        (tmp_path / "own.csv").write_text("x1,x2,x3,x4,y\n" + "0.1,0.2,0.3,0.4,0.5\n" * rows)
        settings |= {"clients": nodes, "node_timeout": 1.0, "folder": str(tmp_path / "out")}
        task, app, config = template(own_task=True, federation=settings)
        sent = []
        grid = LoopbackGrid(
            app,
            nodes,
            node_config={"data": str(tmp_path / "own.csv")},
            run_config=config,
            reply_of=lambda _, reply: sent.append(reply) or reply,
        )
        return serve(grid, Context(1, 0, {}, RecordDict(), config), task.build_model(), test, task.LOSS), sent

    return run


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_a_node_trains_on_the_rows_of_its_file_however_few_there_are(rows, serve_template, tmp_path):
    """A node without rows sends zeros, and takes part like any other."""
    run, sent = serve_template(rows, 1, (torch.ones(2, 4), torch.ones(2, 1)), rounds=1)
    assert run.stopped is None
    assert {"test_loss", "test_rmse"} <= set(run.history[0]), "the simulator's names"
    stated = (tmp_path / "out" / "privacy.txt").read_text()
    assert stated == f"{run.privacy}\n"
    assert "This run chose its own settings: the algorithm cdp_fedexp with the safe step; δ =" in stated
    update = sent[-1].content["dpfedexp.report"]["vector"].numpy()[:5]  # and what the step size needs
    assert bool(np.any(update)) == (rows > 0)
    assert "1 round, 1 client" in str(run.privacy), "it is promised what every other client is"


def test_a_run_that_stops_early_is_not_completed_for_flower_either(serve_template, tmp_path):
    """`flower run` of a server on another machine has only Flower's word for it."""
    with pytest.raises(RoundFailed, match=r"the run stopped after \d of 3 rounds: the budget is epsilon 4"):
        serve_template(1, 2, rounds=3, budget=4.0)
    assert json.loads((tmp_path / "out" / "status.json").read_text())["status"] == "stopped"


def test_a_node_without_the_setting_data_says_so():
    with pytest.raises(InputError, match="this node has no setting `data`; start it with --node-config"):
        data_path(Context(1, 0, {"partition-id": 0}, RecordDict(), {}))
