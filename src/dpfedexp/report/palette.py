"""Which series has which colour: the same algorithm the same colour in every chart (Okabe and Ito's palette)."""

from __future__ import annotations

from dpfedexp.report.document import Panel

CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B")
NAMED = {
    "fedexp": 0,
    "fedavg": 1,
    "scaffold": 2,
    "cdp": 0,
    "ldp-gaussian": 1,
    "ldp-privunit": 2,
    "proposed": 0,
    "naive": 1,
    "target": 2,
    "plain": 2,
    "fit": 3,
    "tuned": 4,
    "fedadam": 5,
}


def slots(panel: Panel) -> list[int]:
    """A slot of the palette for each series: the named ones keep theirs, the others take what is left in order."""
    taken = {NAMED[s.colour] for s in panel.series if s.colour in NAMED}
    free = [slot for slot in range(len(CYCLE)) if slot not in taken] or list(range(len(CYCLE)))
    chosen, used = [], 0
    for series in panel.series:
        if series.colour in NAMED:
            chosen.append(NAMED[series.colour])
        else:
            chosen.append(free[used % len(free)])
            used += 1
    return chosen


def colours(panel: Panel) -> list[str]:
    return [CYCLE[slot] for slot in slots(panel)]
