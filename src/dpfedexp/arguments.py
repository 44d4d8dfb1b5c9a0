"""Sentences for misspelt arguments: a public function says which argument does not exist and which one was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from dpfedexp.errors import InputError, nearest

Callee = TypeVar("Callee", bound=Callable[..., Any])


@overload
def checked(callee: Callee) -> Callee: ...


@overload
def checked(*, instead: Mapping[str, str]) -> Callable[[Callee], Callee]: ...


def checked(callee: Callable[..., Any] | None = None, *, instead: Mapping[str, str] | None = None) -> Any:
    """A function, or a class by its constructor, that answers wrong arguments with a sentence; its signature stays what it was.

    Args:
        callee: what is called.
        instead: for arguments that people try and that are called otherwise, what to write.

    >>> @checked
    ... def area(width, height=1.0):
    ...     return width * height
    >>> area(2.0, hight=3.0)
    Traceback (most recent call last):
    dpfedexp.errors.InputError: area has no argument 'hight'. Did you mean 'height'?
    """
    if callee is None:
        return functools.partial(checked, instead=instead)
    if isinstance(callee, type):
        # The constructor of a class: `self` comes first, and is not an argument that anybody types.
        callee.__init__ = _checked(callee.__init__, callee.__name__, instead, own=1)  # type: ignore[misc]
        return callee
    first = next(iter(inspect.signature(callee).parameters), "")
    return _checked(callee, callee.__name__, instead, own=int(first in ("cls", "self")))


def _checked(
    function: Callable[..., Any], name: str, instead: Mapping[str, str] | None, own: int = 0
) -> Callable[..., Any]:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[own:]

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except TypeError:
            # Arguments that don't fit fail before anything has run; a TypeError from inside stays what it is.
            try:
                signature.bind(*args, **named)
            except TypeError as error:
                raise InputError(_sentence(name, parameters, args[own:], named, instead or {}, error)) from None
            raise

    return call


def _sentence(
    name: str,
    parameters: list[inspect.Parameter],
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    instead: Mapping[str, str],
    error: TypeError,
) -> str:
    known = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for wrong in (key for key in named if key not in known):
        hint = f" Write {instead[wrong]}." if wrong in instead else nearest(wrong, known)
        return f"{name} has no argument {wrong!r}.{hint}"
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(places):
        rest = ", ".join(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        named_ones = f"; give the others by name: {rest}" if rest else ""
        return f"{name} takes {len(places)} arguments by position and got {len(args)}{named_ones}."
    given = {p.name for p in places[: len(args)]}
    for twice in (key for key in named if key in given):
        return f"{name} got the argument {twice!r} twice, by position and by name; give it once."
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in (*named, *given)]
    required = [
        n for n in missing if n in {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    ]
    return f"{name} needs the argument {required[0]!r}." if required else f"{name}: {error}."
