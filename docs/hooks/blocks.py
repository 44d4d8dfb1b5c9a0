"""Runs the code blocks of pages: Python, `dpfedexp` commands, and TOML files.

The blocks of a page run in order, in one namespace and one new folder, beside stand-ins for what a reader brings: a model, clients,
arrays. A page that uses an undefined name fails.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import tomllib
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from names import FENCE, INDENTED, joined, root_command, split

NOT_RUN = {
    "strategy.start(grid": "needs nodes; tests/flower/test_agreement.py runs it",
    "torch.onnx.export": "needs onnx",
    "dpfedexp demo": "minutes; tests/cli/test_demo_cli.py",
    "dpfedexp audit": "minutes; tests/audit",
    "dpfedexp sweep": "minutes; tests/cli",
    "dpfedexp flower": "a deployment; tests/flower runs all of its commands",
    "dpfedexp superlink": "a deployment",
    "dpfedexp node": "a deployment",
    "dpfedexp superexec": "a deployment; tests/flower/test_local_users.py",
    "dpfedexp guard": "of a deployment",
    "dpfedexp privacy verify runs/first": "of a deployment",
    "train run.toml --set algorithm.aggregation": "tests/mechanisms",
}
"""What is not run though a page shows it, by how it begins or what it holds. Its names are checked all the same."""


def blocks(markdown: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of every block of a page, in order; indented commands count as shell."""
    found = [(match.start(), match[3].strip(), match[4]) for match in FENCE.finditer(markdown)]
    inside = [(match.start(), match.end()) for match in FENCE.finditer(markdown)]
    for match in INDENTED.finditer(markdown):
        if not any(begin <= match.start() < end for begin, end in inside):
            found.append((match.start(), "bash", match[1]))
    for place, language, text in sorted(found):
        yield markdown.count("\n", 0, place) + 1, language, text


def failures(markdown: str, *, regression: bool = False) -> list[str]:
    """A sentence for every block of the page that fails.

    Args:
        markdown: the page.
        regression: whether the stand-ins are of a problem with numbers as targets instead of classes.
    """
    found, here = [], Path.cwd()
    namespace = stand_ins(regression)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            prepare(Path(folder), namespace, settings="dpfedexp init my.toml" not in markdown)
            for line, language, text in blocks(markdown):
                problem = failure(language, text, namespace)
                if problem:
                    found.append(f"the block at line {line} fails: {problem}")
        finally:
            os.chdir(here)
    return found


def failure(language: str, text: str, namespace: dict[str, Any]) -> str | None:
    """What went wrong in a block; None where nothing did, or where it is not run."""
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            if language == "python":
                exec(compile(runnable(text), "<block>", "exec"), namespace)
            elif language == "toml":
                check_toml(text)
            elif language == "bash":
                for line in joined(text):
                    call(line)
    except (Exception, SystemExit) as error:
        last = traceback.format_exception_only(error)[-1].strip()
        return f"{last} {quiet.getvalue()[-300:].strip()}".strip()
    return None


def runnable(text: str) -> str:
    """A Python block up to the first line that is not run."""
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if any(known in line for known in NOT_RUN)), len(lines))
    return "\n".join(lines[:end])


def call(line: str) -> None:
    """Runs a line of a shell block, if it is a command of this package."""
    words = split(line)
    if words[0] != "dpfedexp" or any(line.strip().startswith(known) or f" {known}" in line for known in NOT_RUN):
        return
    result = root_command().main(words[1:], prog_name="dpfedexp", standalone_mode=False)
    if result:
        raise SystemExit(f"exit status {result}")


def check_toml(text: str) -> None:
    """A block that has sections of a run's file is one."""
    from dpfedexp.config import Settings, parse

    tree = tomllib.loads(text)
    if set(tree) <= set(Settings.model_fields):
        parse(tree)


def stand_ins(regression: bool) -> dict[str, Any]:
    """What readers bring: 1000 clients of four rows each, a model that fits them, and an algorithm."""
    import torch

    from dpfedexp import Federation, Sgd, cdp_fedexp

    torch.set_num_threads(1)  # the problems are tiny
    torch.manual_seed(0)
    inputs = torch.randn(4000, 4)
    weights = torch.randn(4, 3)
    labels = (inputs @ weights).argmax(dim=1)
    outputs = [torch.nn.Linear(4, 1), torch.nn.Flatten(0)] if regression else [torch.nn.Linear(4, 3)]
    targets = inputs @ weights[:, 0] if regression else labels

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    return {
        "images": inputs,
        "labels": labels,
        "inputs": inputs[:100],
        "targets": targets[:100],
        "model": torch.nn.Sequential(*outputs),
        "clients": Federation.iid(inputs, targets, clients=1000, seed=0),
        "algorithm": cdp_fedexp(clip=0.5, noise_multiplier=5.0),
        "local": Sgd(lr=0.1, steps=2),
        "Doubled": Doubled,
        "df": frame(inputs, labels),
        **of_flower(),
    }


def frame(inputs: Any, labels: Any) -> Any:
    """The same rows as a table with a column of users."""
    import pandas

    table = pandas.DataFrame(inputs.numpy(), columns=list("abcd"))
    return table.assign(user=[f"u{row % 500}" for row in range(len(table))], y=labels.numpy())


def of_flower() -> dict[str, Any]:
    try:
        from flwr.app import ArrayRecord
        from flwr.clientapp import ClientApp
    except ImportError:
        return {}
    return {"ArrayRecord": ArrayRecord, "client_app": ClientApp()}


def prepare(folder: Path, namespace: dict[str, Any], *, settings: bool) -> None:
    """The files that blocks of the pages read: arrays, tables, and a run's file where the page does not write one."""
    import numpy as np

    rows = namespace["images"].numpy()
    np.savez(folder / "arrays.npz", inputs=rows, targets=namespace["labels"].numpy(), client=np.arange(len(rows)) % 200)
    for name in ("rows.csv", "test.csv"):
        namespace["df"].to_csv(folder / name, index=False)
    if not settings:
        return
    (folder / "my.toml").write_text(
        '[data]\nclients = 100\ndimension = 10\n[algorithm]\nclip = "adaptive"\ntarget_epsilon = 8.0\n[run]\nrounds = 3\n'
    )
