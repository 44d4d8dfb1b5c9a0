"""A server optimiser is one class: the simulator runs it with η_g, and a checkpoint keeps what it remembers."""

from dataclasses import replace

import pytest
import torch

from dpfedexp import InputError, Sgd, cdp_fedexp, fedexp, train
from dpfedexp.core.server import Extrapolate, ServerOptimiser
from dpfedexp.data import synthetic_regression
from dpfedexp.models import linear_regression
from tests.optimisers import Adagrad

PROBLEM = synthetic_regression(8, 6, seed=1)
ALGORITHM = replace(cdp_fedexp(clip=0.3, noise_multiplier=0.5, average_last=1), server=Adagrad())


class Stop(Exception):
    pass


def run(algorithm=ALGORITHM, rounds=4, stop=None, **options):
    def on_round(record):
        if record["round"] == stop:
            raise Stop

    given = {"local": Sgd(lr=0.02, steps=2), "rounds": rounds, "device": "cpu", "progress": False, **options}
    return train(linear_regression(6), PROBLEM.federation, algorithm, on_round=on_round, **given)


def weights(done):
    return torch.cat([p.detach().flatten() for p in done.model.parameters()])


def test_the_first_move_is_the_step_size_times_the_direction_of_ones_own():
    """The means are released before the server looks at them, so the move of plain FedEXP says what was released."""
    plain, ours = (run(replace(fedexp(), average_last=1, server=s), rounds=1) for s in (Extrapolate(), Adagrad(0.5)))
    eta_g = plain.history[0]["eta_g"]
    assert eta_g == ours.history[0]["eta_g"] > 1.5
    mean = weights(plain) / eta_g
    torch.testing.assert_close(weights(ours), eta_g * mean / (mean.square() + 0.25).sqrt(), rtol=1e-5, atol=1e-7)


def test_a_run_with_an_optimiser_of_ones_own_resumes_bit_for_bit(tmp_path):
    assert isinstance(ALGORITHM.server, ServerOptimiser)
    whole = run()
    with pytest.raises(Stop):
        run(checkpoint=tmp_path, stop=2)
    assert torch.equal(weights(run(checkpoint=tmp_path, resume=True)), weights(whole))


def test_a_checkpoint_knows_the_optimiser_and_its_settings(tmp_path):
    with pytest.raises(Stop):
        run(checkpoint=tmp_path, stop=2)
    with pytest.raises(InputError, match=r"algorithm\.server\.floor is 0\.2 here and 0\.1 there"):
        run(replace(ALGORITHM, server=Adagrad(0.2)), checkpoint=tmp_path, resume=True)
    with pytest.raises(InputError, match=r"algorithm\.server is 'Extrapolate' here and 'Adagrad' there"):
        run(replace(ALGORITHM, server=Extrapolate()), checkpoint=tmp_path, resume=True)
