"""The picture of the README: `fit` beside DP-FedAvg, from the suite's recorded results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfedexp.engine.plot import CYCLE, NAMED, save_figure
from dpfedexp.report.document import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EPSILON = 8.0
TOP = "mnist"
PROBLEMS = {
    "mnist": "MNIST",
    "mnist-small": "MNIST, 237 parameters",
    "cifar10": "CIFAR-10",
    "movielens": "MovieLens",
    "randhie": "doctor's visits",
    "nlswork": "wages",
    "chem97": "A-levels",
    "insteval": "lecture ratings",
    "shakespeare": "Shakespeare",
    "regression-2": "regression, spread 2",
    "classes-2": "ten classes, spread 2",
}
"""The rows of the README's table, in its order."""
FIT, FEDAVG, TUNED = CYCLE[NAMED["fedexp"]], CYCLE[NAMED["fedavg"]], "#767676"


def overview(results: Path, out: Path) -> Path:
    """Draw the picture from `suite.json` and return its path.

    Args:
        results: the folder of the suite's results.
        out: the file, .svg or .png.
    """
    import matplotlib
    from matplotlib.figure import Figure

    problems = {one["name"]: one for one in Section.read(results / "suite.json").data["problems"]}
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        made = Figure(figsize=(4.9, 5.6), layout="constrained")  # one column: a phone shows all of it
        top, bottom = made.subplots(2, 1, height_ratios=(1, 1.7))
        _against_epsilon(top, problems[TOP])
        _relative(bottom, [(label, problems[name]) for name, label in PROBLEMS.items()])
    save_figure(made, out)
    return out


def _points(problem: dict[str, Any], label: str) -> dict[float, tuple[float, float]]:
    """ε → mean and standard error of one algorithm."""
    (found,) = (one for one in problem["contenders"] if one["label"] == label)
    return {point["epsilon"]: (point["mean"], point["error"]) for point in found["points"]}


def _against_epsilon(axis: Axes, problem: dict[str, Any]) -> None:
    for label, color, text, place in (
        ("fit", FIT, "fit: nothing tuned", (2.3, 80)),
        ("FedAvg", FEDAVG, "DP-FedAvg: local rate\ntuned at ε = 8", (1.5, 45)),
    ):
        points = _points(problem, label)
        means, errors = zip(*points.values(), strict=True)
        axis.errorbar(list(points), means, errors, color=color, marker="o", markersize=4, linewidth=1.8, capsize=2)
        axis.text(*place, text, color=color, va="center")
    axis.set_title("MNIST, 1000 clients: test accuracy, %", loc="right")
    axis.set_xlabel("ε of the whole run (smaller is more private)")
    axis.set_xscale("log")
    axis.set_xticks(list(points), [f"{x:g}" for x in points])
    axis.set_xticks([], minor=True)
    axis.set_ylim(0, 100)
    axis.grid(alpha=0.25)


def _relative(axis: Axes, problems: list[tuple[str, dict[str, Any]]]) -> None:
    """How much smaller or larger than DP-FedAvg's the error is, one row per problem."""
    tuned_label, fit_label = "best of ten server rates,\nchosen on the test data", "fit: nothing tuned"
    for row, (_, problem) in enumerate(problems):
        top = 100.0 if problem["higher_is_better"] else 0.0
        base = abs(top - _points(problem, "FedAvg")[EPSILON][0])

        def change(mean: float, top: float = top, base: float = base) -> float:
            return 100 * (abs(top - mean) / base - 1)

        mean, error = _points(problem, "fit")[EPSILON]
        tuned = min(change(_points(problem, name)[EPSILON][0]) for name in ("FedAvg, tuned", "FedAdam, tuned"))
        axis.plot(tuned, row, "D", color=TUNED, markerfacecolor="none", markersize=5, label=tuned_label)
        bar = 100 * error / base
        axis.errorbar(change(mean), row, xerr=bar, fmt="o", color=FIT, markersize=6, capsize=2, label=fit_label)
        tuned_label = fit_label = "_"  # one entry of the legend each
    axis.axvline(0, color=FEDAVG, linewidth=1.8)
    axis.text(1.2, 5, "DP-FedAvg", color=FEDAVG, va="center")
    axis.legend(loc="lower left", bbox_to_anchor=(0, 0.12), fontsize=9)
    axis.set_yticks(range(len(problems)), [label for label, _ in problems])
    axis.set_title("ε = 8, eleven problems: error against DP-FedAvg's", loc="right")
    axis.set(xlabel="% more error (left of 0: less error, better)", ylim=(len(problems) - 0.3, -0.7))
    axis.grid(alpha=0.25, axis="x")
