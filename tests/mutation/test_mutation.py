"""The mutation runner on a toy package: one function whose tests notice every change, one whose tests notice none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mutation.operators import mutants, sample
from tests.mutation.table import TableError, choose, read_guards, shares

HERE = Path(__file__).resolve().parent
SOURCE = """def double(x):
    return x * 2


def half(x):
    return x / 2
"""
TESTS = """from toy.sums import double, half


def test_double():
    assert double(3) == 6


def test_half_runs():
    half(3)
"""


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "src/toy").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src/toy/__init__.py").write_text("")
    (tmp_path / "src/toy/sums.py").write_text(SOURCE)
    (tmp_path / "tests/test_toy.py").write_text(TESTS)
    (tmp_path / "guards.toml").write_text('[guards]\n"sums.py" = ["test_toy.py"]\n')
    (tmp_path / "equivalents.toml").write_text("")
    return tmp_path


def command(toy, *arguments):
    return [sys.executable, "-m", "tests.mutation", "--root", toy, "--package", "toy", "--tables", toy, *arguments]


def run(toy, *arguments):
    done = subprocess.run(
        command(toy, *arguments), cwd=HERE.parent.parent, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_changes_are_killed_or_survive_as_the_tests_deserve_and_the_work_tree_stays(toy):
    code, text = run(toy)
    assert code == 1, text
    found = json.loads((toy / "build/mutants/result.json").read_text())
    verdicts = {(row["line"], row["verdict"]) for row in found["mutants"]}
    assert verdicts == {("return x * 2", "killed"), ("return x / 2", "survived")}
    assert found["files"]["sums.py"] == {"mutants": 8, "killed": 4, "survived": 4, "equivalent": 0}
    assert found["score"] == 0.5
    assert "  - x / 2\n  + (x * 2)" in text
    assert (toy / "src/toy/sums.py").read_text() == SOURCE

    survivors = [row for row in found["mutants"] if row["verdict"] == "survived"]
    entry = "[[equivalent]]\nfile = 'sums.py'\nline = '{line}'\nchange = '{change}'\nreason = 'a toy'\n"
    (toy / "equivalents.toml").write_text("".join(entry.format(**row) for row in survivors))
    code, text = run(toy)
    assert code == 0, text
    assert json.loads((toy / "build/mutants/result.json").read_text())["files"]["sums.py"]["equivalent"] == 4
    assert "for each of 4 mutants" in text, "the kills are remembered, with the time that they took"


def test_a_test_that_fails_on_the_code_as_it_is_is_named(toy):
    (toy / "tests/test_toy.py").write_text(TESTS + "\n\ndef test_wrong():\n    assert double(1) == 3\n")
    code, text = run(toy)
    assert code == 1, text
    assert "fails on the code as it is, so it judged nothing: tests/test_toy.py::test_wrong: assert 2 == 3" in text
    found = json.loads((toy / "build/mutants/result.json").read_text())
    assert list(found["failing"]) == ["tests/test_toy.py::test_wrong"]
    assert found["score"] == 0.5, "a test that always fails kills no mutant"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_ended_leaves_no_folder_and_no_process(toy, number, code):
    begun, scratch = toy / "begun", toy / "scratch"
    scratch.mkdir()
    sleeping = f"""import os, pathlib, time


def test_sleeps():
    pathlib.Path({str(begun)!r}).write_text(str(os.getpid()))
    time.sleep(60)
"""
    (toy / "tests/test_toy.py").write_text(sleeping)
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(
        command(toy), cwd=HERE.parent.parent, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        until = time.monotonic() + 60
        while not (begun.exists() and begun.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        assert any(scratch.iterdir())
        process.send_signal(number)
        assert process.wait(20) == code
    assert not any(scratch.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


def test_a_table_that_does_not_fit_is_one_sentence(toy):
    (toy / "guards.toml").write_text('[guards]\n"gone.py" = ["test_toy.py"]\n')
    code, text = run(toy)
    assert code == 2
    assert "lists 'gone.py', which does not exist" in text
    with pytest.raises(TableError, match="is not in guards"):
        choose({"sums.py": []}, ["other.py"])
    (toy / "guards.toml").write_text('[guards]\n"sums.py" = ["test_none.py"]\n')
    with pytest.raises(TableError, match="no test file"):
        read_guards(toy / "guards.toml", toy / "src/toy", toy / "tests")


def test_the_table_of_this_library_lists_files_that_exist_and_misses_none():
    root = HERE.parent.parent
    guards = read_guards(HERE / "guards.toml", root / "src/dpfedexp", root / "tests")
    assert {
        "core/clipping.py",
        "algorithms/round.py",
        "accounting/ledger.py",
        "flower/node/guard.py",
        "engine/checkpoint.py",
    } <= set(guards)


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


def test_a_sample_does_not_change_with_lines_elsewhere():
    source = "def f(a, b):\n    return a + b * 2\n"
    moved = "import math\n\n\ndef g(c):\n    return c\n\n\n" + source
    chosen = {mutant.id for mutant in sample(mutants(source, "toy.py"), 3, seed=1)}
    assert chosen == {mutant.id for mutant in sample(mutants(moved, "toy.py"), 3, seed=1)}
    assert len(chosen) == 3
    assert chosen != {mutant.id for mutant in sample(mutants(source, "toy.py"), 3, seed=3)}


def test_files_share_a_run_in_proportion_and_none_is_left_out():
    assert shares({"a": 900, "b": 95, "c": 4, "d": 1}, 100) == {"a": 90, "b": 10, "c": 3, "d": 1}
