"""The sections of a Flower app's configuration that this library reads.

Flower flattens `[tool.flwr.app.config.algorithm] clip = 0.3` to the key `algorithm.clip`, which `flwr run -c 'algorithm.clip=0.5'`
overrides. The sections `algorithm`, `local` and `participation` are those of a `dpfedexp train` file, `federation` is Flower's own;
other sections are the app's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpfedexp.config import Settings, parse
from dpfedexp.config.settings import sentence
from dpfedexp.errors import InputError


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
