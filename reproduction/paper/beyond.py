"""Beyond the paper: the free rule, the safe step, better PrivUnit, stronger privacy, nothing to tune, a better network, fewer
clients a round. Each question has the runs that it asks for, and an answer from the finished ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from dpfedexp.config import Settings
from dpfedexp.engine.plot import Chart, Panel, Series
from dpfedexp.report.document import Claim, Section, Table
from reproduction.paper.comparison import line
from reproduction.paper.experiments import experiment, vary
from reproduction.paper.results.collected import Results
from reproduction.paper.results.planned import PlannedRun, Result, points, trainings
from reproduction.paper.results.size import Size
from reproduction.paper.results.spread import Paired, Spread, final, note_on_tests, paired, spread

Changes = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One of the paper's runs with changes. `method` gathers those of which the best counts; `x` is its place on a chart."""

    group: str
    label: str
    base: str
    changes: Changes = field(default_factory=dict)
    method: str = ""
    x: float | None = None
    seeds: int | None = None
    in_quick: bool = False

    @property
    def settings(self) -> Settings:
        return vary(experiment(self.base), self.changes)

    @property
    def curves(self) -> tuple[str, ...]:
        return ("round", "test_accuracy" if self.base.startswith("mnist") else "distance", "eta_g", "clip")


