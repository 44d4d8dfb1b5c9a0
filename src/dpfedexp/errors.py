"""Exceptions with helpful messages, and checks of misspelled arguments."""

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any, TypeVar, get_args, get_type_hints, overload

Callee = TypeVar("Callee", bound=Callable[..., Any])


class InputError(ValueError):
    """Invalid input; the message names the field, the value and what is expected.

    The command line prints it without a traceback and exits with code 2.

    >>> from dpfedexp import cdp_fedexp
    >>> cdp_fedexp(clip=-1.0, noise_multiplier=5.0)
    Traceback (most recent call last):
    dpfedexp.errors.InputError: clip is -1.0; it must be a positive number from 2^-64 (5.4e-20) to 2^64 (1.8e19).
    """


class BudgetExceeded(RuntimeError):
    """The next round would exceed the privacy budget; nothing of it has been computed or released.

    >>> from dpfedexp.accounting import Budget, GaussianEvent, Ledger, Query
    >>> event = GaussianEvent("central", "replace-one", (Query("update", 1.0, 2.0, 5.0),))
    >>> Ledger.in_memory().check(Budget(epsilon=1.0, delta=1e-5), event)
    Traceback (most recent call last):
    dpfedexp.errors.BudgetExceeded: the budget is epsilon 1 at delta 1e-05; ...
    """


class LedgerError(RuntimeError):
    """A ledger that is truncated, edited, or does not belong to the run."""


class RoundFailed(RuntimeError):
    """A round failed, for example because of too few replies."""


class AdviceWarning(UserWarning):
    """A run is likely to fail or to give little privacy; `docs/advice.md` lists the messages.

    >>> import warnings
    >>> warnings.simplefilter("ignore", AdviceWarning)  # silences them
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint " Did you mean 'x'?" for a misspelt name, or the list of known names."""
    known = list(known)
    if not known:
        return " It takes none."
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def is_count(value: object) -> bool:
    """Return whether a value is a positive whole number, also of NumPy. True is not: as a setting it is a mistake."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def is_number(value: object) -> bool:
    """Return whether a value is a number or converts to float; text and booleans do not count."""
    return not isinstance(value, bool) and (isinstance(value, (int, float)) or hasattr(value, "__float__"))


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def check_known(field: str, name: object, known: Iterable[str]) -> None:
    """Raise `InputError` with the nearest known name unless `name` is one of them."""
    known = list(known)
    if name not in known:
        raise InputError(f"{field} is {name!r}, which does not exist.{nearest(str(name), known)}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the nearest line outside this package: the user's call."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "dpfedexp":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


@overload
def checked(callee: Callee) -> Callee: ...


@overload
def checked(*, hints: Mapping[str, str]) -> Callable[[Callee], Callee]: ...


def checked(callee: Callable[..., Any] | None = None, *, hints: Mapping[str, str] | None = None) -> Any:
    """Decorate a function or a class so that wrong arguments raise `InputError` with a hint.

    The signature stays the same, except that the options of an `Unpack[…]` are listed one by one. `hints` say what to write instead
    of a wrong argument name.

    >>> @checked
    ... def area(width, height=1.0):
    ...     return width * height
    >>> area(2.0, hight=3.0)
    Traceback (most recent call last):
    dpfedexp.errors.InputError: area has no argument 'hight'. Did you mean 'height'?
    """
    if callee is None:
        return functools.partial(checked, hints=hints)
    if isinstance(callee, type):
        callee.__init__ = _checked(callee.__init__, callee.__name__, hints or {})  # type: ignore[misc]
        return callee
    return _checked(callee, callee.__name__, hints or {})


def _checked(function: Callable[..., Any], name: str, hints: Mapping[str, str]) -> Callable[..., Any]:
    signature = _with_options(function)
    parameters = list(signature.parameters.values())
    # The caller does not pass `self` or `cls`.
    own = int(bool(parameters) and parameters[0].name in ("self", "cls"))

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        # Otherwise the error would come from an inner function and name that function.
        if unpacked and not named.keys() <= signature.parameters.keys():
            raise InputError(_sentence(name, parameters[own:], args[own:], named, hints, ""))
        try:
            return function(*args, **named)
        except TypeError:
            # Only arguments that don't fit the signature become an `InputError`; a TypeError from inside is raised unchanged.
            try:
                signature.bind(*args, **named)
            except TypeError as error:
                raise InputError(_sentence(name, parameters[own:], args[own:], named, hints, error)) from None
            raise

    unpacked = signature != inspect.signature(function)
    if unpacked:
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _with_options(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature in which `**options: Unpack[…]` is replaced by the single options."""
    signature = inspect.signature(function)
    *first, last = signature.parameters.values() or [None]
    if last is None or last.kind is not last.VAR_KEYWORD or "Unpack[" not in str(last.annotation):
        return signature
    options = get_args(get_type_hints(function)[last.name])[0].__annotations__
    added = [inspect.Parameter(name, last.KEYWORD_ONLY, default=..., annotation=options[name]) for name in options]
    return signature.replace(parameters=[*first, *added])


def _sentence(
    name: str,
    parameters: list[inspect.Parameter],
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    hints: Mapping[str, str],
    error: object,
) -> str:
    known = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for wrong in (key for key in named if key not in known):
        hint = f" Write {hints[wrong]}." if wrong in hints else nearest(wrong, known)
        return f"{name} has no argument {wrong!r}.{hint}"
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(places):
        rest = ", ".join(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        named_ones = f"; give the others by name: {rest}" if rest else ""
        return f"{name} takes {len(places)} arguments by position and got {len(args)}{named_ones}."
    given = {p.name for p in places[: len(args)]}
    for p in parameters:
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in (*named, *given):
            return f"{name} needs the argument {p.name!r}."
    return f"{name}: {error}."
