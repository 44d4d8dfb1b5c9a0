"""What one audit found, and whether it could have found anything."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dpfedexp.audit.bounds import Power
from dpfedexp.errors import checked
from dpfedexp.files import finite

Curve = tuple[tuple[float, float, float], ...]
Outcome = Literal["holds", "BROKEN", "NO POWER", "not audited"]


@checked
@dataclass(frozen=True)
class Result:
    """A measured value beside the claim that it must not exceed, and the power that the measurement had.

    Args:
        lower: what was proven: a lower bound on ε or μ, or the size of an effect that ought not to be there.
        claim: what it must not exceed: the accountant's figure, or the limit of an effect that chance explains.
        unit: what both are: "ε at δ = 0.01", "μ", "largest correlation".
        power: what the attack would have proven at this sample size, were the claim exactly tight, and the least of it.
        sees: for an effect that ought not to be there: the smallest one that would have been noticed, in words.
        one_sided: stated in advance: the attack is known to reach little, so reaching little says nothing.
        skipped: why nothing was measured; empty where something was.
        curve: (δ, lower bound, claim) at several δ, for the picture.
        detail: what was done, in a few words.
    """

    kind: str
    name: str
    unit: str
    lower: float
    claim: float
    confidence: float
    detail: str = ""
    curve: Curve = field(default=(), repr=False)
    power: Power | None = None
    sees: str = ""
    one_sided: bool = False
    skipped: str = ""

    @property
    def outcome(self) -> Outcome:
        """A relative 1e-9 is for the rounding of claims that are exact. Without a statement of power there is none."""
        if self.skipped:
            return "not audited"
        if not self.lower <= self.claim * (1.0 + 1e-9):
            return "BROKEN"
        if self.power is None:
            return "holds" if self.sees else "NO POWER"
        return "holds" if self.one_sided or self.lower >= self.power.least > 0 else "NO POWER"

    @property
    def fails(self) -> bool:
        """Whether the audit as a whole must fail because of this."""
        return self.outcome in ("BROKEN", "NO POWER")

    @property
    def holds(self) -> bool:
        return self.outcome == "holds"

    @property
    def share(self) -> float:
        """How much of the claim was reached."""
        return self.lower / self.claim if self.claim > 0 else math.nan

    @property
    def could(self) -> str:
        """What the attack could have shown, in words."""
        if self.skipped:
            return ""
        if self.power is None:
            return self.sees
        return f"{self.power.expected:.4f}" + (" (one-sided)" if self.one_sided else f", ≥ {self.power.least:.4f}")

    def to_json(self) -> dict[str, Any]:
        """For programs: numbers that JSON has no word for are null."""
        found: dict[str, Any] = finite(
            asdict(self) | {"outcome": self.outcome, "holds": self.holds, "could": self.could}
        )
        return found


def skip(kind: str, name: str, why: str) -> Result:
    """A part that was not audited, which is listed and never ticked."""
    return Result(kind, name, "", 0.0, 0.0, 1.0, why, skipped=why)
