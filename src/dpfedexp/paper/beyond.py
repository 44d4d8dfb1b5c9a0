"""Beyond the paper: the free rule, better PrivUnit, stronger privacy, nothing to tune, a better network, fewer clients a round."""

from __future__ import annotations

from typing import Any

from dpfedexp.paper.beyond_groups import GROUPS, Seen
from dpfedexp.paper.beyond_runs import VARIANTS, Variant
from dpfedexp.paper.cells import Cell, TrainingCell
from dpfedexp.paper.scale import Scale
from dpfedexp.paper.seeds import note_on_tests
from dpfedexp.paper.store import Results
from dpfedexp.report.document import Section


def variants(scale: Scale) -> list[Variant]:
    return [v for v in VARIANTS if (v.in_quick or not scale.quick) and scale.includes(v.base.partition("-")[0])]


def cells(scale: Scale) -> list[Cell]:
    return [TrainingCell(settings) for v in variants(scale) for settings in scale.runs(v.settings, v.seeds)]


def section(scale: Scale, results: Results) -> Section:
    seen = [Seen(v, results.training(scale.runs(v.settings, v.seeds))) for v in variants(scale)]
    groups = {name: [one for one in seen if one.variant.group == name] for name in GROUPS}
    made = {name: GROUPS[name](group) for name, group in groups.items() if group}
    # Small runs keep the order of the methods, not the accuracies that the other claims are about.
    claimed = ("rule", "sweep") if scale.quick else tuple(made)
    return Section(
        name="beyond",
        title="Beyond the paper",
        text=[
            "On MNIST the metric is test accuracy in per cent, on the synthetic problem the distance to the optimum, both averaged "
            f"over the last 5 rounds: mean (sd) over up to {scale.seeds} seeds. A positive gain is an improvement."
        ],
        tables=[table for part in made.values() for table in part.tables],
        charts=[chart for part in made.values() for chart in part.charts],
        claims=[claim for name, part in made.items() if name in claimed for claim in part.claims],
        notes=[*scale.notes, note_on_tests(scale.seeds), *NOTES],
        command=scale.command("beyond"),
        configuration={one.variant.label: scale.runs(one.variant.settings)[0].to_toml() for one in seen},
        privacy={one.variant.label: one.results[0]["privacy"] for one in seen},
        data={"variants": [_data(one) for one in seen]},
    )


def _data(one: Seen) -> dict[str, Any]:
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
    "Another data set in MNIST's file format takes its place everywhere: dpfedexp paper beyond --data FOLDER.",
)
