"""Advice about a run. `preflight` advises before the run, from public numbers alone; `AdviceMonitor` during the run, from what
rounds release; `Advisor` reports both in every runtime. `docs/advice.md` lists the messages and their thresholds.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from dpfedexp.algorithms.probe import RATE, make_probe
from dpfedexp.algorithms.round import State
from dpfedexp.core.local_rate import IMPROVED, PRIOR_RATE, RATES, first_rate
from dpfedexp.core.step_size import Extrapolate
from dpfedexp.core.sums import MAX_SHARE
from dpfedexp.engine.engine import ClientEvaluation
from dpfedexp.engine.plan import (
    DEVIATIONS,
    LEVEL,
    SAMPLED_COHORT,
    Advice,
    Plan,
    about,
    alignment,
    default_delta,
    is_detectable,
    is_longer_than_noise,
    number,
)
from dpfedexp.errors import checked

FEW_CLIENTS = 20
"""Below this number of clients, one client is more than 5% of every mean, and noise that hides one client hides all."""
LARGE_EPSILON = 20.0
"""Largest ε without a warning. e^20 is 5·10⁸: a guess about a client with odds of one in a million may reach odds of 485 to one."""
FEW_ROUNDS = 10
"""The fewest rounds that advice recommends; hardly any model trains in fewer."""
DROWNED_VOTE = 0.5
"""Noise per bin of the vote on the local rate, as a share of the clients, above which the prior decides the rate."""

_warning, _note = partial(Advice, "warning"), partial(Advice, "note")


@checked
def preflight(plan: Plan) -> list[Advice]:
    """Check a plan before any privacy is spent; returns advice, warnings first.

    Formal guarantee: the advice is a function of the plan alone. No client's data enter, and under add-remove adjacency not even
    the number of clients. It is empty for an algorithm without privacy.

    >>> from dpfedexp import Full, dp_fedavg
    >>> tiny = Plan.of(dp_fedavg(clip=1.0, target_epsilon=8.0), Full(), population=3, dimension=1000, rounds=50)
    >>> [advice.code for advice in preflight(tiny)]
    ['few-clients']
    """
    if not plan.algorithm.private:
        return []
    found = [
        few_clients(plan) or more_noise(plan) or noisy_rounds(plan),
        delta(plan),
        epsilon(plan),
        sampling(plan),
        unheard_votes(plan),
    ]
    return sorted((advice for advice in found if advice is not None), key=lambda advice: advice.level, reverse=True)


def few_clients(plan: Plan) -> Advice | None:
    if plan.population >= FEW_CLIENTS:
        return None
    who = "1 client" if plan.population == 1 else f"{plan.population} clients"
    drowned = plan.best_signal is not None and plan.best_signal < 1
    numbers = _numbers(plan) if drowned else f"One of them is {1 / plan.population:.0%} of every mean."
    return _warning(
        "few-clients",
        f"{who}: client-level privacy does not work here, because it hides all data of a client. {numbers} Consider record-level "
        "privacy, which hides one record of a client.",
    )


def more_noise(plan: Plan) -> Advice | None:
    """Warn where the noise of all rounds together is longer than the sum of updates of clients who agree in every round."""
    best = plan.best_signal
    if best is None or best >= 1:
        return None
    trust = " A server that clients trust adds far less noise: mechanism 'central-gaussian'."
    numbers = _numbers(plan) + (trust if plan.mechanism.is_local else "")
    if is_detectable(best, plan.dimension):
        return _warning("mostly-noise", f"There will be more noise than signal. {numbers}")
    drowned = (
        "The noise hides the signal: even identical updates of all clients in every round could not be told from noise."
    )
    return _warning("no-signal", f"{drowned} {numbers}")


def noisy_rounds(plan: Plan) -> Advice | None:
    """Note that the mean of one round has more noise than signal even at best, though all rounds together have more signal."""
    share, best = plan.noise_share, plan.best_signal
    if share is None or best is None or share <= 1 or best < 1:
        return None
    fewer = math.floor(plan.rounds / share**2)
    remedy = "More clients or a smaller model would help; judge the run by many rounds, not by one."
    if FEW_ROUNDS <= fewer <= plan.rounds / 2:
        remedy = (
            f"With {fewer} rounds instead of {plan.rounds}, at the same ε, the mean of each round could be signal for the larger "
            "part: take fewer rounds, with more local steps where you choose them."
        )
    return _note(
        "noisy-rounds",
        f"The mean of one round has at least {number(share)} times as much noise as signal ({_facts(plan)}), and all "
        f"{plan.rounds} rounds together have at most {number(best)} times as much signal as noise. {remedy}",
    )


def delta(plan: Plan) -> Advice | None:
    """Warn about a δ above 1/M, which allows publishing one client's data; note a δ that is less than 10 times below 1/M."""
    given, share = plan.algorithm.delta, plan.algorithm.delta * plan.population
    remedy = f"take delta = {default_delta(plan.population):.2g} or less."
    if share > 1:
        return _warning(
            "delta",
            f"delta is {given:g} with {plan.population:,} clients: above 1/M = {1 / plan.population:.2g} it allows that one "
            f"client's data are published as they are; {remedy}",
        )
    if share > 0.1 * (1 + 1e-9):
        return _note(
            "delta",
            f"delta is {given:g} with {plan.population:,} clients, which is {share:.2f}/M; it should be well below 1/M: {remedy}",
        )
    return None


