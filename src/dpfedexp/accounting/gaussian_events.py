"""What a round of Gaussian noise charges, from its settings alone.

The mechanisms call these with their own fields; the command line calls them with its flags, and needs no torch for it. Everything
is in units of the clip C, so that rounds with different adaptive clips are the same event.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dpfedexp.accounting.events import Adjacency, BesideSum, GaussianEvent, Query, Sampling
from dpfedexp.accounting.joint import joint_mu


def central_gaussian_event(
    noise_multiplier: float,
    adjacency: Adjacency = "replace-one",
    sampling: Sampling = Sampling(),
    *,
    scalar_multiplier: float | None = None,
    count_noise: float | None = None,
) -> GaussianEvent:
    """The server adds noise to sums over clients: everything that it releases in a round, as one joint event.

    Args:
        noise_multiplier: the noise on the sum of the updates, over C.
        adjacency: what changes between neighbours.
        sampling: who takes part.
        scalar_multiplier: the noise on the sum of the squared norms, over C²; None where that sum is not released.
        count_noise: the noise on the number of clients within the clip; None where that number is not released.
    """
    both = 2.0 if adjacency == "replace-one" else 1.0
    queries = [Query("update", 1.0, both, noise_multiplier, diameter=2.0)]
    replaced, left_out = 2.0 / noise_multiplier, 1.0 / noise_multiplier
    if scalar_multiplier is not None:
        queries.append(Query("squared norms", 1.0, 1.0, scalar_multiplier, diameter=1.0))
        replaced = joint_mu(1.0, noise_multiplier, scalar_multiplier)
        left_out = math.hypot(left_out, 1.0 / scalar_multiplier)
    if count_noise is not None:
        queries.append(Query("within clip", 0.5, 0.5 * both, count_noise, diameter=1.0))
        replaced, left_out = math.hypot(replaced, 1.0 / count_noise), math.hypot(left_out, 0.5 / count_noise)
    # Attained, all queries at once: an update of norm C, left out or turned round; its bit is free to differ, because an
    # update of norm C may have been longer before it was clipped.
    full = sampling.kind == "full"
    event = GaussianEvent("central", adjacency, tuple(queries), sampling, attained=full)
    if not full or len(queries) == 1:
        return event
    joint, other = (replaced, left_out) if adjacency == "replace-one" else (left_out, replaced)
    return replace(event, joint_mu=joint, other_mu=other)


def local_gaussian_event(
    noise_multiplier: float, sampling: Sampling = Sampling(), *, squares: bool = False
) -> GaussianEvent:
    """Every client adds noise to its own update. The server sees who sent what, so sampling amplifies nothing against it; the
    event names it for other readers.

    Args:
        noise_multiplier: the noise on each update, over C.
        sampling: who takes part.
        squares: whether the released models depend on the squared norms of the reports beside their sum.
    """
    update = Query("update", 1.0, 2.0, noise_multiplier, diameter=2.0)
    beside: BesideSum = "squares" if squares else "nothing"
    return GaussianEvent("local", "replace-one", (update,), sampling, attained=True, beside_sum=beside)
