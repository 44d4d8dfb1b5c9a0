"""What is left at a smaller ε? DP-FedEXP beside DP-FedAvg and tuned servers."""

from __future__ import annotations

from collections.abc import Iterator

from dpfedexp.engine.plot import Chart, Panel, Series
from dpfedexp.report.document import Claim, Table
from reproduction.paper.beyond.finished import Answer, Changes, Finished, Variant, best_of_each_method
from reproduction.paper.beyond.variants import (
    COLOURS,
    FREE,
    FULL_EPSILON,
    SWEEP_SEEDS,
    adaptive,
    at_epsilon,
    tuned_servers,
)

EPSILONS = (1.0, 2.0, 4.0, 8.0, 15.456)


def variants() -> Iterator[Variant]:
    for epsilon in EPSILONS:
        target = at_epsilon(epsilon)

        def at(
            label: str, base: str, changes: Changes, method: str, in_quick: bool = False, epsilon: float = epsilon
        ) -> Variant:
            return Variant("sweep", f"ε = {epsilon:g}, {label}", base, changes, method, epsilon, SWEEP_SEEDS, in_quick)

        quick = epsilon == FULL_EPSILON
        yield at("DP-FedEXP", "mnist-cdp-fedexp", FREE | target, "DP-FedEXP", quick)
        yield at(
            "DP-FedEXP, adaptive clip from 1",
            "mnist-cdp-fedexp",
            FREE | target | adaptive(1.0),
            "DP-FedEXP, no knobs",
            quick,
        )
        yield at("DP-FedAvg", "mnist-cdp-fedavg", target, "DP-FedAvg", quick)
        for label, changes, method in tuned_servers(target):
            yield at(label, "mnist-cdp-fedavg", changes, method)


def answer(group: list[Finished]) -> Answer:
    epsilons = sorted({one.variant.x for one in group if one.variant.x is not None})
    at = {epsilon: best_of_each_method([one for one in group if one.variant.x == epsilon]) for epsilon in epsilons}
    methods = list(dict.fromkeys(one.variant.method for one in group))
    rows, claims = [], []
    for epsilon, best in at.items():
        shown = [best[m].spread.show() + _rate(best[m]) for m in methods]
        rows.append([f"{epsilon:g}", *shown, best["DP-FedEXP"].against(best["DP-FedAvg"]).show()])
        gain = best["DP-FedEXP"].against(best["DP-FedAvg"])
        claims.append(Claim(f"ε = {epsilon:g}: DP-FedEXP above DP-FedAvg", gain.show(), gain.gain > 0))
    lines = []
    for method in methods:
        ends = [at[epsilon][method].spread for epsilon in epsilons]
        mean, low, high = [e.mean for e in ends], [e.mean - e.sd for e in ends], [e.mean + e.sd for e in ends]
        lines.append(Series(method, epsilons, mean, low, high, COLOURS.get(method, "")))
    note = "In brackets after a tuned method: the server rate that did best there, chosen after the fact."
    chart = Chart(
        "privacy",
        "Test accuracy against ε",
        "Total ε over 50 rounds at δ = 1e-5; mean over seeds, band of one standard deviation.",
        [Panel("MNIST, CDP", "total ε", "test accuracy in %", lines, log_x=True)],
    )
    columns = ["total ε", *methods, "FedEXP over FedAvg"]
    return Answer([Table("Stronger privacy: accuracy on MNIST, CDP", columns, rows, note)], [chart], claims)


def _rate(one: Finished) -> str:
    rate = one.variant.settings.algorithm.server_rate
    return "" if rate is None else f" [{rate:g}]"
