"""The explorer as a page of the site, made from the suite's committed results."""

from __future__ import annotations

from mkdocs.structure.files import File
from names import ROOT, of_repository

from dpfedexp.report.document import Section

RESULTS = ROOT / "reproduction" / "experiments" / "suite" / "suite.json"


def on_files(files, config):
    page = of_repository("reproduction.explorer.explorer_page")
    html = page.render(Section.read(RESULTS), "python -m reproduction explore", home="index.html")
    files.append(File.generated(config, "explorer.html", content=html))
    return files
