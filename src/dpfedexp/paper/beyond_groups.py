"""Each question beyond the paper, from its finished runs to a table, a chart and what it claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, stdev

from dpfedexp.paper.beyond_runs import FULL_EPSILON, Variant
from dpfedexp.paper.cells import Result
from dpfedexp.paper.comparison import line
from dpfedexp.paper.seeds import Paired, Spread, last_rounds, paired, spread
from dpfedexp.report.document import Chart, Claim, Panel, Series, Table

NETWORK_TARGET = 96.5


@dataclass(frozen=True)
class Seen:
    """A variant and its finished runs, one per seed."""

    variant: Variant
    results: list[Result]

    @property
    def on_mnist(self) -> bool:
        return self.variant.base.startswith("mnist")

    @property
    def finals(self) -> list[float]:
        metric, factor = ("test_accuracy", 100.0) if self.on_mnist else ("distance", 1.0)
        return [factor * last_rounds(result, metric) for result in self.results]

    @property
    def spread(self) -> Spread:
        return spread(self.finals)

    @property
    def last_model(self) -> Spread:
        """Test accuracy in per cent of the model that the run ends with."""
        return spread([100.0 * result["history"][-1]["test_accuracy"] for result in self.results])

    def against(self, other: Seen) -> Paired:
        n = min(len(self.finals), len(other.finals))
        return paired(self.finals[:n], other.finals[:n], larger_is_better=self.on_mnist)

    @property
    def epsilon(self) -> str:
        return f"{self.results[0]['epsilon_total']:.3f}"

    @property
    def step_size_sd(self) -> float:
        """How much η_g jumps from round to round in the second half, where it has settled."""
        halves = [[record["eta_g"] for record in r["history"][len(r["history"]) // 2 :]] for r in self.results]
        return fmean(stdev(half) if len(half) > 1 else 0.0 for half in halves)


@dataclass(frozen=True)
class Made:
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)


def rule(group: list[Seen]) -> Made:
    """Pairs: the paper's numerator, then the free rule."""
    rows, claims = [], []
    for paper, free in zip(group[::2], group[1::2], strict=True):
        test = free.against(paper)
        for one, gain in ((paper, "–"), (free, test.show())):
            rows.append([one.variant.label, one.spread.show(), f"{one.step_size_sd:.2f}", one.epsilon, gain])
        name = free.variant.label.removesuffix(", free rule")
        worst = 0.5 if free.on_mnist else 0.05 * paper.spread.mean
        claims.append(
            Claim(
                f"{name}: the free rule is as good as the paper's, and costs nothing",
                f"{free.spread.mean:.2f} against {paper.spread.mean:.2f}",
                test.gain > -worst,
            )
        )
    columns = ["run", "metric", "sd of η_g over rounds", "ε total", "gain of the free rule"]
    note = "The paper's own account of its CDP numerator adds to ε (Table 1); here it is accounted jointly with the update."
    return Made([Table("The step size for free", columns, rows, note)], [], claims)


def privunit(group: list[Seen]) -> Made:
    """On each problem: the paper's γ first, then what improves on it at the same ε."""
    rows = []
    reference = group[0]
    for one in group:
        first = one.variant.label.endswith("the paper's γ")
        reference = one if first else reference
        gain = "–" if first else one.against(reference).show()
        rows.append([one.variant.label, one.spread.show(), f"{one.results[0]['epsilon_round']:.3f}", one.epsilon, gain])
    columns = ["run", "metric", "ε per round", "ε total", "gain over the paper's γ"]
    note = "The paper's γ is only sufficient: it spends 5.586 of the 6 that are allowed; the others spend them all."
    return Made([Table("PrivUnit with the same budget, better spent", columns, rows, note)])


def _best(group: list[Seen]) -> dict[str, Seen]:
    """The best run of each method."""
    best: dict[str, Seen] = {}
    for one in group:
        name = one.variant.method
        if name not in best or one.spread.mean > best[name].spread.mean:
            best[name] = one
    return best


