"""The privacy statement in plain language. Every number comes from `shown`, which the JSON holds too."""

from __future__ import annotations

import math
import textwrap

from dpfedexp.accounting.statements.promise import Promise, View

_AGAINST = {
    "central": (
        "Against whom: anyone who sees the released models, those of every round included, whatever else they know. "
        "Not against the server: it receives the clients' updates as they are, and is trusted to add the noise and to "
        "keep nothing else."
    ),
    "local": (
        "Against whom: the server, and anyone else who sees what a client sends, whatever else they know. Each client "
        "adds the noise itself, so nobody has to be trusted with its data."
    ),
    "two-party": (
        "Against whom: {whom}. Neither aggregator receives an update that it can read: the server has it under a mask, and the "
        "helper has the mask. {rests} Sampling hides nobody from an aggregator, which sees who takes part."
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
_COLLUSION = "If server and helper work together, they can read every client's update, and nothing here protects anybody from them."

_ADJACENCY = {
    "replace-one": "replace-one: everything that the client holds is replaced by something else.",
    "add-remove": (
        "add-remove: the client, with everything it holds, is added or left out. A client that is left out contributes zero; "
        "the number of clients that sums are divided by is declared, public, and stays the same."
    ),
}

_PUSHED_OUT = (
    "Cohorts have a fixed size, so a client that is added takes another one's place: two contributions change, and the "
    "sampling hides neither."
)

_QUESTION = {
    "replace-one": "which of two data sets a client holds",
    "add-remove": "whether a client took part",
}

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
        "When to stop was decided by a measurement of the released models on the server's own test data: the figures do not cover "
        "whoever those data are about."
    ),
    "unknown": (
        "When to stop was decided by the caller's own function: the figures hold only if it looked at nothing but public "
        "numbers and what was released."
    ),
    "hand": "Somebody interrupted it.",
}

_SIMULATION = (
    "This was a simulation: its noise came from a seed, so that the run can be repeated, and whoever knows the seed can "
    "take the noise away again. The figures hold for the same algorithm when it runs with secure noise."
)


def statement_text(s: Promise) -> str:
    """The whole promise: one paragraph to a line, and a small table of at most 80 columns."""
    if not s.private:
        return f"{s.algorithm}: this run is not private; it makes no promise about any client's data.\n"
    if s.rounds == 0 and not s.votes:
        return f"{s.algorithm}: nothing has been released yet, so no privacy has been spent.\n"
    n = shown(s)
    paragraphs = [
        f"Privacy of {s.algorithm}: {n['rounds']} {_plural('round', s.rounds)}, "
        f"{n['clients']} {_plural('client', s.clients)}",
        *_larger(s, n),
        *_selected(s, n),
        "Who is protected: every client, with all of its data at once, not only single records.",
        _against(s),
        "How much: if one client changed, no outcome would become more than e^epsilon times as likely, except for a small "
        f"probability delta = {n['delta']}. Smaller is better. Epsilon is:",
        _table(s, n),
        _total(s, n),
        *_stopping(s, n),
        *_votes(s),
        *_chosen(s),
        _changes(s),
        *_models_only(s, n),
        *_nominal(s, n),
        *_large_delta(s, n),
        f"In practice: suppose an attacker knows everything except {_QUESTION[s.adjacency]}, and both answers are equally "
        f"likely. A blind guess is right {n['guessing_percent']}% of the time. With everything that was released, no "
        f"attack of any kind is right more than {n['attack_success_percent']}% of the time. {_VERDICT[s.strength]}",
        "What is not covered:\n" + "\n".join(f"  - {item}" for item in s.not_covered),
    ]
    if s.simulated:
        paragraphs.append(_SIMULATION)
    return "\n\n".join(paragraphs) + "\n"


def _against(s: Promise) -> str:
    text = _AGAINST[s.setting]
    return f"{text.format(**_TWO_PARTY[s.noise_by])} {_COLLUSION}" if s.setting == "two-party" else text


