"""Changes to the paper's runs that more than one question makes."""

from __future__ import annotations

from collections.abc import Iterator

from reproduction.paper.beyond.finished import Changes

FULL_EPSILON = 15.456
"""What the paper's central noise costs over 50 rounds at δ = 1e-5."""
SERVER_RATES = (2.0, 4.0, 8.0, 16.0)
ADAM_RATES = (0.003, 0.01, 0.03)
SWEEP_SEEDS = 2
FREE: Changes = {"algorithm.numerator": "free"}
SAFE: Changes = {"algorithm.step": "safe"}


def at_epsilon(epsilon: float) -> Changes:
    return {"algorithm.noise_multiplier": None, "algorithm.target_epsilon": epsilon}


def adaptive(start: float) -> Changes:
    return {"algorithm.clip": "adaptive", "algorithm.adaptive": {"initial": start}}


def tuned_servers(target: Changes) -> Iterator[tuple[str, Changes, str]]:
    """What people tune in place of FedEXP's step size, at its clip."""
    for rate in SERVER_RATES:
        changes = {**target, "algorithm.server_rate": rate, "algorithm.clip": 0.3}
        yield f"DP-FedAvg, clip 0.3, server rate {rate:g}", changes, "best fixed server rate"
    for rate in ADAM_RATES:
        changes = {**target, "algorithm.name": "dp_fedadam", "algorithm.server_rate": rate, "algorithm.clip": 0.3}
        yield f"DP-FedAdam, clip 0.3, server rate {rate:g}", changes, "best DP-FedAdam"


COLOURS = {"DP-FedEXP": "fedexp", "DP-FedAvg": "fedavg", "tuned DP-FedEXP": "fedexp", "tuned DP-FedAvg": "fedavg"}
