"""A likelihood ratio that is learnt: which bins of what is seen are more frequent under one input than under the other.

It needs no formula of the mechanism, so it also finds what the formula does not know, such as a shell that no report of one client
ever falls into. It is learnt on one half of the samples and scores the other, of which one half chooses the test and one proves.
"""

from __future__ import annotations

import numpy as np

from dpfedexp.audit.bounds import Floats

_FEWEST, _MOST, _PER_BIN = 32, 256, 400
"""Bins, and samples that one more bin needs: the finer they are, the thinner the shells that are found."""


def learnt_ratio(here: Floats, there: Floats, *, levels: bool) -> tuple[Floats, Floats]:
    """Of the second half of the samples, the log ratio of the bin that each falls into.

    The first column has bins of like mass; with `levels` the last one is a level, which is taken as it is.
    """
    half = min(len(here), len(there)) // 2
    pooled = np.concatenate([here[:half, 0], there[:half, 0]])
    bins = min(_MOST, max(_FEWEST, len(here) // _PER_BIN))
    edges = np.quantile(pooled, np.linspace(0.0, 1.0, bins + 1)[1:-1])
    first, second = _bin(here, edges, levels), _bin(there, edges, levels)
    size = 1 + max(int(first.max()), int(second.max()))
    counts = [np.bincount(cells[:half], minlength=size) + 0.5 for cells in (first, second)]
    ratio = np.log(counts[0] / counts[1]) - np.log(counts[0].sum() / counts[1].sum())
    return ratio[first[half:]], ratio[second[half:]]


def _bin(seen: Floats, edges: Floats, levels: bool) -> np.ndarray:
    cells = np.searchsorted(edges, seen[:, 0])
    return cells + (len(edges) + 1) * seen[:, -1].astype(np.int64) if levels else cells
