"""Does the step size cost anything? The free rule beside the paper's numerator."""

from __future__ import annotations

from collections.abc import Iterator

from dpfedexp.report.document import Claim, Table
from reproduction.paper.beyond.finished import Answer, Finished, Variant
from reproduction.paper.beyond.variants import FREE


def variants() -> Iterator[Variant]:
    for base, name in (
        ("mnist-cdp-fedexp", "MNIST, CDP"),
        ("mnist-ldp-gaussian-fedexp", "MNIST, LDP (Gaussian)"),
        ("synthetic-cdp-fedexp", "Synthetic, CDP"),
        ("synthetic-ldp-gaussian-fedexp", "Synthetic, LDP (Gaussian)"),
    ):
        quick = base in ("mnist-cdp-fedexp", "synthetic-cdp-fedexp", "synthetic-ldp-gaussian-fedexp")
        yield Variant("rule", f"{name}, the paper's numerator", base, in_quick=quick)
        yield Variant("rule", f"{name}, free rule", base, FREE, in_quick=quick)


def answer(group: list[Finished]) -> Answer:
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
