"""The HTML report of a run, of several runs, or of saved sections."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dpfedexp import __version__
from dpfedexp.accounting import PrivacyStatement
from dpfedexp.engine.outlets import CHECKPOINT, CONFIG, METRICS, REPORT, STATEMENT_TEXT
from dpfedexp.engine.plan import Advice
from dpfedexp.engine.plot import FORMATS, STEERING, Chart, Panel, draw, metrics_in, name_of, over_rounds, run_panels
from dpfedexp.engine.run import RunFacts, baseline_text, read_advice, read_history, read_text
from dpfedexp.engine.verify import read_claim
from dpfedexp.errors import InputError
from dpfedexp.files import finite, replace_text, writing
from dpfedexp.report.document import Section, Table


@dataclass(frozen=True)
class RunRecord:
    """The content of the folder of a run; empty or None for what is missing. `promise` is the ε in words."""

    name: str
    history: list[dict[str, Any]]
    privacy: str
    configuration: str
    epsilon_total: float | None
    advice: tuple[Advice, ...] = ()
    promise: str = ""
    facts: RunFacts | None = None

    def title(self, promise: bool = True) -> str:
        """Return one line about the run, without what is not known."""
        facts, known = self.facts, [self.promise] if promise and self.promise else []
        if facts is None:
            return f"{self.promise}." if known else ""
        sizes = f"M = {facts.clients:,} clients, d = {facts.parameters:,} parameters"
        what = " on ".join(part for part in (facts.algorithm, facts.data) if part)
        return f"{what}: {', '.join([sizes, *known])}."

    @property
    def failure(self) -> str | None:
        """The reason why the run failed: it learned nothing, or a value is not finite; None if it did not fail."""
        dead = [advice.sentence for advice in self.advice if advice.code == "dead"]
        last = self.history[-1] if self.history else {}
        lost = [name_of(key) for key in (*self.metrics, "eta_g") if last.get(key, 0) is None]
        reasons = [*dead, *(f"{name} is not a finite number after the last round." for name in lost)]
        return reasons[0] if reasons else None

    @property
    def metrics(self) -> list[str]:
        return metrics_in(self.history)

    def last(self, key: str) -> str:
        values = [record[key] for record in self.history if key in record]
        if values and not isinstance(values[-1], int | float):
            return "infinite" if key == "epsilon_total" else "not finite"
        return f"{values[-1]:z.4g}" if values else "–"


def is_run(folder: Path) -> bool:
    """Return whether the folder is that of a run; before its first round it has only the checkpoint."""
    return (folder / METRICS).is_file() or (folder / CHECKPOINT).is_file()


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a run, also of an interrupted one."""
    history, statement = read_history(folder), read_claim(folder)
    epsilon = statement.epsilon_total if statement is not None and statement.private else None
    privacy, configuration = (read_text(folder / name) for name in (STATEMENT_TEXT, CONFIG))
    promise, facts = _promise(statement, history), RunFacts.read(folder)
    name, advice = folder.resolve().name, read_advice(folder)
    return RunRecord(name, history, privacy, configuration, epsilon, advice, promise, facts)


def _promise(statement: PrivacyStatement | None, history: list[dict[str, Any]]) -> str:
    if statement is None and not history:
        return ""
    spent = history[-1].get("epsilon_total") if statement is None else statement.epsilon_total
    if not isinstance(spent, int | float) or math.isinf(spent):
        return "not private"
    if statement is None:
        return f"ε = {spent:.3f} so far"
    plan = statement.planned_rounds if statement.stopping else None
    notes = [f"of all {plan} planned rounds"] if plan is not None else []
    notes += ["the promise of a larger deployment, none to these clients"] if statement.noise_cohort else []
    said = f"ε = {spent:.3f} at δ = {statement.delta:g}"
    return f"{said} ({'; '.join(notes)})" if notes else said


def run_section(run: RunRecord, chart: str = "run") -> Section:
    varying = [key for key in (*STEERING, "epsilon_total") if len(set(over_rounds(run.history, key, "").y)) > 1]
    panels = run_panels(run.history, [*run.metrics, *varying])
    known = [key for key in (*run.metrics, *STEERING, "epsilon_total") if run.last(key) != "–"]
    baselines = {} if run.facts is None else run.facts.baselines
    rows = [[name_of(key), run.last(key) + baseline_text(baselines, key)] for key in known]
    times = [record["seconds"] for record in run.history if isinstance(record.get("seconds"), int | float)]
    facts, made = run.facts, len(run.history)
    planned = "" if facts is None or facts.rounds == made else f" of {facts.rounds} planned"
    notes = [] if run.privacy else ["This run wrote no privacy statement: it was interrupted, or it is still going on."]
    notes += [f"{advice.level.capitalize()}: {advice.sentence}" for advice in run.advice if advice.code != "dead"]
    return Section(
        name="run-" + "".join(c if c.isalnum() or c in "-_" else "-" for c in run.name),
        title=run.name,
        text=[
            *([f"Failed: {run.failure}"] if run.failure else []),
            *([f"Stopped early: {facts.stopped}"] if facts is not None and facts.stopped else []),
            f"{made}{planned} rounds" + (f" in {sum(times):.1f} seconds." if times else "."),
        ],
        tables=[Table("After the last round", ["", "value"], rows)],
        charts=[Chart(chart, "Over rounds", "", panels)] if panels else [],
        notes=notes,
        command="" if facts is None else facts.command,
        configuration={CONFIG: run.configuration} if run.configuration else {},
        privacy={"What this run promises": run.privacy} if run.privacy else {},
    )


