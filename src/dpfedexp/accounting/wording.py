"""The privacy statement in plain language. Every number comes from `statement.shown`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpfedexp.accounting.statement import PrivacyStatement

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
}

_NEIGHBOURS = {
    "replace-one": "everything that one client holds were replaced by something else",
    "add-remove": "one client, with everything it holds, were added or left out",
}

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

_SIMULATION = (
    "This was a simulation: its noise came from a seed, so that the run can be repeated, and whoever knows the seed can "
    "take the noise away again. The figures hold for the same algorithm when it runs with secure noise."
)


def statement_text(s: PrivacyStatement) -> str:
    if not s.private:
        return f"{s.algorithm}: this run is not private; it makes no promise about any client's data.\n"
    n = s.shown
    if s.rounds == 0:
        return f"{s.algorithm}: nothing has been released yet, so no privacy has been spent.\n"
    paragraphs = [
        f"Privacy of {s.algorithm}: {n['rounds']} {_plural('round', s.rounds)}, "
        f"{n['clients']} {_plural('client', s.clients)}",
        "Who is protected: every client, with all of its data at once, not only single records.",
        _AGAINST[s.setting],
        _how_much(s),
        f"In practice: suppose an attacker knows everything except {_QUESTION[s.adjacency]}, and both answers are equally "
        f"likely. A blind guess is right {n['guessing_percent']}% of the time. With everything that was released, no "
        f"attack of any kind is right more than {n['attack_success_percent']}% of the time. {_VERDICT[s.strength]}",
        "What is not covered:\n" + "\n".join(f"  - {item}" for item in s.not_covered),
    ]
    if s.simulated:
        paragraphs.append(_SIMULATION)
    return "\n\n".join(paragraphs) + "\n"


def _how_much(s: PrivacyStatement) -> str:
    n = s.shown
    sentences = [
        f"How much: if {_NEIGHBOURS[s.adjacency]} ({s.adjacency} adjacency), no outcome would become more than e^epsilon "
        "times as likely, except for a small probability delta. Smaller is better.",
        f"One round alone has epsilon = {n['epsilon_round']}" + (", with no delta." if s.delta_round == 0.0 else "."),
        f"The total over {_all_rounds(s)}, which is what counts, is epsilon = {n['epsilon_total']} "
        f"at delta = {n['delta']}.",
    ]
    if s.pure_epsilon_total is not None and n["pure_epsilon_total"] != n["epsilon_total"]:
        sentences.append(f"With no delta at all the total is epsilon = {n['pure_epsilon_total']}.")
    if s.planned_rounds is not None and s.planned_rounds != s.rounds:
        sentences.append(
            f"The plan is {n['planned_rounds']} rounds, which would cost epsilon = {n['planned_epsilon_total']} in total."
        )
    sentences.append(f"Computed by: {s.accountant}.")
    return " ".join(sentences)


def _all_rounds(s: PrivacyStatement) -> str:
    return "its only round" if s.rounds == 1 else f"all {s.shown['rounds']} rounds"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
