"""The explorer in Chromium: sliders, addresses, keyboard, both widths and colour schemes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reproduction.suite.command import explore

from dpfedexp.accounting import epsilon, noise
from tests.browser import DESK, PHONE, SCHEMES, cut_off, faint_texts, visit

SUITE = Path(__file__).parents[3] / "reproduction" / "experiments" / "suite"
CHARTS = ("accuracy", "cohort", "map", "spending", "saving", "tradeoff", "belief")
SPOKEN = ("promise", "command", "accuracy", "noise", "rounds", "attacker")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return explore(tmp_path_factory.mktemp("explorer") / "explorer.html", SUITE)


def fact(browser, name: str) -> float:
    return float(browser.find_element("css selector", f'.fact [data-fact="{name}"]').get_attribute("data-value"))


def said(browser) -> dict[str, str]:
    return {name: browser.find_element("css selector", f'[data-say="{name}"]').text for name in SPOKEN}


def slide(browser, name: str, position: int) -> None:
    script = """const slider = document.querySelector(`[data-name="${arguments[0]}"] [type=range]`);
    slider.value = arguments[1]; slider.dispatchEvent(new Event('input', {bubbles: true}))"""
    browser.execute_script(script, name, position)


def drawn(browser) -> dict[str, str]:
    return {
        name: browser.execute_script(f"return document.querySelector('[data-chart={name}]').innerHTML")
        for name in CHARTS
    }


def test_it_is_one_file_that_loads_nothing(page):
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", html)
    assert not re.search(r"@import|url\(\s*[\"']?https?:|fetch\(|XMLHttpRequest", html)


def test_every_slider_changes_what_it_should(browser, page):
    visit(browser, page.as_uri() + "#mode=noise")
    everything = {"z", "rounds", "clients", "dimension", "delta", "clip", "alarms", "prior"}
    changes_epsilon = {"z", "rounds", "delta"}
    assert fact(browser, "epsilon") == pytest.approx(epsilon(5.0, rounds=50, delta=1e-5), abs=1e-6)
    for name in sorted(everything):
        before, words = fact(browser, "epsilon"), said(browser)
        slide(browser, name, 700)
        assert (fact(browser, "epsilon") != before) == (name in changes_epsilon), name
        assert said(browser) != words, name
        assert re.search(rf"\b{name}=", browser.current_url), "the setting is in the address"
    assert browser.get_log("browser") == []


def test_every_chart_follows_the_noise(browser, page):
    visit(browser, page.as_uri())
    before = drawn(browser)
    slide(browser, "epsilon", 450)
    after = drawn(browser)
    assert [name for name in CHARTS if before[name] == after[name]] == []


def test_an_address_brings_a_setting_back(browser, page):
    visit(browser, page.as_uri() + "#mode=epsilon&epsilon=3&rounds=20&adjacency=add-remove&delta=1e-6&problem=chem97")
    z = noise(3.0, rounds=20, delta=1e-6, adjacency="add-remove")
    assert fact(browser, "z") == pytest.approx(z, rel=1e-6)
    assert "1928 schools" in browser.find_element("css selector", '[data-say="problem"]').text
    slide(browser, "clients", 900)
    address = browser.current_url
    share = fact(browser, "share")
    visit(browser, "about:blank")
    visit(browser, address)
    assert fact(browser, "share") == share
    assert fact(browser, "z") == pytest.approx(z, rel=1e-6)


def test_a_broken_address_is_the_usual_setting(browser, page):
    visit(browser, page.as_uri() + "#rounds=many&z=-4&who=%3Cscript%3E&problem=nowhere&delta=")
    assert fact(browser, "epsilon") == 8.0
    assert browser.execute_script("return document.getElementById('rounds').value") == "50"


def test_typed_numbers_are_exact_and_kept_within_their_range(browser, page):
    from selenium.webdriver.common.keys import Keys

    def typed(name: str, text: str) -> str:
        box = browser.find_element("id", name)
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(text, Keys.TAB)
        return box.get_attribute("value")

    visit(browser, page.as_uri() + "#mode=noise")
    assert typed("z", "7.4321") == "7.4321"
    assert fact(browser, "epsilon") == pytest.approx(epsilon(7.4321, rounds=50, delta=1e-5), abs=1e-6)
    assert typed("z", "nonsense") == "7.4321"
    assert typed("rounds", "0") == "1"


def test_the_keyboard_reaches_sliders_and_values(browser, page):
    from selenium.webdriver.common.keys import Keys

    visit(browser, page.as_uri() + "#mode=noise")
    before = fact(browser, "epsilon")
    browser.find_element("css selector", '[data-name="rounds"] [type=range]').send_keys(Keys.ARROW_RIGHT)
    assert fact(browser, "epsilon") > before
    chart = browser.find_element("css selector", '[data-chart="accuracy"] svg')
    chart.send_keys(Keys.ARROW_RIGHT)
    tip = browser.find_element("id", "tip").text
    assert tip.startswith("ε = 2\n")
    assert "FedAdam, tuned: 86.31 ± 0.46 [0.01]" in tip, "as the suite's table has it"
    chart.send_keys(Keys.ESCAPE)
    assert not browser.find_element("id", "tip").is_displayed()


def test_the_legend_says_who_was_tuned_on_test_data(browser, page):
    visit(browser, page.as_uri())
    entries = [item.text for item in browser.find_elements("css selector", '[data-legend="accuracy"] li')]
    assert [one for one in entries if "tuned" in one] == [
        f"{name}, tuned (best of 5 server rates, chosen on test data)" for name in ("FedAvg", "FedAdam")
    ]
    assert "the rivals are shown better than they could be had" in browser.find_element("id", "accuracy").text


def test_switching_between_noise_and_target_keeps_the_setting(browser, page):
    visit(browser, page.as_uri() + "#epsilon=2.5")
    z = fact(browser, "z")
    browser.execute_script("document.querySelector('[name=mode][value=noise]').click()")
    assert fact(browser, "z") == pytest.approx(z, rel=1e-5)
    assert fact(browser, "epsilon") == pytest.approx(2.5, rel=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("setting", ["", "#mode=noise&z=0.1&who=local&clients=5&delta=0.1&problem=randhie&step=paper"])
def test_it_is_legible_and_whole(browser, page, width, scheme, setting):
    visit(browser, "about:blank")
    visit(browser, page.as_uri() + setting, width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert faint_texts(browser) == []
    assert cut_off(browser) == []


@pytest.mark.parametrize("mode", ["noise", "epsilon"])
@pytest.mark.parametrize("who", ["central", "local"])
def test_the_ends_of_every_slider_are_drawn(browser, page, mode, who):
    """An address beyond the ends is brought back to them; nothing is NaN, nothing throws."""
    names = ("z", "epsilon", "rounds", "clients", "dimension", "delta", "alarms", "prior", "clip")
    for value in ("1e-99", "1e99"):
        visit(browser, "about:blank")
        numbers = "&".join(f"{name}={value}" for name in names)
        visit(browser, page.as_uri() + f"#mode={mode}&who={who}&step=paper&{numbers}")
        text = browser.find_element("tag name", "main").text + "".join(drawn(browser).values())
        assert not re.search("NaN|undefined|null", text)