def epsilon(plan: Plan) -> Advice | None:
    if not plan.epsilon > LARGE_EPSILON:
        return None
    return _warning(
        "large-epsilon",
        f"ε = {number(plan.epsilon)} over {plan.rounds} rounds is hardly a guarantee: above {LARGE_EPSILON:g}, an attacker who "
        "thinks a fact about a client has a chance of one in a million may end up 99.8% sure of it. Use more noise, which more "
        "clients average out, or fewer rounds.",
    )


def sampling(plan: Plan) -> Advice | None:
    """Note that sampling a large population would make rounds cheaper, with about the same noise in the mean.

    At the same ε, the mean of a sample has about the noise of the full mean while z·q is well above 1; at z·q = 2 a test measures
    less than a tenth more noise.
    """
    z = plan.noise_multiplier
    if z is None or plan.mechanism.is_local or plan.sampling.kind != "full":
        return None
    rate = max(2 / z, SAMPLED_COHORT / plan.population)
    digit = 10.0 ** math.floor(math.log10(rate))
    rate = round(math.ceil(rate / digit * (1 - 1e-12)) * digit, 12)
    if rate > 0.5:
        return None
    return _note(
        "sampling",
        f"All {plan.population:,} clients take part in every round. With Poisson sampling (rate {rate:g}) a round would cost "
        f"{rate:.0%} of the computation, and at the same ε its mean would have at most a tenth more noise.",
    )


def unheard_votes(plan: Plan) -> Advice | None:
    if not _votes_on_rate(plan):
        return None
    vote = make_probe(plan.mechanism, plan.rounds, plan.sampling).mechanisms[RATE]
    variance = vote.noise_variance(plan.cohort, plan.cohort)
    noise = math.sqrt(variance or 0.0) / MAX_SHARE
    if noise <= DROWNED_VOTE:
        return None
    return _note(
        "rate-by-default",
        f"The votes on the local rate have noise of {noise:.0%} of the clients in every bin, so the rate will be near the usual "
        f"{PRIOR_RATE:g} whatever the clients answer. Choose lr on public data, if there are any.",
    )


def _votes_on_rate(plan: Plan) -> bool:
    return any(vote.name == IMPROVED.name for vote in plan.mechanism.votes)


def _numbers(plan: Plan) -> str:
    """Sentences for a plan with more noise than signal: by how much, and which clients, model size or ε would balance them."""
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
        f"together could contribute if they agreed in every round ({_facts(plan)}). As much signal as noise takes "
        f"{', '.join(ways[:-1])} or {ways[-1]}."
    )


def _facts(plan: Plan) -> str:
    z = "" if plan.noise_multiplier is None else f"z = {number(plan.noise_multiplier)}, "
    return f"{z}d = {plan.dimension:,}, {number(plan.cohort)} clients a round"


Record = dict[str, Any]
Norms = Callable[[], tuple[float, float]]
"""Returns the model's distance from its start and the norm of its parameters; called only in the rounds that check them."""

FIRST_LOOK = 20
"""Rounds before the monitor first looks for a signal; it looks again after 2, 4, 8, … times as many."""
EARLY = 1.0
"""While rounds are left, "drowned" is reported only within this many standard deviations of a random walk."""
WINDOW = 10
"""Rounds that must agree before the monitor reports a trend."""
FEWEST = 5
"""A run of fewer rounds is too short for a verdict."""
MOVING_CLIP = 2.0
"""A clip that rises in each of `WINDOW` rounds, by this factor in all: noise alone does that less than once in 500 runs."""
MIN_CHANGE = 0.01
"""A loss that changed by less than this share counts as unchanged; so does an accuracy that rose by less."""
CLIMBING = 5
"""Evaluations at the end whose mean is compared with the mean of as many evaluations before them."""
CLIMBED = 0.01
"""Gain between the two means above which a metric still improves: absolute for an accuracy, relative for a loss."""
EDGE = 10.0
"""A voted rate within this factor of an end of the grid counts as at the end."""
EXPLODED = 1e4
"""Parameters count as diverged when their norm exceeds this factor times their norm at the start, or times 1 if that is larger."""

