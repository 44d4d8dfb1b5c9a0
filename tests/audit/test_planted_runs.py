"""Bugs planted in noise sources and in whole runs: `train` and Flower, seen only through what they publish."""

import os
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from dpfedexp import Sgd, dp_fedavg
from dpfedexp.algorithms.round import Poisson
from dpfedexp.audit import isolation
from dpfedexp.audit import runs as whole_runs
from dpfedexp.audit.mechanisms import audit_noise
from dpfedexp.audit.runs import balanced_signs, bounds, observe, observe_candidates, participation, repetition
from dpfedexp.core import noise as noise_module
from dpfedexp.core.noise import ChaChaNoise, KeyedNoise, Streams, SystemStreams
from dpfedexp.core.sums import WITHIN_CLIP
from dpfedexp.engine.simulated import OneGroup, Simulation
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import central_gaussian as secure_gaussian

CONFIDENCE = 1 - 1e-6
SIGNS = balanced_signs(128, 0)
PLAIN, LOUD = dp_fedavg(clip=0.5, noise_multiplier=2.0), dp_fedavg(clip=0.5, noise_multiplier=0.2)


def outcomes(results):
    return {result.outcome for result in results}


def test_healthy_runs_prove_what_they_should_and_no_more():
    assert outcomes(whole_runs.audit_train(1, CONFIDENCE)) == {"holds"}


def test_a_client_in_two_groups_of_candidates_is_caught(monkeypatch):
    monkeypatch.setattr(OneGroup, "take", lambda *given: None)
    monkeypatch.setattr(Simulation, "groups", lambda self, request, groups: torch.full((256,), request.group[0]))
    caught = bounds(observe_candidates(PLAIN, balanced_signs(256, 1), 32, 3), CONFIDENCE)
    assert "BROKEN" in outcomes(caught)


def repeated_noise(values, step, deviation, noise, strict=False, honest=secure_gaussian.add_noise):
    drawn = honest(torch.zeros_like(values[:, :4]), step, deviation, noise, strict)
    return values + drawn.repeat(1, -(-values.shape[1] // 4))[:, : values.shape[1]]


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (Streams, "at", lambda self, purpose, round: KeyedNoise(self.seed, purpose, 1)),
        (SystemStreams, "at", lambda self, purpose, round: KeyedNoise(id(self), purpose, 1)),
        (SystemStreams, "at", lambda self, purpose, round: KeyedNoise(7, purpose, round)),
        (secure_gaussian, "add_noise", repeated_noise),
    ],
    ids=["every round of a seeded run", "every round of a secure run", "in two secure runs", "every four coordinates"],
)
def test_planted_noise_that_comes_again_is_caught(monkeypatch, owner, name, planted):
    monkeypatch.setattr(owner, name, planted)
    runs = [observe(PLAIN, SIGNS, 16, seed, secure=owner is not Streams) for seed in (1, 2)]
    assert repetition(runs, "train", CONFIDENCE).outcome == "BROKEN"


def less_noise(monkeypatch, factor):
    honest = secure_gaussian.add_noise
    monkeypatch.setattr(
        secure_gaussian,
        "add_noise",
        lambda values, step, deviation, noise, strict=False: honest(values, step, deviation / factor, noise, strict),
    )


def test_planted_half_of_the_noise_is_caught_in_a_run(monkeypatch):
    less_noise(monkeypatch, 2)
    found = bounds(observe(PLAIN, balanced_signs(256, 1), 32, 3, secure=True), CONFIDENCE)
    assert outcomes(found) == {"BROKEN"}, "one round, and four rounds together"


DISPERSION = "|log| of the counts' dispersion"


def everybody(self, clients, noise):
    return torch.arange(clients)


def all_or_none(self, clients, noise):
    return torch.arange(clients) if noise.generator(0).random(1)[0] < self.rate else torch.arange(0)


