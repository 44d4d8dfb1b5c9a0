"""What a run promises, to whom: a statement made only from what was charged, under each adjacency and for each observer.

Where the charges prove nothing, there is a reason and no number. The text is for people who are not experts; the JSON holds every
number of the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dpfedexp.accounting import gdp, pld, privunit, wording
from dpfedexp.accounting.compose import Charges, Guarantee, compose
from dpfedexp.accounting.events import Adjacency, Event, GaussianEvent, NoiseBy, PrivUnitEvent, PureEvent, ReportEvent
from dpfedexp.accounting.wording import TUNING, Promise, Source, View
from dpfedexp.errors import checked, require
from dpfedexp.files import finite

VERSION = 2
"""Of the JSON form."""

OTHER: dict[str, Adjacency] = {"replace-one": "add-remove", "add-remove": "replace-one"}

NOT_LEFT_OUT = "the charges say what replacing a client changes, and not what leaving one out does"
NO_ADD_REMOVE = "a client's own message shows that the client is there; only what it holds can be hidden"
NOT_COUNTED = (
    "it is not known how many clients report in every round, each from its own data and the released models alone"
)
SAMPLED = "only some of the clients report in a round, and how much noise they add together is not fixed"
UNSAID = "the ledger was written before it said what the server computes from the reports"
MORE_THAN_THE_SUM = {
    "unknown": UNSAID,
    "squares": "the step size uses the squared norm of every report, so the models show more than the sum of the reports",
    "rounding": "strict noise is rounded in every report, so the models show slightly more than the sum of the reports",
}
NO_SHUFFLING = (
    "hiding one report among the others (amplification by shuffling) is proven only for reports that say less or for "
    "more clients"
)
MIXED = "the rounds use different kinds of noise"

SHUFFLE = "amplification by shuffling"

Counts = Sequence[tuple[Event, int]]


@checked
@dataclass(frozen=True)
class PrivacyStatement(Promise):
    """The claim of one run, made from its charges."""

    @staticmethod
    @checked
    def from_charges(
        charges: Charges,
        delta: float,
        *,
        algorithm: str,
        clients: int,
        simulated: bool = True,
        planned: Charges | None = None,
        not_covered: Sequence[str] = (),
        reporting: int | None = None,
        no_other_adjacency: str = "",
        stopping: Source | Literal["hand", ""] = "",
        noise_cohort: int | None = None,
        stand_ins: float | None = None,
        selection_runs: float | None = None,
        selection_mu: float | None = None,
    ) -> PrivacyStatement:
        """The statement for what was charged.

        Args:
            charges: every event and how often it was charged.
            delta: δ of the total.
            algorithm: the name that the text uses.
            clients: how many there are, a public number.
            simulated: whether the noise came from a seed.
            planned: the charges of the whole run, where it stopped early or still runs. If somebody decided the end, who may have
                looked at what was released, the figures are those of the plan: that some rounds were not made may tell something.
            not_covered: what the guarantee leaves out beside the usual list.
            reporting: in a local run, how many clients at least report in every round, each from its own data and the released
                models alone; 0 where that is not known. All of them unless told otherwise.
            no_other_adjacency: why the figures hold under the run's own adjacency only, where something beside the charges says so.
            stopping: what decided that the run ended before its last planned round, where somebody decided it.
            noise_cohort: clients of a round of a larger deployment, where the run simulated one with fewer.
            stand_ins: how many simulated clients stood for them.
            selection_runs: the mean of the secret, geometric number of runs of which this one is the best, where one was selected.
            selection_mu: μ of the most expensive of those runs.
        """
        made = [(event, n) for event, n in charges if n]
        plan = None if planned is None else [(event, n) for event, n in planned if n]
        charges = made if plan is None or not stopping else plan
        total = compose(charges, delta)
        own = view(charges, delta)
        advantage = membership_advantage(total)
        local = total.setting == "local"
        reporting = (clients if reporting is None else reporting) if local else None
        turned, no_turned = other_adjacency(charges, delta)
        if turned is not None and no_other_adjacency:
            turned, no_turned = None, no_other_adjacency
        readers, no_readers = models_only(charges, delta, reporting or 0, clients)
        statement = PrivacyStatement(
            algorithm=algorithm,
            private=math.isfinite(total.epsilon),
            setting=total.setting,
            adjacency=total.adjacency,
            clients=clients,
            rounds=_rounds(made),
            epsilon_round=own.epsilon_round,
            epsilon_total=total.epsilon,
            delta=delta,
            delta_round=round_delta(charges, delta),
            accountant=total.accountant,
            membership_advantage=advantage,
            attack_success=0.5 * (1.0 + advantage),
            strength=strength(total.epsilon),
            simulated=simulated,
            pure_epsilon_total=total.pure_epsilon,
            not_covered=(TUNING, wording.METRICS, wording.OTHER_USES, *not_covered),
            exact=total.exact,
            nominal_epsilon_round=_nominal(charges),
            large_delta=clients > 0 and math.isfinite(total.epsilon) and delta * clients >= 1.0,
            sampling=_sampling(charges),
            other_adjacency=turned,
            no_other_adjacency=no_turned,
            reporting=reporting,
            models_only=readers,
            no_models_only=no_readers,
            votes=_votes(charges),
            stopping=stopping,
            noise_by=_noise_by(charges),
            noise_cohort=noise_cohort,
            stand_ins=stand_ins,
            planned_rounds=None if plan is None else _rounds(plan),
            planned_epsilon_total=None if plan is None else compose(plan, delta).epsilon,
        )
        if selection_runs is None or selection_mu is None:
            return statement
        return statement.of_selection(total, selection_runs, selection_mu)

    def of_selection(self, total: Guarantee, runs: float, mu: float) -> PrivacyStatement:
        """The statement of a private selection that shows this run; `total` is what the run alone promises.

        Which run is shown depends on all its rounds, so what one of them shows costs as much as everything.
        """
        require(
            total.mu is not None,
            f"the run was charged by {total.accountant!r}; a selection has a figure for Gaussian noise without sampling only.",
        )
        mu = max(mu, total.mu or 0.0)
        epsilon = pld.selection_epsilon(mu, self.delta, runs)
        advantage = membership_advantage(replace(total, epsilon=epsilon, mu=None))
        return replace(
            self,
            epsilon_round=epsilon,
            epsilon_total=epsilon,
            delta_round=self.delta,
            accountant=pld.SELECTION,
            exact=False,
            membership_advantage=advantage,
            attack_success=0.5 * (1.0 + advantage),
            strength=strength(epsilon),
            pure_epsilon_total=None,
            other_adjacency=None,
            no_other_adjacency="the selection was accounted under one adjacency",
            models_only=None,
            no_models_only="",
            nominal_epsilon_round=None,
            planned_rounds=None,
            planned_epsilon_total=None,
            not_covered=(
                wording.OTHER_TUNING,
                wording.NOT_SECRET,
                *(item for item in self.not_covered if item != TUNING),
            ),
            selection_runs=runs,
            selection_mu=mu,
        )

    @property
    def shown(self) -> dict[str, str]:
        """The figures as the text prints them."""
        return wording.shown(self)

    @property
    def text(self) -> str:
        return wording.statement_text(self)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<PrivacyStatement: {wording.summary(self)}; print it to read all of it>"

    def _repr_html_(self) -> str:
        folded = ("The whole statement", self.text)
        return wording.card("Privacy", [wording.summary(self)], folded=folded, failed=not self.private)

    def to_json(self) -> str:
        """One JSON object; infinite figures are null, because JSON has no infinity."""
        values = {"version": VERSION, **finite(asdict(self)), "shown": self.shown, "text": self.text}
        return json.dumps(values, indent=2, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> PrivacyStatement:
        """The statement that `to_json` wrote; a clear error where another version did."""
        values: dict[str, Any] = json.loads(text)
        version = values.get("version")
        require(version == VERSION, f"its version is {version!r}, and this library reads version {VERSION}")
        values = {name: value for name, value in values.items() if name not in ("version", "shown", "text")}
        for name in ("epsilon_round", "epsilon_total"):
            values[name] = math.inf if values[name] is None else values[name]
        for name in ("other_adjacency", "models_only"):
            if values.get(name) is not None:
                fields: dict[str, Any] = {key: math.inf if v is None else v for key, v in values[name].items()}
                values[name] = View(**fields)
        lists = {name: tuple(values.get(name, ())) for name in ("not_covered", "votes", "chosen")}
        return PrivacyStatement(**{**values, **lists})


def membership_advantage(guarantee: Guarantee) -> float:
    """The largest advantage of any attacker: exact for μ-GDP, (e^ε − 1 + 2δ)/(e^ε + 1) for (ε, δ)-DP."""
    if math.isinf(guarantee.epsilon):
        return 1.0
    if guarantee.mu is not None:
        return gdp.advantage(guarantee.mu)
    half = guarantee.epsilon / 2.0
    return min(1.0, math.tanh(half) + guarantee.delta * math.exp(-half) / math.cosh(min(half, 700.0)))


def strength(epsilon: float) -> str:
    """One word for a total ε. Up to 1 and up to 10 follow the tiers of Ponomareva et al. (2023), "How to DP-fy ML"."""
    for limit, word in ((1.0, "strong"), (10.0, "moderate"), (50.0, "weak"), (math.inf, "very weak")):
        if epsilon <= limit and math.isfinite(epsilon):
            return word
    return "none"


def _nominal(charges: Counts) -> float | None:
    """The ε that was asked for in the most expensive round, where the exact one differs."""
    dearest = max((event for event, _ in charges), key=lambda event: event.strength, default=None)
    if dearest is None or any(event.nominal is None for event, _ in charges) or dearest.nominal is None:
        return None
    return None if math.isclose(dearest.nominal, dearest.strength, rel_tol=1e-9) else dearest.nominal


def _sampling(charges: Counts) -> str:
    """How cohorts were drawn: one kind, or all that occur."""
    kinds = {event.sampling.kind for event, _ in charges if event.sampling is not None}
    return ", ".join(sorted(kinds)) or "full"


def _noise_by(charges: Counts) -> NoiseBy:
    """Who adds the noise of a two-party run: the helper alone as soon as one of its rounds has no other."""
    sides = {event.noise_by for event, _ in charges if isinstance(event, GaussianEvent)}
    return "helper" if "helper" in sides else "both" if "both" in sides else ""


def _rounds(charges: Counts) -> int:
    """How many of the charges released an update: votes before the first round are charged too, and are no round."""
    return sum(n for event, n in charges if not (isinstance(event, GaussianEvent) and event.votes_alone))


def _votes(charges: Counts) -> tuple[str, ...]:
    """The names of all votes that were charged, in the order of their first charge."""
    gaussian = (event for event, _ in charges if isinstance(event, GaussianEvent))
    return tuple(dict.fromkeys(query.name for event in gaussian for query in event.queries if query.is_vote))


def round_delta(charges: Counts, delta: float) -> float:
    """The δ at which a single round is quoted: 0 where every round is pure."""
    return 0.0 if charges and all(event.family == "report" for event, _ in charges) else delta


def view(charges: Counts, delta: float) -> View:
    """The charges as they are: the most expensive round, and all of them together."""
    total = compose(charges, delta)
    single = round_delta(charges, delta)
    one = max((compose([(event, 1)], single).epsilon for event, _ in charges), default=0.0)
    return View(total.adjacency, one, total.epsilon, total.accountant, total.exact)


def other_adjacency(charges: Counts, delta: float) -> tuple[View | None, str]:
    """The view under the other adjacency, or None and why there is none."""
    turned: list[tuple[Event, int]] = []
    for event, n in charges:
        if event.setting in ("local", "two-party"):
            return None, NO_ADD_REMOVE
        if event.family == "none":
            return None, ""
        if event.family == "report" and event.adjacency == "replace-one":
            return None, NOT_LEFT_OUT
        turned.append((event.under(OTHER[event.adjacency]), n))
    return (view(turned, delta), "") if turned else (None, "")


def models_only(charges: Counts, delta: float, reporting: int, clients: int) -> tuple[View | None, str]:
    """A local or two-party run against an observer of nothing but the models, or None and why there is no figure.

    Assumes that the server shows only models and does not help the reader, and that at least `reporting` of the `clients` add
    their noise in every round and keep it to themselves.
    """
    if charges and all(isinstance(event, GaussianEvent) and event.setting == "two-party" for event, _ in charges):
        return view([(e.to_readers(), n) for e, n in charges if isinstance(e, GaussianEvent)], delta), ""
    if not charges or any(event.setting != "local" for event, _ in charges):
        return None, ""
    gaussian = [(event, n) for event, n in charges if isinstance(event, GaussianEvent)]
    reports = [(event, n) for event, n in charges if isinstance(event, PrivUnitEvent | PureEvent)]
    if gaussian and reports:
        return None, MIXED
    for event, _ in (*gaussian, *reports):
        if isinstance(event, GaussianEvent) and event.beside_sum != "nothing":
            return None, MORE_THAN_THE_SUM[event.beside_sum]
        if event.sampling is None:
            return None, UNSAID
        if event.sampling.kind != "full":
            return None, SAMPLED
    if reporting < 1:
        return None, NOT_COUNTED
    if gaussian:
        # The sum of n reports is the sum of their rows with noise of √n times the standard deviation.
        spread, everyone = math.sqrt(reporting), reporting == clients
        summed = [
            (replace(event, queries=tuple(replace(q, noise=q.noise * spread) for q in event.queries)), n)
            for event, n in gaussian
        ]
        return view([(replace(e, attained=e.attained and everyone), n) for e, n in summed], delta), ""
    # The server's sums do not depend on the order of the reports, so an observer of the models sees no more than a shuffle.
    total = shuffled_epsilon(reports, delta, reporting)
    if total is None or total >= compose(reports, delta).epsilon:
        return None, NO_SHUFFLING
    rounds = (shuffled_epsilon([(event, 1)], delta, reporting) for event, _ in reports)
    return View("replace-one", max(one for one in rounds if one is not None), total, SHUFFLE, False), ""


def amplified(epsilon0: float, clients: int, delta: float) -> float | None:
    """ε at δ of `clients` shuffled ε₀-DP reports; None where the theorem says nothing.

    A server that shows only models, computed from sums over its clients, shows no more than the reports of the round in random
    order. Among n such reports one client hides (Feldman, McMillan and Talwar, "Hiding Among the Clones", FOCS 2021, theorem 3.1):
    under replace-one adjacency and for ε₀ ≤ log(n / (16·log(2/δ))) they are together (ε, δ)-DP with

        ε = log(1 + (e^ε₀ − 1)/(e^ε₀ + 1) · (8·√(e^ε₀·log(4/δ)/n) + 8·e^ε₀/n)).
    """
    if clients < 1 or delta <= 0.0 or epsilon0 > math.log(clients / (16.0 * math.log(2.0 / delta))):
        return None
    spread = 8.0 * math.sqrt(math.exp(epsilon0) * math.log(4.0 / delta) / clients) + 8.0 * math.exp(epsilon0) / clients
    return min(epsilon0, math.log1p(math.tanh(epsilon0 / 2.0) * spread))


def shuffled_epsilon(charges: Sequence[tuple[ReportEvent, int]], delta: float, clients: int) -> float | None:
    """ε at δ over all the rounds for an observer who sees each of them shuffled; None where a round is not amplified.

    Rounds compose as every (ε, δ)-DP release does: randomised response at ε in each of them, after a failure with probability δ
    (Kairouz, Oh and Viswanath 2015). Half of the total δ pays for the failures, the other half for the composition.
    """
    rounds = sum(n for _, n in charges)
    share = delta if rounds == 1 else delta / (2.0 * rounds)
    each = [(one, n) for event, n in charges if (one := amplified(event.epsilon, clients, share)) is not None]
    if not each or len(each) < len(charges):
        return None
    if rounds == 1:
        return each[0][0]
    return privunit.epsilon([(PureEvent(one, "local"), n) for one, n in each], delta / 2.0)[0]
