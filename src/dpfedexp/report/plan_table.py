"""`plan`: how much signal to expect of a run, as a table; `dpfedexp plan` prints the same table."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.probe import Extras, bind, evaluation_count
from dpfedexp.algorithms.round import Full, LargerCohort, Participation, larger_cohort, public_population
from dpfedexp.core.local_optimizer import LocalOptimizer, Sgd
from dpfedexp.engine.advice import preflight
from dpfedexp.engine.fit import LOCAL_STEPS, automatic_algorithm, fit, rounds_for, trained_parameters
from dpfedexp.engine.plan import EPSILONS, ROUNDS, Advice, Plan, number, plans
from dpfedexp.engine.train import train
from dpfedexp.errors import checked, is_count, nearest, require
from dpfedexp.evaluation import Evaluation, Evaluations
from dpfedexp.mechanisms import Secure
from dpfedexp.report.document import as_text, print_advice
from dpfedexp.trainers.task import Clients

COLORS = {"clear": "green", "noisy rounds": "yellow", "mostly noise": "dark_orange", "no signal": "red", None: "dim"}
LEGEND = (
    "noise/clip: norm of the noise in the mean of one round, over the clip C. Best signal: signal over noise of all rounds "
    "together if all clients pushed the same way by the whole clip in every round; no data do better. Clients needed: for a best "
    "signal of 1."
)


@dataclass(frozen=True, repr=False)
class PlanTable:
    """Plans for several ε and numbers of rounds, and advice on one of them. Its text is the table of `dpfedexp plan`.

    Attributes:
        rows: a plan for each ε and number of rounds.
        chosen: the plan of the run, which the advice is about.
    """

    rows: Sequence[Plan]
    chosen: Plan

    @property
    def advice(self) -> list[Advice]:
        """The advice on the chosen plan, warnings first."""
        return preflight(self.chosen)

    def __repr__(self) -> str:
        return as_text(self.show)

    def show(self, console: Console) -> None:
        """Print the table, its legend and the advice."""
        first, chosen = self.rows[0], self.chosen
        title = f"{first.population:,} clients, {first.dimension:,} parameters, δ = {first.algorithm.delta:g}"
        title += f", {first.algorithm.mechanism}"
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in ("ε", "rounds", "cohort", "z", "noise/clip", "best signal", "clients needed"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for place, one in enumerate(self.rows):
            follows = place + 1 < len(self.rows) and self.rows[place + 1].epsilon == one.epsilon
            numbers = (one.noise_multiplier, one.noise_share, one.best_signal, one.clients_needed)
            table.add_row(
                f"{one.epsilon:g}",
                str(one.rounds),
                "all" if one.sampling.kind == "full" else number(one.cohort),
                *("–" if value is None else number(value) for value in numbers),
                f"[{COLORS[one.verdict]}]{one.verdict or 'not known'}[/]",
                end_section=not follows,
            )
        console.print(table)
        console.print(f"[dim]{LEGEND}[/]\n", highlight=False)
        who = "all of them" if chosen.sampling.kind == "full" else f"{number(chosen.cohort)} of them"
        console.print(
            f"At ε = {number(chosen.epsilon)} over {chosen.rounds} rounds with {who} in each:", highlight=False
        )
        for advice in self.advice:
            print_advice(advice, console)
        if not self.advice:
            console.print("No warnings.")


@checked
def plan(
    model: nn.Module | int,
    clients: Clients | int,
    algorithm: Algorithm | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    rounds: int | None = None,
    local: LocalOptimizer | None = None,
    participation: Participation | None = None,
    evaluate: Evaluations = None,
    secure: Secure = False,
    **others: Any,
) -> PlanTable:
    """Show how much signal to expect before anything is spent: replace `fit(…)` or `train(…)` by `plan(…)`.

    Formal guarantee: the plan is a function of public numbers. Of the data it uses only the number of clients, and not even that
    under add-remove adjacency, where `participation` declares it.

    Args:
        model: the model, or its number of trained parameters.
        clients: the `Federation`, or the number of clients.
        algorithm: the algorithm of `train`; by default that of `fit`.
        epsilon: ε of the whole run, as in `fit`; by default 8.
        delta: δ, as in `fit`.
        rounds: the number of rounds; by default that of `fit`.
        local: the local optimizer of `train`; votes on an automatic rate cost a part of ε.
        participation: who takes part in a round.
        evaluate: as in `train`; evaluations by the clients cost a part of ε.
        secure: as in `train`.
        others: the other arguments of `fit` and `train`, which do not change the plan.

    Returns:
        The table; print it.

    >>> print(plan(1000, 3, epsilon=8).advice[0].code)
    few-clients
    """
    known = {*inspect.signature(fit).parameters, *inspect.signature(train).parameters}
    for name in others:
        require(name in known, f"plan has no argument {name!r}.{nearest(name, known)}")
    for name, value, fits, what in (
        ("model", model, is_count(model) or isinstance(model, nn.Module), "an nn.Module or its number of parameters"),
        ("clients", clients, is_count(clients) or hasattr(clients, "gather"), "a Federation or the number of clients"),
    ):
        require(
            fits, f"{name} is {value if isinstance(value, int) else f'a {type(value).__name__}'}; it must be {what}."
        )
    require(
        algorithm is None or (epsilon is None and delta is None),
        "epsilon and delta are part of the algorithm: write algorithm=cdp_fedexp(clip=0.3, target_epsilon=8.0, delta=1e-5).",
    )
    require(algorithm is None or algorithm.private, "the algorithm is not private, so there is no noise to plan for.")
    dimension = trained_parameters(model) if isinstance(model, nn.Module) else int(model)
    present = clients if isinstance(clients, int) else len(clients)
    everyone = participation or Full()
    if isinstance(everyone, LargerCohort):
        everyone, population = larger_cohort(everyone, present)
    else:
        population = public_population("replace-one" if algorithm is None else algorithm.adjacency, everyone, present)
    if algorithm is None:
        algorithm = automatic_algorithm(8.0 if epsilon is None else epsilon, delta, population)
        local = local or Sgd(lr="auto", steps=LOCAL_STEPS)
    rounds = rounds_for(algorithm, dimension, population, everyone) if rounds is None else rounds
    _, by_clients = Evaluation.split(evaluate)
    extras = Extras(evaluations=0 if by_clients is None else evaluation_count(rounds, by_clients.every))
    mechanism, *_ = bind(algorithm, local, dimension, population, everyone, rounds, secure, extras=extras)
    chosen = Plan.of(algorithm, everyone, population, dimension, rounds, secure, mechanism)
    full = chosen.sampling.kind == "full"
    target = algorithm.target_epsilon if algorithm.target_per == "total" else None
    grid = plans(
        population,
        dimension,
        delta=algorithm.delta,
        mechanism=algorithm.mechanism,
        epsilons=sorted({*EPSILONS, *([] if target is None else [target])}),
        # Calibrating the noise of sampled rounds takes a second for each row.
        rounds=sorted({*ROUNDS, rounds}) if full else [rounds],
        rates=[1.0 if full else chosen.sampling.rate],
    )
    return PlanTable(list(grid), chosen)
