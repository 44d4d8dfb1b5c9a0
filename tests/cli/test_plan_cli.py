"""`dpfedexp plan`: a table and its sentences, one JSON object, and one sentence for whatever is wrong."""

import json
import re

import pytest
from typer.testing import CliRunner

from dpfedexp.accounting import Sampling
from dpfedexp.algorithms import dp_fedavg
from dpfedexp.algorithms.round import Full
from dpfedexp.cli import app
from dpfedexp.cli.plan import _of_file
from dpfedexp.engine.plan import Plan
from dpfedexp.errors import InputError
from dpfedexp.report.page import report

RUN = """
[data]
clients = 40
dimension = 3000
[algorithm]
clip = 1.0
target_epsilon = 1.0
[local]
lr = 0.01
steps = 2
[run]
rounds = 20
device = "cpu"
"""


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_table_has_a_row_for_every_epsilon_and_number_of_rounds():
    done = plan("--clients", 1000, "--parameters", 8000)
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"^ *\d.*(?:clear|rounds|noise|signal) *$", done.output, re.M)) == 20
    assert "1,000 clients, 8,000 parameters, δ = 1e-05" in done.output
    assert "No warnings." in done.output


def test_json_holds_the_numbers_of_the_plans():
    done = plan("-M", 50_000, "-d", 5046, "-e", 8, "-T", 50, "-q", 1, "--json")
    told = json.loads(done.output)
    assert (told["clients"], told["parameters"], told["delta"]) == (50_000, 5046, 2e-6)
    (row,) = told["rows"]
    ours = Plan.of(dp_fedavg(clip=1.0, target_epsilon=8.0, delta=2e-6), Full(), 50_000, 5046, 50)
    assert row["noise_multiplier"] == pytest.approx(ours.noise_multiplier)
    assert row["noise_over_clip"] == pytest.approx(ours.noise_share)
    assert (row["clients_needed"], row["verdict"]) == (ours.clients_needed, "clear")
    assert [one["code"] for one in told["advice"]] == ["sampling"]


def test_a_runs_own_file_is_planned_with_its_own_numbers(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    told = json.loads(plan(tmp_path / "run.toml", "-e", 1, "-T", 20, "--json").output)
    assert (told["clients"], told["parameters"], told["mechanism"]) == (40, 3000, "central-gaussian")
    assert [one["code"] for one in told["advice"]] == ["no-signal"]
    assert "20 rounds" in told["advice"][0]["sentence"]


def test_a_larger_deployment_is_planned_with_its_own_sampling(tmp_path):
    run = RUN.replace("target_epsilon", "noise_multiplier")
    (tmp_path / "run.toml").write_text(f'{run}[participation]\nkind = "fixed"\ncount = 4\nnoise_cohort = 20\n')
    planned = _of_file(tmp_path / "run.toml")
    assert (planned.population, planned.cohort, planned.sampling) == (200, 20, Sampling("fixed", 0.1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-d", 10], "pass --clients and --parameters"),
        (["-M", 0, "-d", 10], "--clients is 0; it must be 1 or more"),
        (["-M", 10, "-d", 0], "--parameters is 0; it must be 1 or more"),
        (["-M", 10, "-d", 10, "--delta", 2], "--delta is 2.0; it must be between 0 and 1"),
        (["-M", 10, "-d", 10, "-e", 0], "target_epsilon is 0"),
        (["-M", 10, "-d", 10, "-T", 0], "rounds is 0"),
        (["-M", 10, "-d", 10, "-q", 2], "participation rate is 2.0"),
        (["nothing.toml"], "does not exist"),
        (["nothing.toml", "-M", 10], "a file is given with --clients"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, words):
    done = plan(*arguments)
    assert isinstance(done.exception, InputError)
    assert words in str(done.exception)


def test_a_dead_run_says_so_before_during_and_at_the_end_and_its_page_does(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--out", str(out), "--quiet"])
    assert done.exit_code == 0, done.output
    warned = done.stderr.splitlines()
    assert warned[0].startswith("Warning: The noise hides the signal: even")
    assert warned[1].startswith("Warning: So far in 20 rounds neither")
    assert done.stdout.strip().splitlines()[-1].startswith("Nothing shows that this run learned anything: ")
    told = [json.loads(line) for line in (out / "advice.jsonl").read_text().splitlines()]
    assert [one["code"] for one in told] == ["no-signal", "drowned", "dead"]
    page = report(out).read_text()
    assert "<b>✗ This model is not usable.</b> Nothing shows that this run learned anything: " in page
    assert "The noise hides the signal" in page