def sweep(group: list[Seen]) -> Made:
    epsilons = sorted({one.variant.x for one in group if one.variant.x is not None})
    at = {epsilon: _best([one for one in group if one.variant.x == epsilon]) for epsilon in epsilons}
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
        mean, low, high = (
            [f(e) for e in ends] for f in (lambda e: e.mean, lambda e: e.mean - e.sd, lambda e: e.mean + e.sd)
        )
        lines.append(Series(method, epsilons, mean, low, high, COLOURS.get(method, "")))
    note = "In brackets after a tuned method: the server rate that did best there, chosen after the fact."
    chart = Chart(
        "privacy",
        "Test accuracy against ε",
        "Total ε over 50 rounds at δ = 1e-5; mean over seeds, band of one standard deviation.",
        [Panel("MNIST, CDP", "total ε", "test accuracy in %", lines, log_x=True)],
    )
    columns = ["total ε", *methods, "FedEXP over FedAvg"]
    return Made([Table("Stronger privacy: accuracy on MNIST, CDP", columns, rows, note)], [chart], claims)


COLOURS = {"DP-FedEXP": "fedexp", "DP-FedAvg": "fedavg", "tuned DP-FedEXP": "fedexp", "tuned DP-FedAvg": "fedavg"}


def _rate(one: Seen) -> str:
    rate = one.variant.settings.algorithm.server_rate
    return "" if rate is None else f" [{rate:g}]"


def no_knobs(group: list[Seen]) -> Made:
    """Nothing tuned, from starting clips three decades apart, against every tuned method at the same ε."""
    best = _best(group)
    tuned, average = best["tuned DP-FedEXP"], best["tuned DP-FedAvg"]
    rows, claims = [], []
    for one in group:
        clip = fmean(result["history"][-1]["clip"] for result in one.results)
        rows.append(
            [one.variant.label, one.spread.show(), f"{clip:.2f}", one.epsilon]
            + ["–" if one is other else f"{one.against(other).gain:+.2f}" for other in (tuned, average)]
        )
    adaptive = [one for one in group if one.variant.method == "no knobs"]
    near = [one for one in adaptive if one.variant.x is not None and 0.1 <= one.variant.x <= 10.0]
    gaps = {f"{one.variant.x:g}": one.against(tuned).gain for one in near}
    claims.append(
        Claim(
            "No knobs, starting clips from 0.1 to 10: within 1 point of the tuned DP-FedEXP",
            ", ".join(f"{gap:+.2f} from {start}" for start, gap in gaps.items()),
            min(gaps.values()) >= -1.0,
        )
    )
    gains = {f"{one.variant.x:g}": one.against(average) for one in adaptive}
    claims.append(
        Claim(
            "No knobs, every starting clip: above the tuned DP-FedAvg",
            ", ".join(f"{gain.gain:+.2f} from {start}" for start, gain in gains.items()),
            all(gain.gain > 0 for gain in gains.values()),
        )
    )
    lines = [line(one.results, "test_accuracy", f"from {one.variant.x:g}", factor=100.0) for one in adaptive]
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
    return Made([Table("No knobs: accuracy on MNIST, CDP", columns, rows)], [chart], claims)


def network(group: list[Seen]) -> Made:
    rows = [
        [
            one.variant.label,
            one.spread.show(),
            one.last_model.show(),
            one.epsilon,
            "–" if one is group[0] else one.against(group[0]).show(),
        ]
        for one in group
    ]
    best = group[-1]
    claim = Claim(
        f"A better-conditioned network at ε = {FULL_EPSILON:g}: above {NETWORK_TARGET} %",
        f"{best.spread.show()} % over the last 5 rounds, {best.last_model.show()} % the final model",
        best.spread.mean > NETWORK_TARGET,
    )
    columns = ["network", "accuracy, last 5 rounds", "final model", "ε total", "gain"]
    return Made([Table("A better-conditioned network, CDP-FedEXP with the free rule", columns, rows)], [], [claim])


def participation(group: list[Seen]) -> Made:
    rows = [
        [one.variant.label, one.spread.show(), one.epsilon, "–" if one is group[-1] else one.against(group[-1]).show()]
        for one in group
    ]
    columns = ["run", "accuracy", "ε total", "gain over DP-FedAvg"]
    note = (
        "Each client takes part in a round with probability 0.1 (Poisson), adjacency add-remove: an ε of another kind than the "
        "replace-one of the other tables, not to be compared with them."
    )
    return Made([Table("Partial participation, 100 of 1000 clients a round on average", columns, rows, note)])


GROUPS: dict[str, Callable[[list[Seen]], Made]] = {
    "rule": rule,
    "privunit": privunit,
    "sweep": sweep,
    "no knobs": no_knobs,
    "network": network,
    "participation": participation,
}
