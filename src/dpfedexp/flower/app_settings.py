"""The settings of a Flower app, for the server and the clients.

Flower flattens `[tool.flwr.app.config.algorithm] clip = 0.3` to the key `algorithm.clip`, which `flwr run -c 'algorithm.clip=0.5'`
overrides. The sections `algorithm`, `local` and `participation` are those of a `dpfedexp train` file, `federation` has the
settings of the deployment, `candidates.NAME` those of a candidate, and other sections belong to the app.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from flwr.app import Context
from flwr.common.config import unflatten_dict
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpfedexp.algorithms.probe import MOST_CANDIDATES
from dpfedexp.config import Settings, parse
from dpfedexp.config.settings import sentence
from dpfedexp.engine.fit import FIT_ROUNDS, fit_settings
from dpfedexp.engine.tournament import Candidate
from dpfedexp.errors import InputError, nearest, require


class FederationSettings(BaseModel):
    """The section [tool.flwr.app.config.federation]."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clients: int = Field(ge=1)
    epsilon: float | None = Field(None, gt=0)
    rounds: Annotated[int, Field(ge=1)] = FIT_ROUNDS
    folder: str
    nodes: str = ""
    evaluate: str = ""
    evaluate_every: int | None = Field(None, ge=1)
    held_out: float = Field(0.0, ge=0, lt=1)
    clients_per_node: int = Field(1, ge=1)
    min_reply_fraction: float = Field(0.6, gt=0, le=1)
    budget: float | None = Field(None, ge=0)
    round_timeout: float = Field(600.0, gt=0)
    node_timeout: float = Field(300.0, gt=0)


def read_settings(run_config: Mapping[str, Any]) -> tuple[FederationSettings, Settings]:
    """Parse and check the sections of this library, except `candidates`."""
    federation, tree = _sections(run_config)
    return federation, parse({name: tree[name] for name in ("algorithm", "local", "participation") if name in tree})


def read_candidates(run_config: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """Parse and check the sections `candidates.NAME`, whose `local` and `algorithm` replace settings of the run.

    Flower does not keep the order of sections. Server and nodes sort candidates by name, those with the voted rate first.
    """
    if not any(name.startswith("candidates.") for name in run_config):
        return ()
    tree, found = _sections(run_config)[1], []
    for name, section in tree["candidates"].items():
        try:
            parts = {part: section.pop(part, {}) for part in ("algorithm", "local")}
            settings = parse({part: {**tree.get(part, {}), **given} for part, given in parts.items()})
            built = {"local": settings.build_local(), "algorithm": settings.build_algorithm(), "name": name}
            found.append(Candidate(**{**section, **built}))
        except (AttributeError, TypeError):
            raise InputError(f"candidates.{name}: it and its `local` and `algorithm` must be sections.") from None
        except InputError as error:
            raise InputError(f"candidates.{name}: {error}") from None
    require(
        2 <= len(found) <= MOST_CANDIDATES,
        f"candidates has {len(found)} sections; it must have 2 to {MOST_CANDIDATES}. Flower drops empty sections, so a candidate "
        "without other settings needs rate = 1.0.",
    )
    return tuple(sorted(found, key=lambda one: (one.rate != 1.0, one.name)))


def models_by_name(models: Any) -> dict[str, Any]:
    """The app's models by name; a single model has the name ""."""
    known = models if isinstance(models, dict) else {"": models}
    require(bool(known), "the app has no model; pass one, or several by name.")
    return known


def model_named(models: Any, candidate: Candidate) -> Any:
    """The model of a candidate: the one that it names, by default the first."""
    known = models_by_name(models)
    name = next(iter(known)) if candidate.model is None else candidate.model
    hint = f"candidates.{candidate.name}.model is {name!r}, and the app passes no model of this name."
    require(name in known, hint + nearest(str(name), known))
    return known[str(name)]


def _sections(run_config: Mapping[str, Any]) -> tuple[FederationSettings, dict[str, Any]]:
    """The section `federation`, and all sections with the settings that `federation.epsilon` chooses."""
    try:
        tree: dict[str, Any] = unflatten_dict({key: value for key, value in run_config.items() if "." in key})
        federation = FederationSettings.model_validate(tree.get("federation", {}))
    except ValidationError as error:
        raise InputError(sentence(error, FederationSettings, "federation.")) from None
    except TypeError:
        raise InputError(
            "a name in the app's configuration is a setting and a section; it must be one of them."
        ) from None
    if federation.epsilon is not None:
        # The settings that `fit` chooses; settings that are given override them.
        given = tree.get("algorithm", {})
        for name in ("noise_multiplier", "target_epsilon"):
            if name in given:
                raise InputError(
                    f"federation.epsilon is {federation.epsilon:g} and algorithm.{name} is {given[name]}; leave one of them out."
                )
        for section, chosen in fit_settings(federation.epsilon, federation.clients).items():
            tree[section] = {**chosen, **tree.get(section, {})}
    return federation, tree


def data_path(context: Context) -> str:
    """The path of this node's data: the setting `data` of the node's configuration, which its operator sets."""
    path = context.node_config.get("data")
    if path is None:
        raise InputError(
            "this node has no setting `data`; start it with --node-config 'data=\"/path/to/rows.csv\"', or all nodes with "
            "`dpfedexp flower up`."
        )
    return str(path)
