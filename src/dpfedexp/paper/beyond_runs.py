"""What goes beyond the paper, as a list of runs: each a variation of one of the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dpfedexp.config import Settings
from dpfedexp.paper.experiments import experiment, vary

EPSILONS = (1.0, 2.0, 4.0, 8.0, 15.456)
FULL_EPSILON = 15.456
"""What the paper's central noise costs over 50 rounds at δ = 1e-5."""
SERVER_RATES = (2.0, 4.0, 8.0, 16.0)
ADAM_RATES = (0.003, 0.01, 0.03)
STARTING_CLIPS = (0.01, 0.1, 1.0, 10.0)
SWEEP_SEEDS = 2
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


FREE: Changes = {"algorithm.numerator": "free"}


def _rules() -> Iterator[Variant]:
    for base, name in (
        ("mnist-cdp-fedexp", "MNIST, CDP"),
        ("mnist-ldp-gaussian-fedexp", "MNIST, LDP (Gaussian)"),
        ("synthetic-cdp-fedexp", "Synthetic, CDP"),
        ("synthetic-ldp-gaussian-fedexp", "Synthetic, LDP (Gaussian)"),
    ):
        quick = base in ("mnist-cdp-fedexp", "synthetic-cdp-fedexp", "synthetic-ldp-gaussian-fedexp")
        yield Variant("rule", f"{name}, the paper's numerator", base, in_quick=quick)
        yield Variant("rule", f"{name}, free rule", base, FREE, in_quick=quick)


def _privunit() -> Iterator[Variant]:
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


def _sweep() -> Iterator[Variant]:
    for epsilon in EPSILONS:
        target = _at(epsilon)

        def at(
            label: str, base: str, changes: Changes, method: str, in_quick: bool = False, epsilon=epsilon
        ) -> Variant:
            return Variant("sweep", f"ε = {epsilon:g}, {label}", base, changes, method, epsilon, SWEEP_SEEDS, in_quick)

        quick = epsilon == FULL_EPSILON
        yield at("DP-FedEXP", "mnist-cdp-fedexp", FREE | target, "DP-FedEXP", quick)
        yield at(
            "DP-FedEXP, adaptive clip from 1",
            "mnist-cdp-fedexp",
            FREE | target | _adaptive(1.0),
            "DP-FedEXP, no knobs",
            quick,
        )
        yield at("DP-FedAvg", "mnist-cdp-fedavg", target, "DP-FedAvg", quick)
        for label, changes, method in _tuned_servers(target):
            yield at(label, "mnist-cdp-fedavg", changes, method)


def _at(epsilon: float) -> Changes:
    return {"algorithm.noise_multiplier": None, "algorithm.target_epsilon": epsilon}


def _adaptive(start: float) -> Changes:
    return {"algorithm.clip": "adaptive", "algorithm.adaptive": {"initial": start}}


def _tuned_servers(target: Changes) -> Iterator[tuple[str, Changes, str]]:
    """What people tune in place of FedEXP's step size, at its clip."""
    for rate in SERVER_RATES:
        changes = {**target, "algorithm.server_rate": rate, "algorithm.clip": 0.3}
        yield f"DP-FedAvg, clip 0.3, server rate {rate:g}", changes, "best fixed server rate"
    for rate in ADAM_RATES:
        changes = {**target, "algorithm.name": "dp_fedadam", "algorithm.server_rate": rate, "algorithm.clip": 0.3}
        yield f"DP-FedAdam, clip 0.3, server rate {rate:g}", changes, "best DP-FedAdam"


def _no_knobs() -> Iterator[Variant]:
    target = _at(FULL_EPSILON)
    for start in STARTING_CLIPS:
        changes = FREE | target | _adaptive(start)
        label = f"CDP-FedEXP, adaptive clip from {start:g}"
        yield Variant("no knobs", label, "mnist-cdp-fedexp", changes, "no knobs", start, in_quick=start in (1.0, 10.0))
    tuned = FREE | target
    yield Variant("no knobs", "CDP-FedEXP, tuned clip 0.3", "mnist-cdp-fedexp", tuned, "tuned DP-FedEXP", in_quick=True)
    yield Variant("no knobs", "DP-FedAvg, tuned clip 1", "mnist-cdp-fedavg", target, "tuned DP-FedAvg", in_quick=True)
    for label, changes, method in _tuned_servers(target):
        yield Variant("no knobs", label, "mnist-cdp-fedavg", changes, method, seeds=SWEEP_SEEDS)


def _network() -> Iterator[Variant]:
    target = _at(FULL_EPSILON)
    relu = {**FREE, **target, "model.name": "mnist_relu_net", "data.standardise": True}
    yield Variant("network", "the paper's network", "mnist-cdp-fedexp", FREE | target, in_quick=True)
    yield Variant("network", "ReLU and standardised inputs, η_l = 0.1, C = 0.3", "mnist-cdp-fedexp", relu)
    better = {**relu, "local.lr": 0.3, "algorithm.clip": 0.5}
    label = "ReLU and standardised inputs, η_l = 0.3, C = 0.5"
    yield Variant("network", label, "mnist-cdp-fedexp", better, in_quick=True)
    label = f"{label}, 100 rounds at the same total ε"
    yield Variant("network", label, "mnist-cdp-fedexp", {**better, "run.rounds": 100})


def _participation() -> Iterator[Variant]:
    sampled = {
        **_at(8.0),
        "algorithm.adjacency": "add-remove",
        "participation.kind": "poisson",
        "participation.rate": 0.1,
    }
    yield Variant("participation", "CDP-FedEXP, free rule, C = 0.3", "mnist-cdp-fedexp", FREE | sampled)
    yield Variant("participation", "DP-FedAvg, C = 1", "mnist-cdp-fedavg", sampled)


VARIANTS: tuple[Variant, ...] = (*_rules(), *_privunit(), *_sweep(), *_no_knobs(), *_network(), *_participation())
