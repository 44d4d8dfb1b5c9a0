"""The demo's settings are the paper's, with the free rule."""

from __future__ import annotations

import pytest
from reproduction.paper.experiments import experiment, vary

from dpfedexp.cli import demo


@pytest.mark.parametrize(("setting", "algorithm"), demo.ALGORITHMS)
def test_the_demo_runs_the_papers_settings(setting, algorithm):
    papers = experiment(f"synthetic-{setting}-{algorithm}")
    free = vary(papers, {"algorithm.numerator": "free"}) if algorithm == "fedexp" else papers
    assert demo.settings(setting, algorithm) == free
