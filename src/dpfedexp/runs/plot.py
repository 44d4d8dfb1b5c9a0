"""A run's rounds as a picture, without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpfedexp.errors import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOOKKEEPING = ("round", "eta_g", "clip", "update_norm", "vote_within_clip", "epsilon_total", "seconds")
"""Fields of a record that are no metric."""
NAMES = {"eta_g": "global step size η_g", "clip": "clip C", "local_rate": "local rate"}


def metrics_in(history: Sequence[dict[str, Any]]) -> list[str]:
    """The fields that measure the model, in the order in which they first occur."""
    return [key for key in dict.fromkeys(k for record in history for k in record) if key not in BOOKKEEPING]


def figure_of(history: Sequence[dict[str, Any]], title: str) -> Figure:
    """One panel for each metric, and one each for η_g and the clip, over rounds. Rounds that are not finite are left out.

    The figure belongs to no window; a notebook shows it, and `savefig` writes it.
    """
    require(len(history) > 0, "the run has no rounds, so there is nothing to plot; train for at least one.")
    from matplotlib.figure import Figure

    class RunFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=110)
            return picture.getvalue()

    keys = [*metrics_in(history), *(key for key in ("eta_g", "clip") if key in history[-1])]
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
        axis.set(title=NAMES.get(key, key.replace("_", " ")), xlabel="round")
        axis.grid(alpha=0.25)
    return figure


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
