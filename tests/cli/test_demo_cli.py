"""`dpfedexp demo` from the outside, with small runs in place of the paper's."""

import json

from typer.testing import CliRunner

from dpfedexp import machine as processes
from dpfedexp.cli import app, demo

TINY = {"data": {"clients": 60, "dimension": 5}, "run": {"rounds": 4}}


def test_demo_ends_with_its_report(tmp_path, monkeypatch):
    full, run_all = demo.settings, processes.run_jobs

    def tiny(*names):
        settings = full(*names)
        parts = {name: getattr(settings, name).model_copy(update=given) for name, given in TINY.items()}
        return settings.model_copy(update=parts)

    monkeypatch.setattr(demo, "settings", tiny)
    monkeypatch.setattr(processes, "run_jobs", lambda work, jobs, text: run_all(work, jobs, text, workers=1))
    done = CliRunner().invoke(app, ["demo", "--seeds", "2", "--out", str(tmp_path / "demo")], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.output.rstrip().endswith("report.html")
    assert "Seen: with central DP" in done.output
    rows = json.loads((tmp_path / "demo" / "demo.json").read_text())["tables"][0]["rows"]
    assert len(rows) == 6
    cost = {(place, name): spent for place, name, _, *spent in rows}
    for place in ("central DP", "local DP (Gaussian)"):
        assert cost[place, "DP-FedEXP"] == cost[place, "DP-FedAvg"], "the demo says: at exactly the same ε"
    assert "DP-FedEXP" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "demo" / "distance.pdf").is_file()
