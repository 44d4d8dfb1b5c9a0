"""Examples in docstrings become blocks of code: Markdown would take their `>>>` for quotations."""

from __future__ import annotations

import re

from griffe import Docstring, Extension

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)(?! *$).*)*", re.M)


class Doctests(Extension):
    def on_object(self, *, obj, **kwargs) -> None:
        """Puts every example between fences, but for those in an `Example:` section, which is one already."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(match: re.Match[str]) -> str:
    indent = match["indent"]
    return match[0] if indent else f"```pycon\n{match[0]}\n```"
