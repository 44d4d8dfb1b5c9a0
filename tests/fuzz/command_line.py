"""Words on the command line: a result, a usage error or one sentence."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from typer.testing import CliRunner

from tests.fuzz.harness import fuzz, instrumented

with instrumented():
    from dpfedexp.cli import app
    from dpfedexp.errors import BudgetExceeded, InputError, LedgerError, RoundFailed

FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "run.toml").write_text(
    "data = { clients = 4, dimension = 2 }\nalgorithm = { clip = 0.3, noise_multiplier = 5.0 }\n"
    'run = { rounds = 2, device = "cpu" }\n'
)
WORDS = [
    *(
        "privacy",
        "epsilon",
        "noise",
        "rounds",
        "explain",
        "verify",
        "train",
        "init",
        "plan",
        "report",
        "flower",
        "new",
        "--help",
    ),
    *("-z", "--rounds", "--delta", "--adjacency", "--mechanism", "--epsilon", "--per", "--json", "--resume"),
    *(
        "--set",
        "--out",
        "run.toml",
        "out",
        "--epsilon0",
        "--epsilon1",
        "--epsilon2",
        "--quiet",
        "--force",
        "--data",
        "audit",
    ),
    *(
        "0",
        "1",
        "-1",
        "5",
        "1e-5",
        "0.1",
        "nan",
        "inf",
        "1e308",
        "1e-308",
        "99999999999999999999",
        "",
        "=",
        "algorithm.clip=0",
    ),
    *("add-remove", "replace-one", "local-gaussian", "privunit", "central-gaussian", "run.rounds=1"),
    *(
        "algorithm.name=fedavg",
        "run.secure=true",
        "run.seed=-1",
        "data.kind=npz",
        "data.path=x",
        "..",
        "/dev/null",
        "\0",
        "é",
    ),
]
SLOW = {"demo", "audit", "up", "plot"}
"""Commands that would work for minutes: they are parsed, with one word that stops them. Sampled rounds are left out for the same
reason: their accountant takes seconds."""


def words(data: bytes) -> list[str]:
    """A byte names a word; 255 begins one of their own."""
    spelt, *literal = data.split(b"\xff")
    chosen = [WORDS[byte % len(WORDS)] for byte in spelt[:12]]
    return chosen + [word[:200].decode("utf-8", "replace") for word in literal[:4]]


SEEDS = [
    bytes(map(WORDS.index, line.split()))
    for line in (
        "privacy epsilon -z 5 --rounds 5 --delta 1e-5",
        "privacy noise --epsilon 5 --rounds 5 --mechanism local-gaussian",
        "privacy rounds --epsilon 5 -z 5 --adjacency add-remove",
        "privacy verify out",
        "train run.toml --out out --quiet --resume",
        "train run.toml --set algorithm.clip=0 --set run.rounds=1",
        "init out --force",
        "report out",
    )
]


def one(data: bytes) -> None:
    given = [word for word in words(data) if "\0" not in word]
    if SLOW & set(given):
        given.append("--no-such-option")
    torch.set_num_threads(1)
    os.chdir(FOLDER)
    done = CliRunner().invoke(app, given)
    error = done.exception
    if error is not None and not isinstance(
        error, SystemExit | InputError | LedgerError | BudgetExceeded | RoundFailed
    ):
        raise error
    assert "Traceback" not in done.output
    assert not (FOLDER.parent / "out").exists()


if __name__ == "__main__":
    fuzz(one, SEEDS)
