"""The explorer: one page with the suite's results and an exact accountant, to try settings in a browser. It loads nothing."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dpfedexp import __version__
from dpfedexp.engine.advice import FEW_CLIENTS, LARGE_EPSILON
from dpfedexp.engine.plan import DEVIATIONS
from dpfedexp.engine.plot import NAMED
from dpfedexp.report.document import Section

SCRIPTS = ("accountant.js", "words.js", "figures.js", "explorer.js")


def render(suite: Section, command: str, home: str = "") -> str:
    """The page as HTML.

    Args:
        suite: the suite's section, whose `data` hold the numbers against ε.
        command: what writes the page.
        home: where the page of a site leads back to; nothing for a page on its own.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    here, own = files("dpfedexp.report"), files("reproduction.explorer")
    template = environment.from_string((own / "explorer.html.j2").read_text(encoding="utf-8"))
    styles = (here / "page.css", own / "explorer.css")
    scripts = (here / "chart.js", *(own / name for name in SCRIPTS), here / "page.js")
    return template.render(
        suite=suite,
        css=Markup("\n".join(file.read_text(encoding="utf-8") for file in styles)),
        js=Markup("\n".join(file.read_text(encoding="utf-8") for file in scripts)),
        data=Markup(_inline({"suite": suite.data, "slots": NAMED, "limits": _limits()})),
        command=command,
        home=home,
        version=__version__,
    )


def _limits() -> dict[str, float]:
    """What the preflight judges by."""
    return {"deviations": DEVIATIONS, "few_clients": FEW_CLIENTS, "large_epsilon": LARGE_EPSILON}


def _inline(value: Any) -> str:
    """JSON that can't end the element that it stands in."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
