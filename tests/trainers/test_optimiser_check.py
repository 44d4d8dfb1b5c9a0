"""An optimiser that breaks its contract is refused before a round is paid for."""

from dataclasses import dataclass

import pytest
import torch

from dpfedexp import Federation, InputError, LocalOptimiser, Sgd, dp_fedavg, train
from dpfedexp.trainers.apart import check_optimiser
from tests.optimisers import AdamW, Bounded, Cosine, HeavyBall


def made(direction):
    return dataclass(frozen=True)(type("Own", (LocalOptimiser,), {"direction": direction}))(lr=0.1, steps=6)


def late(self, w, gradient, moments, clock):
    """Couples the clients from the fourth step on."""
    return torch.where(clock.step >= 3, gradient.mean(0, keepdim=True).expand_as(gradient), gradient)


class Memory:
    last = 0.0


def remembering(self, w, gradient, moments, clock):
    before, Memory.last = Memory.last, float(gradient[-1].sum())
    return gradient + 0.1 * before * (len(gradient) == 1)


BROKEN = {
    "mixes clients": lambda self, w, gradient, moments, clock: gradient - gradient.mean(0, keepdim=True),
    "mixes clients:": late,
    "parameters' shape": lambda self, w, gradient, moments, clock: gradient.mean(0),
    "gradient in place": lambda self, w, gradient, moments, clock: gradient.mul_(2.0),
    "fails on synthetic gradients": lambda self, w, gradient, moments, clock: moments["v"],
    "mixes clients|remembers": remembering,
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_direction_that_breaks_the_contract_is_refused(sentence):
    with pytest.raises(InputError, match=sentence):
        check_optimiser(made(BROKEN[sentence]))


@pytest.mark.parametrize("kind", [Sgd, HeavyBall, AdamW, Bounded, Cosine])
def test_an_honest_optimiser_passes(kind):
    check_optimiser(kind(lr=0.1, steps=5))


def test_nothing_is_charged_for_a_run_that_is_refused(tmp_path):
    clients = Federation.from_clients([(torch.ones(2, 3), torch.ones(2)) for _ in range(4)])
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    with pytest.raises(InputError, match="mixes clients"):
        train(
            model,
            clients,
            dp_fedavg(clip=1.0, noise_multiplier=1.0),
            local=made(late),
            rounds=2,
            ledger=tmp_path / "ledger.jsonl",
            progress=False,
        )
    assert not (tmp_path / "ledger.jsonl").exists()


def test_an_optimiser_without_a_direction_is_one_sentence():
    with pytest.raises(
        InputError, match=r"LocalOptimiser does not say which way a step goes; give it a method direction"
    ):
        check_optimiser(LocalOptimiser(lr=0.1, steps=1))
