"""`plan`: how much signal to expect of a run; `dpfedexp plan` prints the same table."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.probe import Extras, bind, evaluation_count
from dpfedexp.algorithms.round import Full, LargerCohort, Participation, larger_cohort, public_population
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.engine.advice import preflight
from dpfedexp.engine.fit import LOCAL, automatic_algorithm, fit, rounds_for, trained_parameters
from dpfedexp.engine.plan import EPSILONS, ROUNDS, Plan, number, plans
from dpfedexp.engine.train import train
from dpfedexp.errors import checked, is_count, is_number, nearest, require
from dpfedexp.evaluation import Evaluation, Evaluations
from dpfedexp.mechanisms import Secure
from dpfedexp.report.document import Section, Table
from dpfedexp.trainers.task import Clients

COLUMNS = ("ε", "rounds", "cohort", "z", "noise/clip", "best signal", "clients needed", "verdict")
FIELDS = ("epsilon", "rounds", "cohort", "noise_multiplier", "noise_share", "best_signal", "clients_needed", "verdict")
LEGEND = (
    "noise/clip: norm of the noise in the mean of one round, over the clip C. Best signal: signal over noise of all rounds "
    "together if all clients pushed the same way by the whole clip in every round; no data do better. Clients needed: for a best "
    "signal of 1."
)


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
) -> Section:
    """Show how much signal to expect of `fit(…)` or `train(…)`, called with the same arguments. Nothing is spent.

    Formal guarantee: the result is a function of public numbers. Of the clients only their number is used, or under add-remove
    adjacency the number that `participation` declares.

    Args:
        model: the model, or its number of trained parameters.
        clients: the `Federation`, or the number of clients.
        algorithm: the algorithm of `train`; without it the plan is that of `fit`.
        others: the other arguments of `fit` and `train`, which do not change the plan.

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
    dimension = trained_parameters(model) if isinstance(model, nn.Module) else model
    present = len(clients) if hasattr(clients, "gather") else clients
    for name, value in (("model", dimension), ("clients", present)):
        what = (
            "an nn.Module or its number of parameters" if name == "model" else "a Federation or the number of clients"
        )
        require(
            is_count(value),
            f"{name} is {value if is_number(value) else f'a {type(value).__name__}'}; it must be {what}.",
        )
    everyone = participation or Full()
    if isinstance(everyone, LargerCohort):
        everyone, population = larger_cohort(everyone, present)
    else:
        population = public_population("replace-one" if algorithm is None else algorithm.adjacency, everyone, present)
    if algorithm is None:
        algorithm, local = automatic_algorithm(8.0 if epsilon is None else epsilon, delta, population), LOCAL
    rounds = rounds_for(algorithm, dimension, population, everyone) if rounds is None else rounds
    _, by_clients = Evaluation.split(evaluate)
    extras = Extras(evaluations=0 if by_clients is None else evaluation_count(rounds, by_clients.every))
    mechanism, *_ = bind(algorithm, local, dimension, population, everyone, rounds, secure, extras=extras)
    chosen = Plan.of(algorithm, everyone, population, dimension, rounds, secure, mechanism)
    full = chosen.sampling.kind == "full"
    grid = plans(
        population,
        dimension,
        delta=algorithm.delta,
        mechanism=algorithm.mechanism,
        epsilons=sorted({*EPSILONS, round(chosen.epsilon, 3)}),
        # Calibrating the noise of sampled rounds takes a second for each row.
        rounds=sorted({*ROUNDS, rounds}) if full else [rounds],
        rates=[1.0 if full else chosen.sampling.rate],
    )
    return plan_section(list(grid), chosen)


def plan_section(rows: Sequence[Plan], chosen: Plan) -> Section:
    """Return a table of plans, and the advice on the chosen one."""

    def cells(one: Plan) -> list[str]:
        numbers = (one.noise_multiplier, one.noise_share, one.best_signal, one.clients_needed)
        shown = ["–" if value is None else number(value) for value in numbers]
        cohort = "all" if one.sampling.kind == "full" else number(one.cohort)
        return [f"{one.epsilon:g}", str(one.rounds), cohort, *shown, one.verdict or "not known"]

    algorithm, advice = rows[0].algorithm, preflight(chosen)
    who = "all clients" if chosen.sampling.kind == "full" else f"{number(chosen.cohort)} clients"
    facts = {"clients": chosen.population, "parameters": chosen.dimension, "delta": algorithm.delta}
    return Section(
        "plan",
        f"{chosen.population:,} clients, {chosen.dimension:,} parameters, δ = {algorithm.delta:g}, {algorithm.mechanism}",
        tables=[Table("Signal to expect", COLUMNS, [cells(one) for one in rows], LEGEND)],
        notes=[
            f"At ε = {number(chosen.epsilon)} over {chosen.rounds} rounds with {who} in each:",
            *([f"{one.level.capitalize()}: {one.sentence}" for one in advice] or ["No warnings."]),
        ],
        data={
            **facts,
            "mechanism": algorithm.mechanism,
            "rows": [{name: getattr(one, name) for name in FIELDS} for one in rows],
            "advice": [one.to_json() for one in advice],
        },
    )
