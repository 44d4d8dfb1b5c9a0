"""`dpfedexp privacy …` from the outside."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpfedexp.accounting.statement import figure
from dpfedexp.cli.privacy import app
from dpfedexp.errors import InputError
from tests.engine.small import ROUNDS, small_run

KEYS = {"epsilon_total", "epsilon_round", "delta", "adjacency", "accountant"}


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def call_json(*arguments: object) -> dict:
    answer = json.loads(call(*arguments, "--json"))
    assert set(answer) >= KEYS
    return answer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    small_run(out=tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("flags", "one", "total"),
    [
        (["--noise-multiplier", 5, "--rounds", 50], 1.5550, 15.4562),
        (["--mechanism", "local-gaussian", "--noise-multiplier", 0.7, "--rounds", 50], 15.6581, 289.3386),
        (["--mechanism", "privunit", "--rounds", 50], 6.0, 289.6706),
        (["--noise-multiplier", 5, "--rounds", 50, "--adjacency", "add-remove"], 0.7255, 6.5730),
    ],
)
def test_epsilon_answers_per_round_and_in_total(flags, one, total):
    answer = call_json("epsilon", *flags, "--delta", 1e-5)
    assert answer["epsilon_round"] == pytest.approx(one, abs=5e-5)
    assert answer["epsilon_total"] == pytest.approx(total, abs=5e-5)
    table = call("epsilon", *flags)
    assert figure(answer["epsilon_total"]) in table
    assert figure(answer["epsilon_round"]) in table


def test_epsilon_of_a_local_run_has_both_readers_or_the_reason_why_not():
    flags = ["epsilon", "--mechanism", "local-gaussian", "-z", 0.7, "-T", 50, "--clients", 1000]
    answer = call_json(*flags)
    assert answer["models_only"]["epsilon_total"] == pytest.approx(2.6242, abs=1e-3)
    assert answer["other_adjacency"] is None
    assert "only what it holds" in answer["no_other_adjacency"]
    assert "2.6242 in total (exact)" in call(*flags)
    assert "only some of the clients" in call_json(*flags, "--sampling-rate", 0.5)["no_models_only"]
    assert call_json(*flags[:-2])["models_only"] is None


def test_epsilon_of_privunit_has_its_nominal_and_its_exact_figure():
    flags = ["epsilon", "--mechanism", "privunit", "-T", 50, "--clients", 1000]
    exact, papers = call_json(*flags), call_json(*flags, "--gamma", "paper", "--dimension", 237)
    assert (exact["nominal_epsilon_round"], papers["nominal_epsilon_round"]) == (6.0, 6.0)
    assert papers["epsilon_round"] == pytest.approx(5.586, abs=1e-3)
    assert papers["epsilon_total"] == pytest.approx(269.1535, abs=1e-3)
    assert "Gaussian noise" in papers["no_models_only"]


def test_noise_costs_its_target():
    central = call_json("noise", "--epsilon", 8, "--rounds", 50)
    assert central["noise_multiplier"] == pytest.approx(8.48852, abs=1e-5)
    assert central["epsilon_total"] == pytest.approx(8.0, rel=1e-6)
    one = call_json("noise", "--epsilon", 15.6581, "--mechanism", "local-gaussian")
    assert one["noise_multiplier"] == pytest.approx(0.7, abs=1e-5)
    total = call_json("noise", "--epsilon", 289.3386, "--mechanism", "local-gaussian", "--rounds", 50)
    assert total["noise_multiplier"] == pytest.approx(0.7, abs=1e-5)
    report = call_json("noise", "--epsilon", 289.67057, "--mechanism", "privunit", "--rounds", 50)
    assert [report[f"epsilon{i}"] for i in range(3)] == pytest.approx([2.0, 2.0, 2.0], abs=1e-5)


@pytest.mark.parametrize("width", [80, 120])
def test_explain_fits_the_terminal_and_shows_both_adjacencies(run, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = call("explain", run)
    assert max(map(len, text.splitlines())) <= width
    assert max(map(len, text.splitlines())) > width - 15
    assert "replace-one (this run's)" in text
    assert "\n  add-remove  " in text
    assert f"all {ROUNDS} rounds" in " ".join(text.split())
    answer = call_json("explain", run)
    assert answer["rounds"] == ROUNDS
    assert answer["shown"]["other_adjacency_epsilon_total"] in text


def test_verify_passes_an_honest_run_and_fails_a_dishonest_one(run):
    assert "The claim holds" in call("verify", run)
    assert call_json("verify", run)["verified"] is True
    claim = json.loads((run / "privacy.json").read_text())
    (run / "privacy.json").write_text(json.dumps({**claim, "epsilon_total": 1.0}))
    for flags in ([], ["--json"]):
        result = CliRunner().invoke(app, ["verify", str(run), *flags], catch_exceptions=False)
        assert result.exit_code == 1
        assert "DOES NOT HOLD" in result.output if not flags else json.loads(result.output)["verified"] is False
    (run / "privacy.json").write_text(json.dumps(claim))
    (run / "ledger.jsonl").write_bytes((run / "ledger.jsonl").read_bytes()[:-40])
    for flags in ([], ["--json"]):
        assert CliRunner().invoke(app, ["verify", str(run), *flags], catch_exceptions=False).exit_code == 1, "damaged"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epsilon"], "noise-multiplier is missing"),
        (["epsilon", "-z", 0], "noise-multiplier is 0"),
        (["epsilon", "-z", 5, "--rounds", 0], "rounds is 0"),
        (["epsilon", "-z", 5, "--delta", 2], "delta is 2"),
        (["epsilon", "-z", 5, "--sampling-rate", 1.5], "sampling-rate is 1.5"),
        (["epsilon", "-z", 5, "--mechanism", "local-gaussian", "--adjacency", "add-remove"], "adjacency is"),
        (["epsilon", "--mechanism", "privunit", "--epsilon0", -1], "epsilon0 is -1"),
        (["epsilon", "--mechanism", "privunit", "--gamma", "paper"], "dimension is None"),
        (["epsilon", "-z", 5, "--clients", 0], "clients is 0"),
        (["noise", "--epsilon", -1], "target_epsilon is -1"),
        (["explain", "nowhere"], "'nowhere'"),
    ],
)
def test_bad_input_is_one_sentence_that_names_it(arguments, message):
    with pytest.raises(InputError, match=message):
        call(*arguments)
