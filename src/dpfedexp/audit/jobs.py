"""The jobs of `dpfedexp audit`, and a report section with their results."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from dpfedexp.audit import QUICK_SAMPLES
from dpfedexp.audit.bounds import Result
from dpfedexp.audit.isolation import audit_isolation, audit_state
from dpfedexp.audit.mechanisms import GAMMAS, audit_density, audit_mechanism, audit_noise, standard_cases
from dpfedexp.audit.runs import audit_flower, audit_history, audit_train, audit_training, step_size_cases
from dpfedexp.mechanisms import PrivUnit
from dpfedexp.report.document import Claim, Section, Table
from dpfedexp.trainers.select import trainer_names


@dataclass(frozen=True)
class Job:
    """A part of the audit: a function that returns its results, and about how many seconds it takes."""

    name: str
    seconds: float
    work: Callable[[], list[Result]]


def all_jobs(samples: int, seed: int, confidence: float) -> list[Job]:
    """The jobs of the whole audit; more samples also mean more rounds, canaries and keys."""
    more = samples > QUICK_SAMPLES
    jobs = [
        Job("Flower", 25, partial(audit_flower, seed, confidence, rounds=64 if more else 32)),
        Job("train", 15, partial(audit_train, seed, confidence, rounds=128 if more else 32)),
    ]
    jobs += [
        Job(f"isolation, {name}", 5, partial(audit_isolation, seed, name, steps=60 if more else 20))
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
    for dimension, rule in product((3, 237, 5046), GAMMAS):
        size = min(samples, 2_000_000 // dimension)  # the coordinates of all reports must fit into memory
        mechanism = PrivUnit(0.3, dimension, gamma=rule)
        jobs.append(Job(f"density {dimension}", 0.3, partial(audit_density, mechanism, size, seed, confidence)))
    return jobs


def run_job(job: Job) -> list[Result]:
    """Run a job on one thread, without the warnings of numerical libraries about runs with hardly any noise."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return job.work()


_KINDS = {
    "mechanism": "Mechanism audit: two worst-case neighbors, told apart by the best test",
    "density": "PrivUnit's densities, and its sampler",
    "noise": "Noise sources",
    "black box": "Black-box audit: whole runs, every client a canary in a coordinate of its own",
    "isolation": "Isolation: what else moves when one client's data do",
    "training": "Training audit: one run, the coins of many canaries guessed",
}
_COLUMNS = ["audited", "unit", "lower bound", "claim", "reached", "tight claim would give", "outcome", "how"]


def audit_section(results: Sequence[Result], command: str) -> Section:
    kinds = {kind: [_row(result) for result in results if result.kind == kind] for kind in _KINDS}
    return Section(
        name="audit",
        title="Privacy measured from outside",
        text=[
            "A lower bound is the epsilon or mu that an attack has proven, at a confidence that the JSON states for each. A claim "
            "is the accountant's figure, which no attack can exceed. BROKEN: the bound is above the claim. NO POWER: even if the "
            "claim were exactly tight, the attack should have proven more, so its result shows nothing. For an effect that must "
            "not exist, the claim is the largest effect that chance explains, and the next column has the smallest effect that "
            "the attack would have detected."
        ],
        tables=[Table(_KINDS[kind], _COLUMNS, rows) for kind, rows in kinds.items() if rows],
        claims=_claims(results),
        command=command,
        data={"results": [result.to_json() for result in results]},
    )


def _claims(results: Sequence[Result]) -> list[Claim]:
    audited = [result for result in results if not result.skipped]

    def claim(text: str, wrong: str) -> Claim:
        bad = [f"{r.name} ({r.unit})" for r in audited if r.outcome == wrong]
        return Claim(text, "; ".join([f"{len(audited) - len(bad)} of {len(audited)}", *bad]), not bad)

    left_out = [f"{r.name} ({r.skipped.rstrip('.')})" for r in results if r.skipped]
    return [
        claim("No measured lower bound exceeds its claim", "BROKEN"),
        claim("Every attack has power, or is one-sided by its nature", "NO POWER"),
        *([Claim("Not audited here", "; ".join(left_out), True)] if left_out else []),
    ]


_MARKS = {"holds": "✓ holds", "BROKEN": "✗ BROKEN", "NO POWER": "✗ NO POWER", "not audited": "– not audited"}


def _row(result: Result) -> list[str]:
    reached = f"{100 * result.lower / result.claim:.0f}%" if result.claim > 0 and result.power is not None else ""
    figures = [result.unit, f"{result.lower:.4f}", f"{result.claim:.4f}", reached, result.power_text]
    return [result.name, *([""] * 5 if result.skipped else figures), _MARKS[result.outcome], result.detail]
