"""A likelihood ratio that is learnt: which bins of what is seen are more frequent under one input than under the other.

It needs no formula of the mechanism, so it also finds what the formula does not know, such as a shell that no report of one client
ever falls into. It is learnt on one half of the samples and scores both; the bound is proven on the other half.
"""

from __future__ import annotations

import numpy as np

from dpfedexp.audit.bounds import Floats

_FEWEST, _MOST, _PER_BIN = 32, 256, 400
"""Bins, and samples that one more bin needs: the finer they are, the thinner the shells that are found."""


def learnt_ratio(here: Floats, there: Floats) -> tuple[Floats, Floats]:
    """Log ratio of the bin that each sample falls into; the first column in bins of like mass, the last (a level) as it is."""
    pooled = np.concatenate([here[::2, 0], there[::2, 0]])
    bins = min(_MOST, max(_FEWEST, len(here) // _PER_BIN))
    edges = np.quantile(pooled, np.linspace(0.0, 1.0, bins + 1)[1:-1])
    first, second = _bin(here, edges), _bin(there, edges)
    size = 1 + max(int(first.max()), int(second.max()))
    counts = [np.bincount(cells[::2], minlength=size) + 0.5 for cells in (first, second)]
    ratio = np.log(counts[0] / counts[1]) - np.log(counts[0].sum() / counts[1].sum())
    return ratio[first], ratio[second]


def _bin(seen: Floats, edges: Floats) -> np.ndarray:
    return np.searchsorted(edges, seen[:, 0]) + (len(edges) + 1) * seen[:, -1].astype(np.int64)
