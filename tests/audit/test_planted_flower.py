"""Bugs planted in the Flower strategy, seen only through the models that it publishes."""

import sys

import pytest

pytest.importorskip("flwr")

from dpfedexp import dp_fedavg
from dpfedexp.algorithms.round import Poisson
from dpfedexp.audit.runs import audit_flower, balanced_signs, bounds, observe_flower, participation, repetition
from dpfedexp.core.noise import Streams
from dpfedexp.flower import DpFedExp
from tests.audit.test_planted_runs import CONFIDENCE, LOUD, less_noise

SIGNS = balanced_signs(32, 0)


def who(rounds=12):
    found = participation(observe_flower(LOUD, SIGNS, rounds, Poisson(0.5)), CONFIDENCE)
    return {(result.unit, result.outcome) for result in found}


def test_a_healthy_federation_passes():
    seen = observe_flower(dp_fedavg(clip=0.5, noise_multiplier=0.5), SIGNS, 16)
    assert {result.outcome for result in bounds(seen, CONFIDENCE)} == {"holds"}
    assert repetition([seen], "Flower", CONFIDENCE).holds
    assert {outcome for _, outcome in who()} == {"holds"}


def test_planted_full_participation_of_nodes_is_caught(monkeypatch):
    monkeypatch.setattr("dpfedexp.flower.cohort.choose", lambda nodes, *_, equal: [{node: [0] for node in nodes}])
    assert ("rate off the one charged", "BROKEN") in who()


@pytest.mark.parametrize("bug", ["same noise every round", "third of the noise"])
def test_planted_noise_of_a_strategy_is_caught(monkeypatch, bug):
    """A third, because a few hundred samples of μ = 2 can't prove a factor of two."""
    same = bug == "same noise every round"
    if same:
        # The constructor that answers misspelt arguments calls this one, which has the defaults.
        defaults = DpFedExp.__init__.__wrapped__.__kwdefaults__
        monkeypatch.setitem(defaults, "noise", lambda: Streams(5).at("central noise", 1))
    else:
        less_noise(monkeypatch, 3)
    seen = observe_flower(dp_fedavg(clip=0.5, noise_multiplier=1.0), SIGNS, 8 if same else 16)
    found = repetition([seen], "Flower", CONFIDENCE) if same else bounds(seen, CONFIDENCE)[0]
    assert found.outcome == "BROKEN"


def test_without_flower_the_part_is_listed_as_not_audited(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    (result,) = audit_flower(0, CONFIDENCE)
    assert result.outcome == "not audited"
    assert "pip install" in result.skipped
