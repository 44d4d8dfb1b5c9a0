"""Charts and their matplotlib figures, for files and notebooks; HTML pages draw the same charts with `report/chart.js`.

An algorithm has the same color in every chart (Okabe and Ito's palette, which works in print and for color-blind readers).
"""

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfedexp.errors import nearest, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEERING = ("eta_g", "clip", "local_rate")
"""Settings that change from round to round."""
BOOKKEEPING = (
    *("round", *STEERING, "update_norm", "noisy_mean_within_clip", "noisy_mean_improved", "epsilon_total", "seconds"),
    *("candidate", "candidates"),
)
"""Fields of a record that are not metrics."""
NAMES = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "test_auc": "test AUC",
    "test_mae": "test error, mean absolute",
    "test_rmse": "test error, root mean square",
    "test_r2": "test R²",
    "clients_accuracy": "accuracy on the clients' rows",
    "clients_loss": "loss on the clients' rows",
    "clients_auc": "AUC on the clients' rows",
    "clients_error_median": "median error on the clients' rows",
    "clients_error_p90": "90% quantile of the error on the clients' rows",
    "distance": "distance to the optimum",
    "eta_g": "global step size η_g",
    "clip": "clip C",
    "update_norm": "length of the released update ‖c̄‖",
    "epsilon_total": "ε so far",
    "seconds": "seconds per round",
}
"""Labels of record fields in pages and figures; other fields use their own names."""
FORMATS = ("png", "svg", "pdf")
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B")
NAMED = {
    **dict.fromkeys(("fedexp", "cdp", "proposed"), 0),
    **dict.fromkeys(("fedavg", "ldp-gaussian", "naive"), 1),
    **dict.fromkeys(("scaffold", "ldp-privunit", "target", "plain"), 2),
    **{"fit": 3, "tuned": 4, "fedadam": 5},
}
"""The place in `CYCLE` of the colors that have a name."""


@dataclass(frozen=True)
class Series:
    """A line, with an optional band from `low` to `high`; `color` names an algorithm's color."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    color: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False

    @property
    def slots(self) -> list[int]:
        """The palette index of each series: series with a named color keep theirs, the others take the free ones in order."""
        taken = {NAMED[s.color] for s in self.series if s.color in NAMED}
        free = [slot for slot in range(len(CYCLE)) if slot not in taken] or list(range(len(CYCLE)))
        others = itertools.cycle(free)
        return [NAMED[s.color] if s.color in NAMED else next(others) for s in self.series]


@dataclass(frozen=True)
class Chart:
    """Panels with a title and a caption; `name` is the stem of the chart's files."""

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]


def metrics_in(history: Sequence[dict[str, Any]]) -> list[str]:
    """The fields of the records that are metrics, in the order in which they first occur."""
    found = dict.fromkeys(k for record in history for k in record if k not in BOOKKEEPING)
    parts = {key + end for key in found for end in ("_low", "_high", "_at_bound")}
    return [key for key in found if key not in parts]


def main_metric(histories: Sequence[Sequence[dict[str, Any]]], asked: str | None, field: str) -> str:
    """The metric to compare runs by: `asked`, or by default the test accuracy, or the first metric; `field` is for errors."""
    names = list(dict.fromkeys(name for history in histories for name in metrics_in(history)))
    require(len(names) > 0, "the runs have no metric to compare; train them with evaluate=(inputs, targets).")
    if asked is None:
        return "test_accuracy" if "test_accuracy" in names else names[0]
    require(asked in names, f"{field} is {asked!r}, which the runs did not measure.{nearest(asked, names)}")
    return asked


def name_of(key: str) -> str:
    if key.startswith("nonprivate_"):
        return f"{key.removeprefix('nonprivate_').replace('_', ' ')} (not private)"
    return NAMES.get(key, key.replace("_", " "))


