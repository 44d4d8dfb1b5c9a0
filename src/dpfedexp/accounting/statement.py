"""The privacy statement: the guarantee of a run and whom it protects, computed from the ledger, as plain text and JSON.

Every number in the text comes from `shown`, which is also in the JSON.
"""

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any, Literal, Self

from dpfedexp.accounting import gdp
from dpfedexp.accounting.compose import Charges, Guarantee, compose
from dpfedexp.accounting.events import EVALUATION, Event, GaussianEvent, NoiseBy
from dpfedexp.errors import checked, require
from dpfedexp.files import finite

VERSION = 2
"""The version of the JSON format."""

TUNING = "choosing the model, the clip or any other setting by trying several of them on the same clients"
METRICS = "anything measured on the clients' data without noise, such as a training loss or a test score on their data"
Source = Literal["private", "public", "test", "unknown"]
"""The data behind a decision to stop a run early: values released with noise, public data, the server's own test data, or data
that the run does not know."""
OTHER_USES = "other uses of the same clients' data, now or later: every further run adds to the total"

NOT_LEFT_OUT = "the charges say what replacing a client changes, and not what leaving one out does"
NO_ADD_REMOVE = "a client's own message shows that the client is there; only what it holds can be hidden"
NOT_COUNTED = (
    "it is not known how many clients report in every round, each from its own data and the released models alone"
)
SAMPLED = "only some of the clients report in a round, and how much noise they add together is not fixed"
MORE_THAN_THE_SUM = {
    "unknown": "the mechanism does not say what the server computes from the reports",
    "squares": "the step size uses the squared norm of every report, so the models show more than the sum of the reports",
    "rounding": "strict noise is rounded in every report, so the models show slightly more than the sum of the reports",
}
NOT_GAUSSIAN = "a smaller figure for the sum of the reports is known only if all of them have Gaussian noise"

EventCounts = Sequence[tuple[Event, int]]


@dataclass(frozen=True)
class View:
    """The ε of a run under `adjacency` against one observer.

    `epsilon_round` is the ε of the most expensive single round. `exact` says that no smaller total holds at the same δ;
    otherwise the total is an upper bound.
    """

    adjacency: str
    epsilon_round: float
    epsilon_total: float
    accountant: str
    exact: bool


def round_delta(charges: EventCounts, delta: float) -> float:
    """Return the δ of the figure for a single round: 0 if every event is ε-DP by itself."""
    return 0.0 if charges and all(event.family == "report" for event, _ in charges) else delta


def view(charges: EventCounts, delta: float) -> View:
    """Return ε of the most expensive round and of all charges together, under their own adjacency."""
    total = compose(charges, delta)
    single = round_delta(charges, delta)
    one = max((compose([(event, 1)], single).epsilon for event, _ in charges), default=0.0)
    return View(total.adjacency, one, total.epsilon, total.accountant, total.exact)


def other_adjacency(charges: EventCounts, delta: float) -> tuple[View | None, str]:
    """Return the view under the other adjacency, or None and the reason why there is none."""
    turned: list[tuple[Event, int]] = []
    for event, n in charges:
        if event.setting in ("local", "two-party"):
            return None, NO_ADD_REMOVE
        if event.family == "none":
            return None, ""
        if event.family == "report" and event.adjacency == "replace-one":
            return None, NOT_LEFT_OUT
        turned.append((event.under("add-remove" if event.adjacency == "replace-one" else "replace-one"), n))
    return (view(turned, delta), "") if turned else (None, "")


def models_only(charges: EventCounts, delta: float, reporting: int, clients: int) -> tuple[View | None, str]:
    """Return ε of a local or two-party run against an observer of the models only, or None and the reason why there is none.

    Assumes that the server shows only models and does not help the observer, and that at least `reporting` of the `clients` add
    their noise in every round and keep it secret.
    """
    if charges and all(isinstance(event, GaussianEvent) and event.setting == "two-party" for event, _ in charges):
        return view([(e.to_readers(), n) for e, n in charges if isinstance(e, GaussianEvent)], delta), ""
    if not charges or any(event.setting != "local" for event, _ in charges):
        return None, ""
    summed: list[tuple[Event, int]] = []
    for event, n in charges:
        if not isinstance(event, GaussianEvent):
            return None, NOT_GAUSSIAN
        if event.beyond_sum != "nothing":
            return None, MORE_THAN_THE_SUM[event.beyond_sum]
        if event.sampling.kind != "full":
            return None, SAMPLED
        # The sum of n reports is the sum of n vectors plus noise with √n times the standard deviation.
        queries = tuple(replace(q, noise=q.noise * math.sqrt(max(reporting, 0))) for q in event.queries)
        summed.append((replace(event, queries=queries, attained=event.attained and reporting == clients), n))
    return (view(summed, delta), "") if reporting >= 1 else (None, NOT_COUNTED)


