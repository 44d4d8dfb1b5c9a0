"""A run whose local rate sets itself: it pays for its probe first, goes on where it stopped, and says where it can't."""

import json

import pytest
import torch

from dpfedexp import Poisson, Sgd, cdp_fedexp, fedexp, ldp_fedexp, train
from dpfedexp.data import synthetic_regression
from dpfedexp.errors import InputError
from dpfedexp.models import linear_regression
from dpfedexp.runs.file_names import LEDGER

D, M, ROUNDS = 6, 200, 4
AUTO = Sgd(lr="auto", steps=3)


class Crash(Exception):
    pass


def run(algorithm=None, local=AUTO, **given):
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0) if algorithm is None else algorithm
    federation = synthetic_regression(M, D, seed=3).federation
    return train(
        linear_regression(D),
        federation,
        algorithm,
        local=local,
        rounds=ROUNDS,
        seed=1,
        progress=False,
        device="cpu",
        **given,
    )


def weights(done):
    return torch.cat([p.detach().flatten() for p in done.model.parameters()])


@pytest.mark.parametrize(
    "given", [{}, {"participation": Poisson(0.5)}, {"secure": True}], ids=["full", "poisson", "secure"]
)
def test_probe_and_rounds_together_cost_what_was_asked_for(given):
    done = run(**given)
    assert 7.99 < done.privacy.epsilon_total <= 8.0
    assert {"local rate", "first clip", "helped", "within clip"} == set(done.privacy.votes)


def test_the_probe_is_charged_before_the_first_round_and_a_resumed_run_is_the_whole_one(tmp_path):
    def crash(record):
        if record["round"] == 2:
            raise Crash

    with pytest.raises(Crash):
        run(checkpoint=tmp_path, on_round=crash)
    resumed, whole = run(checkpoint=tmp_path, resume=True), run()
    assert torch.equal(weights(resumed), weights(whole))
    lines = [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines()]
    assert [line["round"] for line in lines if "round" in line] == [0, 0, *range(1, ROUNDS + 1)]
    assert resumed.privacy.epsilon_total == whole.privacy.epsilon_total


def test_a_budget_that_the_probe_exceeds_releases_nothing():
    done = run(budget=1e-3)
    assert done.history == []
    assert done.stopped


def test_without_privacy_the_rate_sets_itself_too_and_costs_nothing():
    done = run(fedexp())
    assert all(record["local_rate"] > 0 for record in done.history)
    assert not done.privacy.private


def test_in_local_privacy_there_is_a_sentence():
    with pytest.raises(InputError, match=r"local lr is 'auto' in a local setting: .* give it: Sgd"):
        run(ldp_fedexp(clip=0.3, noise_multiplier=1.0))
