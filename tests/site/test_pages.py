"""What `make docs` refuses, and what its generated pages hold. The pages themselves are checked when the site is built."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from dpfedexp.accounting import epsilon, noise
from dpfedexp.engine.plan import plans

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "hooks"))  # modules beside the pages, not a package
blocks, names, reference = map(importlib.import_module, ("blocks", "names", "reference"))
DECIDE = (ROOT / "docs" / "decide.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("`dpfedexp.fit`", "`dpfedexp.fitt`"),
        ("`step_size.cdp`", "`step_size.cpd`"),
        ("`local.max_examples`", "`local.max_example`"),
        ("`Sgd(lr=0.1, steps=10)`", "`Sgd(rate=0.1)`"),
        ("`Federation.from_pandas(df, by='user')`", "`Federation.from_panda(df)`"),
        ("`dpfedexp privacy verify`", "`dpfedexp privacy verfy`"),
        ("`dpfedexp plan --clients 3`", "`dpfedexp plan --client 3`"),
        ("```bash\ndpfedexp train my.toml --quiet\n```", "```bash\ndpfedexp train my.toml --quite\n```"),
        ("    dpfedexp flower up --data rows", "    dpfedexp flower up --nodes 3"),
        ("`python -m reproduction paper table1`", "`python -m reproduction papers table1`"),
        ("`python -m reproduction.benchmarks.scale`", "`python -m reproduction.benchmarks.scales`"),
        ("`make docs`", "`make dosc`"),
        ("`dpfedexp[flower]`", "`dpfedexp[flowers]`"),
        ("`tests/test_house.py`", "`tests/test_horse.py`"),
    ],
)
def test_a_name_that_does_not_exist_is_found(right, wrong):
    assert names.wrong_names(f"Text.\n\n{right}\n") == []
    (problem,) = names.wrong_names(f"Text.\n\n{wrong}\n")
    assert problem


def test_a_block_that_fails_is_found_and_its_page_goes_on():
    page = (
        "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n\n```toml\n[run]\nroundz = 3\n```\n\n"
        "```bash\ndpfedexp privacy noise --epsilon 8 --rounds 5\ndpfedexp train missing.toml\n```\n"
    )
    first, second, third = blocks.failures(page)
    assert first.startswith("the block at line 5 fails: AssertionError")
    assert "run.roundz is not a setting" in second
    assert "'missing.toml' does not exist" in third


def test_every_command_option_and_setting_is_on_its_page():
    page = reference.command_page()
    for words, command in reference.command_tree():
        assert f"\n## {' '.join(words)}\n" in page
        for parameter in command.params:
            assert getattr(parameter, "hidden", False) or all(
                f"`{name}`" in page for name in parameter.opts if name[0] == "-"
            )
    settings = reference.configuration_page()
    assert all(f"| `{key}` |" in settings for key in ("clip", "quantile", "lr", "population", "secure", "cohort"))
    rows = re.findall(r"^\| `[a-z_]+` \|.*$", settings, flags=re.M)
    assert len(rows) > 50
    assert [row for row in rows if not row.rstrip(" |").endswith((".", ")"))] == [], "a setting without its sentence"


def row(start: str) -> list[float]:
    """The numbers of the row of the decision guide that begins so."""
    (line,) = re.findall(rf"^\| {re.escape(start)} \|(.*)\|$", DECIDE, flags=re.M)
    return [float(cell.replace(",", "")) for cell in line.split("|")]


def test_the_numbers_of_the_decision_guide_are_those_of_the_library():
    every = (1.0, 2.0, 4.0, 8.0, 16.0)
    for start, mechanism in (("central", "central-gaussian"), ("local Gaussian", "local-gaussian")):
        planned = plans(1000, 5046, delta=1e-5, mechanism=mechanism, epsilons=every, rounds=(50,))
        assert row(f"{start}: clients needed") == [plan.clients_needed for plan in planned]
    found = [noise(8.0, rounds=50, delta=delta) for delta in (1e-4, 1e-5, 1e-6)]
    assert row("z at ε = 8 over 50 rounds") == [round(z, 3) for z in found]
    z = noise(8.0, rounds=50, delta=1e-5, adjacency="add-remove")
    assert f"| add-remove | {z:.3f} | replace-one, ε = {epsilon(z, rounds=50, delta=1e-5):.2f} |" in DECIDE
    for clients in (100, 1000):
        planned = plans(clients, 5046, delta=1e-5, epsilons=every, rounds=(50,))
        assert row(f"{clients:,} clients") == [float(f"{plan.best_signal:.2g}") for plan in planned]


def test_the_tests_that_the_security_policy_names_exist():
    found = set()
    for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines():
        names: list[str] = []
        for file, test in re.findall(r"`(?:(\w+/test_\w+\.py)(?:::)?)?([\w…]*)`", line):
            if file:
                names = re.findall(
                    r"^ *def (test_\w+)", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE
                )
                found.add(file)
            if test and (file or test.startswith("…")):
                assert any(re.fullmatch(test.replace("…", r"\w*"), name) for name in names), f"{file}::{test}"
    assert len(found) > 20
