"""Docstrings that an editor and a site can render: every public name has one, and its arguments are those that exist."""

import importlib
import inspect
import re

import pytest

PACKAGES = ("accounting", "algorithms", "audit", "config", "data", "flower", "mechanisms")
ARGUMENT = re.compile(r"^ {4}([a-z_0-9]+): ", re.M)


def public():
    for package in ("dpfedexp", *(f"dpfedexp.{name}" for name in PACKAGES)):
        room = importlib.import_module(package)
        for name in room.__all__:
            value = getattr(room, name)
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{package}.{name}", value


NAMES = dict(public())


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_is_and_explains_arguments_that_exist(name):
    said = inspect.getdoc(NAMES[name]) or ""
    assert said
    assert not said.startswith(f"{name.rpartition('.')[2]}("), "a dataclass without a docstring shows its signature"
    said = inspect.cleandoc(NAMES[name].__doc__ or "")
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", said, re.M)
    explained = set(ARGUMENT.findall(section[1])) if section else set()
    if explained:
        assert explained <= set(inspect.signature(NAMES[name]).parameters)
