"""How far does a better-conditioned network get at the same ε?"""

from __future__ import annotations

from collections.abc import Iterator

from dpfedexp.report.document import Claim, Table
from reproduction.paper.beyond.finished import Answer, Finished, Variant
from reproduction.paper.beyond.variants import FREE, FULL_EPSILON, at_epsilon

NETWORK_TARGET = 96.5


def variants() -> Iterator[Variant]:
    target = at_epsilon(FULL_EPSILON)
    relu = {**FREE, **target, "model.name": "mnist_relu_net", "data.standardise": True}
    yield Variant("network", "the paper's network", "mnist-cdp-fedexp", FREE | target, in_quick=True)
    yield Variant("network", "ReLU and standardised inputs, η_l = 0.1, C = 0.3", "mnist-cdp-fedexp", relu)
    better = {**relu, "local.lr": 0.3, "algorithm.clip": 0.5}
    label = "ReLU and standardised inputs, η_l = 0.3, C = 0.5"
    yield Variant("network", label, "mnist-cdp-fedexp", better, in_quick=True)
    label = f"{label}, 100 rounds at the same total ε"
    yield Variant("network", label, "mnist-cdp-fedexp", {**better, "run.rounds": 100})


def answer(group: list[Finished]) -> Answer:
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
