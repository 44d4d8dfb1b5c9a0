"""A misspelt argument of anything public is answered with a sentence."""

import importlib
import inspect

import pytest

from dpfedexp import InputError, cdp_fedexp
from dpfedexp.errors import checked

ROOMS = ("accounting", "audit", "data", "flower", "mechanisms")
PACKAGES = ("dpfedexp", *(f"dpfedexp.{room}" for room in ROOMS))


def public_callables():
    """Every public function and class method of more than one argument, and every public class, by its name."""
    for package in PACKAGES:
        room = importlib.import_module(package)
        for name in room.__all__:
            value = getattr(room, name)
            if isinstance(value, type):
                if not issubclass(value, Exception) and not _is_abstract(value):
                    yield f"{package}.{name}", value
                for method, found in vars(value).items():
                    if isinstance(found, (classmethod, staticmethod)) and not method.startswith("_"):
                        yield from _several(f"{package}.{name}.{method}", getattr(value, method))
            elif inspect.isfunction(value):
                yield from _several(f"{package}.{name}", value)


def _several(name, function):
    """The argument of a function that has only one is seldom named; options that go on to another function are checked there."""
    parameters = inspect.signature(function).parameters.values()
    if len(parameters) > 1 and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        yield name, function


def _is_abstract(kind):
    return inspect.isabstract(kind) or getattr(kind, "_is_protocol", False) or issubclass(kind, tuple)


CALLABLES = dict(public_callables())


def test_there_are_public_names_to_ask():
    assert len(CALLABLES) > 50


@pytest.mark.parametrize("name", CALLABLES)
def test_a_misspelt_argument_is_named_with_the_nearest_right_one(name):
    names = [p.name for p in inspect.signature(CALLABLES[name]).parameters.values() if p.kind != p.VAR_KEYWORD]
    longest = max(names, key=len, default="")
    with pytest.raises(InputError) as told:
        CALLABLES[name](**{longest + "x": None})
    assert f"has no argument '{longest}x'" in str(told.value)
    assert not longest or repr(longest) in str(told.value) or "Write" in str(told.value)


def test_what_is_missing_twice_or_too_much_is_said():
    with pytest.raises(InputError, match="cdp_fedexp needs the argument 'clip'"):
        cdp_fedexp(noise_multiplier=1.0)
    with pytest.raises(InputError, match="takes 0 arguments by position and got 1; give the others by name: clip"):
        cdp_fedexp(0.3)

    @checked
    def area(width, height=1.0):
        return width * height

    assert area(2.0, height=3.0) == 6.0
    with pytest.raises(InputError, match="multiple values for argument 'width'"):
        area(1.0, width=2.0)
    assert str(inspect.signature(area)) == "(width, height=1.0)"


def test_a_type_error_inside_a_function_stays_what_it_is():
    @checked
    def broken():
        return None + 1

    with pytest.raises(TypeError, match="unsupported operand"):
        broken()
