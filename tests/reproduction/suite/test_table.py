"""Tables of the suite from made-up lines."""

from __future__ import annotations

import math

import pytest
from reproduction.suite.plan import LEADING, Size, best_rate, grid
from reproduction.suite.problems import PROBLEMS

from reproduction.suite import page, table
from tests.reproduction.suite.made_up_results import ADVANTAGE, made_up_result

ACCURACY, LOSS = PROBLEMS["classes-0"], PROBLEMS["regression-2"]


def test_the_best_local_rate_is_the_one_that_is_best_for_fedavg():
    for problem in (ACCURACY, LOSS):
        assert best_rate(problem, made_up_result, Size()) == problem.centre


def test_no_local_rate_is_chosen_while_the_grid_has_a_hole():
    hole = grid(LOSS, "fedavg", LEADING, Size())[-1][-1]
    assert best_rate(LOSS, lambda run: None if run == hole else made_up_result(run), Size()) is None


def test_a_tuned_contender_shows_its_best_server_rate_by_name():
    for problem in (ACCURACY, LOSS):
        cell = table.cell(problem, "fedavg-tuned", LEADING, problem.centre, Size(), made_up_result)
        assert cell.server_rate == 2.0
        assert cell.show(problem).endswith("[2]")


def test_the_difference_is_paired_so_that_what_a_seed_does_to_both_cancels():
    size = Size()
    cells = [table.cell(ACCURACY, name, LEADING, ACCURACY.centre, size, made_up_result) for name in ("safe", "fedavg")]
    gain = table.difference(ACCURACY, *cells)
    assert cells[0].error > 0.5  # over seeds alone, in points
    assert gain.gain == pytest.approx(3.0)
    assert gain.error == pytest.approx(0.0, abs=1e-9)
    assert gain.seeds == 5
    assert not gain.worse


@pytest.mark.parametrize("problem", [ACCURACY, LOSS])
def test_worse_by_more_than_a_standard_error_is_marked_for_accuracy_and_for_loss(problem):
    behind = ADVANTAGE | {"safe": -0.05}
    made, gains = table.at_epsilon(
        {problem: problem.centre}, 2.0, ("safe", "fedavg"), Size(), lambda run: made_up_result(run, behind)
    )
    assert gains[problem.name].worse
    assert gains[problem.name].gain < 0
    assert made.rows[0][-1].startswith("−")
    assert made.rows[0][-1].endswith(table.MARK)


@pytest.mark.parametrize(
    ("diverged", "worse"), [(["safe"], True), (["fedavg"], False), (["safe", "fedavg"], False)], ids=str
)
def test_a_run_that_diverged_is_worse_than_one_that_did_not(diverged, worse):
    def lookup(run):
        result = made_up_result(run)
        return {"finals": dict.fromkeys(result["finals"])} if run.contender_name in diverged else result

    made, gains = table.at_epsilon({LOSS: LOSS.centre}, 8.0, ("safe", "fedavg"), Size(), lookup)
    assert [cell == "diverged" for cell in made.rows[0][2:4]] == ["safe" in diverged, "fedavg" in diverged]
    assert gains[LOSS.name].worse == worse


@pytest.mark.parametrize(("short", "mark"), [(0.005, False), (0.02, True)])
def test_the_automatic_rate_is_marked_beyond_a_point_or_two_per_cent(short, mark):
    behind = ADVANTAGE | {"auto": ADVANTAGE["safe"] - short}
    made, gaps = table.automatic_rates([ACCURACY, LOSS], (8.0, 2.0), Size(), lambda run: made_up_result(run, behind))
    assert len(gaps) == 2 * 2
    assert all(gap.too_large == mark for gap in gaps)
    assert not any(gap.collapses for gap in gaps)
    assert math.isclose(gaps[0].loss, 100 * short, rel_tol=1e-6)
    assert all((table.MARK in cell) == mark for row in made.rows for cell in row[4:])


def test_the_page_leads_with_epsilon_8_says_what_was_selected_and_counts_its_claims(tmp_path):
    made = page.section([ACCURACY.name, LOSS.name], Size(), made_up_result)
    assert made.tables[0].title == "ε = 8"
    assert any("on the test data" in paragraph for paragraph in made.text)
    assert [claim.holds for claim in made.claims] == [True, True, True]
    assert made.claims[0].seen == "10 of 10"  # two problems at five ε
    written = page.write_markdown(made, tmp_path).read_text(encoding="utf-8")
    assert written.count("\n## ") == len(made.tables) + len(made.charts)


def test_an_exploded_loss_does_not_stretch_its_panel():
    exploding = ADVANTAGE | {"plain": -2.0}
    made = page.section([LOSS.name], Size(), lambda run: made_up_result(run, exploding))
    panel = made.charts[0].panels[0]
    drawn = [y for series in panel.series for y in series.y]
    assert max(drawn) <= 2.0 * min(drawn)
    assert "plain FedEXP" not in {series.name for series in panel.series}
