"""A bound simulation by its settings: what its result depends on, and what its files are told."""

from __future__ import annotations

from typing import Any

from dpfedexp.mechanisms import Mechanism
from dpfedexp.mechanisms.text import text_fields
from dpfedexp.runs.checkpoints.earlier_names import SERVER_STEP
from dpfedexp.runs.checkpoints.settings import NamedValues, flatten
from dpfedexp.runs.description import RunDescription
from dpfedexp.runs.private.data_tag import parameter_tag
from dpfedexp.server import Extrapolate
from dpfedexp.simulation.rounds import Simulation


def settings_of(simulation: Simulation, **more: Any) -> NamedValues:
    """Name → value, all of them JSON, of a bound simulation and whatever else the result depends on."""
    task = simulation.task
    return flatten(
        {
            "algorithm": simulation.algorithm,
            "mechanism": type(simulation.mechanism).__name__,
            **_fields(simulation.mechanism),
            "local": task.local,
            "participation": simulation.participation,
            # A secure run's shuffles come from a number that nobody may know, and are new whenever it goes on.
            "seed": None if simulation.system is not None else simulation.streams.seed,
            "loss": task.loss,
            "model": {
                "parameters": dict(zip(task.layout.names, map(list, task.layout.shapes), strict=True)),
                "start": parameter_tag(task.layout.read(task.model).cpu()),
            },
            "clients": simulation.population,
            "diagnostics": simulation.diagnostics,
            **({} if simulation.algorithm.server == Extrapolate() else {SERVER_STEP: "eta_g"}),
            **more,
        }
    )


def _fields(mechanism: Mechanism) -> NamedValues:
    """A mechanism's fields by the names of every version, so that a run of before is continued."""
    return {f"mechanism.{name}": value for name, value in text_fields(mechanism.settings(), mechanism.kind).items()}


def description_of(simulation: Simulation, rounds: int, **more: Any) -> RunDescription:
    """What the files of this simulation's run are told; `more` are further settings that the result depends on."""
    return RunDescription(
        name=simulation.run,
        settings=settings_of(simulation, rounds=rounds, **more),
        start=simulation.begin(),
        clients=simulation.task.clients,
        algorithm=simulation.algorithm.name,
        delta=simulation.algorithm.delta,
        population=simulation.population,
        rounds=rounds,
        secure=simulation.system is not None,
        chunk_size=simulation.chunk_size,
        trainer=simulation.trainer.name,
    )
