"""The cases of the mechanism audit: every mechanism with every step-size rule, plain and secure, and its worst neighbours.

All claim about μ = 1 a round, where some ten thousand samples have the power to tell. Vectors have eight coordinates, so that noise
repeated after a few of them is in the sample's covariance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpfedexp.accounting.charges import GammaRule
from dpfedexp.accounting.gdp import FREE_THRESHOLD
from dpfedexp.core.votes import Vote, within_clip
from dpfedexp.errors import checked, require
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, Mechanism, PrivUnit
from dpfedexp.mechanisms.base import Numerator

DIMENSION = 8
GAMMAS: tuple[GammaRule, ...] = ("exact", "paper", "optimal")
RULES: dict[Numerator | None, str] = {
    None: "",
    "free": ", free rule",
    "paper": ", paper's rule",
    "naive": ", naive rule",
}
_HOSTILE = 8.0
"""Clients of the central setting send reports this many times too long: the server must not trust their clipping."""


@checked
@dataclass(frozen=True)
class Case:
    """A mechanism, and two neighbouring inputs that differ in the last client.

    For central mechanisms these are the rows that the clients send, for local ones a client's own update. `votes` holds what the
    last client sends for every vote in both; the others send ½, and an absent client nothing. `denominator` is public.
    """

    name: str
    mechanism: Mechanism
    here: Tensor
    there: Tensor
    denominator: float = 3.0
    votes: tuple[float, float] = (0.5, 0.5)

    @property
    def secure(self) -> bool:
        return "secure" in self.name


def standard_cases() -> list[Case]:
    """Every mechanism with every rule that it knows, plain and secure."""
    plain = [*_central_cases(0.5, 2.0), *_local_cases(0.5, 2.0), *_privunit_cases(0.5)]
    secure = [
        Case(f"{c.name}, secure", c.mechanism.secure(), c.here, c.there, c.denominator, c.votes)
        for c in plain
        if not c.name.endswith(("coordinate", "naive rule", "paper γ", "optimal γ"))
    ]
    return plain + secure


def _central_cases(c: float, z: float) -> list[Case]:
    ahead, back = _row(c * _HOSTILE), _row(-c * _HOSTILE)
    free = CentralGaussian(c, z, numerator="free")
    counted = CentralGaussian(c, 2.8, numerator="free", votes=(within_clip(1.4),))
    leaving = CentralGaussian(c, 1.4, "add-remove", votes=(within_clip(0.7),))
    votes = (within_clip(2.4), Vote("loss", 0.0, 10.0, noise=2.0), Vote("loss fell", noise=3.0))
    asking = CentralGaussian(c, 3.0, numerator="free", votes=votes)
    asked_apart = CentralGaussian(c, 1.5, "add-remove", votes=tuple(replace(v, noise=v.noise / 2) for v in votes))
    return [
        Case("central Gaussian", CentralGaussian(c, z), *_neighbours(ahead, back)),
        Case("central Gaussian, free rule", free, *_neighbours(*_lifted(ahead, back))),
        Case("central Gaussian, free rule's coordinate", free, *_neighbours(*_poles(c))),
        Case("central Gaussian, paper's rule", *_paper(c, z)),
        Case("central Gaussian, adaptive clip", counted, *_neighbours(*_lifted(ahead, back)), votes=(0.5, -0.5)),
        Case("central Gaussian, add-remove", CentralGaussian(c, 1.0, "add-remove"), *_absent(ahead)),
        Case("central Gaussian, adaptive clip, add-remove", leaving, *_absent(ahead)),
        Case("central Gaussian, votes", asking, *_neighbours(*_lifted(ahead, back)), votes=(_HOSTILE, -_HOSTILE)),
        Case("central Gaussian, votes, add-remove", asked_apart, *_absent(ahead), votes=(_HOSTILE, _HOSTILE)),
    ]


def _local_cases(c: float, z: float) -> list[Case]:
    return [
        Case(f"local Gaussian{named}", LocalGaussian(c, z, rule), _row(c), _row(-c)) for rule, named in RULES.items()
    ]


def _privunit_cases(c: float) -> list[Case]:
    """A client at the clip beside one with hardly any update and the opposite direction: both halves of a report differ most."""
    return [
        Case(f"PrivUnit, {gamma} γ", PrivUnit(c, DIMENSION, 1.0, 1.0, 1.0, gamma=gamma), _row(c), _row(-1e-7 * c))
        for gamma in GAMMAS
    ]


def _row(value: float) -> Tensor:
    row = torch.zeros(1, DIMENSION)
    row[0, 0] = value
    return row


def _neighbours(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two clients that everybody knows, and the one that is replaced."""
    known = torch.zeros(2, one.shape[1])
    known[:, -1] = 0.1
    return torch.cat([known, one]), torch.cat([known, other])


def _absent(row: Tensor) -> tuple[Tensor, Tensor]:
    """The client takes part, or does not; the others all point the other way, which shows a denominator that counts them."""
    known = -row.expand(4, -1)
    return torch.cat([known, row]), known


def _lifted(*rows: Tensor) -> list[Tensor]:
    return [torch.cat([row, torch.zeros(1, 1)], dim=1) for row in rows]


def _poles(c: float) -> tuple[Tensor, Tensor]:
    """The two ends of the free rule's own coordinate, which a hostile client may fill with anything."""
    end = torch.zeros(1, DIMENSION + 1)
    end[0, -1] = c * _HOSTILE
    return end, -end


def _paper(c: float, z: float) -> tuple[Mechanism, Tensor, Tensor]:
    """The pair of `joint_mu` where the scalar counts: antiparallel, with norms C and bC."""
    scalar = 1.0
    rho = (z / scalar) ** 2
    require(
        rho > FREE_THRESHOLD,
        f"z is {z:g}; the scalar of the paper's rule counts only where z is above {FREE_THRESHOLD**0.5:.4g}, so raise it.",
    )
    b = 1.0 / (rho * (1.0 + np.sqrt(1.0 - 2.0 / rho)))
    mechanism = CentralGaussian(c, z, numerator="paper", scalar_multiplier=scalar)
    return mechanism, *_neighbours(_row(c * _HOSTILE), _row(-float(b) * c))
