"""Errors that are sentences for the person who typed the input."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral


class InputError(ValueError):
    """Something the user gave is wrong; the message names the field, the value and what would be right.

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
    """A round that may not be released, such as one with fewer survivors than the floor."""


class AdviceWarning(UserWarning):
    """A run that is likely to be in vain, or to promise little; `docs/advice.md` lists the messages.

    >>> import warnings
    >>> warnings.simplefilter("ignore", AdviceWarning)  # silences them
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean 'x'?' for a misspelt name, or the list of what exists."""
    known = list(known)
    if not known:
        return " It takes none."
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def is_count(value: object) -> bool:
    """Whether a value is a positive whole number, NumPy's too. True is not one: it is an int in Python, and a slip in a setting."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def is_number(value: object) -> bool:
    """Whether a value can be compared with numbers; text can't."""
    return not isinstance(value, bool) and (isinstance(value, (int, float)) or hasattr(value, "__float__"))


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)
