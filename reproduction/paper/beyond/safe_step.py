"""What does the safe step cost where the paper's is at its best? Both on the paper's problems."""

from __future__ import annotations

from collections.abc import Iterator

from dpfedexp.report.document import Claim, Table
from reproduction.paper.beyond.finished import Answer, Finished, Variant
from reproduction.paper.beyond.variants import SAFE

SETTINGS = (
    ("synthetic-cdp", "Synthetic, CDP"),
    ("synthetic-ldp-gaussian", "Synthetic, LDP (Gaussian)"),
    ("synthetic-ldp-privunit", "Synthetic, LDP (PrivUnit)"),
    ("mnist-cdp", "MNIST, CDP"),
)


def variants() -> Iterator[Variant]:
    for base, name in SETTINGS:
        quick = base == "synthetic-cdp"
        yield Variant("step", f"{name}, DP-FedAvg", f"{base}-fedavg", in_quick=quick)
        yield Variant("step", f"{name}, the paper's step", f"{base}-fedexp", in_quick=quick)
        yield Variant("step", f"{name}, safe step", f"{base}-fedexp", SAFE, in_quick=quick)


def answer(group: list[Finished]) -> Answer:
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
