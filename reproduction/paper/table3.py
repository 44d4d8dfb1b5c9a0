"""Table 3: test accuracy on MNIST, with the right half of Fig. 1, which shows the same runs."""

from __future__ import annotations

from dpfedexp.report.document import Claim, Section, Table
from reproduction.paper import comparison
from reproduction.paper.comparison import LAST, Comparison
from reproduction.paper.figure1 import accuracy_chart
from reproduction.paper.published import ALGORITHMS, SETTINGS, TABLE_3
from reproduction.paper.results.collected import Results
from reproduction.paper.results.planned import PlannedRun
from reproduction.paper.results.size import Size
from reproduction.paper.results.spread import note_on_tests

CLOSE = 0.5
"""Percentage points below the paper's mean that still count as reproduced."""


def planned(size: Size) -> list[PlannedRun]:
    return comparison.planned("mnist", size, ("round", "test_accuracy"))


def section(size: Size, results: Results) -> Section:
    seen = Comparison.of("mnist", size, results)
    return Section(
        name="mnist",
        title="MNIST: test accuracy (Fig. 1 right, Table 3)",
        text=[
            "1000 clients with 60 images each, class mix Dirichlet(0.3), 50 rounds of 10 full-batch steps, the paper's networks "
            "(d = 5046 and 237) and its selected (η_l, C). "
            f"Test accuracy in percent is {LAST}: mean (sd) over {size.seeds} seeds."
        ],
        tables=[_table(seen), _gains(seen, size)],
        charts=[accuracy_chart(seen)],
        claims=_claims(seen, against_paper=results.on_mnist and not size.quick),
        notes=[*([] if results.on_mnist else [OTHER_IMAGES]), *size.notes, *NOTES],
        command=size.command("mnist"),
        configuration=seen.configuration(),
        privacy=seen.privacy(),
        data={"cells": seen.data()},
    )


def _table(seen: Comparison) -> Table:
    rows = []
    for key, (mean, sd) in TABLE_3.items():
        ours, settings = seen.spread(key), seen.settings[key][0]
        rows.append(
            [
                SETTINGS[key[0]],
                ALGORITHMS[key[1]],
                ours.show(),
                f"{mean:.2f} ({sd:.2f})",
                f"{ours.mean - mean:+.2f}",
                f"{settings.local.lr:g}, {settings.algorithm.clip:g}",
                *seen.epsilons(key),
            ]
        )
    columns = ["setting", "algorithm", "accuracy", "paper", "difference", "η_l, C", "ε per round", "ε total"]
    return Table("Table 3: test accuracy on MNIST", columns, rows)


def _gains(seen: Comparison, size: Size) -> Table:
    published = {
        (setting, other): TABLE_3[setting, "fedexp"][0] - TABLE_3[setting, other][0]
        for setting in SETTINGS
        for other in ("fedavg", "scaffold")
    }
    return seen.gains_table("Does DP-FedEXP beat the others? Percentage points", note_on_tests(size.seeds), published)


def _claims(seen: Comparison, against_paper: bool) -> list[Claim]:
    claims = []
    for setting, name in SETTINGS.items():
        ours, theirs = seen.spread((setting, "fedexp")).mean, TABLE_3[setting, "fedexp"][0]
        if against_paper:
            text = f"{name}: DP-FedEXP within {CLOSE} points of the paper's mean or above it"
            claims.append(Claim(text, f"{ours:.2f} against {theirs:.2f}", ours >= theirs - CLOSE))
        test = seen.gain(setting, "fedavg")
        claims.append(Claim(f"{name}: DP-FedEXP above DP-FedAvg, paired over seeds", test.show(), test.gain > 0))
    return claims


OTHER_IMAGES = "These images are not MNIST's: the paper's numbers stand beside them only for orientation."

NOTES = (
    "DP-SCAFFOLD at client level: the clients' control variates follow their own clipped update and never leave them; the "
    "server's is derived from what is released anyway. The paper leaves these details open, so its row is a comparison, "
    "not a reproduction.",
    "The paper's Table 1 gives ε per round in the local settings; the total over all rounds stands beside it here.",
)
