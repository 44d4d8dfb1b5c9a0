"""Line charts as inline SVG: axes, bands, a legend of the same colours, and what the page's script needs to show values on hover.

Colours are classes (`s0`, `s1`, …) that the page's style sheet fills for light and dark; nothing here names a colour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dpfedexp.report.document import Panel, Series
from dpfedexp.report.palette import slots

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 44
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """From values to pixels, with ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        f: Callable[[float], float] = math.log10 if self.log else float
        inside = min(max(value, self.low), self.high)
        share = (f(inside) - f(self.low)) / (f(self.high) - f(self.low))
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        return logarithmic(self.low, self.high) if self.log else linear(self.low, self.high)


def chart(panel: Panel) -> Markup:
    """One panel. Empty panels say so."""
    points = [
        (x, y)
        for s in panel.series
        for x, y in zip(s.x, s.y, strict=True)
        if _shown(x, panel.log_x) and _shown(y, panel.log_y)
    ]
    if not points:
        return Markup('<p class="empty">No values.</p>')
    x_axis = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT, panel.log_x, room=0.0)
    y_axis = _axis([*(y for _, y in points), *_bands(panel)], HEIGHT - BOTTOM, TOP, panel.log_y, room=0.04)
    parts = [_grid(x_axis, y_axis), _labels(panel)]
    chosen = slots(panel)
    for series, slot in zip(panel.series, chosen, strict=True):
        parts.append(_band(series, slot, x_axis, y_axis))
    for series, slot in zip(panel.series, chosen, strict=True):
        parts.append(_line(series, slot, x_axis, y_axis))
    parts.append(
        Markup('<line class="guide" y1="{}" y2="{}" x1="-9" x2="-9"/><g class="dots"></g>').format(TOP, HEIGHT - BOTTOM)
    )
    name = f"{panel.title}: {panel.y_label} against {panel.x_label} for " + ", ".join(s.name for s in panel.series)
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" tabindex="0" aria-label="{}" data-hover="{}">{}</svg>'
    ).format(
        WIDTH,
        HEIGHT,
        name,
        json.dumps(_hover(panel, chosen, x_axis, y_axis), ensure_ascii=False),
        Markup("").join(parts),
    )


def legend(panel: Panel) -> Markup:
    """The names of the lines; nothing where the panel's title says it already."""
    if [s.name for s in panel.series] == [panel.title]:
        return Markup("")
    items = [
        Markup('<li class="s{}"><i{}></i>{}</li>').format(slot, Markup(' class="dashed"') if s.dashed else "", s.name)
        for s, slot in zip(panel.series, slots(panel), strict=True)
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _shown(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _bands(panel: Panel) -> list[float]:
    edges = [v for s in panel.series for side in (s.low, s.high) if side is not None for v in side]
    return [v for v in edges if _shown(v, panel.log_y)]


def _axis(values: Sequence[float], start: float, end: float, log: bool, room: float) -> Axis:
    low, high = min(values), max(values)
    if log:
        low, high = (low, high) if high > low else (low / 2, high * 2)
        stretch = (high / low) ** room
        return Axis(low / stretch, high * stretch, start, end, log)
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    stretch = room * (high - low)
    return Axis(low - stretch, high + stretch, start, end, log)


def _grid(x_axis: Axis, y_axis: Axis) -> Markup:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in y_axis.ticks:
        y = y_axis(tick)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, y, y))
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(LEFT - 6, y + 4, label(tick))
        )
    for tick in x_axis.ticks:
        x = x_axis(tick)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(x, x, TOP, bottom))
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                x, bottom + 16, label(tick)
            )
        )
    parts.append(Markup('<path class="axis" d="M{} {}V{}H{}"/>').format(LEFT, TOP, bottom, WIDTH - RIGHT))
    return Markup("").join(parts)


def _labels(panel: Panel) -> Markup:
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return Markup(
        '<text class="label" x="{}" y="{}" text-anchor="middle">{}</text>'
        '<text class="label" transform="translate(14 {}) rotate(-90)" text-anchor="middle">{}</text>'
    ).format(middle_x, HEIGHT - 8, panel.x_label, middle_y, panel.y_label)


def _line(series: Series, slot: int, x_axis: Axis, y_axis: Axis) -> Markup:
    at = [
        (x_axis(x), y_axis(y))
        for x, y in zip(series.x, series.y, strict=True)
        if _shown(x, x_axis.log) and _shown(y, y_axis.log)
    ]
    path = "M" + "L".join(f"{x} {y}" for x, y in at)
    dots = (
        Markup("").join(Markup('<circle cx="{}" cy="{}" r="2.8"/>').format(x, y) for x, y in at)
        if len(at) <= 12
        else ""
    )
    style = Markup(" dashed") if series.dashed else ""
    return Markup('<g class="series s{}{}"><path d="{}"/>{}</g>').format(slot, style, path, dots) if at else Markup("")


def _band(series: Series, slot: int, x_axis: Axis, y_axis: Axis) -> Markup:
    if series.low is None or series.high is None:
        return Markup("")
    rows = [
        (x_axis(x), y_axis(max(low, y_axis.low)), y_axis(high))
        for x, low, high in zip(series.x, series.low, series.high, strict=True)
        if _shown(x, x_axis.log) and _shown(high, y_axis.log)
    ]
    if not rows:
        return Markup("")
    there = "L".join(f"{x} {high}" for x, _, high in rows)
    back = "L".join(f"{x} {low}" for x, low, _ in reversed(rows))
    return Markup('<path class="band s{}" d="M{}L{}Z"/>').format(slot, there, back)


def _hover(panel: Panel, chosen: list[int], x_axis: Axis, y_axis: Axis) -> dict[str, object]:
    """Pixels and texts for every x that a series has."""
    xs = sorted({x for s in panel.series for x in s.x if _shown(x, panel.log_x)})
    rows = []
    for series, slot in zip(panel.series, chosen, strict=True):
        at = dict(zip(series.x, range(len(series.x)), strict=True))
        values = []
        for x in xs:
            i = at.get(x)
            known = i is not None and _shown(series.y[i], panel.log_y)
            values.append([y_axis(series.y[i]), _value(series, i)] if known and i is not None else None)
        rows.append({"name": series.name, "slot": slot, "values": values})
    return {"label": panel.x_label, "x": [x_axis(x) for x in xs], "at": [label(x) for x in xs], "series": rows}


def _value(series: Series, i: int) -> str:
    shown = f"{series.y[i]:z.4g}"
    if series.low is None or series.high is None or series.low[i] == series.high[i]:
        return shown
    return f"{shown} ({series.low[i]:z.4g} … {series.high[i]:z.4g})"


def linear(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, within the range."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= 0.7 * rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def logarithmic(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 between them over two decades or less; linear ones where fewer than three would be left."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    between = (1,) if last - first > 3 else (1, 2, 5)
    ticks = [m * 10.0**k for k in range(first, last + 1) for m in between]
    inside = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
    return inside if len(inside) >= 3 else [t for t in linear(low, high) if t > 0]


def label(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{'' if mantissa == '1' else mantissa + '·'}10{str(int(exponent)).translate(_RAISED)}"
    return f"{value:.6g}"
