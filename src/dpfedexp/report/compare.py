"""`plan` compares settings before a run, and `compare` compares runs."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from dpfedexp.algorithms import Algorithm, cdp_fedexp
from dpfedexp.algorithms.probe import bind
from dpfedexp.algorithms.round import Full, LargerCohort, Participation, larger_cohort, public_population
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.core.modules import Layout
from dpfedexp.engine.advice import preflight
from dpfedexp.engine.fit import FIT_LOCAL, FIT_ROUNDS, fit
from dpfedexp.engine.plan import EPSILONS, ROUNDS, Plan, default_delta, number, plans
from dpfedexp.engine.plot import Chart, Panel, main_metric, name_of, over_rounds
from dpfedexp.engine.run import Run
from dpfedexp.engine.train import train
from dpfedexp.errors import checked, nearest, require
from dpfedexp.mechanisms import Secure
from dpfedexp.report.document import Section, Table
from dpfedexp.report.page import RunRecord, runs_section
from dpfedexp.trainers.task import Clients

COLUMNS = ("ε", "rounds", "cohort", "z", "noise/clip", "best signal", "clients needed", "verdict")
FIELDS = ("epsilon", "rounds", "cohort", "noise_multiplier", "best_signal", "clients_needed", "verdict")
LEGEND = (
    "noise/clip: norm of the noise in the mean of one round, over the clip C. Best signal: signal over noise of all rounds "
    "together if all clients sent the same update at the clip in every round; no data do better. Clients needed: for a best "
    "signal of 1."
)
SHARED = tuple(f"algorithm.{name}" for name in ("mechanism", "clip", "noise_multiplier", "target_epsilon", "delta"))
"""Settings of every private algorithm. Its other settings follow from its name."""


@checked
def plan(
    model: nn.Module | int,
    clients: Clients | int,
    algorithm: Algorithm | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    rounds: int = FIT_ROUNDS,
    local: LocalOptimizer | None = None,
    participation: Participation | None = None,
    secure: Secure = False,
    **others: Any,
) -> Section:
    """Show how much signal to expect of `fit(…)` or `train(…)` with the same arguments. No data are read, and nothing is spent.

    Args:
        model: the model, or its number of trained parameters.
        clients: the `Federation`, or the number of clients.
        algorithm: the algorithm of `train`; without it the plan is that of `fit`.
        others: arguments of `fit` and `train` that hardly change the plan; evaluations by the clients add less than 1% of noise.

    Returns:
        The table and the advice; print it. `data` holds the numbers.

    >>> plan(1000, 3, epsilon=8).data["advice"][0]["code"]
    'few-clients'
    """
    known = {*inspect.signature(fit).parameters, *inspect.signature(train).parameters}
    wrong = next((name for name in others if name not in known), None)
    require(wrong is None, f"plan has no argument {wrong!r}.{nearest(str(wrong), known)}")
    require(
        algorithm is None or (algorithm.private and epsilon is None and delta is None),
        "algorithm is not private, or epsilon or delta is given with it; write cdp_fedexp(clip=0.3, target_epsilon=8.0).",
    )
    dimension = Layout.of(model).dimension if isinstance(model, nn.Module) else model
    present = clients if isinstance(clients, int | str) else len(clients)
    everyone = participation or Full()
    if isinstance(everyone, LargerCohort):
        everyone, population = larger_cohort(everyone, present)
    else:
        population = public_population("replace-one" if algorithm is None else algorithm.adjacency, everyone, present)
    if algorithm is None:
        at = default_delta(population) if delta is None else delta
        algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0 if epsilon is None else epsilon, delta=at)
        local = FIT_LOCAL
    mechanism, *_ = bind(algorithm, local, dimension, population, everyone, rounds, secure)
    chosen = Plan.of(algorithm, everyone, population, dimension, rounds, secure, mechanism)
    # Calibrating the noise of sampled rounds takes a second for each row.
    rate, counts = (chosen.sampling.rate, {rounds}) if chosen.sampling.kind != "full" else (1.0, {*ROUNDS, rounds})
    rows = plans(
        population,
        dimension,
        delta=algorithm.delta,
        mechanism=algorithm.mechanism,
        epsilons=sorted({*EPSILONS, round(chosen.epsilon, 3)}),
        rounds=sorted(counts),
        rates=[rate],
    )
    return plan_section(list(rows), chosen)


def plan_section(rows: Sequence[Plan], chosen: Plan) -> Section:
    def cells(one: Plan) -> list[str]:
        numbers = (one.noise_multiplier, one.noise_share, one.best_signal, one.clients_needed)
        shown = ["–" if value is None else number(value) for value in numbers]
        cohort = "all" if one.sampling.kind == "full" else number(one.cohort)
        return [f"{one.epsilon:g}", str(one.rounds), cohort, *shown, one.verdict or "not known"]

    first, advice = rows[0], preflight(chosen)
    delta, mechanism = first.algorithm.delta, first.algorithm.mechanism
    who = "all clients" if chosen.sampling.kind == "full" else f"{number(chosen.cohort)} clients"
    facts = {"clients": first.population, "parameters": first.dimension, "delta": delta, "mechanism": mechanism}
    told = [{"noise_over_clip": one.noise_share} | {name: getattr(one, name) for name in FIELDS} for one in rows]
    return Section(
        "plan",
        f"{first.population:,} clients, {first.dimension:,} parameters, δ = {delta:g}, {mechanism}",
        tables=[Table("Signal to expect", COLUMNS, [cells(one) for one in rows], LEGEND)],
        notes=[
            f"At ε = {number(chosen.epsilon)} over {chosen.rounds} rounds with {who} in each:",
            *([f"{one.level.capitalize()}: {one.sentence}" for one in advice] or ["No warnings."]),
        ],
        data={**facts, "rows": told, "advice": [one.to_json() for one in advice]},
    )


@checked
def compare(
    runs: Sequence[Run | Path | str] | Mapping[str, Run | Path | str],
    metric: str | None = None,
    *,
    over: Literal["round", "epsilon"] = "round",
) -> Section:
    """Compare runs: a table of their last values, and a plot of one metric.

    Args:
        runs: runs or their folders. A dict names them; otherwise their names are the settings in which they differ.
        metric: the metric of the plot, such as "test_loss"; by default the test accuracy, or the first metric.
        over: "round", or "epsilon" for a plot over ε.

    Returns:
        The comparison: print it for the table, and call `plot()` for a matplotlib figure.
    """
    require(over in ("round", "epsilon"), f"over is {over!r}; it must be 'round' or 'epsilon'.")
    require(
        isinstance(runs, Sequence | Mapping) and not isinstance(runs, str) and len(runs) > 0,
        f"runs is {runs!r}; pass a list of runs or of their folders, or a dict of them by name.",
    )
    given = list(runs.values() if isinstance(runs, Mapping) else runs)
    loaded = [one if isinstance(one, Run) else Run.load(one) for one in given]
    names = (
        list(map(str, runs))
        if isinstance(runs, Mapping)
        else _names(loaded, ["run" if isinstance(one, Run) else Path(one).name for one in given])
    )
    chosen = main_metric([run.history for run in loaded], metric, "metric")
    x, label = ("epsilon_total", "ε so far") if over == "epsilon" else ("round", "round")
    records = [
        RunRecord(name, run.history, "", "", run.privacy.epsilon_total, run.advice)
        for run, name in zip(loaded, names, strict=True)
    ]
    panel = Panel("", label, name_of(chosen), [over_rounds(one.history, chosen, one.name, x) for one in records])
    return replace(runs_section(records), charts=[Chart("comparison", name_of(chosen), "", [panel])])


def _names(runs: Sequence[Run], usual: Sequence[str]) -> list[str]:
    """Name runs by the settings in which they differ, or else by their usual names; equal names get numbers."""
    settings: list[dict[str, Any]] = [{} if run.facts is None else run.facts.settings for run in runs]

    def label(name: str, own: dict[str, Any]) -> str:
        within = name.startswith("algorithm.") and name not in SHARED
        others = [one.get(name) for one in settings if not within or one.get("algorithm") == own["algorithm"]]
        value = own[name]
        if value is None or all(one == value for one in others):
            return ""
        text = f"{value:g}" if isinstance(value, float) else str(value).replace("AdaptiveClip", "adaptive")
        return text if name == "algorithm" else f"{name.rpartition('.')[2]}={text}"

    found = [", ".join(filter(None, (label(name, own) for name in own))) for own in settings]
    labels = [one or name for one, name in zip(found, usual, strict=True)]
    return [one if labels.count(one) == 1 else f"{one} ({number})" for number, one in enumerate(labels, 1)]