_RATE = "lower the local rate, or take fewer local steps"


@dataclass
class AdviceMonitor:
    """Collect the records of a run and give each piece of advice once.

    Formal guarantee: the inputs are records, which hold released values and the server's own metrics, norms of the released model,
    and the run's public numbers. The advice is post-processing of them.
    """

    plan: Plan
    start_norm: float = 0.0
    advice: list[Advice] = field(default_factory=list)
    evaluation: ClientEvaluation | None = None
    _records: list[Record] = field(default_factory=list)
    evaluations: list[bool] = field(default_factory=list)
    """For each evaluation by the clients, whether it gave more than noise."""

    def seen(self, record: Record, norms: Norms | None = None) -> list[Advice]:
        """Add the record of a round; return advice that was not given before."""
        self._records.append(record)
        found = [self._not_finite(), self._diverging(), self._rate_at_edge()]
        looks = len(self._records) / FIRST_LOOK
        if norms is not None and looks >= 1 and math.log2(looks).is_integer():
            traveled, length = norms()
            noise = self._nothing_but_noise(traveled, EARLY)
            found.append(_warning("drowned", f"So far {noise}") if noise else self._exploded(length))
        return self._new(found)

    def end(self, norms: Norms) -> list[Advice]:
        """Return advice at the end of the run that was not given before, such as that the run learned nothing."""
        if not self._records:
            return []
        return self._new([self._dead(*norms()) or self._climbing(), self._evaluations_lost()])

    def _new(self, found: Iterable[Advice | None]) -> list[Advice]:
        known = {advice.code for advice in self.advice}
        new = [advice for advice in found if advice is not None and advice.code not in known]
        self.advice += new
        return new

    def _not_finite(self) -> Advice | None:
        last = self._records[-1]
        bad = [key for key in ("eta_g", "update_norm") if not math.isfinite(last.get(key) or 0.0)]
        if not bad:
            return None
        return _warning(
            "not-finite",
            f"Round {last['round']} released a value that is not a finite number ({bad[0]}), and the model is unusable from then "
            f"on: {_RATE}.",
        )

    def _diverging(self) -> Advice | None:
        recent = self._records[-WINDOW:]
        votes = [record[IMPROVED.field] for record in recent if record.get(IMPROVED.field) is not None]
        noise = self.plan.mechanism.vote_noise(IMPROVED.name) / self.plan.cohort
        if len(votes) == WINDOW and sum(votes) / WINDOW < 0.5 - 3.0 * noise / math.sqrt(WINDOW):
            share = max(0.0, sum(votes) / WINDOW)
            seen = (
                f"In {WINDOW} rounds only {share:.0%} of the clients had a lower loss after their local steps. Either model or "
                "loss fail on their rows (class labels must be 0, 1, 2, …; secure runs are silent about it), or local training"
            )
        elif self._clip_rises() and self._noise_alone(recent):
            seen = (
                f"In {WINDOW} rounds the clip rose from {recent[0]['clip']:.3g} to {recent[-1]['clip']:.3g}, and the released "
                "updates are no longer than noise alone: the clients' updates are long and do not agree. Either their data "
                "disagree, or local training"
            )
        else:
            return None
        return _warning("diverging", f"{seen} diverges: {_RATE}.")

    def _rate_at_edge(self) -> Advice | None:
        first = self._records[0]
        if len(self._records) > 1 or not _votes_on_rate(self.plan) or not first.get("local_rate"):
            return None
        rate = first["local_rate"]
        noise = self.plan.noise_share or 0.0
        if first_rate(RATES[0] * EDGE, noise) < rate < first_rate(RATES[-1] / EDGE, noise):
            return None
        return _warning(
            "rate-at-edge",
            f"The clients' votes put the local rate at the end of its grid ({RATES[0]:g} to {RATES[-1]:g}). If inputs "
            "or targets are numbers far from 1, scale them to values around 1, by public numbers, and train again.",
        )

    def _evaluations_lost(self) -> Advice | None:
        lost, split = self.evaluations.count(False), self.evaluation is not None and self.evaluation.held_out
        if not lost:
            return None
        few = "Clients with few rows hold none out. Evaluate on all rows, or on" if split else "Evaluate on"
        return _warning(
            "evaluation-lost",
            f"{lost} of {len(self.evaluations)} evaluations by the clients were only noise and are not in the history: too few "
            f"clients answered. {few} public data.",
        )

    def _climbing(self) -> Advice | None:
        name = next(filter(_is_accuracy, self._names), None) or next(filter(_is_loss, self._names), "")
        values = self._values(name)[-2 * CLIMBING :]
        if len(values) < 2 * CLIMBING:
            return None
        before, last = sum(values[:CLIMBING]) / CLIMBING, sum(values[CLIMBING:]) / CLIMBING
        gain = (before - last) / abs(before) if _is_loss(name) and before else last - before
        if not gain > CLIMBED:
            return None
        return _note(
            "still-climbing",
            f"{name.replace('_', ' ').capitalize()} was still improving at the end: {number(last)} on average in the last "
            f"{CLIMBING} evaluations, {number(before)} in the {CLIMBING} before. Take more rounds at the same ε, or a larger "
            "local rate.",
        )

    def _clip_rises(self) -> bool:
        """Whether an adaptive clip rose in each of the last `WINDOW` rounds, by more than `MOVING_CLIP` in all."""
        clips = [record["clip"] for record in self._records[-WINDOW:]]
        rises = len(clips) == WINDOW and all(after > before for before, after in pairwise(clips))
        return bool(self.plan.mechanism.adapts_clip and rises and clips[-1] > MOVING_CLIP * clips[0])

    def _exploded(self, length: float) -> Advice | None:
        if length <= EXPLODED * max(self.start_norm, 1.0):
            return None
        return _warning(
            "exploded",
            f"After round {self._records[-1]['round']} the model's parameters have norm {length:.3g}; at the start it was "
            f"{self.start_norm:.3g}. The run diverges: {_RATE}.",
        )

    def _dead(self, traveled: float, length: float) -> Advice | None:
        """The verdict, or None. Releases that look like noise do not prove that nothing was learned, so that message says less."""
        if len(self._records) < FEWEST:
            return None
        lost = next((advice for advice in self.advice if advice.code == "not-finite"), None)
        noise = self._nothing_but_noise(traveled, DEVIATIONS)
        lost = lost or (None if noise else self._exploded(length))
        failed = lost.sentence if lost else self._loss_still()
        if failed:
            return _warning("dead", f"This run learned nothing: {failed[0].lower()}{failed[1:]}")
        return _warning("dead", f"Nothing shows that this run learned anything: {noise}") if noise else None

    def _nothing_but_noise(self, traveled: float, deviations: float) -> str | None:
        """Return a sentence if neither update norms nor the model's distance from its start differ from noise alone.

        None if one of them differs, if a loss or an accuracy improved, or if the test does not apply to this run.
        """
        records, plan = self._records, self.plan
        known = all(record.get("update_norm") is not None for record in records)
        if not known or not plan.algorithm.private or plan.algorithm.server != Extrapolate():
            return None
        moves = [record["eta_g"] * record["update_norm"] for record in records]
        if not math.isfinite(sum(moves)) or abs(alignment(moves, traveled, plan.dimension)) > deviations:
            return None
        if self._noise_alone(records) is False or self._improved():
            return None
        few = f"there are too few clients for this ε and {plan.dimension:,} parameters (`dpfedexp plan` says how many it takes)"
        hopeless = plan.best_signal is not None and not is_detectable(plan.best_signal, plan.dimension)
        cause = f"T{few[1:]}." if hopeless else f"Either {few}, or local training diverges and sends nothing: {_RATE}."
        return (
            f"in {len(records)} rounds neither the lengths of the updates nor the way that the model went differed from noise "
            f"alone (tests at {LEVEL:.0%}). {cause}"
        )

    def _noise_alone(self, records: list[Record]) -> bool | None:
        """Whether updates are no longer than noise alone; None where the mechanism does not know its noise variance."""
        plan, squares, variances = self.plan, [], []
        for record in records:
            norm, at = record.get("update_norm"), plan.mechanism.at_radius(record["clip"])
            variance = at.noise_variance(plan.cohort, record.get("valid", plan.cohort))
            if norm is None or not variance:
                return None
            squares.append(norm**2)
            variances.append(variance)
        return not is_longer_than_noise(squares, variances, plan.dimension)

    def _loss_still(self) -> str | None:
        """A sentence where a recorded loss did not fall after its first value and no accuracy rose; else None."""
        name = next(filter(_is_loss, self._names), "")
        values = self._values(name)
        if len(values) < FEWEST or self._improved():
            return None
        return (
            f"{name.replace('_', ' ')} was {number(values[0])} when it was first measured and {number(values[-1])} at the end. "
            "Another local rate may help; so may more clients or a larger ε (`dpfedexp plan`)."
        )

    def _improved(self) -> bool:
        """Whether a loss fell by the share `MIN_CHANGE` since it was first measured, or an accuracy rose by `MIN_CHANGE`."""
        for name in self._names:
            values = self._values(name) if _is_loss(name) or _is_accuracy(name) else []
            if len(values) < 2:
                continue
            first, last = values[0], values[-1]
            if last < first - MIN_CHANGE * abs(first) if _is_loss(name) else last > first + MIN_CHANGE:
                return True
        return False

    @property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(key for record in self._records for key in record))

    def _values(self, name: str) -> list[float]:
        return [record[name] for record in self._records if record.get(name) is not None]


