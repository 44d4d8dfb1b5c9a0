"""What a run promises, to whom, in words and numbers.

A statement is made only from what was charged. Its text is for people who are not experts; its JSON holds every
number of the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpfedexp.accounting import gdp
from dpfedexp.accounting.compose import Charges, Guarantee, compose
from dpfedexp.accounting.events import PrivUnitEvent

TUNING = "choosing the model, the clip or any other setting by trying several of them on the same clients"
METRICS = "anything measured on the clients' data without noise, such as a training loss or a test score on their data"
OTHER_USES = "other uses of the same clients' data, now or later: every further run adds to the total"


@dataclass(frozen=True)
class PrivacyStatement:
    """The claim of one run. `epsilon_round` is the most expensive single round; δ is for the total.

    `membership_advantage` bounds (true positive rate − false positive rate) of every attack that tells two
    neighbouring data sets apart, and `attack_success` its rate of right guesses when both were equally likely: (1 +
    advantage)/2.
    """

    algorithm: str
    private: bool
    setting: str
    adjacency: str
    clients: int
    rounds: int
    epsilon_round: float
    epsilon_total: float
    delta: float
    delta_round: float
    accountant: str
    membership_advantage: float
    attack_success: float
    strength: str
    simulated: bool
    pure_epsilon_total: float | None = None
    planned_rounds: int | None = None
    planned_epsilon_total: float | None = None
    not_covered: tuple[str, ...] = (TUNING, METRICS, OTHER_USES)

    @staticmethod
    def from_charges(
        charges: Charges,
        delta: float,
        *,
        algorithm: str,
        clients: int,
        simulated: bool = True,
        planned: Charges | None = None,
        not_covered: Sequence[str] = (),
    ) -> PrivacyStatement:
        """The statement for what was charged. `planned` are the charges of the whole run where it stopped early or
        still runs; `not_covered` adds to the list of what the guarantee leaves out."""
        charges = [(event, n) for event, n in charges if n]
        total = compose(charges, delta)
        rounds = sum(n for _, n in charges)
        pure_rounds = bool(charges) and all(isinstance(event, PrivUnitEvent) for event, _ in charges)
        delta_round = 0.0 if pure_rounds else delta
        per_round = max((compose([(event, 1)], delta_round).epsilon for event, _ in charges), default=0.0)
        advantage = membership_advantage(total)
        return PrivacyStatement(
            algorithm=algorithm,
            private=math.isfinite(total.epsilon),
            setting=total.setting,
            adjacency=total.adjacency,
            clients=clients,
            rounds=rounds,
            epsilon_round=per_round,
            epsilon_total=total.epsilon,
            delta=delta,
            delta_round=delta_round,
            accountant=total.accountant,
            membership_advantage=advantage,
            attack_success=0.5 * (1.0 + advantage),
            strength=strength(total.epsilon),
            simulated=simulated,
            pure_epsilon_total=total.pure_epsilon,
            not_covered=(TUNING, METRICS, OTHER_USES, *not_covered),
            **_plan(planned, delta),
        )

    @property
    def shown(self) -> dict[str, str]:
        """The figures as the text prints them, so that a reader finds each of them in the JSON."""
        return _shown(self)

    @property
    def text(self) -> str:
        from dpfedexp.accounting.wording import statement_text

        return statement_text(self)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> str:
        """One JSON object; infinite figures are null, because JSON has no infinity."""
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}
        return json.dumps({**values, "shown": self.shown, "text": self.text}, indent=2, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> PrivacyStatement:
        values: dict[str, Any] = json.loads(text)
        values = {name: value for name, value in values.items() if name not in ("shown", "text")}
        for name in ("epsilon_round", "epsilon_total"):
            values[name] = math.inf if values[name] is None else values[name]
        return PrivacyStatement(**{**values, "not_covered": tuple(values["not_covered"])})


def membership_advantage(guarantee: Guarantee) -> float:
    """The largest advantage of any attacker: exact for μ-GDP, (e^ε − 1 + 2δ)/(e^ε + 1) for (ε, δ)-DP."""
    if math.isinf(guarantee.epsilon):
        return 1.0
    if guarantee.mu is not None:
        return gdp.advantage(guarantee.mu)
    half = guarantee.epsilon / 2.0
    return min(1.0, math.tanh(half) + guarantee.delta * math.exp(-half) / math.cosh(min(half, 700.0)))


def strength(epsilon: float) -> str:
    """One word for a total ε. Up to 1 and up to 10 follow the tiers of Ponomareva et al. (2023), "How to DP-fy ML"."""
    for limit, word in ((1.0, "strong"), (10.0, "moderate"), (50.0, "weak"), (math.inf, "very weak")):
        if epsilon <= limit and math.isfinite(epsilon):
            return word
    return "none"


def _plan(planned: Charges | None, delta: float) -> dict[str, Any]:
    if planned is None:
        return {}
    planned = list(planned)
    return {
        "planned_rounds": sum(n for _, n in planned),
        "planned_epsilon_total": compose(planned, delta).epsilon,
    }


def _shown(s: PrivacyStatement) -> dict[str, str]:
    shown = {
        "clients": f"{s.clients}",
        "rounds": f"{s.rounds}",
        "epsilon_round": _figure(s.epsilon_round),
        "epsilon_total": _figure(s.epsilon_total),
        "delta": f"{s.delta:g}",
        "attack_success_percent": _percent(s.attack_success),
        "guessing_percent": "50",
    }
    if s.pure_epsilon_total is not None:
        shown["pure_epsilon_total"] = _figure(s.pure_epsilon_total)
    if s.planned_rounds is not None and s.planned_epsilon_total is not None:
        shown["planned_rounds"] = f"{s.planned_rounds}"
        shown["planned_epsilon_total"] = _figure(s.planned_epsilon_total)
    return shown


def _figure(value: float) -> str:
    """Rounded up in the last printed digit, so that the text never promises more than was proven."""
    if not math.isfinite(value):
        return "infinite"
    digits = 2 if value >= 0.1 else 4
    scaled = math.ceil(value * 10**digits - 1e-9)
    return f"{scaled / 10**digits:.{digits}f}"


def _percent(value: float) -> str:
    """Rounded up; certainty is printed only where it is certain."""
    for digits in (1, 3, 6):
        text = f"{math.ceil(value * 100 * 10**digits - 1e-9) / 10**digits:.{digits}f}"
        if float(text) < 100.0:
            return text
    return "100"
