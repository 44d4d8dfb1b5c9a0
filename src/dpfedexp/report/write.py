"""A section into a folder: JSON, and its charts as files."""

from __future__ import annotations

from pathlib import Path

from dpfedexp.errors import InputError
from dpfedexp.files import replace_text
from dpfedexp.report.document import Section
from dpfedexp.report.figures import draw


def save(section: Section, folder: Path) -> list[Path]:
    """`<name>.json`, and every chart as PNG, SVG and PDF."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{section.name}.json"
        replace_text(path, section.to_json())
        return [path, *(file for chart in section.charts for file in draw(chart, folder))]
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None