def _is_loss(key: str) -> bool:
    return key.endswith("loss") and not key.startswith("nonprivate")


def _is_accuracy(key: str) -> bool:
    return key.endswith("accuracy") and not key.startswith("nonprivate")


def beyond_budget(planned: float, budget: float) -> Advice | None:
    """Warn where all rounds together, with all that the ledger holds, cost more than the budget."""
    if planned <= budget * (1 + 1e-9):
        return None
    return _warning(
        "beyond-budget",
        f"The budget of ε = {number(budget)} ends this run early: all planned rounds and everything in its ledger would cost "
        f"ε = {number(planned)}. Give a smaller epsilon, more noise, or fewer rounds.",
    )


def silence(advice: Advice) -> None:
    """Ignore advice: the listener of runs whose settings are bad on purpose, such as audits."""


def evaluation_precision(evaluation: ClientEvaluation | None, cohort: float, rounds: int) -> Advice | None:
    """Warn where the noise on the metrics that clients measure is too large."""
    if evaluation is None:
        return None
    half_width = evaluation.metrics.half_width(math.sqrt(evaluation.mechanism.noise_variance(cohort, cohort) or 0.0))
    if half_width <= 0.2:
        return None
    twice = 2 * evaluation.every
    less_often = f", or less often, such as every {twice} rounds" if twice <= rounds else ""
    return _warning(
        "evaluation-noise",
        f"Evaluation by the clients: with {number(cohort)} clients a round a share of examples, such as an accuracy, gets "
        f"noise of ±{half_width:.2g}; an evaluation that is only noise is left out of the history. For ±0.1 it takes about "
        f"{about(cohort * half_width / 0.1)} clients a round at this ε. Otherwise evaluate on public data{less_often}.",
    )


