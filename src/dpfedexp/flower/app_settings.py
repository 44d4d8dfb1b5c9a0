"""From a Flower app's configuration to a strategy, and to the clients' local steps.

Flower flattens `[tool.flwr.app.config.algorithm] clip = 0.3` to the key `algorithm.clip`, which `flwr run -c 'algorithm.clip=0.5'`
overrides. The sections `algorithm`, `local` and `participation` are those of a `dpfedexp train` file, `federation` is Flower's own;
other sections are the app's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Message
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpfedexp.algorithms.participation import FixedSize
from dpfedexp.config import Settings, parse
from dpfedexp.config.settings import sentence
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.errors import InputError, checked
from dpfedexp.flower.messages import at_round, check_rate
from dpfedexp.mechanisms import mechanism_class

if TYPE_CHECKING:
    from dpfedexp.flower.strategy import DpFedExp


class FederationSettings(BaseModel):
    """[tool.flwr.app.config.federation]"""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clients: int = Field(ge=1)
    rounds: int = Field(ge=1)
    folder: str
    nodes: str = ""
    resume: bool = False
    rebind: bool = False
    clients_per_node: int = Field(1, ge=1)
    floor: float = Field(0.8, gt=0, le=1)
    budget: float | None = Field(None, ge=0)
    round_timeout: float = Field(600.0, gt=0)
    node_timeout: float = Field(300.0, gt=0)


def read_settings(run_config: Mapping[str, Any]) -> tuple[FederationSettings, Settings]:
    """The sections that this library reads, checked."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in run_config.items():
        section, dot, name = key.partition(".")
        if dot:
            tree.setdefault(section, {})[name] = value
    for name in [name for name in tree.get("local", {}) if "." in name]:
        table, _, key = name.partition(".")
        tree["local"].setdefault(table, {})[key] = tree["local"].pop(name)
    try:
        federation = FederationSettings.model_validate(tree.get("federation", {}))
    except ValidationError as error:
        raise InputError(sentence(error, FederationSettings, "federation.")) from None
    return federation, parse({name: tree[name] for name in ("algorithm", "local", "participation") if name in tree})


def strategy_from(run_config: Mapping[str, Any], **options: Any) -> DpFedExp:
    """The strategy that an app's configuration asks for.

    Args:
        run_config: Flower's flattened configuration, with the sections `federation`, `algorithm`, `local` and `participation`.
        **options: go to `DpFedExp` as they are, and win.
    """
    # Here, because a node reads its settings from this module for every message.
    from dpfedexp.flower.strategy import DpFedExp
    from dpfedexp.flower.two_party import TwoPartyFedExp

    federation, settings = read_settings(run_config)
    participation = settings.build_participation()
    if isinstance(participation, FixedSize):
        raise InputError("participation.kind is 'fixed'; a deployment has 'full' and 'poisson'.")
    given = federation.model_dump(exclude={"round_timeout"})
    given["budget"] = federation.budget or None
    algorithm = settings.build_algorithm()
    kind = TwoPartyFedExp if mechanism_class(algorithm.mechanism).needs_helper else DpFedExp
    return kind(algorithm, **{"participation": participation, "local": settings.build_local(), **given, **options})


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
