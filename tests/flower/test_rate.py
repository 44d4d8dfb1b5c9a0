"""A deployment's local rate is a number, and its clip's quantile the simulator's."""

import pytest
import torch
from flwr.app import ArrayRecord

from dpfedexp import InputError, Sgd, cdp_fedexp
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import LedgerError
from dpfedexp.flower import DpFedExp, local_from, train_local
from tests.flower.test_agreement import LOCAL, problem

AUTO = Sgd(lr="auto", steps=2)
ALGORITHM = cdp_fedexp(clip="adaptive", noise_multiplier=1.0)


def strategy(folder, algorithm=ALGORITHM, **options):
    return DpFedExp(algorithm, clients=6, rounds=2, folder=folder, **options)


def test_an_automatic_rate_is_refused_wherever_it_comes_in(tmp_path):
    model, config = torch.nn.Linear(2, 1), {"federation.clients": 6, "federation.rounds": 2, "federation.folder": "x"}
    for use in (
        lambda: strategy(tmp_path, local=AUTO),
        lambda: train_local(model, torch.ones(3, 2), torch.ones(3, 1), local=AUTO),
        lambda: local_from({**config, "local.lr": "auto"}),
    ):
        with pytest.raises(InputError, match=r"'auto', which is for simulations; a deployment needs a number"):
            use()
    assert local_from({**config, "local.lr": 0.2}).lr == 0.2


def test_the_quantile_settles_to_what_the_simulator_settles_it_to(tmp_path):
    federation, model = problem()
    server = strategy(tmp_path / "auto")
    server.begin(ArrayRecord(model.state_dict()))
    simulation, _ = prepare(model, federation, ALGORITHM, local=LOCAL, rounds=2)
    # The grid of secure noise adds a millionth to it.
    assert server.algorithm.clip.quantile == pytest.approx(simulation.algorithm.clip.quantile, rel=1e-5)
    assert server.config["quantile"] == server.algorithm.clip.quantile != 0.5


def test_a_run_of_the_median_is_not_resumed_with_another_quantile(tmp_path):
    _, model = problem()
    median = cdp_fedexp(clip=AdaptiveClip(), noise_multiplier=1.0)
    server = strategy(tmp_path, median)
    server.begin(ArrayRecord(model.state_dict()))
    assert server.config["quantile"] == 0.5
    server.ledger.close()
    again = strategy(tmp_path, resume=True)
    with pytest.raises(LedgerError, match="is of a run with other settings"):
        again.begin(ArrayRecord(model.state_dict()))
