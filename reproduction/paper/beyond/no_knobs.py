"""Can everything on the server be left untuned? Free rule and adaptive clipping from any starting clip."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from dpfedexp.engine.plot import Chart, Panel
from dpfedexp.report.document import Claim, Table
from reproduction.paper.beyond.finished import Answer, Finished, Variant, best_of_each_method, last
from reproduction.paper.beyond.variants import (
    COLOURS,
    FREE,
    FULL_EPSILON,
    SWEEP_SEEDS,
    adaptive,
    at_epsilon,
    tuned_servers,
)
from reproduction.paper.comparison import line

STARTING_CLIPS = (0.01, 0.1, 1.0, 10.0)


def variants() -> Iterator[Variant]:
    target = at_epsilon(FULL_EPSILON)
    for start in STARTING_CLIPS:
        changes = FREE | target | adaptive(start)
        label = f"CDP-FedEXP, adaptive clip from {start:g}"
        yield Variant("no knobs", label, "mnist-cdp-fedexp", changes, "no knobs", start, in_quick=start in (1.0, 10.0))
    tuned = FREE | target
    yield Variant("no knobs", "CDP-FedEXP, tuned clip 0.3", "mnist-cdp-fedexp", tuned, "tuned DP-FedEXP", in_quick=True)
    yield Variant("no knobs", "DP-FedAvg, tuned clip 1", "mnist-cdp-fedavg", target, "tuned DP-FedAvg", in_quick=True)
    for label, changes, method in tuned_servers(target):
        yield Variant("no knobs", label, "mnist-cdp-fedavg", changes, method, seeds=SWEEP_SEEDS)


def answer(group: list[Finished]) -> Answer:
    """Nothing tuned, from starting clips three decades apart, against every tuned method at the same ε."""
    best = best_of_each_method(group)
    tuned, average = best["tuned DP-FedEXP"], best["tuned DP-FedAvg"]
    rows, claims = [], []
    for one in group:
        clip = fmean(last(result, "clip") for result in one.results)
        rows.append(
            [one.variant.label, one.spread.show(), f"{clip:.2f}", one.epsilon]
            + ["–" if one is other else f"{one.against(other).gain:+.2f}" for other in (tuned, average)]
        )
    untuned = [one for one in group if one.variant.method == "no knobs"]
    near = [one for one in untuned if one.variant.x is not None and 0.1 <= one.variant.x <= 10.0]
    gaps = {f"{one.variant.x:g}": one.against(tuned).gain for one in near}
    claims.append(
        Claim(
            "No knobs, starting clips from 0.1 to 10: within 1 point of the tuned DP-FedEXP",
            ", ".join(f"{gap:+.2f} from {start}" for start, gap in gaps.items()),
            min(gaps.values()) >= -1.0,
        )
    )
    gains = {f"{one.variant.x:g}": one.against(average) for one in untuned}
    claims.append(
        Claim(
            "No knobs, every starting clip: above the tuned DP-FedAvg",
            ", ".join(f"{gain.gain:+.2f} from {start}" for start, gain in gains.items()),
            all(gain.gain > 0 for gain in gains.values()),
        )
    )
    lines = [line(one.results, "test_accuracy", f"from {one.variant.x:g}", factor=100.0) for one in untuned]
    lines += [
        line(one.results, "test_accuracy", one.variant.method, COLOURS[one.variant.method], 100.0)
        for one in (tuned, average)
    ]
    chart = Chart(
        "no-knobs",
        "Nothing to tune on the server: free rule and adaptive clipping",
        "Mean over seeds, band of one standard deviation.",
        [Panel("MNIST, CDP", "round", "test accuracy in %", lines)],
    )
    columns = ["run", "accuracy", "last clip", "ε total", "over tuned FedEXP", "over tuned FedAvg"]
    return Answer([Table("No knobs: accuracy on MNIST, CDP", columns, rows)], [chart], claims)
