"""The privacy statement in plain language. Every number comes from `statement.shown`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpfedexp.accounting.statement import PrivacyStatement

_AGAINST = {
    "central": (
        "Against whom: anyone who sees the released models, those of all rounds included, whatever else they know and however "
        "much computing power they have. Not against the server: it receives the clients' updates as they are and is trusted "
        "to add the noise."
    ),
    "local": (
        "Against whom: the server and anyone else who sees what a client sends, whatever else they know and however much computing "
        "power they have. Each client adds the noise itself, so nobody needs to be trusted with its data."
    ),
}

_NEIGHBOURS = {
    "replace-one": "everything one client holds were replaced by something else",
    "add-remove": "one client, with everything it holds, were added or left out",
}

_VERDICT = {
    "strong": "This is a strong guarantee.",
    "moderate": "This is a moderate guarantee: real protection, but not enough to publish secrets behind.",
    "weak": "This is a weak guarantee: a determined attacker in the worst case learns a lot. Do not rely on it alone.",
    "very weak": (
        "This is a very weak guarantee: in the worst case it protects next to nothing. Real attacks may do worse than the "
        "worst case, but nothing here proves it."
    ),
}


def statement_text(s: PrivacyStatement) -> str:
    if not s.private:
        return f"{s.algorithm}: this run is not private; it makes no promise about any client's data."
    n = s.shown
    if s.rounds == 0:
        return f"{s.algorithm}: nothing has been released yet, so nothing has been spent (delta = {n['delta']})."
    paragraphs = [
        f"Privacy of {s.algorithm}, {n['rounds']} {_plural('round', s.rounds)} with {n['clients']} {_plural('client', s.clients)}",
        "Who is protected: every client, with all of its data at once, and not only single records of it.",
        _AGAINST[s.setting],
        _how_much(s),
        _meaning(s),
        "What is not covered:\n" + "\n".join(f"  - {item}" for item in s.not_covered),
    ]
    if s.simulated:
        paragraphs.append(
            "This was a simulation: its noise came from a seed, so that the run can be repeated. Whoever knows the seed can take "
            "the noise away. The figures hold for the algorithm when it runs with secure noise."
        )
    return "\n\n".join(paragraphs) + "\n"


def _how_much(s: PrivacyStatement) -> str:
    n = s.shown
    pure = s.delta_round == 0.0
    one = f"One round alone: epsilon = {n['epsilon_round']}" + (" (without any delta)." if pure else ".")
    text = (
        f"How much: if {_NEIGHBOURS[s.adjacency]}, no outcome would become more than e^epsilon times as likely, except with a "
        f"small probability delta. Smaller is better. {one} All {n['rounds']} {_plural('round', s.rounds)} together, which is what "
        f"counts: epsilon = {n['epsilon_total']} at delta = {n['delta']}."
    )
    if s.pure_epsilon_total is not None and n["pure_epsilon_total"] != n["epsilon_total"]:
        text += f" Without any delta the total is epsilon = {n['pure_epsilon_total']}."
    text += f" Neighbouring data sets: {s.adjacency}. Accountant: {s.accountant}."
    if s.planned_rounds is not None and s.planned_rounds != s.rounds:
        text += f" The plan is {n['planned_rounds']} rounds, which would cost epsilon = {n['planned_epsilon_total']}."
    return text


def _meaning(s: PrivacyStatement) -> str:
    n = s.shown
    question = (
        "whether a client's data is what it is or something else"
        if s.adjacency == "replace-one"
        else "whether a client took part at all"
    )
    return (
        f"What that means: suppose someone knows everything but one thing, {question}, and both were equally likely. A blind guess is "
        f"right {n['guessing_percent']}% of the time. With everything that was released, no attack of any kind can be right more than "
        f"{n['attack_success_percent']}% of the time. {_VERDICT[s.strength]}"
    )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
