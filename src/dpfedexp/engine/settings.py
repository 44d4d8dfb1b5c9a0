"""A bound simulation by its settings: what its result depends on, and what its files are told."""

from __future__ import annotations

import math
from typing import Any

from dpfedexp.engine.checkpoint_settings import NamedValues, flatten
from dpfedexp.engine.data_tag import parameter_tag
from dpfedexp.engine.description import RunDescription
from dpfedexp.engine.facts import RunFacts, argument_text, call_text
from dpfedexp.engine.folder import RunFolder
from dpfedexp.engine.open_run import OpenRun
from dpfedexp.engine.rounds import Simulation
from dpfedexp.mechanisms import Mechanism
from dpfedexp.mechanisms.text import text_fields
from dpfedexp.trainers.task import Clients


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
            **more,
        }
    )


def _fields(mechanism: Mechanism) -> NamedValues:
    """A mechanism's fields by the names that its text form has."""
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
        noise_cohort=None if simulation.larger is None else simulation.larger.noise_cohort,
        stand_ins=None if simulation.larger is None else simulation.larger.stand_ins,
    )


def facts_of(
    simulation: Simulation, open_run: OpenRun, clients: Clients, folder: RunFolder | None, options: dict[str, Any]
) -> RunFacts:
    """The run in a few public facts.

    Args:
        simulation: what is run.
        open_run: its files.
        clients: the federation as it was given.
        folder: where the run is written, which knows the command and the data where the command line gave them.
        options: further arguments of the call; those that are None or False are left out of its text.
    """
    task, algorithm, described = simulation.task, simulation.algorithm, open_run.description
    command, data = ("", "") if folder is None else (folder.command, folder.data)
    model = type(task.model).__name__
    promise = {name: getattr(algorithm, name) for name in ("clip", "noise_multiplier", "target_epsilon", "adjacency")}
    usual = {"noise_multiplier": None, "target_epsilon": None, "adjacency": "replace-one", "clip": math.inf}
    what = call_text(algorithm.name, {name: value for name, value in promise.items() if value != usual[name]})
    how = {"local": task.local, "rounds": described.rounds, **options}
    named = [
        f"{name}={argument_text(value)}" for name, value in how.items() if value is not None and value is not False
    ]
    call = f"train({', '.join([model, type(clients).__name__, what, *named])})"
    return RunFacts(
        run=open_run.name,
        algorithm=algorithm.name,
        data=data or f"a {type(clients).__name__} from Python",
        model=model,
        clients=simulation.population,
        parameters=task.layout.dimension,
        rounds=described.rounds,
        delta=algorithm.delta,
        secure=described.secure,
        command=command or call,
        trainer="" if described.secure else simulation.trainer.name,
    )
