"""Views of a run and its statement: a short repr, escaped HTML, a figure without a display; and exports."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from dpfedexp import InputError
from dpfedexp.engine.plan import Advice
from tests.engine.small import small_run

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def run():
    return small_run()


def test_html_is_escaped_and_takes_its_colors_from_the_page(run):
    privacy, advice = replace(run.privacy, algorithm=EVIL), (Advice("warning", "dead", EVIL),)
    evil = replace(run, privacy=privacy, stopped=EVIL, advice=advice)
    for text in (evil._repr_html_(), evil.privacy._repr_html_()):
        ElementTree.fromstring(text)  # every tag is closed
        assert "<script" not in text
        assert "&lt;script&gt;" in text
        assert not any(color in text for color in ("color:#", "background:#"))
        assert text.count("<table") == text.count("color:inherit'><tr>")
    assert "Failed:" in evil._repr_html_()
    assert "Failed:" not in run._repr_html_()
    assert run.privacy.shown["epsilon_total"] in run._repr_html_()


def test_a_run_is_drawn_without_a_display(run, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    figure = run.plot()
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[0] == "test loss"
    assert titles[-2:] == ["global step size η_g", "clip C"]
    drawn = figure.axes[0].lines[0].get_ydata()
    assert list(drawn) == [record["test_loss"] for record in run.history]
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="no rounds"):
        replace(run, history=[]).plot()


def test_a_small_negative_number_is_shown_as_zero(run):
    assert "-0.0" not in repr(replace(run, history=[{"round": 1, "loss": -0.00001}]))
    assert "-0<" not in replace(run, history=[{"round": 1, "loss": -0.0}])._repr_html_()
