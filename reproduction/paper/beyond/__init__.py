"""Beyond the paper, a file to a question: the free rule, the safe step, better PrivUnit, stronger privacy, nothing to tune, a
better network, fewer clients a round."""

from __future__ import annotations

from typing import Any

from dpfedexp.report.document import Section
from reproduction.paper.beyond import free_rule, network, no_knobs, participation, privunit, safe_step, stronger_privacy
from reproduction.paper.beyond.finished import Finished, Variant
from reproduction.paper.results.collected import Results
from reproduction.paper.results.planned import PlannedRun, trainings
from reproduction.paper.results.size import Size
from reproduction.paper.results.spread import note_on_tests

QUESTIONS = {
    "rule": free_rule,
    "step": safe_step,
    "privunit": privunit,
    "sweep": stronger_privacy,
    "no knobs": no_knobs,
    "network": network,
    "participation": participation,
}


def variants(size: Size) -> list[Variant]:
    every = (variant for question in QUESTIONS.values() for variant in question.variants())
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
    made = {name: QUESTIONS[name].answer(group) for name, group in groups.items() if group}
    # Small runs keep the order of the methods, not the accuracies that the other claims are about.
    claimed = ("rule", "sweep") if size.quick else tuple(made)
    return Section(
        name="beyond",
        title="Beyond the paper",
        text=[
            "On MNIST the metric is test accuracy in per cent, on the synthetic problem the distance to the optimum, both averaged "
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
