"""A privacy statement where a notebook shows it: escaped HTML that takes its colours from the page, light or dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dpfedexp.accounting.statements.promise import Promise
from dpfedexp.accounting.statements.wording import caveats, shown, statement_text


def summary(s: Promise) -> str:
    """One line: the algorithm, its rounds and clients, what it promises, and to whom where that is not these clients."""
    rounds = f"{s.rounds} round{'' if s.rounds == 1 else 's'}"
    if not s.private:
        return f"{s.algorithm}, {rounds}, {s.clients} clients, not private"
    if s.rounds == 0 and not s.votes:
        return f"{s.algorithm}, nothing released yet"
    n = shown(s)
    bound = "" if s.exact else "at most "
    plan = f"; stopped early, epsilon of all {n['planned_rounds']} planned" if s.stopping and s.planned_rounds else ""
    return "; ".join(
        [
            f"{s.algorithm}, {rounds}, {n['clients']} clients, {bound}epsilon {n['epsilon_total']} at delta {n['delta']} "
            f"({s.adjacency}, {s.setting}), {s.strength}{plan}",
            *caveats(s),
        ]
    )


def statement_html(s: Promise) -> str:
    """The line of `summary`, and the whole text folded away."""
    return card("Privacy", [summary(s)], folded=("The whole statement", statement_text(s)), failed=not s.private)


def card(
    title: str,
    lines: Iterable[str],
    *,
    rows: Iterable[tuple[str, str]] = (),
    folded: tuple[str, str] | None = None,
    failed: bool = False,
) -> str:
    """A small box; everything given is text and is escaped.

    Args:
        title: in bold.
        lines: paragraphs.
        rows: a table of two columns.
        folded: a heading, and the text that a click on it shows.
        failed: whether the box is marked as bad news.
    """
    colour = "#d9534f" if failed else "#4a90c2"
    parts = [f"<b>{escape(title)}</b>", *(f"<div>{escape(line)}</div>" for line in lines)]
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    if cells:
        parts.append(f"<table style='margin:4px 0;color:inherit'>{cells}</table>")
    if folded is not None:
        text = f"<pre style='white-space:pre-wrap;background:none;color:inherit'>{escape(folded[1])}</pre>"
        parts.append(f"<details><summary>{escape(folded[0])}</summary>{text}</details>")
    return f"<div style='border-left:3px solid {colour};padding:2px 12px;margin:4px 0'>{''.join(parts)}</div>"
