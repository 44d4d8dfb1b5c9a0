"""A healthy library passes: nothing is broken, and every attack has power."""

import json

import pytest
from typer.testing import CliRunner

from dpfedexp import cdp_fedexp, dp_fedavg
from dpfedexp.accounting import Sampling, compose
from dpfedexp.accounting.events import central_gaussian
from dpfedexp.audit import audit_density, audit_mechanism, audit_training, jobs, standard_cases
from dpfedexp.audit.bounds import Power, Result, skip
from dpfedexp.audit.jobs import Job, all_jobs, run_job
from dpfedexp.audit.mechanisms import audit_noise
from dpfedexp.audit.runs import clip_and_noise, mu_of
from dpfedexp.cli import app
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import PrivUnit
from tests.sizes import sized

CONFIDENCE = 1 - 1e-6
CASES = {case.name: case for case in standard_cases()}


SHORT = [name for name, case in CASES.items() if not (case.secure and "add-remove" in name)]


@pytest.mark.parametrize("name", sized(SHORT, list(CASES)))
def test_no_mechanism_is_caught_and_every_audit_has_power(name):
    """System noise has no seed: few samples of it prove μ all but surely, ε only as a rule."""
    case = CASES[name]
    for result in audit_mechanism(case, 2000 if case.secure else 4000, 3, CONFIDENCE):
        assert result.outcome != "BROKEN", result
        assert result.holds or (case.secure and result.unit != "μ"), result


def test_every_mechanism_and_rule_is_among_the_cases_plain_and_secure():
    seen = {(type(case.mechanism).__name__, getattr(case.mechanism, "numerator", None)) for case in CASES.values()}
    wanted = {(kind, rule) for kind in ("CentralGaussian", "SecureCentralGaussian") for rule in (None, "free", "paper")}
    wanted |= {(kind, rule) for kind in ("LocalGaussian", "SecureLocalGaussian") for rule in (None, "free", "paper")}
    wanted |= {("LocalGaussian", "naive"), ("PrivUnit", None), ("SecurePrivUnit", None)}
    assert wanted <= seen
    counted = [c for c in CASES.values() if c.mechanism.adapts_clip]
    assert {(c.mechanism.adjacency, c.secure) for c in counted} == {
        (adjacency, secure) for adjacency in ("replace-one", "add-remove") for secure in (False, True)
    }


@pytest.mark.parametrize("dimension", [2, 3, 237, 5046])
@pytest.mark.parametrize("gamma", ["exact", "paper", "optimal"])
def test_the_densities_of_privunit_have_the_ratio_that_is_charged(dimension, gamma):
    exact, *sampled = audit_density(PrivUnit(0.3, dimension, gamma=gamma), 500, 0, CONFIDENCE)
    assert exact.lower == pytest.approx(exact.claim, rel=1e-10)
    assert exact.holds
    assert all(result.holds for result in sampled)


def test_the_noise_sources_are_independent_and_normal():
    found = audit_noise(5, CONFIDENCE, instances=1024)
    assert len(found) > 15
    assert all(result.holds for result in found), [r for r in found if not r.holds]


@pytest.mark.parametrize(
    "algorithm", [None, cdp_fedexp(clip=0.3, noise_multiplier=1.0, adjacency="add-remove", delta=1e-9)]
)
def test_a_training_run_reveals_its_canaries_but_no_more_than_claimed(algorithm):
    older, newer = audit_training(0, CONFIDENCE, algorithm=algorithm, canaries=400, others=50)
    assert 1.0 < older.lower < newer.lower <= newer.claim
    assert older.holds
    assert newer.holds
    assert newer.one_sided
    assert newer.power.expected > 0.5 * newer.lower


def test_every_part_of_the_audit_is_among_the_jobs():
    names = " ".join(job.name for job in all_jobs(50_000, 0, CONFIDENCE))
    parts = ("Flower", "train", "isolation", "module state", "noise", "canaries", "density", "adaptive clip")
    assert [part for part in (*CASES, *parts) if part not in names] == []


def test_a_few_jobs_do_their_work_and_every_result_holds_with_its_power():
    few = ("noise", "central Gaussian", "PrivUnit, exact γ", "density 3")
    made = [job for job in all_jobs(4000, 0, CONFIDENCE) if job.name in few]
    results = [result for job in made for result in run_job(job)]
    assert {job.name for job in made} == set(few)
    assert len(results) > 20
    assert all(result.outcome == "holds" and result.power_text for result in results)


@pytest.mark.parametrize(("lower", "outcome", "code"), [(0.9, "holds", 0), (2.0, "BROKEN", 1), (0.01, "NO POWER", 1)])
def test_the_command_writes_its_table_and_its_exit_code_says_whether_all_is_well(
    tmp_path, monkeypatch, lower, outcome, code
):
    made = Result("mechanism", "central Gaussian", "μ", lower, 1.0, CONFIDENCE, power=Power(0.9, 0.5))
    left_out = skip("black box", "Flower", "Flower is not installed")
    monkeypatch.setattr(jobs, "all_jobs", lambda *_: [Job("made", 1.0, lambda: [made, left_out])])
    done = CliRunner().invoke(app, ["audit", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == code
    assert all(shown in done.output for shown in (outcome, "tight claim", "not audited")), done.output
    results = json.loads((tmp_path / "audit.json").read_text())["data"]["results"]
    assert [result["outcome"] for result in results] == [outcome, "not audited"]
    assert results[0]["power_text"] == "0.9000, ≥ 0.5000"


def test_what_can_not_be_audited_is_refused():
    for options in ({"clip": "adaptive", "noise_multiplier": 2}, {"clip": 1, "target_epsilon": 8}):
        with pytest.raises(InputError, match="has no fixed clip and noise_multiplier; this audit needs both"):
            clip_and_noise(dp_fedavg(**options))
    full = compose([(central_gaussian(5.0), 1)], 1e-5)
    assert mu_of(full, "full") == full.mu
    sampled = compose([(central_gaussian(5.0, sampling=Sampling("poisson", 0.5)), 1)], 1e-5)
    with pytest.raises(InputError, match="the guarantee of sampled has no μ"):
        mu_of(sampled, "sampled")
