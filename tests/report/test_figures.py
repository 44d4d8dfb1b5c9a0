"""Figures as files, and the same bytes every time."""

from __future__ import annotations

from dpfedexp.report.document import Chart, Panel, Series
from dpfedexp.report.figures import draw

CHART = Chart(
    "four",
    "Four panels",
    "",
    [
        Panel(f"panel {i}", "x", "y", [Series("a", [1, 10], [1.0, 2.0], [0.5, 1.0], [2.0, 3.0])], i % 2 == 0, i > 1)
        for i in range(4)
    ],
)


def test_a_chart_is_written_as_png_svg_and_pdf(tmp_path):
    png, svg, pdf = draw(CHART, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()
    assert pdf.read_bytes().startswith(b"%PDF")


def test_figures_can_be_compared_by_their_bytes(tmp_path):
    (tmp_path / "b").mkdir()
    first = [path.read_bytes() for path in draw(CHART, tmp_path)]
    assert [path.read_bytes() for path in draw(CHART, tmp_path / "b")] == first
