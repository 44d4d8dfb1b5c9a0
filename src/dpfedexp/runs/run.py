"""What a run returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dpfedexp.accounting import Ledger, PrivacyStatement
from dpfedexp.advice.message import Advice
from dpfedexp.arguments import checked


@checked
@dataclass(frozen=True)
class Run:
    """What a run returns.

    Attributes:
        model: the trained module: the average of the last two iterates for FedEXP variants, the last one otherwise.
        history: one record per round: test metrics, eta_g, clip, update_norm, epsilon_total so far, and seconds if not secure.
        privacy: the statement of what was promised to whom; print it.
        ledger: what was charged.
        trainer: how local updates were computed.
        stopped: why the run ended before its last round, None if it did not.
        advice: what there was to say about the run, before it and while it went on (docs/advice.md).
    """

    model: nn.Module
    history: list[dict[str, Any]] = field(repr=False)
    privacy: PrivacyStatement = field(repr=False)
    ledger: Ledger = field(repr=False)
    trainer: str = "vectorised"
    stopped: str | None = None
    advice: tuple[Advice, ...] = field(default=(), repr=False)

    @property
    def verdict(self) -> str | None:
        """Why the run learnt nothing, or nothing shows that it did; None where there is no reason to say so."""
        return next((advice.sentence for advice in self.advice if advice.code == "dead"), None)

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        shown = {k: round(v, 4) for k, v in last.items() if isinstance(v, float)}
        ended = "" if self.stopped is None else f", stopped: {self.stopped}"
        ended += "" if self.verdict is None else f", {self.verdict}"
        return f"Run({len(self.history)} rounds, {shown}{ended})"
