import json

import pytest
import torch
from typer.testing import CliRunner

from dpfedexp import cdp_fedexp
from dpfedexp.audit import audit_density, audit_mechanism, audit_training, standard_cases
from dpfedexp.audit.cost import noise_cost
from dpfedexp.cli import app
from dpfedexp.mechanisms import PrivUnit

CONFIDENCE = 1 - 1e-6
CASES = {case.name: case for case in standard_cases()}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CASES)
def test_no_mechanism_is_caught_and_every_audit_has_power(name):
    """4,000 samples reach some of a claim of μ = 1; `dpfedexp audit --samples 1000000` reaches nine tenths of ε."""
    for result in audit_mechanism(CASES[name], 4000, 3, CONFIDENCE):
        assert result.holds
        assert result.share > (0.5 if result.unit == "μ" else 0.25)


def test_every_mechanism_and_rule_is_among_the_cases():
    seen = {(type(case.mechanism).__name__, getattr(case.mechanism, "numerator", None)) for case in CASES.values()}
    wanted = {("CentralGaussian", rule) for rule in (None, "free", "paper")}
    wanted |= {("LocalGaussian", rule) for rule in (None, "free", "paper", "naive")}
    assert wanted | {("PrivUnit", None)} <= seen


@pytest.mark.parametrize("dimension", [2, 3, 237, 5046])
@pytest.mark.parametrize("gamma", ["exact", "paper", "optimal"])
def test_the_densities_of_privunit_have_the_ratio_that_is_charged(dimension, gamma):
    exact, rate = audit_density(PrivUnit(0.3, dimension, gamma=gamma), 500, 0, CONFIDENCE)
    assert exact.lower == pytest.approx(exact.claim, rel=1e-10)
    assert exact.holds
    assert rate.holds


@pytest.mark.parametrize(
    "algorithm", [None, cdp_fedexp(clip=0.3, noise_multiplier=1.0, adjacency="add-remove", delta=1e-9)]
)
def test_a_training_run_reveals_its_canaries_but_no_more_than_claimed(algorithm):
    result = audit_training(0, CONFIDENCE, algorithm=algorithm, canaries=400, others=50)
    assert 1.0 < result.lower <= result.claim


def test_secure_noise_costs_less_than_twice_the_plain_one():
    """The fastest of many alternating passes, up to three times: other work on the machine only ever adds."""
    assert min(noise_cost(5046, strict=False, passes=15).factor for _ in range(3)) < 2.0


def test_the_command_writes_table_and_picture_and_ends_with_0(tmp_path):
    done = CliRunner().invoke(app, ["audit", "--samples", "2000", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "audit.json").read_text())
    assert len(written["data"]["results"]) > 30
    assert all(result["holds"] for result in written["data"]["results"])
    assert (tmp_path / "audit.png").stat().st_size > 10_000


def test_the_command_ends_with_1_where_a_bound_exceeds_its_claim(tmp_path, monkeypatch):
    from dpfedexp.audit import Result
    from dpfedexp.cli import audit

    broken = Result("mechanism", "central Gaussian", "μ", 2.0, 1.0, CONFIDENCE)
    monkeypatch.setattr(audit, "_work", lambda job, **_: [broken])
    done = CliRunner().invoke(app, ["audit", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "EXCEEDED" in done.output


@pytest.mark.parametrize("given", [["--confidence", "1.5"], ["--samples", "10"], ["noise-cost", "-d", "1"]])
def test_wrong_options_are_one_sentence(given, tmp_path):
    done = CliRunner().invoke(app, ["audit", *given])
    assert done.exit_code != 0
    assert "Traceback" not in done.output
