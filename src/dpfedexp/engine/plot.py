"""A run's rounds as a picture, without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpfedexp.errors import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEERING = ("eta_g", "clip", "local_rate")
"""What sets itself from round to round."""
BOOKKEEPING = ("round", *STEERING, "update_norm", "vote_within_clip", "vote_helped", "epsilon_total", "seconds")
"""Fields of a record that are no metric."""
NAMES = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "test_auc": "test AUC",
    "test_mae": "test error, mean absolute",
    "test_rmse": "test error, root mean square",
    "test_r2": "test R²",
    "distance": "distance to the optimum",
    "eta_g": "global step size η_g",
    "clip": "clip C",
    "update_norm": "length of the released update ‖c̄‖",
    "epsilon_total": "ε so far",
    "seconds": "seconds per round",
}
"""Fields of a record as pages and pictures call them; any other by its own name."""


def metrics_in(history: Sequence[dict[str, Any]]) -> list[str]:
    """The fields that measure the model, in the order in which they first occur."""
    return [key for key in dict.fromkeys(k for record in history for k in record) if key not in BOOKKEEPING]


def name_of(key: str) -> str:
    """A field of a record in words."""
    if key.startswith("nonprivate_"):
        return f"{key.removeprefix('nonprivate_').replace('_', ' ')} (not private)"
    return NAMES.get(key, key.replace("_", " "))


def figure_of(history: Sequence[dict[str, Any]], title: str) -> Figure:
    """One panel for each metric and for whatever sets itself, over rounds. Rounds that are not finite are left out.

    The figure belongs to no window; a notebook shows it, and `savefig` writes it.
    """
    require(len(history) > 0, "the run has no rounds, so there is nothing to plot; train for at least one.")
    from matplotlib.figure import Figure

    class RunFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=110)
            return picture.getvalue()

    keys = [*metrics_in(history), *(key for key in STEERING if key in history[-1])]
    width = min(len(keys), 3)
    height = -(-len(keys) // width)
    figure = RunFigure(figsize=(4.2 * width, 0.4 + 2.9 * height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for number, key in enumerate(keys, 1):
        axis = figure.add_subplot(height, width, number)
        points = [(record["round"], record[key]) for record in history if _is_finite(record.get(key))]
        axis.plot(
            [x for x, _ in points], [y for _, y in points], marker="o" if len(points) <= 12 else None, markersize=3.5
        )
        axis.set(title=name_of(key), xlabel="round")
        axis.grid(alpha=0.25)
    return figure


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
