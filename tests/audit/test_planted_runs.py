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
from dpfedexp.core.noise import KeyedNoise, Streams, SystemStreams
from dpfedexp.core.sums import WITHIN_CLIP
from dpfedexp.engine.simulated import OneGroup, Simulation
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import central_gaussian as secure_gaussian

CONFIDENCE = 1 - 1e-6
SIGNS = balanced_signs(128, 0)
PLAIN, LOUD = dp_fedavg(clip=0.5, noise_multiplier=2.0), dp_fedavg(clip=0.5, noise_multiplier=0.2)


def outcomes(results):
    return {result.outcome for result in results}


def runs(secure=True, rounds=16):
    return [observe(PLAIN, SIGNS, rounds, seed, secure=secure) for seed in (1, 2)]


@pytest.mark.parametrize("secure", [True, False])
def test_a_healthy_run_has_no_noise_twice(secure):
    assert repetition(runs(secure), "train", CONFIDENCE).holds


def test_a_healthy_run_proves_what_it_should_and_no_more():
    seen = observe(PLAIN, balanced_signs(256, 1), 32, 3, secure=True)
    assert outcomes(bounds(seen, CONFIDENCE)) == {"holds"}


def test_a_run_with_candidates_costs_one_round_and_a_client_in_two_groups_is_caught(monkeypatch):
    signs = balanced_signs(256, 1)
    healthy = bounds(observe_candidates(PLAIN, signs, 32, 3), CONFIDENCE)
    assert outcomes(healthy) == {"holds"}
    assert all(result.lower > 0.3 * result.claim for result in healthy)
    monkeypatch.setattr(OneGroup, "take", lambda *given: None)
    monkeypatch.setattr(Simulation, "groups", lambda self, request, groups: torch.full((256,), request.group[0]))
    caught = bounds(observe_candidates(PLAIN, signs, 32, 3), CONFIDENCE)
    assert "BROKEN" in outcomes(caught)


def test_a_healthy_sampled_run_draws_its_clients_as_charged():
    seen = observe(LOUD, SIGNS, 12, 3, secure=True, participation=Poisson(0.5))
    assert outcomes(participation(seen, CONFIDENCE)) == {"holds"}


@pytest.mark.parametrize(
    ("streams", "at"),
    [
        (Streams, lambda self, purpose, round: KeyedNoise(self.seed, purpose, 1)),
        (SystemStreams, lambda self, purpose, round: KeyedNoise(id(self), purpose, 1)),
        (SystemStreams, lambda self, purpose, round: KeyedNoise(7, purpose, round)),
    ],
    ids=["every round of a seeded run", "every round of a secure run", "in two secure runs"],
)
def test_planted_noise_that_comes_again_is_caught(monkeypatch, streams, at):
    monkeypatch.setattr(streams, "at", at)
    assert repetition(runs(streams is SystemStreams), "train", CONFIDENCE).outcome == "BROKEN"


