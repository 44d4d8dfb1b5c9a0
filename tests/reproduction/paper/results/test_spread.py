"""Means over seeds and paired tests, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from reproduction.paper.results.spread import average_of_last_rounds, final, note_on_tests, paired, spread


def history(*values):
    return [{"round": i, "metric": v} for i, v in enumerate(values, 1)]


def test_the_last_five_rounds_are_averaged():
    assert average_of_last_rounds(history(100, 1, 2, 3, 4, 5), "metric") == 3.0


def test_rounds_without_an_evaluation_are_left_out():
    run = [{"metric": 9.0}, {}, {"metric": 2.0}, {}, {}, {"metric": 4.0}]
    assert average_of_last_rounds(run, "metric") == 3.0


def test_a_diverged_run_is_null_in_its_record_and_infinite_in_a_table():
    assert average_of_last_rounds(history(1, 2, 3, 4, None), "metric") is None
    assert final({"finals": {"metric": None}}, "metric") == math.inf
    assert spread([1.0, math.inf]).show() == "diverged"


def test_spread_is_the_sample_standard_deviation():
    assert spread([1.0, 2.0, 3.0]).show() == "2.00 (1.00)"
    assert spread([2.0]).show() == "2.00"


def test_five_wins_of_five_is_one_in_thirty_two():
    test = paired([2, 3, 4, 5, 6.5], [1, 2, 3, 4, 5], larger_is_better=True)
    assert (test.wins, test.n) == (5, 5)
    assert test.p_sign == pytest.approx(1 / 32)
    assert test.p_t is not None
    assert test.p_t < 1e-3
    assert test.gain == pytest.approx(1.1)


def test_smaller_is_better_turns_the_sign():
    test = paired([1.0, 2.0], [2.0, 4.0], larger_is_better=False)
    assert test.gain == 1.5
    assert test.wins == 2
    assert test.p_t is not None
    assert test.p_t < 0.5


def test_one_seed_has_no_test_and_says_so():
    assert paired([2.0], [1.0], larger_is_better=True).p_t is None
    assert note_on_tests(1) == "One seed: no test."
    assert "n = 5" in note_on_tests(5)
    assert "0.031" in note_on_tests(5)