@dataclass(frozen=True)
class Finished:
    """A variant and its finished runs, one per seed."""

    variant: Variant
    results: list[Result]

    @property
    def on_mnist(self) -> bool:
        return self.variant.base.startswith("mnist")

    @property
    def finals(self) -> list[float]:
        metric, factor = ("test_accuracy", 100.0) if self.on_mnist else ("distance", 1.0)
        return [factor * final(result, metric) for result in self.results]

    @property
    def spread(self) -> Spread:
        return spread(self.finals)

    @property
    def last_model(self) -> Spread:
        """Test accuracy in percent of the model that the run ends with."""
        return spread([100.0 * last(result, "test_accuracy") for result in self.results])

    def against(self, other: Finished) -> Paired:
        n = min(len(self.finals), len(other.finals))
        return paired(self.finals[:n], other.finals[:n], larger_is_better=self.on_mnist)

    @property
    def epsilon(self) -> str:
        return f"{self.results[0]['epsilon_total']:.3f}"

    @property
    def largest_step(self) -> float:
        """The largest η_g of a run, on average over the seeds."""
        return fmean(max(eta for _, eta in points(result, "eta_g") if eta is not None) for result in self.results)

    @property
    def step_size_sd(self) -> float:
        """How much η_g jumps from round to round in the second half, where it has settled."""
        curves = [[eta for _, eta in points(result, "eta_g") if eta is not None] for result in self.results]
        halves = [curve[len(curve) // 2 :] for curve in curves]
        return fmean(stdev(half) if len(half) > 1 else 0.0 for half in halves)


@dataclass(frozen=True)
class Answer:
    """What a section shows of it."""

    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)


def last(result: Result, metric: str) -> float:
    """The metric at the end of the run; infinite where it diverged."""
    value = points(result, metric)[-1][1]
    return math.inf if value is None else value


def best_of_each_method(group: list[Finished]) -> dict[str, Finished]:
    """The best run of each method."""
    best: dict[str, Finished] = {}
    for one in group:
        name = one.variant.method
        if name not in best or one.spread.mean > best[name].spread.mean:
            best[name] = one
    return best


FULL_EPSILON = 15.456
"""What the paper's central noise costs over 50 rounds at δ = 1e-5."""
SERVER_RATES = (2.0, 4.0, 8.0, 16.0)
ADAM_RATES = (0.003, 0.01, 0.03)
SWEEP_SEEDS = 2
FREE: Changes = {"algorithm.numerator": "free"}
SAFE: Changes = {"algorithm.step": "safe"}


def at_epsilon(epsilon: float) -> Changes:
    return {"algorithm.noise_multiplier": None, "algorithm.target_epsilon": epsilon}


def adaptive(start: float) -> Changes:
    return {"algorithm.clip": "adaptive", "algorithm.adaptive": {"initial": start}}


def tuned_servers(target: Changes) -> Iterator[tuple[str, Changes, str]]:
    """What people tune in place of FedEXP's step size, at its clip."""
    for rate in SERVER_RATES:
        changes = {**target, "algorithm.server_rate": rate, "algorithm.clip": 0.3}
        yield f"DP-FedAvg, clip 0.3, server rate {rate:g}", changes, "best fixed server rate"
    for rate in ADAM_RATES:
        changes = {**target, "algorithm.name": "dp_fedadam", "algorithm.server_rate": rate, "algorithm.clip": 0.3}
        yield f"DP-FedAdam, clip 0.3, server rate {rate:g}", changes, "best DP-FedAdam"


COLORS = {"DP-FedEXP": "fedexp", "DP-FedAvg": "fedavg", "tuned DP-FedEXP": "fedexp", "tuned DP-FedAvg": "fedavg"}


def free_rule_variants() -> Iterator[Variant]:
    for base, name in (
        ("mnist-cdp-fedexp", "MNIST, CDP"),
        ("mnist-ldp-gaussian-fedexp", "MNIST, LDP (Gaussian)"),
        ("synthetic-cdp-fedexp", "Synthetic, CDP"),
        ("synthetic-ldp-gaussian-fedexp", "Synthetic, LDP (Gaussian)"),
    ):
        quick = base in ("mnist-cdp-fedexp", "synthetic-cdp-fedexp", "synthetic-ldp-gaussian-fedexp")
        yield Variant("rule", f"{name}, the paper's numerator", base, in_quick=quick)
        yield Variant("rule", f"{name}, free rule", base, FREE, in_quick=quick)


def free_rule_answer(group: list[Finished]) -> Answer:
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
    return Answer([Table("The step size for free", columns, rows, note)], [], claims)


SAFE_SETTINGS = (
    ("synthetic-cdp", "Synthetic, CDP"),
    ("synthetic-ldp-gaussian", "Synthetic, LDP (Gaussian)"),
    ("synthetic-ldp-privunit", "Synthetic, LDP (PrivUnit)"),
    ("mnist-cdp", "MNIST, CDP"),
)


def safe_step_variants() -> Iterator[Variant]:
    for base, name in SAFE_SETTINGS:
        quick = base == "synthetic-cdp"
        yield Variant("step", f"{name}, DP-FedAvg", f"{base}-fedavg", in_quick=quick)
        yield Variant("step", f"{name}, the paper's step", f"{base}-fedexp", in_quick=quick)
        yield Variant("step", f"{name}, safe step", f"{base}-fedexp", SAFE, in_quick=quick)


def safe_step_answer(group: list[Finished]) -> Answer:
    """Triples: DP-FedAvg, the paper's step, the safe one."""
    rows, claims = [], []
    for average, paper, safe in zip(group[::3], group[1::3], group[2::3], strict=True):
        test = safe.against(average)
        for one, gain in ((average, "–"), (paper, paper.against(average).show()), (safe, test.show())):
            rows.append([one.variant.label, one.spread.show(), f"{one.largest_step:.1f}", one.epsilon, gain])
        claims.append(
            Claim(
                f"{safe.variant.label}: not worse than DP-FedAvg",
                f"{safe.spread.mean:.2f} against {average.spread.mean:.2f}",
                test.gain >= 0,
            )
        )
    columns = ["run", "metric", "largest η_g", "ε total", "gain over DP-FedAvg"]
    note = "Clients of these problems share an optimum, or nearly; the safe step is made for those that do not (docs/step-size.md)."
    return Answer([Table("The safe step beside the paper's", columns, rows, note)], [], claims)


def privunit_variants() -> Iterator[Variant]:
    for problem, name in (("mnist", "MNIST"), ("synthetic", "Synthetic")):
        base = f"{problem}-ldp-privunit-fedexp"
        quick = problem == "synthetic"
        yield Variant("privunit", f"{name}, the paper's γ", base, in_quick=quick)
        yield Variant("privunit", f"{name}, exact γ", base, {"algorithm.gamma": "exact"}, in_quick=quick)
        yield Variant("privunit", f"{name}, optimal split", base, {"algorithm.gamma": "optimal"}, in_quick=quick)
        if problem == "synthetic":
            spend = {"algorithm.epsilon0": 2.5, "algorithm.epsilon1": 2.5, "algorithm.epsilon2": 1.0}
            label = f"{name}, optimal split, ε₂ = 1 and 5 for the direction"
            yield Variant("privunit", label, base, {"algorithm.gamma": "optimal", **spend}, in_quick=True)


def privunit_answer(group: list[Finished]) -> Answer:
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
    return Answer([Table("PrivUnit with the same budget, better spent", columns, rows, note)])


EPSILONS = (1.0, 2.0, 4.0, 8.0, 15.456)


def stronger_privacy_variants() -> Iterator[Variant]:
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


def stronger_privacy_answer(group: list[Finished]) -> Answer:
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
        lines.append(Series(method, epsilons, mean, low, high, COLORS.get(method, "")))
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


STARTING_CLIPS = (0.01, 0.1, 1.0, 10.0)


def no_knobs_variants() -> Iterator[Variant]:
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


def no_knobs_answer(group: list[Finished]) -> Answer:
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
        line(one.results, "test_accuracy", one.variant.method, COLORS[one.variant.method], 100.0)
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


NETWORK_TARGET = 96.5


def network_variants() -> Iterator[Variant]:
    target = at_epsilon(FULL_EPSILON)
    relu = {**FREE, **target, "model.name": "mnist_relu_net", "data.standardize": True}
    yield Variant("network", "the paper's network", "mnist-cdp-fedexp", FREE | target, in_quick=True)
    yield Variant("network", "ReLU and standardized inputs, η_l = 0.1, C = 0.3", "mnist-cdp-fedexp", relu)
    better = {**relu, "local.lr": 0.3, "algorithm.clip": 0.5}
    label = "ReLU and standardized inputs, η_l = 0.3, C = 0.5"
    yield Variant("network", label, "mnist-cdp-fedexp", better, in_quick=True)
    label = f"{label}, 100 rounds at the same total ε"
    yield Variant("network", label, "mnist-cdp-fedexp", {**better, "run.rounds": 100})


def network_answer(group: list[Finished]) -> Answer:
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
    return Answer([Table("A better-conditioned network, CDP-FedEXP with the free rule", columns, rows)], [], [claim])


def participation_variants() -> Iterator[Variant]:
    sampled = {
        **at_epsilon(8.0),
        "algorithm.adjacency": "add-remove",
        "participation.kind": "poisson",
        "participation.rate": 0.1,
    }
    yield Variant("participation", "CDP-FedEXP, free rule, C = 0.3", "mnist-cdp-fedexp", FREE | sampled)
    yield Variant("participation", "DP-FedAvg, C = 1", "mnist-cdp-fedavg", sampled)


def participation_answer(group: list[Finished]) -> Answer:
    rows = [
        [one.variant.label, one.spread.show(), one.epsilon, "–" if one is group[-1] else one.against(group[-1]).show()]
        for one in group
    ]
    columns = ["run", "accuracy", "ε total", "gain over DP-FedAvg"]
    note = (
        "Each client takes part in a round with probability 0.1 (Poisson), adjacency add-remove: an ε of another kind than the "
        "replace-one of the other tables, not to be compared with them."
    )
    return Answer([Table("Partial participation, 100 of 1000 clients a round on average", columns, rows, note)])


QUESTIONS = {
    "rule": (free_rule_variants, free_rule_answer),
    "step": (safe_step_variants, safe_step_answer),
    "privunit": (privunit_variants, privunit_answer),
    "sweep": (stronger_privacy_variants, stronger_privacy_answer),
    "no knobs": (no_knobs_variants, no_knobs_answer),
    "network": (network_variants, network_answer),
    "participation": (participation_variants, participation_answer),
}


def variants(size: Size) -> list[Variant]:
    every = (variant for asked, _ in QUESTIONS.values() for variant in asked())
    return [v for v in every if (v.in_quick or not size.quick) and size.includes(v.base.partition("-")[0])]


def planned(size: Size) -> list[PlannedRun]:
    return [
        run
        for variant in variants(size)
        for run in trainings(size.runs(variant.settings, variant.seeds), variant.label, variant.curves)
    ]


def section(size: Size, results: Results) -> Section:
    seen = [Finished(v, results.training(size.runs(v.settings, v.seeds))) for v in variants(size)]
    groups = {name: [one for one in seen if one.variant.group == name] for name in QUESTIONS}
    made = {name: QUESTIONS[name][1](group) for name, group in groups.items() if group}
    # Small runs keep the order of the methods, not the accuracies that the other claims are about.
    claimed = ("rule", "sweep") if size.quick else tuple(made)
    return Section(
        name="beyond",
        title="Beyond the paper",
        text=[
            "On MNIST the metric is test accuracy in percent, on the synthetic problem the distance to the optimum, both averaged "
            f"over the last 5 rounds: mean (sd) over up to {size.seeds} seeds. A positive gain is an improvement."
        ],
        tables=[table for part in made.values() for table in part.tables],
        charts=[chart for part in made.values() for chart in part.charts],
        claims=[claim for name, part in made.items() if name in claimed for claim in part.claims],
        notes=[*size.notes, note_on_tests(size.seeds), *NOTES],
        command=size.command("beyond"),
        configuration={one.variant.label: size.runs(one.variant.settings)[0].to_toml() for one in seen},
        privacy={one.variant.label: one.results[0]["privacy"] for one in seen},
        data={"variants": [_data(one) for one in seen]},
    )


def _data(one: Finished) -> dict[str, Any]:
    first = one.results[0]
    return {
        "group": one.variant.group,
        "label": one.variant.label,
        "mean": one.spread.mean,
        "sd": one.spread.sd,
        "per_seed": one.finals,
        "epsilon_round": first["epsilon_round"],
        "epsilon_total": first["epsilon_total"],
    }


NOTES = (
    "Choosing the best of several server rates (or clips) on the same clients costs privacy that these ε leave out; DP-FedEXP "
    "and the runs without knobs choose nothing.",
    "Another data set in MNIST's file format takes its place everywhere: python -m reproduction paper beyond --data FOLDER.",
)