def wrap(text: str, width: int) -> str:
    """The text with every paragraph broken between words; a table or a list keeps its lines."""
    lines = []
    for line in text.splitlines():
        if line.startswith("  - "):
            lines.append(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False))
        else:
            lines.append(line if line.startswith("  ") else textwrap.fill(line, width, break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def shown(s: Promise) -> dict[str, str]:
    """The figures as the text prints them, so that a reader finds each of them in the JSON."""
    figures = {
        "clients": f"{s.clients}",
        "rounds": f"{s.rounds}",
        "epsilon_round": figure(s.epsilon_round),
        "epsilon_total": figure(s.epsilon_total),
        "delta": f"{s.delta:g}",
        "attack_success_percent": _percent(s.attack_success),
        "guessing_percent": "50",
    }
    for name, value in (
        ("pure_epsilon_total", s.pure_epsilon_total),
        ("nominal_epsilon_round", s.nominal_epsilon_round),
        ("planned_epsilon_total", s.planned_epsilon_total),
    ):
        if value is not None:
            figures[name] = figure(value)
    if s.planned_rounds is not None:
        figures["planned_rounds"] = f"{s.planned_rounds}"
    for name, view in (("other_adjacency", s.other_adjacency), ("models_only", s.models_only)):
        if view is not None:
            figures[f"{name}_epsilon_round"] = figure(view.epsilon_round)
            figures[f"{name}_epsilon_total"] = figure(view.epsilon_total)
    if s.noise_cohort is not None and s.stand_ins is not None:
        figures |= {"noise_cohort": f"{s.noise_cohort}", "stand_ins": f"{s.stand_ins:g}"}
    if s.selection_runs is not None:
        figures["selection_runs"] = f"{s.selection_runs:g}"
    if s.reporting is not None:
        figures["reporting"] = f"{s.reporting}"
    if s.large_delta:
        figures["clients_given_away"] = f"{s.delta * s.clients:.3g}"
    return figures


def figure(value: float) -> str:
    """Rounded up in the last printed digit, so that the text never promises more than was proven."""
    if not math.isfinite(value):
        return "infinite"
    digits = 4 if value >= 0.1 else 6
    scaled = math.ceil(value * 10**digits - 1e-6)
    return f"{scaled / 10**digits:.{digits}f}"


def _table(s: Promise, n: dict[str, str]) -> str:
    """Who or what changes, one round, all rounds, and whether the total is exact or an upper bound."""
    name = {"local": "against the server"}.get(s.setting, f"{s.adjacency} (this run's)")
    if s.setting == "two-party":
        name = "against either aggregator" if s.noise_by == "both" else "against the server"
    rows = [("", "one round", _all_rounds(s, n), "the total is"), (name, *_cells(s, n, ""))]
    if s.other_adjacency is not None:
        rows.append((s.other_adjacency.adjacency, *_cells(s.other_adjacency, n, "other_adjacency_")))
    if s.models_only is not None:
        rows.append(("against readers of the models", *_cells(s.models_only, n, "models_only_")))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"  {label:<{widths[0]}}   {one:>{widths[1]}}   {total:>{widths[2]}}   {kind}"
        for label, one, total, kind in rows
    )


def _cells(s: Promise | View, n: dict[str, str], prefix: str) -> tuple[str, str, str]:
    kind = "exact" if s.exact else "an upper bound"
    return n[f"{prefix}epsilon_round"], n[f"{prefix}epsilon_total"], kind


def _total(s: Promise, n: dict[str, str]) -> str:
    sentences = [
        f"The total, which is what counts, is {'exactly' if s.exact else 'at most'} epsilon = {n['epsilon_total']} "
        f"at delta = {n['delta']} (figures are rounded up).",
    ]
    if s.selection_runs is None:
        alone = ", with no delta." if s.delta_round == 0.0 else "."
        sentences.append(f"One round alone has epsilon = {n['epsilon_round']}{alone}")
    if s.pure_epsilon_total is not None and n["pure_epsilon_total"] != n["epsilon_total"]:
        sentences.append(f"With no delta at all the total is epsilon = {n['pure_epsilon_total']}.")
    if s.planned_rounds is not None and s.planned_rounds != s.rounds and not s.stopping:
        sentences.append(
            f"The plan is {n['planned_rounds']} rounds, which would cost epsilon = {n['planned_epsilon_total']} in total."
        )
    sentences.append(f"Computed by: {s.accountant}.")
    return " ".join(sentences)


def _changes(s: Promise) -> str:
    other = s.other_adjacency
    both = [s.adjacency] if other is None else [s.adjacency, other.adjacency]
    lines = [f"  - {_ADJACENCY[name]}" for name in both]
    if "add-remove" in both and "fixed" in s.sampling:
        lines.append(f"  - {_PUSHED_OUT}")
    if other is not None and other.accountant != s.accountant:
        lines.append(f"  - The {other.adjacency} figures are computed by: {other.accountant}.")
    if s.no_other_adjacency:
        missing = "replace-one" if s.adjacency == "add-remove" else "add-remove"
        lines.append(f"  - There is no {missing} figure: {s.no_other_adjacency}.")
    return "\n".join(["What it means that one client changed:", *lines])


def _larger(s: Promise, n: dict[str, str]) -> list[str]:
    if "noise_cohort" not in n:
        return []
    return [
        f"Whose promise this is: that of a larger deployment, in which {n['noise_cohort']} of {n['clients']} clients take part in "
        f"a round. This run simulated it with {n['stand_ins']} clients in a round and the noise of {n['noise_cohort']}. It "
        "promises nothing to the clients whose data it used."
    ]


def _selected(s: Promise, n: dict[str, str]) -> list[str]:
    if "selection_runs" not in n:
        return []
    return [
        f"What was selected: this run is the best of a secret number of runs, {n['selection_runs']} on average, whose settings "
        "were drawn at random. All the figures are those of the whole selection, the choice included. They hold if nothing was "
        "seen of the other runs, not even how many there were, and if the score came from what each run released and from data "
        "that are not the clients'."
    ]


def caveats(s: Promise) -> list[str]:
    """What must stand wherever the ε of a statement stands alone; empty where ε is for this run and these clients."""
    n = shown(s)
    found = []
    if "noise_cohort" in n:
        found.append(
            f"the promise of a larger deployment with {n['noise_cohort']} clients in a round, and none to the clients of this run"
        )
    if "selection_runs" in n:
        found.append(
            f"the epsilon of the whole selection, of which this is the best of {n['selection_runs']} runs on average"
        )
    return found


def _votes(s: Promise) -> list[str]:
    if not s.votes:
        return []
    named = ", ".join(f'"{name}"' for name in s.votes)
    return [
        "Beside the updates, one number of every client was asked for each of these and released as a noisy mean: "
        f"{named}. Each has noise of its own, and the figures cover all of them together."
    ]


def _stopping(s: Promise, n: dict[str, str]) -> list[str]:
    """An end that depends on the data is not free: the total of the rounds that ran does not bound what their number tells."""
    if not s.stopping:
        return []
    planned = n.get("planned_rounds", n["rounds"])
    return [
        f"Stopped early: {n['rounds']} of {planned} planned rounds ran. {_STOPPING[s.stopping]} Where a run "
        "ends may itself tell something about the clients, so the figures are those of all the rounds that were planned."
    ]


def _chosen(s: Promise) -> list[str]:
    if not s.chosen:
        return []
    listed = "; ".join(s.chosen)
    return [
        f"Nobody tuned this run: it chose {listed}. All of that follows from public numbers and from what was released."
    ]


def _models_only(s: Promise, n: dict[str, str]) -> list[str]:
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
            "Against readers of the models: whoever sees only the released models sees the reports of a round added up, each "
            f"hidden among the others. The figures{at} hold if the server shows nothing but the models and does not help the "
            f"reader, and if at least {n['reporting']} clients in every round add their noise as promised and keep it to "
            f"themselves. Computed by: {view.accountant}."
        ]
    if s.no_models_only:
        return [f"Against readers of the models alone nothing better is promised: {s.no_models_only}."]
    return []


