"""The mutation runner on a toy package: one function whose tests notice every change, one whose tests notice none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import TableError, choose, read_guards
from tests.mutation.operators import mutants

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "def double(x):\n    return x * 2\n\n\ndef half(x):\n    return x / 2\n"
TESTS = (
    "from toy.sums import double, half\n\n\ndef test_double():\n    assert double(3) == 6\n\n\n"
    "def test_half_runs():\n    half(3)\n\n\ndef test_wrong():\n    assert double(1) == 3\n"
)


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "src/toy").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src/toy/__init__.py").touch()
    (tmp_path / "src/toy/sums.py").write_text(SOURCE)
    (tmp_path / "tests/test_toy.py").write_text(TESTS)
    (tmp_path / "guards.toml").write_text('[guards]\n"sums.py" = ["test_toy.py"]\n')
    (tmp_path / "equivalents.toml").touch()
    return tmp_path


def command(toy):
    return [sys.executable, "-m", "tests.mutation", "--root", toy, "--package", "toy", "--tables", toy]


def test_changes_are_killed_or_survive_as_the_tests_deserve_and_the_work_tree_stays(toy):
    entry = "[[equivalent]]\nfile = 'sums.py'\nline = 'return x / 2'\nchange = 'x / 2 → {after}'\nreason = 'a toy'\n"
    (toy / "equivalents.toml").write_text(entry.format(after="x") + entry.format(after="y"))
    done = subprocess.run(command(toy), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads((toy / "build/mutants/result.json").read_text())
    verdicts = {(row["line"], row["verdict"]) for row in found["mutants"]}
    halves = {("return x / 2", "survived"), ("return x / 2", "equivalent")}
    assert verdicts == {("return x * 2", "killed"), *halves}
    assert found["files"]["sums.py"] == {"mutants": 8, "killed": 4, "survived": 3, "equivalent": 1}
    assert found["score"] == pytest.approx(4 / 7)
    assert "  - x / 2\n  + (x * 2)" in done.stdout
    assert "no such change in sums.py any more: x / 2 → y" in done.stdout
    assert (toy / "src/toy/sums.py").read_text() == SOURCE
    assert list(found["failing"]) == ["tests/test_toy.py::test_wrong"], "a test that always fails kills no mutant"
    assert (
        "fails on the code as it is, so it judged nothing: tests/test_toy.py::test_wrong: assert 2 == 3" in done.stdout
    )


def test_a_table_that_does_not_fit_is_one_sentence(toy):
    read = (toy / "guards.toml", toy / "src/toy", toy / "tests")
    (toy / "guards.toml").write_text('[guards]\n"gone.py" = ["test_toy.py"]\n')
    with pytest.raises(TableError, match=r"lists 'gone\.py', which does not exist"):
        read_guards(*read)
    (toy / "guards.toml").write_text('complete = ["."]\n[guards]\n')
    with pytest.raises(TableError, match=r"does not list 'sums\.py'"):
        read_guards(*read)
    with pytest.raises(TableError, match=r"'other' is not in guards\.toml"):
        choose({"folder/a.py": []}, ["folder/", "other"])


def test_the_table_of_this_library_lists_files_that_exist_and_misses_none():
    guards = read_guards(ROOT / "tests/mutation/guards.toml", ROOT / "src/dpfedexp", ROOT / "tests")
    assert {"core/clipping.py", "accounting/ledger.py"} <= set(guards)
    assert any(name.startswith("flower/") for name in guards)


@pytest.mark.parametrize(
    ("source", "operator", "after"),
    [
        ("def f(a, b):\n    return a + b", "arithmetic", "return (a - b)"),
        ("def f(a, b):\n    return a + b", "operand", "return a"),
        ("def f(a, b):\n    return a < b", "boundary", "return (a <= b)"),
        ("def f(a):\n    if a:\n        return 1", "condition", "if (not a):"),
        ("def f(a, b):\n    return a and b", "logic", "return (a or b)"),
        ("def f(a):\n    return not a", "not", "return a"),
        ("def f(a=True):\n    return a", "constant", "def f(a=False):"),
        ("def f(a):\n    return a * 0.5", "constant", "return a * 1.0"),
        ("def f(a, b):\n    return max(a, b)", "extreme", "return min(a, b)"),
        ("def f(a):\n    a.sync()\n    return a", "drop", "    pass"),
        ("def f(a):\n    raise a", "drop", "    pass"),
        ("def f(a):\n    a -= 1", "drop", "    pass"),
        ("def f(a):\n    return g(a, 2)", "argument", "return a"),
    ],
)
def test_every_operator_makes_its_change(source, operator, after):
    made = [mutant.apply(source) for mutant in mutants(source, "toy.py") if mutant.operator == operator]
    assert any(after in text for text in made), made


def test_messages_annotations_and_docstrings_are_left_alone():
    source = 'def f(a: "x + 1" = None) -> 1 + 1:\n    """1 + 1"""\n    assert a > 1\n    require(a, f"{1 + 1}" + "b")\n'
    assert {(mutant.operator, mutant.after) for mutant in mutants(source, "toy.py")} == {("drop", "pass")}
