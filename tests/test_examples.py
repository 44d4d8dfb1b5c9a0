import doctest
import importlib
import sys

import pytest

import dpfedexp


@pytest.mark.parametrize("name", [n for n in dpfedexp.__all__ if not n.startswith("__")])
def test_every_public_name_has_an_example_that_runs(name):
    thing = getattr(dpfedexp, name)
    module = importlib.import_module(thing.__module__)
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [t for t in finder.find(thing, name, module=module, globs=vars(module).copy()) if t.examples]
    owner = "train" if name == "Run" else name
    if name != owner:
        found = [t for t in finder.find(getattr(dpfedexp, owner), owner, module=module) if t.examples]
    assert found, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in found:
        runner.run(test, out=sys.stdout.write)
    assert runner.summarize(verbose=False).failed == 0


def test_the_numerical_core_imports_only_torch_numpy_and_scipy():
    """What a simulation needs must not pull in the accountant's, the command line's or the deployment's packages."""
    import subprocess

    program = (
        "import sys, dpfedexp.mechanisms, dpfedexp.simulation.rounds, dpfedexp.step_size, dpfedexp.server, dpfedexp.local;"
        "heavy = {'dp_accounting', 'flwr', 'typer', 'pydantic', 'matplotlib', 'opendp', 'jinja2', 'ray'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
