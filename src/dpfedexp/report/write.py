"""A section into a folder: JSON, and its charts as files."""

from __future__ import annotations

from pathlib import Path

from dpfedexp.errors import InputError
from dpfedexp.report.document import Section
from dpfedexp.report.figures import draw


def save(section: Section, folder: Path) -> list[Path]:
    """`<name>.json`, and every chart as PNG, SVG and PDF."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{section.name}.json"
        path.write_text(section.to_json(), encoding="utf-8")
        return [path, *(file for chart in section.charts for file in draw(chart, folder))]
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None
