"""The explorer in Chromium: its accountant is the library's; sliders, addresses, keyboard, both widths and color schemes."""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from reproduction.suite.command import explore

from dpfedexp import Full, cdp_fedexp, dp_fedavg
from dpfedexp.accounting import epsilon, gdp, noise
from dpfedexp.accounting.statement import models_only
from dpfedexp.engine.plan import DEVIATIONS, Plan
from tests.browser import DESK, PHONE, cut_off, faint_texts, visit

Setting = dict[str, Any]


def settings(count: int, seed: int = 0) -> list[Setting]:
    """Wider than the sliders: z from 0.01 to 10⁵, δ from 10⁻³⁰ to ½, up to 10⁵ rounds."""
    rng = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    return [
        {
            "mode": "noise",
            "who": rng.choice(("central", "central", "local")),
            "adjacency": rng.choice(("replace-one", "add-remove")),
            "step": rng.choice(("free", "paper")),
            "clients": round(between(1, 1e7)),
            "dimension": round(between(1, 1e10)),
            "rounds": round(between(1, 1e5)),
            "delta": between(1e-30, 0.5),
            "z": between(0.01, 1e5),
            "epsilon": between(1e-3, 1e4),
        }
        for _ in range(count)
    ]


def plan(setting: Setting, z: float) -> Plan:
    """The setting with noise z as a run has it: an algorithm, its mechanism, what that charges, what the preflight says."""
    common: dict[str, Any] = {"clip": 1.0, "noise_multiplier": z, "delta": setting["delta"]}
    if setting["who"] == "local":
        algorithm = dp_fedavg(mechanism="local-gaussian", **common)
    elif setting["step"] == "paper":
        algorithm = cdp_fedexp(numerator="paper", adjacency=setting["adjacency"], **common)
    else:
        algorithm = dp_fedavg(adjacency=setting["adjacency"], **common)
    return Plan.of(algorithm, Full(), setting["clients"], setting["dimension"], setting["rounds"])


COUNT = 1500
TOLERANCE = 1e-6
"""Absolute up to ε = 100,000, and relative above."""


@pytest.fixture(scope="module")
def opened(browser, page):
    visit(browser, page.as_uri())
    return browser


def answers(opened, script: str, given: list) -> list:
    return opened.execute_script(f"return arguments[0].map((s) => {{ {script} }})", given)


def test_epsilon_noise_signal_and_verdict_are_the_librarys_over_1500_settings(opened):
    given = settings(COUNT)
    seen = answers(opened, f"return words.derive(s, {{deviations: {DEVIATIONS}}})", given)
    ours = [plan(setting, setting["z"]) for setting in given]
    for derived, one in zip(seen, ours, strict=True):
        assert derived["epsilon"] == pytest.approx(one.epsilon, rel=TOLERANCE, abs=TOLERANCE)
        assert one.epsilon >= 1e5 or abs(derived["epsilon"] - one.epsilon) <= TOLERANCE
        assert derived["share"] == pytest.approx(one.noise_share, rel=1e-6)
        assert derived["best"] == pytest.approx(one.best_signal, rel=1e-6)
        assert derived["verdict"] == one.verdict
    assert sum(0.01 < one.epsilon < 1000 for one in ours) > COUNT / 4, "ordinary values are among them"
    assert {one.verdict for one in ours} == {"clear", "noisy rounds", "mostly noise", "no signal"}


def test_the_noise_for_a_target_costs_the_target(opened):
    given = settings(300, seed=2)
    seen = answers(opened, "return accountant.noise(s, s.epsilon)", given)
    for setting, z in zip(given, seen, strict=True):
        assert plan(setting, z).epsilon == pytest.approx(setting["epsilon"], rel=TOLERANCE, abs=1e-9)


def test_rows_for_other_readers_are_the_statements(opened):
    for setting in settings(60, seed=4):
        rows = opened.execute_script("return words.readers(arguments[0], words.derive(arguments[0], {}))", setting)
        ours = plan(setting, setting["z"])
        event = ours.mechanism.event(ours.sampling)
        if setting["who"] == "central":
            mus = [event.under(kind).mu * math.sqrt(setting["rounds"]) for kind in ("replace-one", "add-remove")]
            assert [row[1] for row in rows] == pytest.approx(mus, rel=1e-9)
        elif setting["step"] == "free":
            clients = setting["clients"]
            view, _ = models_only([(event, setting["rounds"])], setting["delta"], clients, clients)
            assert view is not None
            assert rows[1][2] == pytest.approx(view.epsilon_total, rel=TOLERANCE, abs=TOLERANCE)
        else:
            assert rows[1][1:] == [None, None]


def test_what_an_attacker_can_guess_is_the_exact_trade_off(opened):
    from scipy.special import ndtr, ndtri

    given = [
        {"mu": 10 ** (i / 20 - 3), "alarms": 10 ** (-5 * (i % 17) / 17) / 2, "prior": (i % 23 + 1) / 24}
        for i in range(100)
    ]
    script = "return [accountant.advantage(s.mu), accountant.hits(s.mu, s.alarms), accountant.right(s.mu, s.prior)]"
    seen = answers(opened, script, given)
    for one, (advantage, hits, right) in zip(given, seen, strict=True):
        mu, prior = one["mu"], one["prior"]
        assert advantage == pytest.approx(gdp.advantage(mu), rel=1e-12)
        assert hits == pytest.approx(ndtr(ndtri(one["alarms"]) + mu), rel=1e-10)
        # No threshold of a test between N(0, 1) and N(μ, 1) is right more often than the one that is said to be the best.
        tried = max(prior * ndtr(mu - t / 50) + (1 - prior) * ndtr(t / 50) for t in range(-2000, 2001))
        assert tried <= right + 1e-12
        assert right <= max(tried, prior, 1 - prior) + 1e-3


SUITE = Path(__file__).parents[2] / "reproduction" / "experiments" / "suite"
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


LOCAL = "#mode=noise&z=0.1&who=local&clients=5&delta=0.1&problem=randhie&step=paper"


@pytest.mark.parametrize(("width", "scheme", "setting"), [(DESK, "light", ""), (PHONE, "dark", LOCAL)])
def test_it_is_legible_and_whole(browser, page, width, scheme, setting):
    visit(browser, "about:blank")
    visit(browser, page.as_uri() + setting, width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert faint_texts(browser) == []
    assert cut_off(browser) == []