def always_half(self, clients, noise):
    return torch.from_numpy(noise.generator(0).choice(clients, clients // 2, replace=False)).sort().values


@pytest.mark.parametrize(
    ("cohort", "unit"), [(everybody, "rate off the one charged"), (all_or_none, DISPERSION), (always_half, DISPERSION)]
)
def test_planted_sampling_that_is_not_poisson_is_caught(monkeypatch, cohort, unit):
    monkeypatch.setattr(Poisson, "cohort", cohort)
    found = participation(observe(LOUD, SIGNS, 32, 3, secure=True, participation=Poisson(0.5)), CONFIDENCE)
    assert unit in {result.unit for result in found if result.outcome == "BROKEN"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("adaptive clip", lambda sums, m: {"votes": {WITHIN_CLIP: 0.5 + float(sums.votes[0]) / m}}),
        ("η_g of the free rule", lambda sums, m: {"statistic": float(sums.vector[-1]) / m}),
    ],
    ids=["a clip that follows the true count", "a step size from the true norms"],
)
def test_planted_history_without_noise_is_caught(monkeypatch, name, change):
    secure, honest = secure_gaussian.SecureCentralGaussian, secure_gaussian.SecureCentralGaussian.release

    def release(self, sums, denominator, *noises):
        return replace(honest(self, sums, denominator, *noises), **change(sums, denominator))

    monkeypatch.setattr(secure, "release", release)
    assert outcomes(whole_runs.audit_history(name, 5, CONFIDENCE, rounds=400)) == {"BROKEN"}


def test_planted_coupling_of_a_chunk_is_caught(monkeypatch):
    """The smallest step of the grid for every example of the largest client."""
    honest = Simulation.collect

    def coupled(self, request, cohort):
        answer = honest(self, request, cohort)
        largest = int(self.task.clients.sizes[cohort].max())
        return replace(answer, sums=replace(answer.sums, vector=answer.sums.vector + largest * 2.0**-20))

    monkeypatch.setattr(Simulation, "collect", coupled)
    federations = [isolation._federation(0, own) for own in (5, isolation.OUTSIZE)]
    assert isolation._audit("", "loop", Sgd(lr=3.0, steps=3), federations, 0).outcome == "BROKEN"


def remembering(*given, honest=isolation.train, **options):
    """As if the evaluated module had kept something of the clients' data."""
    run = honest(*given, **options)
    run.history[-1]["shown"] += 1e-9 * float(given[1].inputs.sum())
    return run


def traveling(self, request, cohort, honest=Simulation.collect):
    """As if the module had kept something of the first client when the second one trained."""
    answer = honest(self, request, cohort)
    first, _ = self.task.clients.gather(cohort[:1], torch.zeros((1, 1), dtype=torch.int64))
    kept = float(first.sum() > 0) * 2.0**-20 * (len(cohort) - 1)
    return replace(answer, sums=replace(answer.sums, vector=answer.sums.vector + kept))


@pytest.mark.parametrize(
    ("owner", "name", "planted", "found"),
    [
        (isolation, "train", remembering, ["holds", "BROKEN"]),
        (Simulation, "collect", traveling, ["BROKEN", "holds"]),
        (isolation, "train", Mock(side_effect=InputError("no.")), ["BROKEN", "BROKEN"]),
    ],
    ids=["state that reaches a metric", "state that travels between clients", "a refusal of everything"],
)
def test_what_looks_like_isolation_and_is_none_is_caught(monkeypatch, owner, name, planted, found):
    monkeypatch.setattr(owner, name, planted)
    module = "a module without state"
    assert [r.outcome for r in isolation.audit_module(module, isolation.modules()[module], 0)] == found


CORRELATED, TWICE = "largest correlation at any shift", "values that come twice"
FIRST_TWICE = "first words that come twice"
SEEDED = {("seeded streams", CORRELATED), ("seeded streams", TWICE)}


def of_the_first_client(self, who, *given, honest=KeyedNoise.normal):
    return honest(self, torch.zeros_like(who), *given)


def of_another_law(change, honest=ChaChaNoise.normal):
    return lambda self, *given: change(honest(self, *given))


@pytest.mark.parametrize(
    ("owner", "name", "planted", "caught"),
    [
        (Streams, "at", lambda self, purpose, round: KeyedNoise(self.seed, purpose, 1), SEEDED),
        (Streams, "at", lambda self, purpose, round: KeyedNoise(self.seed, "noise", round), SEEDED),
        (KeyedNoise, "normal", of_the_first_client, {("seeded streams", CORRELATED)}),
        (Streams, "at", lambda self, *key: KeyedNoise(self.seed % 256, *key), {("seeds", FIRST_TWICE)}),
        (noise_module.os, "urandom", lambda n: os.getrandom(1) + bytes(n - 1), {("keys of system noise", FIRST_TWICE)}),
        (noise_module.os, "getpid", lambda: 1, {("system noise after a fork", "words in common")}),
        *(
            (ChaChaNoise, "normal", of_another_law(change), {("system noise", unit)})
            for change, unit in (
                (lambda drawn: 0.9 * drawn, "variance off 1"),
                (lambda drawn: drawn.sign() * drawn.abs().sqrt(), "distance from the normal law"),
                (lambda drawn: drawn[:, :4].repeat(1, drawn.shape[1] // 4 + 1)[:, : drawn.shape[1]], CORRELATED),
                (lambda drawn: drawn + 0.7 * drawn.roll(1, dims=1), CORRELATED),
            )
        ),
    ],
    ids=[
        *(
            "the same noise every round",
            "one stream for all purposes",
            "noise shared by clients",
            "seeds of eight bits",
        ),
        *("a key of eight bits", "a key that a fork keeps", "a tenth too small", "another law"),
        *("repeated every 4 coordinates", "neighbors alike"),
    ],
)
def test_a_planted_source_of_noise_is_caught(monkeypatch, owner, name, planted, caught):
    monkeypatch.setattr(owner, name, planted)
    found = audit_noise(11, CONFIDENCE, instances=1024)
    assert caught <= {(result.name, result.unit) for result in found if result.outcome == "BROKEN"}
