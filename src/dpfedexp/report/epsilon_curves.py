"""Two pictures for planning a run: ε over rounds for several noise multipliers, and the noise that a target ε needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dpfedexp.accounting.calibrate import calibrate_noise
from dpfedexp.accounting.compose import epsilon_curve
from dpfedexp.accounting.events import Event
from dpfedexp.errors import InputError, require

FORMATS = (".png", ".svg", ".pdf")


def plot_privacy(
    make_event: Callable[[float], Event],
    path: Path,
    *,
    noises: Sequence[float],
    rounds: int,
    delta: float,
    title: str = "",
) -> None:
    """Write both pictures to one PNG, SVG or PDF file."""
    require(path.suffix in FORMATS, f"the picture is {path.name!r}; its name must end in {', '.join(FORMATS)}.")
    require(bool(noises), "no noise multiplier was given; name at least one.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    at = sorted({int(t) for t in np.geomspace(1, rounds, 24).round()})
    for z in sorted(noises):
        left.plot(at, epsilon_curve(make_event(z), at, delta), marker=".", label=f"z = {z:g}")
    left.set(xlabel="rounds", ylabel=f"total ε at δ = {delta:g}", xscale="log", yscale="log", title="ε over rounds")
    left.legend(frameon=False)

    targets = np.geomspace(0.5, 32.0, 9)
    needed = [calibrate_noise(make_event, target_epsilon=float(e), delta=delta, rounds=rounds) for e in targets]
    right.plot(targets, needed, marker="o", color="black")
    right.set(xlabel=f"total ε at δ = {delta:g}", ylabel="noise multiplier z", xscale="log", yscale="log")
    right.set_title(f"noise needed for {rounds} rounds")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise InputError(f"the picture {str(path)!r} can't be written: {error.strerror}.") from None
