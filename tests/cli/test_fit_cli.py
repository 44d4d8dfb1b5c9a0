"""`dpfedexp fit` as a user meets it: arrays in, a folder out that verifies, explains itself and goes on."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from dpfedexp.cli import app
from dpfedexp.config import load
from dpfedexp.engine.run import RunFolder
from dpfedexp.errors import InputError

pytestmark = pytest.mark.usefixtures("undrawn")
M, D = 60, 4


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Arrays of a classification and of a regression, and of other shapes; the working directory is theirs."""
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "private"))
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    x, truth, client = draws.normal(size=(6 * M, D)).astype("f4"), draws.normal(size=D), np.repeat(np.arange(M), 6)
    classes = (x @ truth > 0).astype("i8")
    np.savez("classes", inputs=x, targets=classes, client=client, test_inputs=x[:50], test_targets=classes[:50])
    np.savez("numbers", inputs=x, targets=(x @ truth).astype("f4"), client=client)
    np.savez("unowned", inputs=x, targets=classes)
    np.savez("images", inputs=x.reshape(-1, 1, 2, 2), targets=classes, client=client)
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def fit(*arguments):
    done = call("fit", *arguments, "--quiet")
    if done.exception is not None:
        raise done.exception
    return done


def test_a_folder_of_fit_names_what_was_chosen_verifies_and_makes_a_page(place):
    fit("classes.npz", "--rounds", 3, "--out", "run")
    claim = json.loads((place / "run" / "privacy.json").read_text())
    assert any("the local rate" in fact for fact in claim["choices"])
    assert (claim["rounds"], claim["delta"]) == (3, 1e-5)
    assert claim["epsilon_total"] <= 8.0
    settings = load(place / "run" / "config.toml")
    assert settings.local.lr == settings.algorithm.adaptive.quantile == "auto"
    assert settings.algorithm.step == "safe"
    assert (settings.model.name, settings.model.options) == ("linear", {"inputs": D, "outputs": 2})
    verified = call("privacy", "verify", "run")
    assert verified.exit_code == 0, verified.output
    assert "FAILED" not in verified.output
    assert "This run chose its own settings" in (place / "run" / "privacy.txt").read_text()
    assert "This run chose its own settings" not in call("privacy", "explain", "run").output, "not in the ledger"
    assert call("report", "run").exit_code == 0
    ledger = [json.loads(line) for line in (place / "run" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert [entry["round"] for entry in ledger if "event" in entry] == [0, 0, 1, 1, 2, 3]


def test_a_changed_vote_or_choice_does_not_verify(place):
    fit("numbers.npz", "--rounds", 2, "--out", "run")
    assert load(place / "run" / "config.toml").model.options == {"inputs": D, "outputs": 1}
    claim = place / "run" / "privacy.json"
    claim.write_text(claim.read_text().replace("the clip, ", "the moon, ", 1))
    assert call("privacy", "verify", "run").exit_code == 1
    config = place / "run" / "config.toml"
    claim.write_text(claim.read_text().replace("the moon, ", "the clip, ", 1))
    assert call("privacy", "verify", "run").exit_code == 0
    config.write_text(config.read_text().replace('lr = "auto"', "lr = 0.1"))
    assert call("privacy", "verify", "run").exit_code == 1, "votes that the configuration does not plan"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "pass either"),
        (["classes.npz", "--data-set", "mnist"], "pass either"),
        (["unowned.npz"], "no array 'client'"),
        (["images.npz"], "name a network with --model"),
        (["nothing.npz"], "does not exist"),
        (["classes.npz", "--model", "mpl"], "Did you mean 'mlp'"),
        (["classes.npz", "--secure", "--population", M], "--classes is missing"),
        (["classes.npz", "--secure", "--classes", 2], "population is missing"),
        (["classes.npz", "--set", "local.lr=1"], "fit chooses algorithm and local steps"),
        (["classes.npz", "--adjacency", "add-remove"], "population is missing"),
        (["--data-set", "mnits"], "Did you mean 'mnist'"),
    ],
)
def test_wrong_input_is_one_sentence_and_makes_no_folder(place, arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        fit(*arguments, "--out", "run")
    assert not (place / "run").exists()


def test_a_network_by_name_gets_the_sizes_of_the_arrays(place, monkeypatch):
    monkeypatch.setattr(RunFolder, "finish", lambda self, run: None)
    fit("images.npz", "--model", "mlp", "--rounds", 1, "--set", "model.options.hidden=3", "--out", "run")
    assert load(place / "run" / "config.toml").model.options == {"inputs": 4, "hidden": 3, "classes": 2}
