"""`compare`: several runs in one table and one plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.engine.checkpoint import DERIVED
from dpfedexp.engine.plot import Panel, figure, main_metric, name_of, over_rounds
from dpfedexp.engine.run import Run, RunFacts
from dpfedexp.errors import checked, require
from dpfedexp.report.document import Section, as_text
from dpfedexp.report.page import RunRecord, read_run, runs_section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARED = tuple(
    f"algorithm.{name}" for name in ("mechanism", "clip", "noise_multiplier", "target_epsilon", "delta", "adjacency")
)
"""Settings that every private algorithm has."""
LABELS = {"round": "round", "epsilon": "ε so far"}


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several runs side by side; print it for the table.

    Attributes:
        section: the table of all metrics after the last round, and their charts.
        panel: the curves of one metric.
    """

    section: Section
    panel: Panel

    def plot(self) -> Figure:
        """A matplotlib figure of the metric, with the legend below it; it needs no display."""
        return figure([self.panel], legend_below=True)

    def __repr__(self) -> str:
        return as_text(replace(self.section, charts=()).show)

    def _repr_png_(self) -> bytes:
        return self.plot()._repr_png_()  # type: ignore[attr-defined, no-any-return]


@checked
def compare(
    runs: Iterable[Run | Path | str] | Mapping[str, Run | Path | str],
    metric: str | None = None,
    *,
    over: Literal["round", "epsilon"] = "round",
) -> Comparison:
    """Compare runs: a table of their last values, and a plot of one metric.

    Args:
        runs: runs or their folders. A dict names them; otherwise their names are the settings in which they differ.
        metric: the metric of the plot, such as "test_loss"; by default the test accuracy, or the first metric.
        over: "round", or "epsilon" for a plot over ε.

    Returns:
        The comparison: print it for the table, and call `plot()` for a matplotlib figure.

    Example:
        >>> import torch
        >>> from dpfedexp import Federation, compare, fit
        >>> clients = Federation.from_clients([(torch.randn(5, 3), torch.randn(5)) for _ in range(200)])
        >>> model, test = torch.nn.Linear(3, 1), (torch.randn(9, 3), torch.randn(9))
        >>> both = compare([fit(model, clients, epsilon=e, rounds=3, evaluate=test) for e in (4, 8)], "test_loss")
        >>> [series.name for series in both.panel.series]
        ['target_epsilon=4', 'target_epsilon=8']
    """
    require(over in LABELS, f"over is {over!r}; it must be 'round' or 'epsilon'.")
    single = isinstance(runs, Run | str | Path)
    require(not single, "runs is a single run; pass a list of runs or folders, or a dict of them by name.")
    given = list(runs.values() if isinstance(runs, Mapping) else runs)
    require(len(given) > 0, "runs is empty; pass at least one run or folder.")
    records, facts = zip(*(_read(number, one) for number, one in enumerate(given)), strict=True)
    names = list(map(str, runs)) if isinstance(runs, Mapping) else _names(records, facts)
    named = [replace(record, name=name) for record, name in zip(records, names, strict=True)]
    chosen = main_metric([record.history for record in named], metric, "metric")
    x = "epsilon_total" if over == "epsilon" else "round"
    curves = [over_rounds(record.history, chosen, record.name, x) for record in named]
    panel = Panel("", LABELS[over], name_of(chosen), curves)
    return Comparison(runs_section(named), panel)


def _read(number: int, run: Run | Path | str) -> tuple[RunRecord, RunFacts | None]:
    if isinstance(run, Run):
        epsilon = run.privacy.epsilon_total
        return RunRecord(f"run {number + 1}", run.history, run.privacy.text, "", epsilon, run.advice), run.facts
    require(isinstance(run, str | Path), f"runs[{number}] is a {type(run).__name__}; it must be a Run or its folder.")
    path = Path(run)
    require(path.is_dir(), f"the folder {str(path)!r} does not exist; pass the folder of a run.")
    return read_run(path), RunFacts.read(path)


def _names(records: Sequence[RunRecord], facts: Sequence[RunFacts | None]) -> list[str]:
    """Name runs by the settings in which they differ. Equal names get a number."""
    settings = [_settings(one) for one in facts]

    def differs(name: str, own: dict[str, Any]) -> bool:
        # Algorithms differ in rules that follow from their names; these only count between runs of the same algorithm.
        follows = name.startswith("algorithm.") and name not in SHARED
        others = [one for one in settings if not follows or one["algorithm"] == own["algorithm"]]
        return own[name] is not None and any(one.get(name) != own[name] for one in others)

    labels = [
        ", ".join(_label(name, own[name]) for name in own if differs(name, own)) or record.name
        for record, own in zip(records, settings, strict=True)
    ]
    count = Counter(labels)
    return [label if count[label] == 1 else f"{label} ({number})" for number, label in enumerate(labels, 1)]


def _settings(facts: RunFacts | None) -> dict[str, Any]:
    if facts is None:
        return {"algorithm": None}
    own = {"algorithm": facts.algorithm, "model": facts.model, "parameters": facts.parameters, "data": facts.data}
    others = {name: value for name, value in facts.settings.items() if not name.startswith(DERIVED)}
    return own | {name: value for name, value in others.items() if name not in (*own, "algorithm.name")}


def _label(name: str, value: Any) -> str:
    if name == "algorithm":
        return str(value)
    text = "adaptive" if value == AdaptiveClip.__name__ else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{name.rpartition('.')[2]}={text}"
