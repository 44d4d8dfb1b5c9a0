"""Candidates that a run chooses from while it trains: `fit(…, candidates=[…])`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.probe import MOST_CANDIDATES, Extras, candidate_vote
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.core.local_rate import scale_rounds
from dpfedexp.engine.engine import Engine, Tournament, staying
from dpfedexp.errors import InputError, checked, is_number, require

LENGTHS = (5, 3, 2)
"""Rounds of the last phase, of the phase before it, and of each earlier phase, in a run of `USUAL_ROUNDS` rounds."""
USUAL_ROUNDS = 50
Comparison = tuple[tuple[tuple[int, int], ...], dict[int, tuple[int, float]], Extras]


@checked
@dataclass(frozen=True)
class Candidate:
    """Settings that a run compares with others; None means the setting of the run.

    Args:
        model: another network, with its own initial parameters, frozen layers or augmentation; on Flower its name.
        local: another local optimizer, rate, number of steps or batch size.
        algorithm: another algorithm, server rule or clip quantile; a round must cost the same ε.
        rate: a factor on the local rate and the first clip that the clients' votes choose; only for an automatic rate.
        name: its name in the history and the statement; by default the settings that differ.
    """

    model: nn.Module | str | None = None
    local: LocalOptimizer | None = None
    algorithm: Algorithm | None = None
    rate: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        require(is_number(self.rate) and 0 < self.rate < 1e6, f"rate is {self.rate!r}; it must be a positive factor.")
        require(isinstance(self.name, str), f"name is {self.name!r}; it must be text.")

    @property
    def label(self) -> str:
        parts = [
            self.model if isinstance(self.model, str) else "" if self.model is None else type(self.model).__name__,
            "" if self.local is None else repr(self.local),
            "" if self.algorithm is None else self.algorithm.name,
            "" if self.rate == 1.0 else f"{self.rate:g} times the voted rate",
        ]
        return self.name or ", ".join(filter(None, parts)) or "as given"


def candidates_of(given: Sequence[Candidate | nn.Module | LocalOptimizer | Algorithm] | None) -> tuple[Candidate, ...]:
    """Convert the `candidates` argument to `Candidate`s with unique names; a model, local optimizer or algorithm becomes one."""
    if given is None:
        return ()
    kinds = {nn.Module: "model", LocalOptimizer: "local", Algorithm: "algorithm"}
    found = []
    require(
        isinstance(given, Sequence) and 2 <= len(given) <= MOST_CANDIDATES,
        f"candidates is a {type(given).__name__}{f' of {len(given)}' if isinstance(given, Sequence) else ''}; it must be a list of "
        f"2 to {MOST_CANDIDATES} candidates.",
    )
    for one in given:
        fields = [name for kind, name in kinds.items() if isinstance(one, kind)]
        if not isinstance(one, Candidate) and not fields:
            raise InputError(
                f"candidates has a {type(one).__name__}; give models, local optimizers, algorithms, or Candidate(model=…, local=…)."
            )
        found.append(one if isinstance(one, Candidate) else Candidate(**cast(Any, {fields[0]: one})))
    labels = [one.label for one in found]
    return tuple(
        replace(one, name=one.label if labels.count(one.label) == 1 else f"{one.label} ({number})")
        for number, one in enumerate(found, start=1)
    )


def phases_of(candidates: int, rounds: int) -> tuple[tuple[int, int], ...]:
    """Pairs (r, k): after round r the best k candidates stay. Each phase drops half; all take at most a fifth of the rounds."""
    stays = []
    while candidates > 1:
        candidates = (candidates + 1) // 2
        stays.append(candidates)
    lengths = [LENGTHS[min(len(stays) - 1 - at, len(LENGTHS) - 1)] for at in range(len(stays))]
    ends = [max(at + 1, round(sum(lengths[: at + 1]) * rounds / USUAL_ROUNDS)) for at in range(len(stays))]
    require(
        not ends or ends[-1] < rounds,
        f"rounds is {rounds}, too few to compare so many candidates; take more rounds or fewer candidates.",
    )
    return tuple(zip(ends, stays, strict=True))


def plan_comparison(candidates: Sequence[Candidate], local: LocalOptimizer | None, rounds: int) -> Comparison:
    """Return `phases` and `follows` of a `Tournament`, and its votes. `local` is for candidates without their own optimizer.

    They depend on the settings alone, so the simulator, a server and its nodes compute the same.
    """
    phases = phases_of(len(candidates), rounds)
    follows: dict[int, tuple[int, float]] = {}
    keys = [(one.model, one.local, one.algorithm) for one in candidates]
    automatic = [own is not None and own.automatic for own in (one.local or local for one in candidates)]
    for number, one in enumerate(candidates):
        leader = keys.index(keys[number])
        require(
            one.rate == 1.0 or automatic[number],
            f"candidate {one.label!r} multiplies a rate that is fixed; pass local=Sgd(lr=…) instead of rate.",
        )
        same = [n for n in range(number) if keys[n] == keys[number] and candidates[n].rate == one.rate]
        require(not same, f"candidates {candidates[(same or [0])[0]].label!r} and {one.label!r} are the same.")
        if leader != number or one.rate != 1.0:
            follows[number] = (leader, one.rate)
    require(
        all(leader not in follows for leader, _ in follows.values()),
        "candidates with a factor on the rate need one with the voted rate itself (rate 1.0), such as Candidate(), before them.",
    )
    votes = sum(automatic[number] for number in range(len(candidates)) if number not in follows)
    times = [scale_rounds(rounds, noise_share) for noise_share in (0.0, math.inf)]
    scales = max(sum(staying(phases, n, sum(automatic)) for n in one) for one in times)
    return phases, follows, Extras(rate_votes=votes, scale_votes=scales, candidate_votes=len(phases))


def compared(
    candidates: Sequence[Candidate],
    local: LocalOptimizer | None,
    rounds: int,
    prepared: Callable[[Candidate, Extras], tuple[Engine, str | None]],
) -> tuple[Engine, str | None]:
    """Build the engine of a run that chooses one of the candidates; also return a note for the user, or None.

    `local` is for candidates without their own optimizer; `prepared` maps a candidate and the extra votes of the run to its engine
    and a note.
    """
    phases, follows, extras = plan_comparison(candidates, local, rounds)
    engines: list[Engine] = []
    notes: list[str] = []
    for number, one in enumerate(candidates):
        if number in follows:
            engines.append(engines[follows[number][0]])
            continue
        engine, note = prepared(one, extras)
        engines.append(engine)
        notes += [note] if note else []
    # The rates of all candidates are rescaled after the same rounds: those of the first with an automatic rate.
    noise = next((engine.probe.noise_share for engine in engines if engine.probe), math.inf)
    engines = [replace(engine, probe=engine.probe and replace(engine.probe, noise_share=noise)) for engine in engines]
    first = engines[0]
    for one, engine in zip(candidates, engines, strict=True):
        require(
            not engine.algorithm.scaffold and engine.larger is None,
            f"candidate {one.label!r} can't be compared: DP-SCAFFOLD and noise_cohort need the same clients in every round.",
        )
        require(
            engine.event == first.event,
            f"a round of candidate {one.label!r} does not cost what one of {candidates[0].label!r} costs; compare candidates with "
            "the same mechanism and target.",
        )
    vote = candidate_vote(first.mechanism, rounds, first.sampling)
    tournament = Tournament(tuple(engines), tuple(one.label for one in candidates), phases, vote, follows)
    cohort = first.cohort.of_candidates([engine.cohort for engine in engines])
    return replace(first, cohort=cohort, tournament=tournament), " ".join(dict.fromkeys(notes)) or None
