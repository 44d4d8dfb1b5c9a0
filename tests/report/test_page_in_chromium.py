"""The page in a real browser: no errors, values on hover, both color schemes, a phone's width, paper."""

from pathlib import Path

import pytest

from dpfedexp.engine.plot import Chart, Panel, Series
from dpfedexp.report.document import Section
from dpfedexp.report.page import Page, render, report
from tests.browser import DESK, PHONE
from tests.browser import visit as open_page
from tests.report.pages import write_paper, write_run


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("results") / "paper"
    return report(write_paper(place, "table1", "synthetic", "mnist", "step-size", "beyond"))


def visit(browser, path: Path, width: int = DESK, scheme: str = "light") -> None:
    open_page(browser, path.as_uri(), width, scheme)


def background(browser) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def lightness(color: str) -> float:
    return sum(int(part) for part in color.strip("rgba()").split(",")[:3]) / 765


def test_hover_shows_the_values_and_leaving_hides_them(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    visit(browser, page)
    tip = browser.find_element("id", "tip")
    assert not tip.is_displayed()
    chart = browser.find_element("css selector", "#synthetic svg.plot")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    ActionChains(browser).move_to_element(chart).perform()
    assert tip.is_displayed()
    lines = tip.text.splitlines()
    assert lines[0].startswith("round ")
    assert [line.split(":")[0] for line in lines[1:]] == ["DP-FedEXP", "DP-FedAvg", "DP-SCAFFOLD"]
    # Fabricated FedEXP: 20 − 3·round/50, and 0.005 less for the mean of two seeds.
    at = int(lines[0].removeprefix("round "))
    assert float(lines[1].split(":")[1].split("(")[0]) == pytest.approx(20 - 3 * at / 50 - 0.005, abs=0.01)
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert not tip.is_displayed()
    browser.find_element("css selector", "#mnist svg.plot").send_keys(Keys.ARROW_RIGHT)
    assert tip.text.startswith("round 2"), "the keyboard shows values too"
    assert browser.get_log("browser") == []


def test_both_color_schemes_and_the_button(browser, page):
    visit(browser, page, scheme="dark")
    assert lightness(background(browser)) < 0.2
    line = "return getComputedStyle(document.querySelector('.series polyline')).stroke"
    dark_line = browser.execute_script(line)
    visit(browser, page, scheme="light")
    assert lightness(background(browser)) > 0.9
    assert browser.execute_script(line) != dark_line
    button = browser.find_element("id", "theme")
    seen = []
    for _ in range(3):
        button.click()
        seen.append(lightness(background(browser)) > 0.5)
    assert seen == [True, False, True], "light, dark, and automatic again"


def test_a_phone_needs_no_sideways_scrolling_and_shows_legible_charts(browser, page):
    visit(browser, page, PHONE)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE
    script = """const svg = document.querySelector('svg.plot'), tick = svg.querySelector('.tick');
    return parseFloat(getComputedStyle(tick).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width"""
    assert browser.execute_script(script) >= 9.5


def test_odd_values_make_a_chart_or_say_that_there_is_none(browser, tmp_path):
    values = [[], [1.0], [0.0, 0.0], [5.0, 5.0], [1e-9, 1e9], [-3.0, 4.0]]
    panels = [
        Panel("", "x", "y", [Series("a", [*range(1, len(y) + 1)], y)], log_y=log) for y in values for log in (0, 1)
    ]
    band = Series("a", [1, 2], [1.0, 2.0], [-1.0, 0.0], [3.0, 4.0])
    gaps = [Series("a", [1, 2], [1.0, 2.0]), Series("b", [2, 3], [3.0, float("nan")])]
    panels += [Panel("", "x", "y", [band], log_y=True), Panel("", "x", "y", gaps)]
    page = Page("odd", "", [Section("s", "s", charts=[Chart("c", "", "", panels)])])
    (tmp_path / "report.html").write_text(render(page, tmp_path))
    visit(browser, tmp_path / "report.html")
    shown = [host.get_attribute("innerHTML") for host in browser.find_elements("css selector", "[data-panel]")]
    assert [number for number, html in enumerate(shown) if html == "No values."] == [0, 1, 5]
    assert not [html for html in shown if "NaN" in html or "Infinity" in html]


def test_a_hostile_run_runs_nothing(browser, tmp_path):
    visit(browser, report(write_run(tmp_path / "<img src=x onerror=alert(1)>")), PHONE)
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE
