"""Fig. 1 (left): distance to the known optimum on the synthetic problem."""

from __future__ import annotations

from dpfedexp.paper import comparison
from dpfedexp.paper.cells import Cell
from dpfedexp.paper.comparison import LAST, Comparison
from dpfedexp.paper.published import ALGORITHMS, SETTINGS
from dpfedexp.paper.scale import Scale
from dpfedexp.paper.seeds import note_on_tests
from dpfedexp.paper.store import Results
from dpfedexp.report.document import Chart, Claim, Section, Table


def cells(scale: Scale) -> list[Cell]:
    return list(comparison.cells("synthetic", scale))


def section(scale: Scale, results: Results) -> Section:
    seen = Comparison.of("synthetic", scale, results)
    return Section(
        name="synthetic",
        title="Synthetic problem: distance to the optimum (Fig. 1 left)",
        text=[
            "Linear regression with a common optimum w*, 1000 clients with one sample each, d = 500 (CDP) and 100 (LDP), 50 rounds "
            f"of 20 local steps from w = 0. ‖w − w*‖ is {LAST}: mean (sd) over {scale.seeds} seeds; smaller is better."
        ],
        tables=[
            _table(seen),
            seen.gains_table("Does DP-FedEXP come closer than the others?", note_on_tests(scale.seeds)),
        ],
        charts=[
            Chart(
                "synthetic",
                "Distance to the optimum over rounds",
                "Mean over seeds, band of one standard deviation.",
                seen.panels("distance", "‖w − w*‖", log_y=True),
            )
        ],
        claims=_claims(seen),
        notes=NOTES,
        command=scale.command("synthetic"),
        configuration=seen.configuration(),
        privacy=seen.privacy(),
        data={"cells": seen.data()},
    )


def _table(seen: Comparison) -> Table:
    rows = []
    for setting, name in SETTINGS.items():
        order = sorted(ALGORITHMS, key=lambda a: seen.spread((setting, a)).mean)
        for algorithm, label in ALGORITHMS.items():
            key = (setting, algorithm)
            settings = seen.settings[key][0]
            rows.append(
                [
                    name,
                    label,
                    seen.spread(key).show(),
                    f"{order.index(algorithm) + 1}",
                    f"{PAPER_RANK[setting][algorithm]}",
                    f"{settings.local.lr:g}, {settings.algorithm.clip:g}",
                    *seen.epsilons(key),
                ]
            )
    columns = ["setting", "algorithm", "distance", "rank", "paper's rank", "η_l, C", "ε per round", "ε total"]
    note = "The paper shows these curves in a figure and prints no values, so ranks are compared."
    return Table("Distance to the optimum", columns, rows, note)


PAPER_RANK = {
    "cdp": {"fedexp": 1, "fedavg": 3, "scaffold": 2},
    "ldp-gaussian": {"fedexp": 1, "fedavg": 2, "scaffold": 3},
    "ldp-privunit": {"fedexp": 1, "fedavg": 2, "scaffold": 3},
}
"""§5: DP-FedEXP is best everywhere, and DP-SCAFFOLD improves on DP-FedAvg only in CDP on the synthetic problem."""


def _claims(seen: Comparison) -> list[Claim]:
    claims = []
    for setting, name in SETTINGS.items():
        means = {algorithm: seen.spread((setting, algorithm)).mean for algorithm in ALGORITHMS}
        shown = ", ".join(f"{ALGORITHMS[a]} {mean:.2f}" for a, mean in means.items())
        claims.append(Claim(f"{name}: DP-FedEXP is the closest", shown, min(means, key=means.__getitem__) == "fedexp"))
        test = seen.gain(setting, "fedavg")
        claims.append(Claim(f"{name}: DP-FedEXP closer than DP-FedAvg, paired over seeds", test.show(), test.gain > 0))
        scaffold_better = PAPER_RANK[setting]["scaffold"] < PAPER_RANK[setting]["fedavg"]
        relation = "closer" if scaffold_better else "no closer"
        claims.append(
            Claim(
                f"{name}: DP-SCAFFOLD {relation} than DP-FedAvg, as the paper says",
                f"{means['scaffold']:.2f} against {means['fedavg']:.2f}",
                (means["scaffold"] < means["fedavg"]) == scaffold_better,
            )
        )
    return claims


NOTES = (
    "The objective is ½(xᵀw − y)²; without the ½ the printed rates are unstable at d = 500. "
    "CDP DP-FedAvg runs at η_l = 0.001: at the printed 0.003 most clients diverge (see the grid).",
    "The paper leaves the details of DP-SCAFFOLD at client level open. Ours passes its closest point in the local settings before "
    "the last round and moves away again, where the other two still approach.",
)
