import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file

FAST = [
    "--set",
    "run.rounds=3",
    "--set",
    "data.clients=20",
    "--set",
    "data.dimension=5",
    "--set",
    "local.steps=2",
    "--quiet",
]


def dpfedexp(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "dpfedexp", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_init_then_train_writes_everything_that_it_names(tmp_path):
    assert dpfedexp("init", "my.toml", cwd=tmp_path).returncode == 0
    done = dpfedexp("train", "my.toml", *FAST, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert (folder / "metrics.csv").read_text().startswith("round,distance,eta_g")
    assert load_file(folder / "model.safetensors")["weight"].shape == (1, 5)
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["epsilon_total"] == pytest.approx(8.0, rel=1e-3)
    assert "8.00" in (folder / "privacy.txt").read_text()
    assert "[resolved]" in (folder / "config.toml").read_text()
    verified = dpfedexp("privacy", "verify", "run", cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    again = dpfedexp("train", "my.toml", *FAST, "--out", "run", cwd=tmp_path)
    assert again.returncode == 2
    assert "not empty" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nothing.toml"], "does not exist"),
        (["train", "my.toml", "--set", "algorithm.clipp=1"], "Did you mean 'clip'"),
        (["train", "my.toml", "--set", "algorithm.clip=0"], "clip is 0"),
        (["train", "my.toml", "--set", "data.kind=npz"], "data.path is missing"),
        (["init", "my.toml"], "exists"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(tmp_path, arguments, words):
    (tmp_path / "my.toml").write_text('[algorithm]\nclip = 1.0\nnoise_multiplier = 1.0\n[model]\nname = "mlp"')
    done = dpfedexp(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
