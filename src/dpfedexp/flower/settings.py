"""From a Flower app's configuration to a strategy, and to the clients' local steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Message

from dpfedexp.algorithms.participation import FixedSize
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.errors import InputError, checked
from dpfedexp.flower.rate import at_round, check_rate
from dpfedexp.flower.sections import read_settings
from dpfedexp.mechanisms import mechanism_class

if TYPE_CHECKING:
    from dpfedexp.flower.server.strategy import DpFedExp


def strategy_from(run_config: Mapping[str, Any], **options: Any) -> DpFedExp:
    """The strategy that an app's configuration asks for.

    Args:
        run_config: Flower's flattened configuration, with the sections `federation`, `algorithm`, `local` and `participation`.
        **options: go to `DpFedExp` as they are, and win.
    """
    # Here, because a node reads its settings from this module for every message.
    from dpfedexp.flower.server.strategy import DpFedExp
    from dpfedexp.flower.two_party.strategy import TwoPartyFedExp

    federation, settings = read_settings(run_config)
    participation = settings.build_participation()
    if isinstance(participation, FixedSize):
        raise InputError("participation.kind is 'fixed'; a deployment has 'full' and 'poisson'.")
    given = federation.model_dump(exclude={"round_timeout"})
    given["budget"] = federation.budget or None
    algorithm = settings.build_algorithm()
    kind = TwoPartyFedExp if mechanism_class(algorithm.mechanism).needs_helper else DpFedExp
    return kind(
        algorithm,
        **{"participation": participation, "local": settings.build_local(), **given, **options},
    )


@checked
def local_from(run_config: Mapping[str, Any], message: Message | None = None) -> LocalOptimiser:
    """The clients' optimiser that an app's configuration asks for, for the app's train function.

    Args:
        run_config: Flower's flattened configuration, with the section `local`.
        message: the server's, which says the round; needed where the rate has a schedule.

    Returns:
        The optimiser, for `train_local` and `train_hosted`, or for a training loop of your own.
    """
    local = read_settings(run_config)[1].build_local()
    check_rate(local)
    return at_round(local, message)


def round_timeout(run_config: Mapping[str, Any]) -> float:
    """Seconds that a round waits for answers."""
    return read_settings(run_config)[0].round_timeout
