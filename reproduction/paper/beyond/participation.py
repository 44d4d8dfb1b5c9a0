"""What happens when only a part of the clients takes part in a round?"""

from __future__ import annotations

from collections.abc import Iterator

from dpfedexp.report.document import Table
from reproduction.paper.beyond.finished import Answer, Finished, Variant
from reproduction.paper.beyond.variants import FREE, at_epsilon


def variants() -> Iterator[Variant]:
    sampled = {
        **at_epsilon(8.0),
        "algorithm.adjacency": "add-remove",
        "participation.kind": "poisson",
        "participation.rate": 0.1,
    }
    yield Variant("participation", "CDP-FedEXP, free rule, C = 0.3", "mnist-cdp-fedexp", FREE | sampled)
    yield Variant("participation", "DP-FedAvg, C = 1", "mnist-cdp-fedavg", sampled)


def answer(group: list[Finished]) -> Answer:
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
