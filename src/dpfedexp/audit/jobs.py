"""Everything that `dpfedexp audit` does, as jobs that any process can take."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from dpfedexp.audit import QUICK_SAMPLES
from dpfedexp.audit.mechanisms.bins import audit_bins, bin_cases
from dpfedexp.audit.mechanisms.cases import GAMMAS, standard_cases
from dpfedexp.audit.mechanisms.density import audit_density
from dpfedexp.audit.mechanisms.noise import audit_noise
from dpfedexp.audit.mechanisms.release import audit_mechanism
from dpfedexp.audit.result import Result
from dpfedexp.audit.runs.blackbox import audit_history, audit_train, step_size_cases
from dpfedexp.audit.runs.canaries import audit_training
from dpfedexp.audit.runs.flower_run import audit_flower
from dpfedexp.audit.runs.isolation import audit_isolation
from dpfedexp.audit.runs.state import audit_state
from dpfedexp.mechanisms import PrivUnit
from dpfedexp.trainers.select import trainer_names

_DENSITY_NUMBERS = 2_000_000
"""Coordinates of all the reports of one density check."""


@dataclass(frozen=True)
class Job:
    """Some checks, and about how many seconds they take."""

    name: str
    seconds: float
    work: Callable[[], list[Result]]


def all_jobs(samples: int, seed: int, confidence: float) -> list[Job]:
    """The whole audit; more samples are also more rounds, canaries and keys."""
    more = samples > QUICK_SAMPLES
    jobs = [
        Job("Flower", 25, partial(audit_flower, seed, confidence, rounds=64 if more else 32)),
        Job("train", 15, partial(audit_train, seed, confidence, rounds=128 if more else 32)),
    ]
    jobs += [
        Job(f"isolation, {name}", 5, partial(audit_isolation, seed, trainers=(name,), steps=60 if more else 20))
        for name in (trainer_names() if more else ("auto", "fast", "loop"))
    ]
    jobs += [
        Job(name, 4, partial(audit_history, name, seed, confidence, rounds=2000 if more else 600))
        for name in step_size_cases()
    ]
    jobs += [
        Job("canaries", 2, partial(audit_training, seed, confidence, canaries=4000 if more else 1000)),
        Job("module state", 2, partial(audit_state, seed)),
        Job("noise", 1, partial(audit_noise, seed, confidence, instances=2**17 if more else 2**12)),
    ]
    jobs += [Job(case.name, 1, partial(audit_mechanism, case, samples, seed, confidence)) for case in standard_cases()]
    jobs += [
        Job(name, 4, partial(audit_bins, name, vote, samples, seed, confidence)) for name, vote in bin_cases().items()
    ]
    for dimension in (3, 237, 5046):
        for rule in GAMMAS:
            size = min(samples, _DENSITY_NUMBERS // dimension)
            mechanism = PrivUnit(0.3, dimension, gamma=rule)
            jobs.append(Job(f"density {dimension}", 0.3, partial(audit_density, mechanism, size, seed, confidence)))
    return jobs


def do(job: Job) -> list[Result]:
    """The job on one thread, without the warnings of numerical libraries about runs with hardly any noise."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return job.work()
