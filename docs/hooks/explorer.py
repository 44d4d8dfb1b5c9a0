"""The explorer as a page of the site, made from the suite's committed results."""

from __future__ import annotations

from pathlib import Path

from mkdocs.structure.files import File

from dpfedexp.report.document import Section
from dpfedexp.report.explorer.page import render

RESULTS = Path(__file__).parents[2] / "experiments" / "suite" / "suite.json"


def on_files(files, config):
    html = render(Section.read(RESULTS), "dpfedexp explore", home="index.html")
    files.append(File.generated(config, "explorer.html", content=html))
    return files