def _nominal(s: Promise, n: dict[str, str]) -> list[str]:
    if s.nominal_epsilon_round is None:
        return []
    why = (
        "the rule that chose the report's cap is safe but does not use up what it was given"
        if s.nominal_epsilon_round > s.epsilon_round
        else "the rule that chose the report's cap is not safe in so few dimensions, and spends more than it was given"
    )
    return [
        f"Nominal and exact: PrivUnit was asked for epsilon = {n['nominal_epsilon_round']} a round, the sum of its three "
        f"parameters. What a report reveals, computed from its probabilities, is epsilon = {n['epsilon_round']}: {why}. All "
        "the figures here come from the exact one."
    ]


def _large_delta(s: Promise, n: dict[str, str]) -> list[str]:
    if not s.large_delta:
        return []
    return [
        f"Delta is large: a delta this large allows a mechanism that gives away everything about "
        f"{n['clients_given_away']} of the {n['clients']} clients on average. Choose one well below one in the number of clients."
    ]


def _all_rounds(s: Promise, n: dict[str, str]) -> str:
    if s.stopping and s.planned_rounds is not None:
        return f"all {n['planned_rounds']} planned"
    return "its only round" if s.rounds == 1 else f"all {n['rounds']} rounds"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _percent(value: float) -> str:
    """Rounded up; certainty is printed only where it is certain."""
    for digits in (1, 3, 6):
        text = f"{math.ceil(value * 100 * 10**digits - 1e-9) / 10**digits:.{digits}f}"
        if float(text) < 100.0:
            return text
    return "100"
