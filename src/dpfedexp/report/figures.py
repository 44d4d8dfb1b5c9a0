"""Charts drawn with matplotlib as PNG, SVG and PDF, in colours that print and that colour-blind readers tell apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from dpfedexp.report.document import Chart, Panel
from dpfedexp.report.palette import colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")


def draw(chart: Chart, folder: Path) -> list[Path]:
    """One file per format, named after the chart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(chart.panels)
    width = min(count, 3)
    height = -(-count // width)
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpfedexp", "font.size": 9}):
        figure, axes = pyplot.subplots(
            height, width, figsize=(4.3 * width, 3.5 * height), squeeze=False, layout="constrained"
        )
        for axis in axes.flat[count:]:
            axis.set_visible(False)
        for axis, panel in zip(axes.flat, chart.panels, strict=False):
            _panel(axis, panel)
        written = [folder / f"{chart.name}.{suffix}" for suffix in FORMATS]
        for path in written:
            stamp = (
                {"Date": None} if path.suffix == ".svg" else {"CreationDate": None} if path.suffix == ".pdf" else None
            )
            figure.savefig(path, dpi=160, metadata=stamp)
        pyplot.close(figure)
    return written


def _panel(axis: Axes, panel: Panel) -> None:
    for series, colour in zip(panel.series, colours(panel), strict=True):
        style = "--" if series.dashed else "-"
        marker = "o" if len(series.x) <= 12 else None
        axis.plot(
            series.x, series.y, style, color=colour, label=series.name, linewidth=1.7, marker=marker, markersize=3.5
        )
        if series.low is not None and series.high is not None:
            axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.16, linewidth=0)
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_x:
        axis.set_xscale("log")
        xs = sorted({x for series in panel.series for x in series.x})
        if len(xs) > 1 and all(math.frexp(x)[0] == 0.5 for x in xs):
            # Powers of two fall between the powers of ten that a logarithmic axis marks.
            axis.set_xticks(xs, [f"{x:g}" for x in xs])
            axis.set_xticks([], minor=True)
    if panel.log_y:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        low, high = axis.get_ylim()
        axis.yaxis.set_minor_formatter("{x:g}" if high / low < 12 else "")
    axis.grid(alpha=0.25, which="both" if not panel.log_y else "major")
    axis.legend(frameon=False, fontsize=8)
