"""Charts as SVG: well-formed, escaped, and true to their values."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml

import pytest

from dpfedexp.report import svg
from dpfedexp.report.document import Panel, Series
from dpfedexp.report.palette import slots
from dpfedexp.report.svg import label, linear, logarithmic


def panel(**changes) -> Panel:
    series = [Series("DP-FedEXP", [1, 2, 3], [10.0, 5.0, 2.0], [9.0, 4.0, 1.5], [11.0, 6.0, 2.5], "fedexp")]
    return Panel(**({"title": "CDP", "x_label": "round", "y_label": "distance", "series": series} | changes))


def parsed(one: Panel) -> xml.Element:
    return xml.fromstring(str(svg.chart(one)))


@pytest.mark.parametrize(("log_x", "log_y"), [(False, False), (True, True)])
def test_a_chart_is_well_formed_and_names_itself(log_x, log_y):
    root = parsed(panel(log_x=log_x, log_y=log_y))
    assert root.get("role") == "img"
    assert "distance against round for DP-FedEXP" in root.get("aria-label")
    assert [p for p in root.iter("path") if "s0" in p.get("class", "")]


def test_hover_holds_every_value_and_its_band():
    data = json.loads(parsed(panel()).get("data-hover"))
    assert data["at"] == ["1", "2", "3"]
    assert [value[1] for value in data["series"][0]["values"]] == ["10 (9 … 11)", "5 (4 … 6)", "2 (1.5 … 2.5)"]
    heights = [value[0] for value in data["series"][0]["values"]]
    assert heights == sorted(heights), "a smaller value lies lower on the page"


def test_series_with_other_x_leave_gaps():
    two = [Series("a", [1, 2], [1.0, 2.0]), Series("b", [2, 3], [3.0, 4.0])]
    data = json.loads(parsed(panel(series=two)).get("data-hover"))
    assert data["series"][0]["values"][2] is None
    assert data["series"][1]["values"][0] is None


def test_everything_is_escaped():
    evil = '"><script>alert(1)</script>'
    one = panel(title=evil, x_label=evil, y_label=evil, series=[Series(evil, [1, 2], [1.0, 2.0])])
    for text in (str(svg.chart(one)), str(svg.legend(one))):
        assert "<script" not in text
    xml.fromstring(str(svg.chart(one)))


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [5.0, 5.0], [1e-9, 1e9], [-3.0, 4.0]])
@pytest.mark.parametrize("log_y", [False, True])
def test_odd_values_make_a_chart_or_say_that_there_is_none(values, log_y):
    text = str(svg.chart(panel(series=[Series("a", list(range(1, len(values) + 1)), values)], log_y=log_y)))
    assert "nan" not in text
    xml.fromstring(text)


def test_a_panel_without_values_says_so():
    assert "No values" in svg.chart(panel(series=[Series("a", [], [])]))


def test_a_band_that_reaches_zero_stays_on_a_logarithmic_chart():
    parsed(panel(series=[Series("a", [1, 2], [1.0, 2.0], [-1.0, 0.0], [3.0, 4.0])], log_y=True))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (92.1, 94.9), (1e-6, 3e-6), (0, 50)])
def test_linear_ticks_are_inside_and_neither_few_nor_many(low, high):
    ticks = linear(low, high)
    assert 3 <= len(ticks) <= 8
    assert low - 1e-9 <= ticks[0] < ticks[-1] <= high + 1e-9


@pytest.mark.parametrize(("low", "high"), [(1, 1000), (8, 22), (2, 10), (100, 10_000), (0.01, 1e6)])
def test_logarithmic_ticks_are_inside(low, high):
    ticks = logarithmic(low, high)
    assert len(ticks) >= 2
    assert low * 0.99 <= ticks[0] < ticks[-1] <= high * 1.01


def test_labels_are_short():
    assert [label(v) for v in (0, 0.1, 1500, 1e6, 2e-5)] == ["0", "0.1", "1500", "10⁶", "2·10⁻⁵"]


def test_an_algorithm_keeps_its_colour_and_others_take_what_is_left():
    series = [Series("x", [], []), Series("b", [], [], colour="fedavg"), Series("y", [], [])]
    assert slots(panel(series=series)) == [0, 1, 2]
    assert len(set(slots(panel(series=[*series, Series("e", [], [], colour="fedexp")])))) == 4
