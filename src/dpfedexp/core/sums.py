"""Sums over clients, and the values that are released from them.

Chunks of clients, ranks of a distributed run and replies of a deployment are all combined with `+`, so memory does not grow with
the number of clients.

Votes are a few bounded numbers that a client adds to its report, such as "my update was within the clip" or its loss. A vote has a
public range. A client's value is centered and scaled to its share, a number within ±½, so one client moves the sum of shares by at
most ½ when it is left out and by at most 1 when it is replaced. Each sum gets Gaussian noise of its own, which is charged together
with the update's. Votes need a trusted server: in local DP the noise on one number per client is too large.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from dpfedexp.core.noise import step_for
from dpfedexp.errors import InputError, checked, is_number, require

WITHIN_CLIP = "within clip"
"""The vote of adaptive clipping: whether a client's update was within the clip. It comes from the update itself."""
MAX_SHARE = 0.5
"""The largest absolute value of a share, a client's scaled value of a vote."""
Secure = bool | Literal["strict"]
"""False for floating-point noise, True for noise rounded to a grid, "strict" for exact discrete noise."""
_COST = 5.05
"""Two votes with noise of this many z each cost the update 0.995% more noise at the same ε."""


@checked
@dataclass(frozen=True)
class VoteSpec:
    """A vote: a bounded number that every client reports.

    Args:
        name: its name in the ledger, the history and the statement.
        low: the smallest value; a smaller one counts as this one.
        high: the largest value; a larger one counts as this one.
    """

    name: str
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and self.name.isprintable() and 0 < len(self.name) <= 60
        require(named, f"the vote's name is {self.name!r}; it must be text of 1 to 60 printable characters.")
        require(
            is_number(self.low) and is_number(self.high) and self.low < self.high and self.width < math.inf,
            f"the vote {self.name!r} has the range {self.low} to {self.high}; it must be two finite numbers, the smaller first.",
        )

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def middle(self) -> float:
        """The value that is used for a client whose answer is missing or not a number."""
        return self.low + self.width / 2

    @property
    def field(self) -> str:
        """The vote's name in a run's history."""
        return "noisy_mean_" + self.name.replace(" ", "_")


@checked
@dataclass(frozen=True)
class Vote(VoteSpec):
    """A vote with its noise.

    Args:
        noise: the standard deviation of the noise on the sum of shares (values scaled to ±½); 0 only in runs without privacy.
    """

    noise: float = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = is_number(self.noise) and 0 <= self.noise < math.inf
        require(known, f"the vote {self.name!r} has noise {self.noise}; it must be a positive number.")


def within_clip_vote(noise: float) -> Vote:
    return Vote(WITHIN_CLIP, noise=noise)


def default_noise(cohort: float, z: float, votes: int) -> float:
    """The default noise of each of `votes` votes, for the public cohort size and the noise multiplier z.

    A twentieth of the cohort is accurate enough. Where that costs too much, the noise is larger: all votes together cost the
    update at most 1% more noise at the same ε, and a single vote half a percent.

    >>> default_noise(1000, 5.0, 1)
    50.0
    """
    return max(cohort / 20.0, 5.0 * z if votes <= 1 else _COST * z * math.sqrt(votes / 2.0))


def to_shares(values: Tensor, vote: VoteSpec) -> Tensor:
    """Scale the clients' values of a vote to shares within ±½, in float64; NaN becomes 0, the middle of the range.

    >>> to_shares(torch.tensor([0.0, 7.5, 1e9, torch.nan]), VoteSpec("loss", 0.0, 10.0)).tolist()
    [-0.5, 0.25, 0.5, 0.0]
    """
    return clamp_shares((values.double() - vote.middle) / vote.width)


def clamp_shares(shares: Tensor) -> Tensor:
    """Clamp received shares to ±½; NaN becomes 0."""
    return torch.nan_to_num(shares.double().clamp(-MAX_SHARE, MAX_SHARE), nan=0.0)


def estimate(noisy_sum: float, denominator: float, vote: VoteSpec) -> float:
    """Estimate the mean value from the noisy sum of shares; `denominator` is public. Noise may take it outside the range."""
    return vote.middle + vote.width * noisy_sum / denominator


def check_votes(votes: Sequence[VoteSpec]) -> None:
    """Raise `InputError` if two votes have the same name, or one has the name that adaptive clipping uses."""
    names = [vote.name for vote in votes]
    twice = [name for name in names if names.count(name) > 1]
    require(not twice, f"votes has {twice[0] if twice else ''!r} twice; names of votes must be unique.")
    if WITHIN_CLIP in names:
        own = (votes[0].name, votes[0].low, votes[0].high) == (WITHIN_CLIP, 0.0, 1.0)
        require(own, f"votes has {WITHIN_CLIP!r}, which is the vote of adaptive clipping; use another name.")


def client_votes(votes: Sequence[Vote]) -> tuple[Vote, ...]:
    """The votes whose values clients provide: all but the vote of adaptive clipping."""
    return tuple(vote for vote in votes if vote.name != WITHIN_CLIP)


