"""Every section is made from finished runs; fabricated ones here, so that the logic is tested and nothing is trained."""

from __future__ import annotations

import pytest
from reproduction.paper.published import TABLE_3
from reproduction.paper.results.collected import key_of
from reproduction.paper.results.size import Size
from reproduction.paper.table2 import Search

from dpfedexp.report.document import Section
from reproduction.paper import PRINTED_AS, SECTIONS, figure1, figure2, figure3, sections, table2, table3
from tests.reproduction.paper.fabricated import Fabricated

FULL, QUICK = Size(seeds=3), Size(seeds=2, quick=True)


def key(run) -> str:
    return key_of(run, "images")


def test_every_name_of_the_command_line_has_its_maker():
    assert tuple(sections.MAKERS) == SECTIONS
    assert {name for names in PRINTED_AS.values() for name in names} == set(SECTIONS)


@pytest.mark.parametrize("size", [FULL, QUICK], ids=["full", "quick"])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_plans_every_run_and_keeps_every_curve_that_it_asks_for(name, size):
    planned = {key(run): run for run in sections.MAKERS[name].planned(size)}

    class Watching(Fabricated):
        def __getitem__(self, run):
            result = super().__getitem__(run)
            return result | {"curves": {curve: result["curves"][curve] for curve in planned[key(run)].curves}}

    section = sections.MAKERS[name].section(size, Watching())
    assert section.name == name
    assert section.tables
    assert section.command.startswith(f"python -m reproduction paper {name}")
    for table in section.tables:
        assert all(len(row) == len(table.columns) for row in table.rows), table.title


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_survives_its_json(name):
    section = sections.MAKERS[name].section(FULL, Fabricated())
    again = Section.from_json(section.to_json())
    assert again.to_json() == section.to_json()
    assert again.tables[0].title == section.tables[0].title


def test_mnist_shows_the_printed_number_and_the_difference():
    """Fabricated FedEXP ends near 0.9 + 0.01 · 3, whatever the setting."""
    section = table3.section(FULL, Fabricated())
    row = section.tables[0].rows[0]
    ours, theirs = float(row[2].split()[0]), TABLE_3["cdp", "fedexp"][0]
    assert row[3].startswith(f"{theirs:.2f}")
    assert float(row[4]) == pytest.approx(ours - theirs, abs=0.011)
    assert not section.claims[0].holds, "92.9 is more than half a point below 94.57"
    assert section.claims[1].holds, "FedEXP is above FedAvg"


def test_other_images_are_not_held_against_the_papers_numbers():
    other = Fabricated()
    other.on_mnist = False
    section = table3.section(FULL, other)
    assert "not MNIST" in section.notes[0]
    assert all(claim.holds for claim in section.claims)


def test_quick_says_that_its_epsilon_is_not_the_papers():
    assert any("ε is not" in note for note in table3.section(QUICK, Fabricated()).notes)
    assert not any("Quick" in note for note in table3.section(FULL, Fabricated()).notes)


def test_synthetic_compares_ranks_and_admits_another_order():
    claims = {claim.text: claim.holds for claim in figure1.section(FULL, Fabricated()).claims}
    assert claims["CDP: DP-FedEXP is the closest"]
    assert not claims["CDP: DP-SCAFFOLD closer than DP-FedAvg, as the paper says"]
    assert claims["LDP (Gaussian): DP-SCAFFOLD, c_i from the report no closer than DP-FedAvg, as the paper says"]


def test_step_size_claims_hold_where_the_numbers_do():
    assert [c.holds for c in figure2.section(FULL, Fabricated()).claims] == [True, True, True, True, False]


def test_step_history_needs_no_runs_of_its_own():
    own = {key(run) for run in figure3.planned(FULL)}
    assert own
    assert own <= {key(run) for run in [*figure1.planned(FULL), *table3.planned(FULL)]}


def test_step_history_of_one_problem_leaves_the_other_out():
    section = figure3.section(Size(seeds=2, problem="synthetic"), Fabricated())
    assert [panel.title for panel in section.charts[0].panels] == ["Synthetic"]
    assert all(claim.holds for claim in section.claims)


def test_the_search_takes_the_smallest_loss_and_the_largest_accuracy():
    points = {(0.001, 0.3): 2.0, (0.003, 0.3): float("inf"), (0.0003, 0.3): 3.0}
    loss = Search(("synthetic", "cdp", "fedexp"), points)
    assert loss.best == (0.001, 0.3)
    assert loss.rank_of_published == 1
    assert loss.ranking[-1] == (0.003, 0.3), "what diverged comes last"
    accuracy = Search(("mnist", "cdp", "fedexp"), {(0.1, 0.3): 0.9, (0.3, 0.3): 0.95})
    assert accuracy.best == (0.3, 0.3)
    assert accuracy.rank_of_published == 2


def test_the_quick_grid_is_part_of_the_full_one():
    for searched in table2.searched(QUICK):
        assert table2.points(searched, QUICK).keys() < table2.points(searched, FULL).keys()
