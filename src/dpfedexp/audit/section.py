"""The findings of an audit as a section of a report: table, picture, and a claim for every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dpfedexp.audit.cost import Cost
from dpfedexp.audit.result import Result
from dpfedexp.engine.plot import Chart, Panel, Series
from dpfedexp.report.document import Claim, Section, Table

_KINDS = {
    "mechanism": "Mechanism audit: two worst-case neighbours, told apart by the best test",
    "density": "PrivUnit's densities, and its sampler",
    "noise": "Noise sources",
    "black box": "Black-box audit: whole runs, every client a canary in a coordinate of its own",
    "isolation": "Isolation: what else moves when one client's data do",
    "training": "Training audit: one run, the coins of many canaries guessed",
}
_COLUMNS = ["audited", "unit", "lower bound", "claim", "reached", "tight claim would give", "outcome", "how"]


def audit_section(results: Sequence[Result], command: str) -> Section:
    tables = []
    for kind, title in _KINDS.items():
        rows = [_row(result) for result in results if result.kind == kind]
        if rows:
            tables.append(Table(title, _COLUMNS, rows))
    return Section(
        name="audit",
        title="Privacy measured from outside",
        text=[
            "A lower bound is what an attack has proven, at a confidence that the JSON states for each; a claim is what the "
            "accountant says no attack can exceed. BROKEN: the bound is above the claim. NO POWER: the attack reached less than "
            "it would reach but for bad luck against a tight claim, so that it says nothing. Where there ought to be nothing at "
            "all, the claim is the limit of chance, and beside it stands the smallest effect that would have been noticed."
        ],
        tables=tables,
        charts=[_chart(results)],
        claims=_claims(results),
        command=command,
        data={"results": [result.to_json() for result in results]},
    )


def _claims(results: Sequence[Result]) -> list[Claim]:
    audited = [result for result in results if not result.skipped]

    def claim(text: str, wrong: str) -> Claim:
        bad = [f"{r.name} ({r.unit})" for r in audited if r.outcome == wrong]
        return Claim(text, "; ".join([f"{len(audited) - len(bad)} of {len(audited)}", *bad]), not bad)

    found = [
        claim("No measured lower bound exceeds its claim", "BROKEN"),
        claim("Every attack has power, or is one-sided by its nature", "NO POWER"),
    ]
    left_out = [f"{r.name} ({r.skipped.rstrip('.')})" for r in results if r.skipped]
    return [*found, *([Claim("Not audited here", "; ".join(left_out), True)] if left_out else [])]


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


_MARKS = {"holds": "✓ holds", "BROKEN": "✗ BROKEN", "NO POWER": "✗ NO POWER", "not audited": "– not audited"}


def _row(result: Result) -> list[str]:
    if result.skipped:
        return [result.name, "", "", "", "", "", _MARKS[result.outcome], result.detail]
    return [
        result.name,
        result.unit,
        f"{result.lower:.4f}",
        f"{result.claim:.4f}",
        f"{100 * result.share:.0f}%" if result.claim > 0 and result.power is not None else "",
        result.could,
        _MARKS[result.outcome],
        result.detail,
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
