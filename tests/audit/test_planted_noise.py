"""Bugs planted in the noise sources."""

import os

import pytest
import torch

from dpfedexp.audit.mechanisms import audit_noise
from dpfedexp.core.noise import chacha
from dpfedexp.core.noise.streams import KeyedNoise, Streams


def broken(instances=1024):
    torch.set_num_threads(1)
    found = audit_noise(11, 1 - 1e-6, instances=instances)
    return {(result.name, result.unit) for result in found if result.outcome == "BROKEN"}


CORRELATED, TWICE = "largest correlation at any shift", "values that come twice"


@pytest.mark.parametrize(
    "forgetful",
    [
        lambda self, purpose, round: KeyedNoise(self.seed, purpose, 1),
        lambda self, purpose, round: KeyedNoise(self.seed, "noise", round),
    ],
    ids=["the same noise every round", "one stream for all purposes"],
)
def test_planted_streams_that_forget_their_key_are_caught(monkeypatch, forgetful):
    monkeypatch.setattr(Streams, "at", forgetful)
    assert {("seeded streams", CORRELATED), ("seeded streams", TWICE)} <= broken()


def test_planted_noise_shared_by_clients_is_caught(monkeypatch):
    honest = KeyedNoise.normal
    monkeypatch.setattr(
        KeyedNoise, "normal", lambda self, clients, *given: honest(self, torch.zeros_like(clients), *given)
    )
    assert ("seeded streams", CORRELATED) in broken()


def test_planted_seeds_of_eight_bits_are_caught(monkeypatch):
    monkeypatch.setattr(Streams, "at", lambda self, purpose, round: KeyedNoise(self.seed % 256, purpose, round))
    assert ("seeds", "first words that come twice") in broken()


def test_planted_chacha_key_of_eight_bits_is_caught(monkeypatch):
    monkeypatch.setattr(chacha.os, "urandom", lambda size: os.getrandom(1) + bytes(size - 1))
    assert ("keys of system noise", "first words that come twice") in broken()


def test_planted_chacha_that_goes_on_after_a_fork_is_caught(monkeypatch):
    monkeypatch.setattr(chacha.os, "getpid", lambda: 1)
    assert ("system noise after a fork", "words in common") in broken(32)


@pytest.mark.parametrize(
    ("change", "unit"),
    [
        (lambda drawn: 0.9 * drawn, "variance off 1"),
        (lambda drawn: drawn.sign() * drawn.abs().sqrt(), "distance from the normal law"),
        (lambda drawn: drawn[:, :4].repeat(1, drawn.shape[1] // 4 + 1)[:, : drawn.shape[1]], CORRELATED),
        (lambda drawn: drawn + 0.7 * drawn.roll(1, dims=1), CORRELATED),
    ],
    ids=["a tenth too small", "another law", "repeated every 4 coordinates", "neighbours alike"],
)
def test_planted_system_noise_of_another_law_is_caught(monkeypatch, change, unit):
    honest = chacha.ChaChaNoise.normal
    monkeypatch.setattr(chacha.ChaChaNoise, "normal", lambda self, *given: change(honest(self, *given)))
    assert ("system noise", unit) in broken(32)
