"""The page's accountant, run by the page in Chromium, against the library's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from reproduction.suite.command import explore

from dpfedexp.accounting import gdp
from dpfedexp.accounting.statement import models_only
from dpfedexp.engine.plan import DEVIATIONS
from tests.browser import visit
from tests.reproduction.explorer.settings import plan, settings

SUITE = Path(__file__).parents[3] / "reproduction" / "experiments" / "suite"
COUNT = 1500
TOLERANCE = 1e-6
"""Absolute up to ε = 1, and relative above; a second assertion asks for it in absolute terms up to ε = 100,000."""


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    visit(browser, explore(tmp_path_factory.mktemp("explorer") / "explorer.html", SUITE).as_uri())
    return browser


def answers(page, script: str, given: list) -> list:
    return page.execute_script(f"return arguments[0].map((s) => {{ {script} }})", given)


def test_epsilon_is_the_librarys_over_1500_settings(page):
    given = settings(COUNT)
    seen = answers(page, "return accountant.epsilon(accountant.totalMu(s, s.z), s.delta)", given)
    ours = [plan(setting, setting["z"]).epsilon for setting in given]
    worst = max(abs(a - b) / max(1.0, b) for a, b in zip(seen, ours, strict=True))
    assert worst <= TOLERANCE
    assert sum(0.01 < epsilon < 1000 for epsilon in ours) > COUNT / 4, "ordinary values are among them"
    small = [abs(a - b) for a, b in zip(seen, ours, strict=True) if b < 1e5]
    assert max(small) <= TOLERANCE, "in absolute terms too, up to ε = 100,000"


def test_one_round_more_would_be_noticed(page):
    """The comparison above can fail."""
    given = [setting for setting in settings(60, seed=1) if 1.0 < plan(setting, setting["z"]).epsilon < 1000]
    script = "return accountant.epsilon(accountant.totalMu({ ...s, rounds: s.rounds + 1 }, s.z), s.delta)"
    seen = answers(page, script, given)
    assert len(given) > 10
    assert all(a - plan(s, s["z"]).epsilon > TOLERANCE for a, s in zip(seen, given, strict=True))


def test_the_noise_for_a_target_costs_the_target(page):
    given = settings(300, seed=2)
    seen = answers(page, "return accountant.noise(s, s.epsilon)", given)
    for setting, z in zip(given, seen, strict=True):
        assert plan(setting, z).epsilon == pytest.approx(setting["epsilon"], rel=TOLERANCE, abs=1e-9)


def test_noise_signal_and_verdict_are_the_preflights(page):
    given = settings(400, seed=3)
    seen = answers(page, f"return words.derive(s, {{deviations: {DEVIATIONS}}})", given)
    verdicts = set()
    for setting, derived in zip(given, seen, strict=True):
        ours = plan(setting, setting["z"])
        assert derived["share"] == pytest.approx(ours.noise_share, rel=1e-6)
        assert derived["best"] == pytest.approx(ours.best_signal, rel=1e-6)
        assert derived["verdict"] == ours.verdict
        verdicts.add(ours.verdict)
    assert verdicts == {"clear", "noisy rounds", "mostly noise", "no signal"}


def test_rows_for_other_readers_are_the_statements(page):
    for setting in settings(60, seed=4):
        rows = page.execute_script("return words.readers(arguments[0], words.derive(arguments[0], {}))", setting)
        ours = plan(setting, setting["z"])
        event = ours.mechanism.event(ours.sampling)
        if setting["who"] == "central":
            mus = [
                event.under(adjacency).mu * math.sqrt(setting["rounds"]) for adjacency in ("replace-one", "add-remove")
            ]
            assert [row[1] for row in rows] == pytest.approx(mus, rel=1e-9)
        elif setting["step"] == "free":
            view, _ = models_only(
                [(event, setting["rounds"])], setting["delta"], setting["clients"], setting["clients"]
            )
            assert view is not None
            assert rows[1][2] == pytest.approx(view.epsilon_total, rel=TOLERANCE, abs=TOLERANCE)
        else:
            assert rows[1][1:] == [None, None]


def test_what_an_attacker_can_guess_is_the_exact_trade_off(page):
    from scipy.special import ndtr, ndtri

    given = [
        {"mu": 10 ** (i / 20 - 3), "alarms": 10 ** (-5 * (i % 17) / 17) / 2, "prior": (i % 23 + 1) / 24}
        for i in range(100)
    ]
    seen = answers(
        page,
        "return [accountant.advantage(s.mu), accountant.hits(s.mu, s.alarms), accountant.right(s.mu, s.prior)]",
        given,
    )
    for one, (advantage, hits, right) in zip(given, seen, strict=True):
        mu, prior = one["mu"], one["prior"]
        assert advantage == pytest.approx(gdp.advantage(mu), rel=1e-12)
        assert hits == pytest.approx(ndtr(ndtri(one["alarms"]) + mu), rel=1e-10)
        # No threshold of a test between N(0, 1) and N(μ, 1) is right more often than the one that is said to be the best.
        tried = max(prior * ndtr(mu - t / 50) + (1 - prior) * ndtr(t / 50) for t in range(-2000, 2001))
        assert tried <= right + 1e-12
        assert right <= max(tried, prior, 1 - prior) + 1e-3
