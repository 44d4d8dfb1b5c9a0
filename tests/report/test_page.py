"""`report` on every kind of folder: one well-formed page that loads nothing and runs nothing of what it was given."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reproduction.paper import sections

from dpfedexp.core.sums import WITHIN_CLIP, VoteSpec
from dpfedexp.engine.plot import Chart, Panel, Series, draw
from dpfedexp.engine.runner import show
from dpfedexp.errors import InputError
from dpfedexp.report.page import RunRecord, report
from tests.report.pages import EVIL, write_paper, write_run

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Counts tags and checks that what opens closes."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag


@pytest.fixture
def without_figures(monkeypatch):
    """Without the files of the figures, which take longer than all the rest."""
    monkeypatch.setattr("dpfedexp.report.page.draw", lambda chart, folder: [])


def check(path: Path) -> tuple[str, Checker]:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.seen.count("script") == 1
    assert "<script>alert" not in text
    assert not [link for link in checker.links if link.startswith(("http", "//", "data:"))]
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest", text)
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    return text, checker


def test_a_run(tmp_path):
    text, _ = check(report(write_run(tmp_path / "my run")))
    assert "my run" in text
    assert "test accuracy" in text
    assert "ε = 6.00 in total &amp; δ = 1e-05." in text
    assert "cdp_fedexp" in text
    assert "dpfedexp train config.toml" in text
    assert text.count("data-panel=") == 3
    assert (tmp_path / "my run" / "run.pdf").read_bytes().startswith(b"%PDF")
    assert 'href="run.png"' in text


def test_a_run_that_was_cut_off_has_a_page_and_says_so(tmp_path, without_figures):
    folder = write_run(tmp_path / "run")
    for name in ("privacy.txt", "privacy.json", "run.json"):
        (folder / name).unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 7, "test_acc')
    text, _ = check(report(folder))
    assert "wrote no privacy statement" in text
    assert "6 rounds" in text


def test_evil_text_is_in_the_page_as_text(tmp_path, without_figures):
    folder = write_run(tmp_path / "<img src=x onerror=alert(1)>")
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 1, EVIL: 1.0}) + "\n")
    text, checker = check(report(folder))
    assert "img" not in checker.seen
    assert "&lt;img" in text
    assert text.count("&lt;script&gt;") > 2
    assert EVIL not in text


def test_a_sweep_sets_runs_side_by_side(tmp_path):
    for clip in (0.1, 0.3):
        write_run(tmp_path / f"clip-{clip}")
    (tmp_path / "notes").mkdir()
    text, _ = check(report(tmp_path))
    assert "2 runs side by side" in text
    assert "clip-0.1" in text
    assert (tmp_path / "comparison.png").is_file()


def test_the_paper_in_its_own_order(tmp_path):
    folder = write_paper(tmp_path / "paper", "step-size", "synthetic", "table1")
    (folder / "summary.json").write_text("[]")  # what is not a section is left alone
    (folder / "broken.json").write_text("{")
    text, _ = check(sections.write_page(folder))
    places = [text.index(f'<section id="{name}"') for name in ("table1", "synthetic", "step-size")]
    assert places == sorted(places)
    assert "python -m reproduction paper synthetic --seeds 2" in text
    assert "Promised &amp; kept." in text
    assert "[algorithm]" in text


def test_a_run_of_one_round_without_metrics_has_a_page(tmp_path, without_figures):
    """Nothing varies over one round, so there is no chart; that was a division by zero."""
    folder = write_run(tmp_path / "sweep" / "run", rounds=1)
    (folder / "metrics.jsonl").write_text('{"round": 1, "eta_g": -0.0, "clip": 0.3, "epsilon_total": 1.0}\n')
    text, _ = check(report(folder))
    assert "data-panel=" not in text
    assert ">-0<" not in text, "a number just below zero has no sign"
    assert "data-panel=" in check(report(tmp_path / "sweep"))[0]


def test_pages_and_figures_can_be_compared_by_their_bytes(tmp_path, without_figures):
    folder = write_paper(tmp_path / "paper", "synthetic")
    assert report(folder).read_bytes() == report(folder).read_bytes()
    line = Series("a", [1, 10], [1.0, 2.0], [0.5, 1.0], [2.0, 3.0])
    chart = Chart("two", "", "", [Panel(f"panel {i}", "x", "y", [line], i == 0, i == 1) for i in range(2)])
    (tmp_path / "b").mkdir()
    first = [path.read_bytes() for path in draw(chart, tmp_path)]
    assert [path.read_bytes() for path in draw(chart, tmp_path / "b")] == first
    assert [content[:4] for content in first] == [b"\x89PNG", b"<?xm", b"%PDF"]


def test_an_algorithm_keeps_its_color_and_others_take_what_is_left():
    series = [Series("x", [], []), Series("b", [], [], color="fedavg"), Series("y", [], [])]
    assert Panel("", "", "", series).slots == [0, 1, 2]
    assert len(set(Panel("", "", "", [*series, Series("e", [], [], color="fedexp")]).slots)) == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "holds no results"),
        (lambda path: write_run(path).joinpath("metrics.jsonl").write_text("[]\n{}\n"), "no round in line 1"),
        (lambda path: write_run(path).joinpath("privacy.json").write_text("nothing"), "not a privacy statement"),
    ],
)
def test_other_folders_get_one_sentence(tmp_path, make, words):
    make(tmp_path / "folder")
    with pytest.raises(InputError, match=words):
        report(tmp_path / "folder")


def test_the_clips_count_is_no_metric_on_a_page_or_in_the_bar_and_other_votes_are():
    votes = {VoteSpec(WITHIN_CLIP).field: 0.5, VoteSpec("loss").field: 0.25}
    record = {"round": 1, "eta_g": 1.0, "clip": 1.0, "update_norm": 0.1, "epsilon_total": 2.0, "seconds": 0.1, **votes}
    assert RunRecord("run", [record], "", "", None).metrics == ["noisy_mean_loss"]
    assert show(record) == "noisy_mean_loss 0.25  η_g 1.00  ε 2.000"


def test_a_run_whose_numbers_were_lost_looks_failed(tmp_path, without_figures):
    folder = write_run(tmp_path / "sweep" / "run")
    assert 'class="failed"' not in check(report(folder))[0]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 7, "test_accuracy": null, "eta_g": 1.0, "epsilon_total": 7.0}\n')
    text, _ = check(report(folder))
    assert "This model is not usable." in text
    assert "test accuracy is not a finite number" in text
    assert "<td>not finite</td>" in text
    assert "run (failed)" in check(report(tmp_path / "sweep"))[0]
