"""Bugs planted in the Flower strategy, seen only through the models that it publishes."""

import pytest
import torch

pytest.importorskip("flwr")

from dpfedexp import dp_fedavg
from dpfedexp.algorithms.participation import Poisson
from dpfedexp.audit.runs import audit_flower, balanced_signs, bounds, observe_flower, participation, repetition
from dpfedexp.core.noise.streams import Streams
from dpfedexp.flower import DpFedExp
from dpfedexp.flower import cohort as server
from dpfedexp.mechanisms import central_gaussian as secure_gaussian

CONFIDENCE = 1 - 1e-6
SIGNS = balanced_signs(32, 0)
PLAIN, LOUD = dp_fedavg(clip=0.5, noise_multiplier=1.0), dp_fedavg(clip=0.5, noise_multiplier=0.2)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def who(rounds=12):
    found = participation(observe_flower(LOUD, SIGNS, rounds, Poisson(0.5)), CONFIDENCE)
    return {(result.unit, result.outcome) for result in found}


def test_a_healthy_federation_passes():
    seen = observe_flower(dp_fedavg(clip=0.5, noise_multiplier=0.5), SIGNS, 24)
    assert {result.outcome for result in bounds(seen, CONFIDENCE)} == {"holds"}
    assert repetition([seen], "Flower", CONFIDENCE).holds
    assert {outcome for _, outcome in who()} == {"holds"}


def test_planted_full_participation_is_caught(monkeypatch):
    monkeypatch.setattr(server, "choose", lambda nodes, clients_per_node, sampling: dict.fromkeys(nodes, (0,)))
    assert ("rate off the one charged", "BROKEN") in who()


def test_planted_same_noise_every_round_is_caught(monkeypatch):
    # The constructor that answers misspelt arguments calls this one, which has the defaults.
    monkeypatch.setitem(
        DpFedExp.__init__.__wrapped__.__kwdefaults__, "noise", lambda: Streams(5).at("central noise", 1)
    )
    assert repetition([observe_flower(PLAIN, SIGNS, 8)], "Flower", CONFIDENCE).outcome == "BROKEN"


def test_planted_third_of_the_noise_is_caught(monkeypatch):
    """A third, because a few hundred samples of μ = 2 can't prove a factor of two."""
    honest = secure_gaussian.add_noise
    monkeypatch.setattr(
        secure_gaussian,
        "add_noise",
        lambda values, step, deviation, noise, strict=False: honest(values, step, deviation / 3, noise, strict),
    )
    found = bounds(observe_flower(PLAIN, SIGNS, 24), CONFIDENCE)
    assert found[0].outcome == "BROKEN"


def test_without_flower_the_part_is_listed_as_not_audited(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    (result,) = audit_flower(0, CONFIDENCE)
    assert result.outcome == "not audited"
    assert "pip install" in result.skipped