def shares(votes: Sequence[Vote], within: Tensor, ballots: Tensor | None) -> Tensor | None:
    """The shares that clients send, [n, k]; `within`: who was within the clip, `ballots`: the values of `client_votes` [n, k']."""
    others = client_votes(votes)
    given = (len(within), 0) if ballots is None else tuple(ballots.shape)
    require(
        given == (len(within), len(others)),
        f"ballots has shape {given}; it must be ({len(within)}, {len(others)}): a row for each client and a column for each of "
        f"the votes {', '.join(vote.name for vote in others) or '(none)'}.",
    )
    if not votes:
        return None
    columns = iter(()) if ballots is None else iter(ballots.to(within.device).unbind(1))
    return torch.stack([to_shares(within if v.name == WITHIN_CLIP else next(columns), v) for v in votes], dim=1)


def sum_shares(sent: Tensor | None, votes: Sequence[Vote], secure: Secure = False) -> Tensor | None:
    """Sum the shares [n, k] that clients sent, [k]; each is clamped to ±½ again and, if secure, rounded to its lattice."""
    if not votes:
        return None
    if sent is None or sent.dim() != 2 or sent.shape[1] != len(votes):
        shape = None if sent is None else tuple(sent.shape)
        raise InputError(f"the report's votes have shape {shape}; they must have {len(votes)} columns.")
    return on_lattice(clamp_shares(sent), votes, secure).sum(0)


def lattice_step(vote: Vote, secure: Secure) -> float:
    """The step of a vote's lattice: a power of two and at most ½, so ±½ are on the lattice."""
    return min(MAX_SHARE, step_for(vote.noise, secure == "strict"))


def on_lattice(values: Tensor, votes: Sequence[Vote], secure: Secure) -> Tensor:
    """Round values, one column per vote, to the lattices of the votes' noise if it is secure.

    A number within ±½ stays within ±½, because both ends are lattice points; so sensitivities do not change.
    """
    if not secure or not votes:
        return values
    steps = torch.tensor([lattice_step(vote, secure) for vote in votes], dtype=torch.float64, device=values.device)
    return (values.double() / steps).round() * steps


@dataclass(frozen=True)
class Sums:
    """Sums over clients, in double precision so that the order of addition has no visible effect.

    Args:
        vector: Σ of what the clients sent, [d] (or [d+1] with the free rule's coordinate).
        squares: Σ of the squared-norm statistic that the step size needs: ‖Δ_i‖², ‖c_i‖² or ŝ_i.
        votes: Σ of the clients' shares of every vote, each within ±½ per client, [k].
        count: how many clients were added.
    """

    vector: Tensor
    squares: Tensor
    votes: Tensor
    count: int

    def __add__(self, other: Self) -> Self:
        return self._joined(self.vector + other.vector, other)

    def take(self, other: Self) -> Self:
        """Add in place: the same as `+` without a new vector."""
        return self._joined(self.vector.add_(other.vector), other)

    def _joined(self, vector: Tensor, other: Self) -> Self:
        return type(self)(vector, self.squares + other.squares, self.votes + other.votes, self.count + other.count)

    def times(self, factor: float) -> Self:
        """Multiply the sums by `factor`, as if there were that many times the clients; `count` is unchanged."""
        return type(self)(self.vector * factor, self.squares * factor, self.votes * factor, self.count)

    def to(self, device: torch.device) -> Self:
        return type(self)(self.vector.to(device), self.squares.to(device), self.votes.to(device), self.count)

    @classmethod
    def zero(cls, width: int, device: torch.device | str = "cpu", votes: int = 0) -> Self:
        vector, squares, shares = (torch.zeros(n, dtype=torch.float64, device=device) for n in ((width,), (), (votes,)))
        return cls(vector, squares, shares, 0)


@checked
@dataclass(frozen=True)
class Release:
    """The output of a mechanism in one round, which anyone may see.

    Args:
        c_bar: the mean update that moves the model.
        statistic: the scalar that the step-size rule needs; None if it needs none.
        votes: the noisy mean of every vote in its own range, by name; empty if there are none.
        clip: the radius C that was in force.
        sigma: the standard deviation of the noise in each coordinate of a client's own report; 0 if it has none.
        variance: of the noise in each coordinate of `c_bar`, or an upper bound of it, from public numbers; infinite if the
            mechanism does not know it.
    """

    c_bar: Tensor
    statistic: float | None
    votes: dict[str, float]
    clip: float
    sigma: float = 0.0
    variance: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "votes", dict(self.votes or {}))

    @property
    def within(self) -> float | None:
        """The noisy fraction of clients within the clip, None without adaptive clipping."""
        return self.votes.get(WITHIN_CLIP)

    @property
    def norm(self) -> float:
        return float(torch.linalg.vector_norm(self.c_bar, dtype=torch.float64))

    @property
    def numerator(self) -> float:
        """The statistic; raises `InputError` if the mechanism releases none."""
        if self.statistic is None:
            raise InputError("the mechanism releases no statistic for this step-size rule; use one that needs none.")
        return self.statistic
