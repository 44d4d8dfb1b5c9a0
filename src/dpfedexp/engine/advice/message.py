"""One piece of advice: a sentence that names its numbers and what to do."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Literal

from dpfedexp.arguments import checked

Level = Literal["note", "warning"]


@checked
@dataclass(frozen=True)
class Advice:
    """Something worth knowing about a run.

    Formal guarantee: it is computed from public numbers and released values alone, so it may be shown and written anywhere.

    Args:
        level: "warning" where the run is likely to be in vain or to promise little, "note" otherwise.
        code: which message it is, as `docs/advice.md` lists them.
        sentence: what is seen, and what to do.
    """

    level: Level
    code: str
    sentence: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def number(value: float) -> str:
    """A number as people read it: 1,234 or 12 or 0.034.

    >>> number(1234.5), number(12.34), number(0.0337)
    ('1,234', '12', '0.034')
    """
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.2g}"


def about(value: float) -> str:
    """A number of which two digits matter.

    >>> about(36_573_198), about(334), about(6.2)
    ('37,000,000', '330', '6.2')
    """
    return f"{float(f'{value:.2g}'):,.0f}" if abs(value) >= 9.95 else f"{value:.2g}"


def log(logger: logging.Logger, advice: Advice) -> None:
    """Tells an advice to a log, at its own level."""
    logger.log(logging.WARNING if advice.level == "warning" else logging.INFO, "%s", advice.sentence)
