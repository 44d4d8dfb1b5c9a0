"""The questions beyond the paper: their runs, and the answers that fabricated ones give."""

from __future__ import annotations

from reproduction.paper.results.collected import key_of
from reproduction.paper.results.size import Size

from reproduction.paper import beyond
from tests.reproduction.paper.fabricated import Fabricated

FULL = Size(seeds=3)


def key(run) -> str:
    return key_of(run, "images")


def test_every_variant_beyond_the_paper_builds_and_is_named_once():
    labels = [(v.group, v.label) for v in beyond.variants(FULL)]
    assert len(set(labels)) == len(labels)
    for variant in beyond.variants(FULL):
        assert variant.settings.build_algorithm().private


def test_beyond_shares_its_runs_between_questions():
    planned = beyond.planned(Size(seeds=5))
    assert len({key(run) for run in planned}) < len(planned)


def test_every_group_beyond_the_paper_makes_a_table():
    titles = " ".join(table.title for table in beyond.section(FULL, Fabricated()).tables)
    for words in (
        "for free",
        "safe step",
        "PrivUnit",
        "Stronger privacy",
        "No knobs",
        "network",
        "Partial participation",
    ):
        assert words in titles


def test_every_question_names_its_variants_after_itself():
    for name, question in beyond.QUESTIONS.items():
        assert {variant.group for variant in question.variants()} == {name}