def test_planted_noise_repeated_every_four_coordinates_is_caught_in_a_run(monkeypatch):
    honest = secure_gaussian.add_noise

    def repeated(values, step, deviation, noise, strict=False):
        drawn = honest(torch.zeros_like(values[:, :4]), step, deviation, noise, strict)
        return values + drawn.repeat(1, -(-values.shape[1] // 4))[:, : values.shape[1]]

    monkeypatch.setattr(secure_gaussian, "add_noise", repeated)
    assert repetition(runs(), "train", CONFIDENCE).outcome == "BROKEN"


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


def changed_release(monkeypatch, change):
    honest = secure_gaussian.SecureCentralGaussian.release
    monkeypatch.setattr(
        secure_gaussian.SecureCentralGaussian,
        "release",
        lambda self, sums, denominator, *noises: change(honest(self, sums, denominator, *noises), sums, denominator),
    )


def test_planted_adaptive_clip_that_follows_the_true_count_is_caught(monkeypatch):
    changed_release(
        monkeypatch, lambda release, sums, m: replace(release, votes={WITHIN_CLIP: 0.5 + float(sums.votes[0]) / m})
    )
    assert outcomes(whole_runs.audit_history("adaptive clip", 5, CONFIDENCE, rounds=400)) == {"BROKEN"}


def test_planted_step_size_from_the_true_norms_is_caught(monkeypatch):
    changed_release(monkeypatch, lambda release, sums, m: replace(release, statistic=float(sums.vector[-1]) / m))
    assert outcomes(whole_runs.audit_history("η_g of the free rule", 5, CONFIDENCE, rounds=400)) == {"BROKEN"}


def test_planted_coupling_of_a_chunk_is_caught(monkeypatch):
    """The smallest step of the grid for every example of the largest client."""
    honest = Simulation.collect

    def coupled(self, request, cohort):
        answer = honest(self, request, cohort)
        largest = int(self.task.clients.sizes[cohort].max())
        sums = replace(answer.sums, vector=answer.sums.vector + largest * 2.0**-20)
        return replace(answer, sums=sums)

    def outcome():
        federations = [isolation._federation(0, own) for own in (5, isolation.OUTSIZE)]
        return isolation._audit("", "loop", Sgd(lr=3.0, steps=3), federations, 0).outcome

    assert outcome() == "holds"
    monkeypatch.setattr(Simulation, "collect", coupled)
    assert outcome() == "BROKEN"


def test_planted_state_that_reaches_a_metric_is_caught(monkeypatch):
    """As if the evaluated module had kept something of the clients' data."""
    honest = whole_runs.train

    def remembering(model, federation, *given, **options):
        run = honest(model, federation, *given, **options)
        run.history[-1]["shown"] += 1e-9 * float(federation.inputs.sum())
        return run

    name = "a module without state"
    assert outcomes(isolation.audit_module(name, isolation.modules()[name], 0)) == {"holds"}
    monkeypatch.setattr(isolation, "train", remembering)
    assert [r.outcome for r in isolation.audit_module(name, isolation.modules()[name], 0)] == ["holds", "BROKEN"]


def test_planted_state_that_travels_between_clients_is_caught(monkeypatch):
    """As if the module had kept something of the first client when the second one trained."""
    honest = Simulation.collect

    def traveling(self, request, cohort):
        answer = honest(self, request, cohort)
        first, _ = self.task.clients.gather(cohort[:1], torch.zeros((1, 1), dtype=torch.int64))
        kept = float(first.sum() > 0) * 2.0**-20 * (len(cohort) - 1)
        return replace(answer, sums=replace(answer.sums, vector=answer.sums.vector + kept))

    monkeypatch.setattr(Simulation, "collect", traveling)
    name = "a module without state"
    assert [r.outcome for r in isolation.audit_module(name, isolation.modules()[name], 0)] == ["BROKEN", "holds"]


def test_a_refusal_of_everything_does_not_pass_for_isolation(monkeypatch):
    monkeypatch.setattr(isolation, "train", Mock(side_effect=InputError("no.")))
    name = "a module without state"
    assert outcomes(isolation.audit_module(name, isolation.modules()[name], 0)) == {"BROKEN"}


def broken(instances=1024):
    found = audit_noise(11, 1 - 1e-6, instances=instances)
    return {(result.name, result.unit) for result in found if result.outcome == "BROKEN"}


CORRELATED, TWICE = "largest correlation at any shift", "values that come twice"
FIRST_TWICE = "first words that come twice"


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


def of_the_first_client(self, who, *given, honest=KeyedNoise.normal):
    return honest(self, torch.zeros_like(who), *given)


@pytest.mark.parametrize(
    ("owner", "name", "planted", "caught"),
    [
        (KeyedNoise, "normal", of_the_first_client, ("seeded streams", CORRELATED)),
        (Streams, "at", lambda self, *key: KeyedNoise(self.seed % 256, *key), ("seeds", FIRST_TWICE)),
        (noise_module.os, "urandom", lambda n: os.getrandom(1) + bytes(n - 1), ("keys of system noise", FIRST_TWICE)),
        (noise_module.os, "getpid", lambda: 1, ("system noise after a fork", "words in common")),
    ],
    ids=["noise shared by clients", "seeds of eight bits", "a key of eight bits", "a key that a fork keeps"],
)
def test_a_planted_source_of_noise_is_caught(monkeypatch, owner, name, planted, caught):
    monkeypatch.setattr(owner, name, planted)
    assert caught in broken()


@pytest.mark.parametrize(
    ("change", "unit"),
    [
        (lambda drawn: 0.9 * drawn, "variance off 1"),
        (lambda drawn: drawn.sign() * drawn.abs().sqrt(), "distance from the normal law"),
        (lambda drawn: drawn[:, :4].repeat(1, drawn.shape[1] // 4 + 1)[:, : drawn.shape[1]], CORRELATED),
        (lambda drawn: drawn + 0.7 * drawn.roll(1, dims=1), CORRELATED),
    ],
    ids=["a tenth too small", "another law", "repeated every 4 coordinates", "neighbors alike"],
)
def test_planted_system_noise_of_another_law_is_caught(monkeypatch, change, unit):
    honest = noise_module.ChaChaNoise.normal
    monkeypatch.setattr(noise_module.ChaChaNoise, "normal", lambda self, *given: change(honest(self, *given)))
    assert ("system noise", unit) in broken(32)