@checked
@dataclass(frozen=True)
class PrivacyStatement:
    """The privacy guarantee of one run, from its charges. `epsilon_round` is the most expensive single round; δ is for the total.

    Args:
        exact: whether no smaller total ε holds at this δ; otherwise the total is an upper bound.
        membership_advantage: bound on (true positive rate − false positive rate) of every attack that tells two neighboring data
            sets apart. `attack_success` is its rate of right guesses if both are equally likely: (1 + advantage)/2.
        nominal_epsilon_round: the requested ε of a PrivUnit report, if it differs from the exact one.
        large_delta: whether δ is at least 1/clients.
        other_adjacency: ε under the other adjacency; None if it is not defined, with the reason in `no_other_adjacency`.
        models_only: ε of a local or two-party run against an observer of the released models only, if at least `reporting`
            clients report in every local round; None if there is none, with the reason in `no_models_only`.
        votes: the names of the votes, which were released beside the updates with their own noise.
        choices: the settings that `fit` chose, in words; empty if all were given.
        noise_by: in a two-party run, who adds noise of the stated size: "both" aggregators, or only the "helper".
        stopping: why the run ended early (`Source`, or "hand" for an interrupt); empty if it was not stopped.
        noise_cohort: see `from_charges`; None if the guarantee is for the clients of this run.
    """

    algorithm: str
    private: bool
    setting: str
    adjacency: str
    clients: int
    rounds: int
    epsilon_round: float
    epsilon_total: float
    delta: float
    delta_round: float
    accountant: str
    membership_advantage: float
    attack_success: float
    strength: str
    simulated: bool
    pure_epsilon_total: float | None = None
    planned_rounds: int | None = None
    planned_epsilon_total: float | None = None
    not_covered: tuple[str, ...] = (TUNING, METRICS, OTHER_USES)
    exact: bool = False
    nominal_epsilon_round: float | None = None
    large_delta: bool = False
    sampling: str = "full"
    other_adjacency: View | None = None
    no_other_adjacency: str = ""
    reporting: int | None = None
    models_only: View | None = None
    no_models_only: str = ""
    votes: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    stopping: Source | Literal["hand", ""] = ""
    noise_by: NoiseBy = ""
    noise_cohort: int | None = None
    stand_ins: float | None = None

    @classmethod
    @checked
    def from_charges(
        cls,
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
    ) -> Self:
        """Make the statement for a list of charges.

        Args:
            charges: every event and how often it was charged.
            delta: δ of the total.
            algorithm: the name of the algorithm in the text.
            clients: the public number of clients.
            simulated: whether the noise came from a seed.
            planned: the charges of all planned rounds, if the run stopped early or is not finished. If the run was stopped, the
                figures are for the plan, because the number of rounds may itself reveal something.
            not_covered: further things that the guarantee does not cover, beside the usual list.
            reporting: the least number of clients that report in every round of a local run, each from its own data and the
                released models alone; 0 if unknown. By default all clients.
            no_other_adjacency: the reason why the figures hold only under the run's own adjacency, if the charges do not say so.
            stopping: the data behind the decision to stop early; empty if the run was not stopped.
            noise_cohort: the number of clients per round of the larger deployment that the run simulates.
            stand_ins: the number of clients per round with which the run simulates that deployment.
        """
        made = [(event, n) for event, n in charges if n]
        plan = None if planned is None else [(event, n) for event, n in planned if n]
        charges = made if plan is None or not stopping else plan
        total = compose(charges, delta)
        advantage = membership_advantage(total)
        reporting = (clients if reporting is None else reporting) if total.setting == "local" else None
        turned, no_turned = other_adjacency(charges, delta)
        if turned is not None and no_other_adjacency:
            turned, no_turned = None, no_other_adjacency
        readers, no_readers = models_only(charges, delta, reporting or 0, clients)
        gaussian = [event for event, _ in charges if isinstance(event, GaussianEvent)]
        # If only the helper adds noise in one of the rounds, the statement is that of the helper alone.
        sides: tuple[NoiseBy, ...] = ("helper", "both", "")
        return cls(
            algorithm=algorithm,
            private=math.isfinite(total.epsilon),
            setting=total.setting,
            adjacency=total.adjacency,
            clients=clients,
            rounds=_rounds(made),
            epsilon_round=view(charges, delta).epsilon_round,
            epsilon_total=total.epsilon,
            delta=delta,
            delta_round=round_delta(charges, delta),
            accountant=total.accountant,
            membership_advantage=advantage,
            attack_success=0.5 * (1.0 + advantage),
            strength=strength(total.epsilon),
            simulated=simulated,
            pure_epsilon_total=total.pure_epsilon,
            not_covered=(TUNING, METRICS, OTHER_USES, *not_covered),
            exact=total.exact,
            nominal_epsilon_round=_nominal([event for event, _ in charges]),
            large_delta=clients > 0 and math.isfinite(total.epsilon) and delta * clients >= 1.0,
            sampling=", ".join(sorted({e.sampling.kind for e, _ in charges if e.sampling is not None})) or "full",
            other_adjacency=turned,
            no_other_adjacency=no_turned,
            reporting=reporting,
            models_only=readers,
            no_models_only=no_readers,
            votes=tuple(dict.fromkeys(q.name for event in gaussian for q in event.queries if q.is_vote)),
            stopping=stopping,
            noise_by=next((side for side in sides if any(event.noise_by == side for event in gaussian)), ""),
            noise_cohort=noise_cohort,
            stand_ins=stand_ins,
            planned_rounds=None if plan is None else _rounds(plan),
            planned_epsilon_total=None if plan is None else compose(plan, delta).epsilon,
        )

    @property
    def shown(self) -> dict[str, str]:
        """The figures as they are printed in the text, so that each of them can be found in the JSON."""
        figures = {
            "clients": f"{self.clients}",
            "rounds": f"{self.rounds}",
            "epsilon_round": figure(self.epsilon_round),
            "epsilon_total": figure(self.epsilon_total),
            "delta": f"{self.delta:g}",
            "attack_success_percent": _percent(self.attack_success),
            "guessing_percent": "50",
        }
        for name in ("pure_epsilon_total", "nominal_epsilon_round", "planned_epsilon_total"):
            if (value := getattr(self, name)) is not None:
                figures[name] = figure(value)
        if self.planned_rounds is not None:
            figures["planned_rounds"] = f"{self.planned_rounds}"
        for name, seen in (("other_adjacency", self.other_adjacency), ("models_only", self.models_only)):
            if seen is not None:
                figures[f"{name}_epsilon_round"] = figure(seen.epsilon_round)
                figures[f"{name}_epsilon_total"] = figure(seen.epsilon_total)
        if self.noise_cohort is not None and self.stand_ins is not None:
            figures |= {"noise_cohort": f"{self.noise_cohort}", "stand_ins": f"{self.stand_ins:g}"}
        if self.reporting is not None:
            figures["reporting"] = f"{self.reporting}"
        if self.large_delta:
            figures["clients_given_away"] = f"{self.delta * self.clients:.3g}"
        return figures

    @property
    def text(self) -> str:
        """The whole statement: one line per paragraph, and a table of at most 80 columns."""
        if not self.private:
            return f"{self.algorithm}: this run is not private; it makes no promise about any client's data.\n"
        if self.rounds == 0 and not self.votes:
            return f"{self.algorithm}: nothing has been released yet, so no privacy has been spent.\n"
        n = self.shown
        return "\n\n".join([*_scope(self, n), *_figures(self, n), *_remarks(self, n)]) + "\n"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<PrivacyStatement: {summary(self)}; print it to read all of it>"

    def _repr_html_(self) -> str:
        return card("Privacy", [summary(self)], folded=("The whole statement", self.text), failed=not self.private)

    def to_json(self) -> str:
        """Return the statement as a JSON object; infinite figures are null, because JSON has no infinity."""
        values = {"version": VERSION, **finite(asdict(self)), "shown": self.shown, "text": self.text}
        return json.dumps(values, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a statement from the output of `to_json`; raise `InputError` for another version."""
        values: dict[str, Any] = json.loads(text)
        version = values.get("version")
        require(version == VERSION, f"its version is {version!r}, and this library reads version {VERSION}")
        values = {name: value for name, value in values.items() if name not in ("version", "shown", "text")}
        for name in ("epsilon_round", "epsilon_total"):
            values[name] = math.inf if values[name] is None else values[name]
        if values.get("planned_rounds") is not None and values.get("planned_epsilon_total") is None:
            values["planned_epsilon_total"] = math.inf
        for name in ("other_adjacency", "models_only"):
            if values.get(name) is not None:
                fields: dict[str, Any] = {key: math.inf if v is None else v for key, v in values[name].items()}
                values[name] = View(**fields)
        lists = {name: tuple(values.get(name, ())) for name in ("not_covered", "votes", "choices")}
        require("\n" not in "".join(lists["choices"]), "a choice is more than one line")
        return cls(**{**values, **lists})


def membership_advantage(guarantee: Guarantee) -> float:
    """Return the largest advantage of any attacker: exact for μ-GDP, (e^ε − 1 + 2δ)/(e^ε + 1) for (ε, δ)-DP."""
    if math.isinf(guarantee.epsilon):
        return 1.0
    if guarantee.mu is not None:
        return gdp.advantage(guarantee.mu)
    half = guarantee.epsilon / 2.0
    return min(1.0, math.tanh(half) + guarantee.delta * math.exp(-half) / math.cosh(min(half, 700.0)))


def strength(epsilon: float) -> str:
    """Return one word for a total ε. The limits 1 and 10 follow the tiers of Ponomareva et al. (2023), "How to DP-fy ML"."""
    for limit, word in ((1.0, "strong"), (10.0, "moderate"), (50.0, "weak"), (math.inf, "very weak")):
        if epsilon <= limit and math.isfinite(epsilon):
            return word
    return "none"


def _nominal(events: Sequence[Event]) -> float | None:
    """Return the requested ε of the most expensive round; None if it equals the exact one or no ε was requested."""
    dearest = max(events, key=lambda event: event.strength, default=None)
    if dearest is None or dearest.nominal is None or any(event.nominal is None for event in events):
        return None
    return None if math.isclose(dearest.nominal, dearest.strength, rel_tol=1e-9) else dearest.nominal


def _rounds(charges: Charges) -> int:
    """Return the number of charges that released an update; votes and evaluations are charged too, but are not rounds."""
    return sum(n for event, n in charges if not event.question)


_AGAINST = {
    "central": (
        "Against whom: anyone who sees the released models, those of every round included, whatever else they know. "
        "Not against the server: it receives the clients' updates as they are, and is trusted to add the noise and to "
        "keep nothing else."
    ),
    "local": (
        "Against whom: the server, and anyone else who sees what a client sends, whatever else they know. Each client adds the "
        "noise itself, so no one has to be trusted with its data."
    ),
    "two-party": (
        "Against whom: {whom}. Neither aggregator receives an update that it can read: the server has it under a mask, and the "
        "helper has the mask. {rests} Sampling does not amplify against an aggregator, which sees who takes part."
    ),
}

_TWO_PARTY = {
    "both": {
        "whom": "the server and the helper, each by itself, and anyone who sees the released models, whatever else they know",
        "rests": (
            "Each of them adds all of the noise that its figure needs, and can't take the other's away. The figure against the "
            "server holds if the helper adds its noise, and that against the helper if the server does."
        ),
    },
    "helper": {
        "whom": "the server, and anyone but the helper who sees the released models, whatever else they know",
        "rests": (
            "Only the helper adds noise, so the figures hold if it does. Against the helper nothing is promised: it knows its own "
            "noise, and learns every round's sum from the released models, though no single update."
        ),
    },
}
_COLLUSION = (
    "If server and helper work together, they can read every client's update; nothing here protects against them."
)

_ADJACENCY = {
    "replace-one": "replace-one: everything that the client holds is replaced by something else.",
    "add-remove": (
        "add-remove: the client, with everything it holds, is added or left out. A client that is left out contributes zero; "
        "the number of clients that sums are divided by is declared, public, and stays the same."
    ),
}

_QUESTION = {"replace-one": "which of two data sets a client holds", "add-remove": "whether a client took part"}

_VERDICT = {
    "strong": "This is a strong guarantee.",
    "moderate": "This is a moderate guarantee: it is real protection, but some risk remains.",
    "weak": "This is a weak guarantee: in the worst case an attacker learns a lot about a client. Do not rely on it alone.",
    "very weak": (
        "This is a very weak guarantee: in the worst case it protects almost nothing. Real attacks usually fall short of "
        "the worst case, but these figures do not promise that."
    ),
}

_STOPPING = {
    "private": "When to stop was decided by values that were released with noise; the figures include what those cost.",
    "public": "When to stop was decided by a measurement of the released models on public data.",
    "test": (
        "When to stop was decided by a measurement of the released models on the server's own test data: the figures do not "
        "cover the people those data are about."
    ),
    "unknown": (
        "When to stop was decided by the caller's own function, or by an error: the figures hold only if that depended on "
        "nothing but public numbers and what was released."
    ),
    "hand": "It was interrupted by hand.",
}


def _scope(s: PrivacyStatement, n: dict[str, str]) -> Iterator[str]:
    rounds, clients = ("" if count == 1 else "s" for count in (s.rounds, s.clients))
    yield f"Privacy of {s.algorithm}: {n['rounds']} round{rounds}, {n['clients']} client{clients}"
    if "noise_cohort" in n:
        yield (
            f"Whose promise this is: that of a larger deployment, in which {n['noise_cohort']} of {n['clients']} clients take part "
            f"in a round. This run simulated it with {n['stand_ins']} clients in a round and the noise of {n['noise_cohort']}. It "
            "promises nothing to the clients whose data it used."
        )
    yield "Who is protected: every client, with all of its data at once, not only single records."
    text = _AGAINST[s.setting]
    yield f"{text.format(**_TWO_PARTY[s.noise_by])} {_COLLUSION}" if s.setting == "two-party" else text


def _figures(s: PrivacyStatement, n: dict[str, str]) -> Iterator[str]:
    yield (
        "How much: if one client changed, no outcome would become more than e^epsilon times as likely, except for a small "
        f"probability delta = {n['delta']}. Smaller is better. Epsilon is:"
    )
    yield _table(s, n)
    yield _total(s, n)
    if s.stopping:
        # Stopping that depends on the data is not free: ε of the rounds that ran does not bound what their number reveals.
        yield (
            f"Stopped early: {n['rounds']} of {n.get('planned_rounds', n['rounds'])} planned rounds ran. {_STOPPING[s.stopping]} "
            "Where a run ends may itself tell something about the clients, so the figures are those of all the rounds that were "
            "planned."
        )
    if EVALUATION in s.votes:
        yield (
            "The clients measured the model on rows of their own. What they sent was released as noisy means, and the figures "
            "cover that."
        )
    if named := ", ".join(f'"{name}"' for name in s.votes if name != EVALUATION):
        yield (
            "Beside the updates, one number of every client was asked for each of these and released as a noisy mean: "
            f"{named}. Each has noise of its own, and the figures cover all of them together."
        )
    if s.choices:
        yield (
            f"This run chose its own settings: {'; '.join(s.choices)}. All of that follows from public numbers and from what was "
            "released."
        )


def _remarks(s: PrivacyStatement, n: dict[str, str]) -> Iterator[str]:
    yield _changes(s)
    yield from _models_only(s, n)
    if s.nominal_epsilon_round is not None:
        yield (
            f"Nominal and exact: PrivUnit was asked for epsilon = {n['nominal_epsilon_round']} a round, the sum of its three "
            f"parameters. What a report reveals, computed from its probabilities, is epsilon = {n['epsilon_round']}, because the "
            "rule that chose the report's cap does not spend exactly what it is given. All the figures come from the exact one."
        )
    if s.large_delta:
        yield (
            f"Delta is large: a delta this large allows a mechanism that gives away everything about {n['clients_given_away']} of "
            f"the {n['clients']} clients on average. Choose one well below one in the number of clients."
        )
    yield (
        f"In practice: suppose an attacker knows everything except {_QUESTION[s.adjacency]}, and both answers are equally "
        f"likely. A blind guess is right {n['guessing_percent']}% of the time. With everything that was released, no "
        f"attack of any kind is right more than {n['attack_success_percent']}% of the time. {_VERDICT[s.strength]}"
    )
    yield "\n".join(["What is not covered:", *(f"  - {item}" for item in s.not_covered)])
    if s.simulated:
        yield (
            "This was a simulation: its noise came from a seed, so that the run can be repeated, and anyone who knows the seed can "
            "remove the noise. The figures hold for the same algorithm when it runs with secure noise."
        )


def wrap(text: str, width: int) -> str:
    """Wrap every paragraph to `width`; tables and list items keep their own lines."""
    lines = []
    for line in text.splitlines():
        if line.startswith("  - "):
            lines.append(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False))
        else:
            lines.append(line if line.startswith("  ") else textwrap.fill(line, width, break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def figure(value: float) -> str:
    """Format ε, rounded up in the last digit, so that the text never states less than was proven."""
    if not math.isfinite(value):
        return "infinite"
    digits = 4 if value >= 0.1 else 6
    scaled = math.ceil(value * 10**digits - 1e-6)
    return f"{scaled / 10**digits:.{digits}f}"


def _table(s: PrivacyStatement, n: dict[str, str]) -> str:
    name = "against the server" if s.setting in ("local", "two-party") else f"{s.adjacency} (this run's)"
    if s.noise_by == "both":
        name = "against either aggregator"
    together = "its only round" if s.rounds == 1 else f"all {n['rounds']} rounds"
    if s.stopping and s.planned_rounds is not None:
        together = f"all {n['planned_rounds']} planned"
    rows = [("", "one round", together, "the total is"), (name, *_cells(s, n, ""))]
    if s.other_adjacency is not None:
        rows.append((s.other_adjacency.adjacency, *_cells(s.other_adjacency, n, "other_adjacency_")))
    if s.models_only is not None:
        rows.append(("against readers of the models", *_cells(s.models_only, n, "models_only_")))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"  {label:<{widths[0]}}   {one:>{widths[1]}}   {total:>{widths[2]}}   {kind}"
        for label, one, total, kind in rows
    )


def _cells(s: PrivacyStatement | View, n: dict[str, str], prefix: str) -> tuple[str, str, str]:
    kind = "exact" if s.exact else "an upper bound"
    return n[f"{prefix}epsilon_round"], n[f"{prefix}epsilon_total"], kind


def _total(s: PrivacyStatement, n: dict[str, str]) -> str:
    sentences = [
        f"The total, which is what counts, is {'exactly' if s.exact else 'at most'} epsilon = {n['epsilon_total']} "
        f"at delta = {n['delta']} (figures are rounded up).",
        f"One round alone has epsilon = {n['epsilon_round']}{', with no delta' if s.delta_round == 0.0 else ''}.",
    ]
    if s.pure_epsilon_total is not None and n["pure_epsilon_total"] != n["epsilon_total"]:
        sentences.append(f"With no delta at all the total is epsilon = {n['pure_epsilon_total']}.")
    if s.planned_rounds is not None and s.planned_rounds != s.rounds and not s.stopping:
        sentences.append(
            f"The plan is {n['planned_rounds']} rounds, which would cost epsilon = {n['planned_epsilon_total']} in total."
        )
    sentences.append(f"Computed by: {s.accountant}.")
    return " ".join(sentences)


def _changes(s: PrivacyStatement) -> str:
    other = s.other_adjacency
    both = [s.adjacency] if other is None else [s.adjacency, other.adjacency]
    lines = [f"  - {_ADJACENCY[name]}" for name in both]
    if "add-remove" in both and "fixed" in s.sampling:
        lines.append(
            "  - Cohorts have a fixed size, so a client that is added takes another one's place: two contributions change, and the "
            "sampling hides neither."
        )
    if other is not None and other.accountant != s.accountant:
        lines.append(f"  - The {other.adjacency} figures are computed by: {other.accountant}.")
    if s.no_other_adjacency:
        missing = "replace-one" if s.adjacency == "add-remove" else "add-remove"
        lines.append(f"  - There is no {missing} figure: {s.no_other_adjacency}.")
    return "\n".join(["What it means that one client changed:", *lines])


def _models_only(s: PrivacyStatement, n: dict[str, str]) -> list[str]:
    view = s.models_only
    if view is not None and s.setting == "two-party":
        noise = (
            "the noise of both aggregators, if both add it and keep it to themselves. If only one does, the figures are those "
            "against an aggregator"
            if s.noise_by == "both"
            else "the helper's noise"
        )
        sampled = "" if s.sampling == "full" else " They do not see who was drawn, so sampling counts for them."
        return [f"Against readers of the models: they see {noise}.{sampled} Computed by: {view.accountant}."]
    if view is not None:
        at = f" at delta = {n['delta']}" if s.delta_round == 0.0 else ""
        return [
            "Against readers of the models: they see only the sum of a round's reports, in which each report is hidden among "
            f"the others. The figures{at} hold if the server shows nothing but the models and does not help the reader, and if "
            f"at least {n['reporting']} clients in every round add their noise as promised and keep it to themselves. Computed "
            f"by: {view.accountant}."
        ]
    if s.no_models_only:
        return [f"Against readers of the models alone nothing better is promised: {s.no_models_only}."]
    return []


def _percent(value: float) -> str:
    """Format a probability as percent, rounded up; "100" is printed only for certainty."""
    for digits in (1, 3, 6):
        text = f"{math.ceil(value * 100 * 10**digits - 1e-9) / 10**digits:.{digits}f}"
        if float(text) < 100.0:
            return text
    return "100"


def caveats(s: PrivacyStatement) -> list[str]:
    """Return the sentences to show with ε if it is not for this run's clients but for a larger deployment (`noise_cohort`)."""
    cohort = s.noise_cohort
    larger = f"the promise of a larger deployment with {cohort} clients in a round, and none to the clients of this run"
    return [] if cohort is None else [larger]


def summary(s: PrivacyStatement) -> str:
    """Return one line: algorithm, rounds, clients, ε, and the caveats if the guarantee is not for the clients of this run."""
    rounds = f"{s.rounds} round{'' if s.rounds == 1 else 's'}"
    if not s.private:
        return f"{s.algorithm}, {rounds}, {s.clients} clients, not private"
    if s.rounds == 0 and not s.votes:
        return f"{s.algorithm}, nothing released yet"
    n = s.shown
    bound = "" if s.exact else "at most "
    plan = f"; stopped early, epsilon of all {n['planned_rounds']} planned" if s.stopping and s.planned_rounds else ""
    line = (
        f"{s.algorithm}, {rounds}, {n['clients']} clients, {bound}epsilon {n['epsilon_total']} at delta {n['delta']} "
        f"({s.adjacency}, {s.setting}), {s.strength}{plan}"
    )
    return "; ".join([line, *caveats(s)])


def card(
    title: str,
    lines: Iterable[str],
    *,
    rows: Iterable[tuple[str, str]] = (),
    folded: tuple[str, str] | None = None,
    failed: bool = False,
) -> str:
    """Return an HTML box with a title, paragraphs, a table of two columns, and a folded text (its heading, and what a click shows).

    All arguments are plain text and are escaped. `failed` colors the box red.
    """
    color = "#d9534f" if failed else "#4a90c2"
    parts = [f"<b>{escape(title)}</b>", *(f"<div>{escape(line)}</div>" for line in lines)]
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    if cells:
        parts.append(f"<table style='margin:4px 0;color:inherit'>{cells}</table>")
    if folded is not None:
        text = f"<pre style='white-space:pre-wrap;background:none;color:inherit'>{escape(folded[1])}</pre>"
        parts.append(f"<details><summary>{escape(folded[0])}</summary>{text}</details>")
    return f"<div style='border-left:3px solid {color};padding:2px 12px;margin:4px 0'>{''.join(parts)}</div>"
