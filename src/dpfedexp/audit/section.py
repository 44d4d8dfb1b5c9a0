"""The findings of an audit as a section of a report: table, picture, and a claim for every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dpfedexp.audit.cost import Cost
from dpfedexp.audit.result import Result
from dpfedexp.report.document import Chart, Claim, Panel, Section, Series, Table

_KINDS = {
    "mechanism": "Mechanism audit: two worst-case neighbours, told apart by the best test",
    "density": "Density-ratio check of PrivUnit",
    "training": "Training audit: one run with many canaries",
}


def audit_section(results: Sequence[Result], command: str) -> Section:
    tables = []
    for kind, title in _KINDS.items():
        rows = [_row(result) for result in results if result.kind == kind]
        if rows:
            tables.append(
                Table(title, ["audited", "unit", "lower bound", "claim", "reached", "confidence", "how"], rows)
            )
    broken = [result for result in results if not result.holds]
    claims = [
        Claim(
            "No measured lower bound exceeds its claim",
            f"{len(results) - len(broken)} of {len(results)}" + "".join(f"; {r.name} ({r.unit})" for r in broken),
            not broken,
        )
    ]
    return Section(
        name="audit",
        title="Privacy measured from outside",
        text=[
            "A lower bound is what an attack has proven, at the stated confidence; a claim is what the accountant says no attack "
            "can exceed. A bound above its claim would mean a bug; a bound far below it means an attack without power."
        ],
        tables=tables,
        charts=[_chart(results)],
        claims=claims,
        command=command,
        data={"results": [asdict(r) | {"holds": r.holds} for r in results]},
    )


def cost_section(costs: Sequence[Cost], command: str) -> Section:
    rows = [
        [
            f"{cost.dimension}",
            f"{1e6 * cost.plain:.0f}",
            f"{1e6 * cost.secure:.0f}",
            f"{cost.factor:.2f}",
            "" if cost.strict is None else f"{1e3 * cost.strict:.1f}",
        ]
        for cost in costs
    ]
    columns = ["d", "plain, µs", "secure, µs", "secure / plain", "strict, ms"]
    return Section(
        name="noise-cost",
        title="What secure noise costs",
        tables=[Table("Time of one central release on one thread", columns, rows)],
        command=command,
        data={"costs": [asdict(cost) for cost in costs]},
    )


def _row(result: Result) -> list[str]:
    mark = "✓" if result.holds else "✗ EXCEEDED"
    reached = f"{100 * result.share:.0f}%" if result.claim > 0 else mark
    confidence = "exact" if result.confidence == 1.0 else f"{result.confidence:.6g}"
    return [
        result.name,
        result.unit,
        f"{result.lower:.4f}",
        f"{result.claim:.4f}",
        reached,
        confidence,
        f"{mark} {result.detail}",
    ]


def _chart(results: Sequence[Result]) -> Chart:
    panels = []
    for family in ("central Gaussian", "local Gaussian", "PrivUnit"):
        measured = [r for r in results if r.curve and r.name.startswith(family)]
        if measured:
            deltas = [point[0] for point in measured[0].curve]
            lines = [Series("claim", deltas, [point[2] for point in measured[0].curve], dashed=True)]
            lines += [
                Series(r.name.removeprefix(f"{family}, "), deltas, [point[1] for point in r.curve])
                for r in measured
                if [point[2] for point in r.curve] == [point[2] for point in measured[0].curve]
            ]
            panels.append(Panel(family, "δ", "ε of one round", lines, log_x=True))
    return Chart(
        "audit",
        "Lower bounds on ε beside the claim",
        "Solid: proven by the best test at this δ. Dashed: what is claimed for the first of them.",
        panels,
    )