def over_rounds(history: Sequence[dict[str, Any]], key: str, name: str, x: str = "round") -> Series:
    """The series of a field over the field `x`, with its interval where it has one. Values that are not finite are left out."""
    known = [r for r in history if all(isinstance(r.get(k), int | float) and math.isfinite(r[k]) for k in (key, x))]
    rounds, values = [r[x] for r in known], [r[key] for r in known]
    if not known or f"{key}_low" not in known[-1]:
        return Series(name, rounds, values)
    low, high = ([r[f"{key}_{end}"] for r in known] for end in ("low", "high"))
    return Series(name, rounds, values, low, high)


def run_panels(history: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[Panel]:
    """One panel per field. Its title counts the rounds in which the true value may be above the bound of the metric."""
    panels = []
    for key in keys:
        reached = sum(bool(record.get(f"{key}_at_bound")) for record in history)
        title = name_of(key) + (f" (may be above its bound in {reached} rounds)" if reached else "")
        panels.append(Panel(title, "round", name_of(key), [over_rounds(history, key, name_of(key))]))
    return panels


def figure(panels: Sequence[Panel], title: str = "", *, legend_below: bool = False) -> "Figure":
    """Draw the panels, three to a row. The figure needs no display: a notebook shows it, and `savefig` writes it."""
    import matplotlib
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=110)
            return picture.getvalue()

    width = max(1, min(len(panels), 3))
    height = max(1, -(-len(panels) // width))
    with matplotlib.rc_context({"font.size": 9}):
        made = Shown(figsize=(4.3 * width, 3.5 * height), layout="constrained")
        axes = made.subplots(height, width, squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        for axis, panel in zip(axes.flat, panels, strict=False):
            _panel(axis, panel, legend=not legend_below)
        if legend_below:
            lines, names = axes.flat[0].get_legend_handles_labels()
            # About 14 characters to an inch; longer names get a wider figure.
            made.set_size_inches(max(4.3 * width, max(map(len, names)) / 14 + 1), 3.5 * height + 0.2 * len(names))
            made.legend(lines, names, loc="outside lower center", frameon=False, fontsize=8)
        if title:
            made.suptitle(title, fontsize=11)
    return made


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the file's suffix. The bytes are the same every time."""
    import matplotlib

    stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpfedexp", "font.size": 9}):
        figure.savefig(path, dpi=160, metadata=stamp)


def draw(chart: Chart, folder: Path) -> list[Path]:
    written = [folder / f"{chart.name}.{suffix}" for suffix in FORMATS] if chart.panels else []
    made = figure(chart.panels)
    for path in written:
        save_figure(made, path)
    return written


def _panel(axis: "Axes", panel: Panel, *, legend: bool = True) -> None:
    for series, slot in zip(panel.series, panel.slots, strict=True):
        style, marker = "--" if series.dashed else "-", "o" if len(series.x) <= 12 else None
        look: dict[str, Any] = {"color": CYCLE[slot], "linewidth": 1.7, "marker": marker, "markersize": 3.5}
        axis.plot(series.x, series.y, style, label=series.name, **look)
        if series.low is not None and series.high is not None:
            axis.fill_between(series.x, series.low, series.high, color=CYCLE[slot], alpha=0.16, linewidth=0)
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_x:
        axis.set_xscale("log")
        xs = sorted({x for series in panel.series for x in series.x})
        if len(xs) > 1 and all(math.frexp(x)[0] == 0.5 for x in xs):
            # A logarithmic axis only marks powers of ten, which misses powers of two.
            axis.set_xticks(xs, [f"{x:g}" for x in xs])
            axis.set_xticks([], minor=True)
    if panel.log_y:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        low, high = axis.get_ylim()
        axis.yaxis.set_minor_formatter("{x:g}" if high / low < 12 else "")
    axis.grid(alpha=0.25, which="both" if not panel.log_y else "major")
    if legend and [series.name for series in panel.series] != [panel.title]:
        axis.legend(frameon=False, fontsize=8)
