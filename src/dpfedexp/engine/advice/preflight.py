"""What can be said before anything is spent, from public numbers alone.

`docs/advice.md` lists the messages and their thresholds.
"""

from __future__ import annotations

import math

from dpfedexp.arguments import checked
from dpfedexp.engine.advice.evidence import is_heard
from dpfedexp.engine.advice.message import Advice, about, number
from dpfedexp.engine.advice.plan import SAMPLED_COHORT, Plan, default_delta

FEW_CLIENTS = 20
"""Below this many clients one of them is more than 5% of every mean, and what hides it hides as much of the others."""
LARGE_EPSILON = 20.0
"""e^20 is 5·10⁸: odds of one in a million for a guess about a client may become odds of 485 to one."""
FEW_ROUNDS = 10
"""Fewer rounds than this are not recommended for the sake of less noise: hardly any model is trained in them."""


@checked
def preflight(plan: Plan) -> list[Advice]:
    """Everything that the public numbers of a run give reason to say, warnings first.

    Formal guarantee: a function of the plan alone, so no client's data enters, and under add-remove adjacency not even their
    number.

    Args:
        plan: the run by its public numbers.

    Returns:
        The advice; none for an algorithm that promises nothing.

    >>> from dpfedexp import Full, dp_fedavg
    >>> tiny = Plan.of(dp_fedavg(clip=1.0, target_epsilon=8.0), Full(), population=3, dimension=1000, rounds=50)
    >>> [advice.code for advice in preflight(tiny)]
    ['few-clients']
    """
    if not plan.algorithm.private:
        return []
    found = [few_clients(plan) or more_noise(plan) or noisy_rounds(plan), delta(plan), epsilon(plan), sampling(plan)]
    return sorted((advice for advice in found if advice is not None), key=lambda advice: advice.level, reverse=True)


def few_clients(plan: Plan) -> Advice | None:
    """Fewer than `FEW_CLIENTS`: hiding a client is not the promise that such a federation needs."""
    if plan.population >= FEW_CLIENTS:
        return None
    who = "1 client" if plan.population == 1 else f"{plan.population} clients"
    drowned = plan.best_signal is not None and plan.best_signal < 1
    numbers = _numbers(plan) if drowned else f"One of them is {1 / plan.population:.0%} of every mean."
    return Advice(
        "warning",
        "few-clients",
        f"{who}: client-level privacy can't work here, because it hides all that a whole client has to say. {numbers} Consider "
        "record-level privacy, which hides one record of a client.",
    )


def more_noise(plan: Plan) -> Advice | None:
    """The noise of all rounds together is longer than clients who all agree in every round could push."""
    best = plan.best_signal
    if best is None or best >= 1:
        return None
    trust = " A server that clients trust adds far less noise: mechanism 'central-gaussian'." if _is_local(plan) else ""
    if is_heard(best, plan.dimension):
        return Advice("warning", "mostly-noise", f"There will be more noise than signal. {_numbers(plan)}{trust}")
    return Advice(
        "warning",
        "no-signal",
        "The noise drowns the signal: not even clients who all say the same in every round could be told from noise. "
        f"{_numbers(plan)}{trust}",
    )


def noisy_rounds(plan: Plan) -> Advice | None:
    """A single round's mean has more noise than signal at best, though all rounds together have a signal."""
    share, best = plan.noise_share, plan.best_signal
    if share is None or best is None or share <= 1 or best < 1:
        return None
    fewer = math.floor(plan.rounds / share**2)
    remedy = "More clients or a smaller model would help; judge the run by many rounds, not by one."
    if fewer >= FEW_ROUNDS:
        remedy = (
            f"With {fewer} rounds instead of {plan.rounds}, at the same ε, the mean of each round could be signal for the larger "
            "part: take fewer rounds and more local steps."
        )
    return Advice(
        "note",
        "noisy-rounds",
        f"The mean of one round has at least {number(share)} times as much noise as signal ({_facts(plan)}), and all "
        f"{plan.rounds} rounds together have at most {number(best)} times as much signal as noise. {remedy}",
    )


def delta(plan: Plan) -> Advice | None:
    """δ against 1/M: above it, δ alone allows one client to be published; within a factor of 10 of it, it is not well below."""
    given, share = plan.algorithm.delta, plan.algorithm.delta * plan.population
    remedy = f"take delta = {default_delta(plan.population):.2g} or less."
    if share > 1:
        return Advice(
            "warning",
            "delta",
            f"delta is {given:g} with {plan.population:,} clients: above 1/M = {1 / plan.population:.2g} it allows that one "
            f"client's data are published as they are; {remedy}",
        )
    if share > 0.1 * (1 + 1e-9):
        return Advice(
            "note",
            "delta",
            f"delta is {given:g} with {plan.population:,} clients, which is {share:.2f}/M; it should be well below 1/M: {remedy}",
        )
    return None


def epsilon(plan: Plan) -> Advice | None:
    """An ε that promises next to nothing."""
    if not plan.epsilon > LARGE_EPSILON:
        return None
    return Advice(
        "warning",
        "large-epsilon",
        f"ε = {number(plan.epsilon)} over {plan.rounds} rounds promises next to nothing: above {LARGE_EPSILON:g}, whoever gives a "
        "guess about a client one chance in a million may end up 99.8% sure of it. More clients pay for more noise; fewer rounds "
        "cost less.",
    )


def sampling(plan: Plan) -> Advice | None:
    """All of a large population in every round, where a sample would have about the same noise in its mean.

    At one ε the noise of a sampled mean is that of the full one while z·q is well above 1; at 2 a test measures less than a tenth
    more.
    """
    z = plan.noise_multiplier
    if z is None or _is_local(plan) or plan.sampling.kind != "full":
        return None
    rate = _rounded_up(max(2 / z, SAMPLED_COHORT / plan.population))
    if rate > 0.5:
        return None
    return Advice(
        "note",
        "sampling",
        f"All {plan.population:,} clients take part in every round. With participation Poisson({rate:g}) a round would cost "
        f"{rate:.0%} of the computation, and at the same ε its mean would have at most a tenth more noise.",
    )


def _numbers(plan: Plan) -> str:
    """The numbers of a plan with more noise than signal, and what would give it as much signal."""
    best, needed = plan.best_signal or 1.0, plan.clients_needed
    at = plan.epsilon_for_signal()
    ways = [
        f"about {about(needed or 1)} clients at this ε and δ",
        f"a model of at most {about(max(1, math.floor(plan.dimension * best**2)))} parameters",
    ]
    if at is not None and math.isfinite(at):
        ways.append(f"ε ≈ {about(at)}")
    return (
        f"At ε = {number(plan.epsilon)} the noise of {plan.rounds} rounds adds up to {number(1 / best)} times what all clients "
        f"together could push if they agreed in every round ({_facts(plan)}). As much signal as noise takes "
        f"{', '.join(ways[:-1])} or {ways[-1]}."
    )


def _facts(plan: Plan) -> str:
    z = "" if plan.noise_multiplier is None else f"z = {number(plan.noise_multiplier)}, "
    return f"{z}d = {plan.dimension:,}, {number(plan.cohort)} clients a round"


def _is_local(plan: Plan) -> bool:
    return plan.mechanism.is_local


def _rounded_up(rate: float) -> float:
    """To one significant digit."""
    step = 10.0 ** math.floor(math.log10(rate))
    return round(math.ceil(rate / step * (1 - 1e-12)) * step, 12)
