"""The paper's Table 1 to three decimals."""

from __future__ import annotations

import pytest
from reproduction.paper.table1 import table1

ROWS = {(row.setting, row.algorithm): row for row in table1()}


@pytest.mark.parametrize(
    ("setting", "algorithm", "printed", "at_49", "at_50"),
    [
        ("CDP", "FedAvg", 15.258, 15.257, 15.456),
        ("CDP (synthetic)", "FedEXP, separate", 15.647, 15.646, 15.851),
        ("CDP (MNIST)", "FedEXP, separate", 15.261, 15.261, 15.460),
        ("CDP (synthetic)", "FedEXP, joint", None, 15.257, 15.456),
        ("CDP (MNIST)", "FedEXP, joint", None, 15.257, 15.456),
        ("CDP (d = 100)", "FedEXP, joint", None, 17.954, 18.192),
        ("CDP (d = 100)", "FedEXP, separate", None, 24.052, 24.382),
    ],
)
def test_central_rows(setting, algorithm, printed, at_49, at_50):
    row = ROWS[setting, algorithm]
    assert row.printed == printed
    assert round(row.epsilon_49, 3) == at_49
    assert round(row.epsilon_total, 3) == at_50
    if printed is not None:
        assert row.epsilon_49 == pytest.approx(printed, abs=1e-3)  # the paper rounds up


def test_local_rows_are_printed_per_round_and_composed_here():
    gaussian, privunit = ROWS["LDP (Gaussian)", "FedAvg, FedEXP"], ROWS["LDP (PrivUnit)", "exact γ"]
    assert (gaussian.printed, round(gaussian.epsilon_round, 3), round(gaussian.epsilon_total, 2)) == (
        15.659,
        15.658,
        289.34,
    )
    assert (privunit.printed, round(privunit.epsilon_round, 3), round(privunit.epsilon_total, 2)) == (6.0, 6.0, 289.67)
    papers = ROWS["LDP (PrivUnit)", "paper's γ"]
    assert (round(papers.epsilon_round, 3), round(papers.epsilon_total, 2), round(papers.pure_total, 1)) == (
        5.586,
        269.15,
        279.3,
    )
    assert privunit.pure_total == pytest.approx(300.0, abs=1e-9)


def test_free_rule_costs_exactly_fedavg_at_every_dimension():
    fedavg = ROWS["CDP", "FedAvg"].epsilon_total
    for setting in ("CDP (synthetic)", "CDP (MNIST)", "CDP (d = 100)"):
        assert ROWS[setting, "FedEXP, free"].epsilon_total == fedavg
