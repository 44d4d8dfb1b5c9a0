"""Figures, drawn with matplotlib, in colours that print and that colour-blind readers tell apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np

COLOURS = {"fedexp": "#0072B2", "fedavg": "#D55E00", "scaffold": "#009E73"}
LABELS = {"fedexp": "DP-FedEXP", "fedavg": "DP-FedAvg", "scaffold": "DP-SCAFFOLD"}
SETTINGS = {"cdp": "central DP", "ldp-gaussian": "local DP (Gaussian)", "ldp-privunit": "local DP (PrivUnit)"}

Curves = dict[str, dict[str, list[list[float]]]]


def distance_figure(curves: Curves, stem: Path, ylabel: str = "distance to the optimum", log: bool = True) -> list[Path]:
    """Fig. 1: mean over seeds with a band of one standard deviation, one panel per setting; PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.6), squeeze=False, layout="constrained")
    for axis, (setting, algorithms) in zip(axes[0], curves.items(), strict=True):
        for algorithm, runs in algorithms.items():
            values = np.asarray(runs)
            rounds = np.arange(1, values.shape[1] + 1)
            mean = values.mean(0)
            spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
            axis.plot(rounds, mean, color=COLOURS[algorithm], label=LABELS[algorithm], linewidth=1.8)
            axis.fill_between(rounds, mean - spread, mean + spread, color=COLOURS[algorithm], alpha=0.2, linewidth=0)
        axis.set_title(SETTINGS[setting])
        axis.set_xlabel("round")
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.25, which="both")
    axes[0][0].set_ylabel(ylabel)
    axes[0][0].legend(frameon=False)
    written = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in written:
        figure.savefig(path, dpi=160)
    pyplot.close(figure)
    return written