def _of_everyone(record: Record) -> bool:
    """Whether all clients trained one model in the round. Groups of a tournament have other noise, so the monitor skips them."""
    return bool(record.get("candidates", 1) == 1)


class Advisor:
    """Report the advice of a run to the function `tell`, each message once.

    Formal guarantee: as for `preflight` and `AdviceMonitor`, only public numbers, records of rounds and norms of the released
    model enter. `more` is further advice before the first round.
    """

    def __init__(
        self,
        plan: Plan,
        start: State,
        tell: Callable[[Advice], object],
        more: Advice | None = None,
        evaluation: ClientEvaluation | None = None,
    ) -> None:
        self.start, self.tell = start, tell
        further = (evaluation_precision(evaluation, plan.cohort, plan.rounds), more)
        self.before = [*preflight(plan), *filter(None, further)]
        self.monitor = AdviceMonitor(plan, float(start.w.norm()), evaluation=evaluation)

    @property
    def advice(self) -> tuple[Advice, ...]:
        return (*self.before, *self.monitor.advice)

    def begin(self, history: Iterable[Record] = ()) -> None:
        """Report the advice before the first round; `history` has the records of rounds that a resumed run has completed."""
        for record in filter(_of_everyone, history):
            # Advice about these rounds was reported before; their models are gone, so there are no norms.
            self.monitor.seen(record)
        self._say(self.before)

    def evaluated(self, found: bool) -> None:
        self.monitor.evaluations.append(found)

    def after(self, record: Record, state: State) -> None:
        if _of_everyone(record):
            self._say(self.monitor.seen(record, partial(self._norms, state)))

    def end(self, state: State) -> None:
        self._say(self.monitor.end(partial(self._norms, state)))

    def _norms(self, state: State) -> tuple[float, float]:
        return float((state.w - self.start.players[state.candidate].w).norm()), float(state.w.norm())

    def _say(self, advice: Iterable[Advice]) -> None:
        for one in advice:
            self.tell(one)