def runs_section(runs: Sequence[RunRecord]) -> Section:
    metrics = list(dict.fromkeys(key for run in runs for key in run.metrics))
    panels = [
        Panel(name_of(key), "round", name_of(key), [over_rounds(run.history, key, run.name) for run in runs])
        for key in (*metrics, "eta_g")
    ]
    rows = [
        [
            f"{run.name} (failed)" if run.failure else run.name,
            str(len(run.history)),
            *(run.last(key) for key in metrics),
            run.last("eta_g"),
            run.last("epsilon_total") if run.epsilon_total is None else f"{run.epsilon_total:.3f}",
        ]
        for run in runs
    ]
    columns = ["run", "rounds", *(name_of(key) for key in metrics), "η_g", "ε total"]
    return Section(
        name="comparison",
        title=f"{len(runs)} runs side by side",
        tables=[Table("After the last round", columns, rows)],
        charts=[Chart("comparison", "Over rounds", "", panels)],
    )


NUMERIC = re.compile(r"^[+\-−–~<>≈]?\s*\d|^–$|^diverged")
SHOWN_ROWS = 11
HEADS = {
    "demo": ("DP-FedEXP at a glance", "Client-level private federated learning with an adaptive server step size."),
    "sweep": ("A sweep", "Many settings on the same clients, and what trying them costs."),
}
"""The title and subtitle of a page that has only this section."""


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    sections: Sequence[Section]
    failed: str = ""
    command: str = ""


def report(folder: Path, *, title: str = "", order: Sequence[str] = (), command: str = "") -> Path:
    """Write `report.html` into the folder of a run, of several runs, or of saved sections, and return its path.

    `title` is for a page of saved sections, `order` the names of those that come first, `command` what writes the page again.
    """
    if not folder.is_dir():
        raise InputError(f"the folder {str(folder)!r} does not exist; name one that a run or a demo wrote.")
    page = _page(folder, title, order)
    with writing(folder):
        replace_text(folder / REPORT, render(replace(page, command=command or f"dpfedexp report {folder}"), folder))
    return folder / REPORT


def render(page: Page, folder: Path) -> str:
    """Return the page as HTML, with links to the figure files in `folder`."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["numeric"] = lambda text: bool(NUMERIC.match(text))
    here = files("dpfedexp.report")
    template, css, *js = (
        (here / name).read_text(encoding="utf-8") for name in ("page.html.j2", "page.css", "chart.js", "page.js")
    )

    def panel_json(panel: Panel) -> str:
        """Return the data of a panel for the script of the page; numbers that are not finite are null."""
        return json.dumps(finite({**asdict(panel), "slots": panel.slots}), ensure_ascii=False)

    return environment.from_string(template).render(
        page=page,
        css=Markup(css),
        js=Markup("\n".join(js)),
        panel_json=panel_json,
        one_legend=lambda chart: len({tuple((s.name, s.color) for s in p.series) for p in chart.panels}) == 1,
        excerpt=excerpt,
        links=lambda chart: [name for name in (f"{chart.name}.{f}" for f in FORMATS) if (folder / name).is_file()],
        version=__version__,
    )


def excerpt(panel: Panel) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a small table of a panel's values, for readers who can't use the chart."""
    xs = sorted({x for s in panel.series for x in s.x})
    if len(xs) > SHOWN_ROWS:
        xs = [xs[round(i * (len(xs) - 1) / (SHOWN_ROWS - 1))] for i in range(SHOWN_ROWS)]
    at = [dict(zip(s.x, s.y, strict=True)) for s in panel.series]
    rows = [[f"{x:g}", *(f"{y[x]:z.4g}" if x in y else "–" for y in at)] for x in xs]
    return [panel.x_label, *(s.name for s in panel.series)], rows


def _page(folder: Path, title: str, order: Sequence[str]) -> Page:
    name = folder.resolve().name
    if saved := saved_sections(folder, order):
        head = HEADS.get(saved[0].name) if len(saved) == 1 else None
        usual, subtitle = head or (name, HEADS["demo"][1])
        return Page(title or usual, subtitle, saved)
    if is_run(folder):
        run = read_run(folder)
        section = run_section(run)
        for chart in section.charts:
            draw(chart, folder)
        section = replace(section, title="What was measured", text=section.text[bool(run.failure) :])
        what = run.title() or f"A run of dpfedexp: {len(run.history)} rounds."
        return Page(run.name, what, [section], run.failure or "")
    runs = [read_run(path) for path in sorted(folder.iterdir()) if path.is_dir() and is_run(path)]
    if not runs:
        raise InputError(
            f"the folder {str(folder)!r} holds no results: no {METRICS} of a run and no folders of runs; give "
            "the folder of a run or of several runs."
        )
    sections = [runs_section(runs), *(run_section(run, f"run-{number}") for number, run in enumerate(runs, 1))]
    for chart in sections[0].charts:
        draw(chart, folder)
    return Page(name, f"{len(runs)} runs of dpfedexp.", sections)


def saved_sections(folder: Path, order: Sequence[str] = ()) -> list[Section]:
    """Read the sections that a command saved in a folder as JSON: those in `order` first, the others by name."""
    sections = [Section.read(path) for path in sorted(folder.glob("*.json")) if _is_section(path)]
    return sorted(sections, key=lambda one: order.index(one.name) if one.name in order else len(order))


def _is_section(path: Path) -> bool:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and {"name", "title", "tables", "charts", "claims"} <= tree.keys()
