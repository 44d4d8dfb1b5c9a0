"""A TOML file into frozen, validated settings, and settings into what `train` takes."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from dpfedexp import algorithms
from dpfedexp.accounting import Event
from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.algorithm import aggregated
from dpfedexp.algorithms.participation import (
    FixedSize,
    Full,
    Participation,
    Poisson,
    larger_cohort,
    larger_sampling,
    public_population,
)
from dpfedexp.algorithms.probe import asked
from dpfedexp.config.sections import (
    AdaptiveSettings,
    AlgorithmSettings,
    DataSettings,
    LocalSettings,
    ModelSettings,
    ParticipationSettings,
    Resolved,
    RunSettings,
    Section,
)
from dpfedexp.config.sentences import sentence
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.errors import InputError, nearest
from dpfedexp.trainers.execution import Execution

_EXECUTION = {field.name for field in fields(Execution)}


class Settings(Section):
    """A whole run."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    local: LocalSettings = LocalSettings()
    participation: ParticipationSettings = ParticipationSettings()
    run: RunSettings = RunSettings()
    resolved: Resolved | None = None

    def with_seed(self, seed: int) -> Settings:
        """The same run with another seed for the noise, the data and the start."""
        return self.model_copy(update={"run": self.run.model_copy(update={"seed": seed})})

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(exclude_none=True, exclude_defaults=False))

    def as_run(self, facts: Resolved) -> Settings:
        """The settings as the folder of a run keeps them: with the facts, and with the step size and the quantile that it takes."""
        takes = inspect.signature(algorithms.ALGORITHMS[self.algorithm.name]).parameters
        chosen: dict[str, Any] = {"step": self.build_algorithm().step} if "step" in takes else {}
        if self.algorithm.clip == "adaptive" and self.algorithm.adaptive is None:
            chosen["adaptive"] = AdaptiveSettings(quantile="auto")
        return self.model_copy(
            update={"resolved": facts, "algorithm": self.algorithm.model_copy(update=chosen)},
        )

    def planned_event(self) -> Event | None:
        """What one round of this configuration charges; None where the file does not say how large the model and federation are."""
        return next(iter(self.planned_events()), None)

    def planned_events(self) -> list[Event]:
        """What one round charges, and after it what is charged once before the first; empty where `planned_event` is None."""
        if self.resolved is None:
            return []
        facts, algorithm = self.resolved, self.build_algorithm()
        participation, noise_cohort = self.build_participation(), self.participation.noise_cohort
        sampling = (
            participation.sampling(facts.clients)
            if noise_cohort is None
            else larger_sampling(participation, noise_cohort, facts.clients)
        )
        rounds, secure = self.run.rounds, self.run.secure
        votes, beside = asked(algorithm, self.build_local(), rounds, sampling, secure)
        mechanism = algorithm.bind(facts.parameters, facts.cohort, sampling, rounds, secure, votes=votes, beside=beside)
        return [mechanism.event(sampling), *(beside(mechanism) if beside is not None else ())]

    def check(self) -> None:
        """Everything that can be wrong without looking at data, before any folder is made."""
        algorithm, participation = self.build_algorithm(), self.build_participation()
        self.build_local()
        self.build_population(algorithm, participation, present=None)

    def build_population(self, algorithm: Algorithm, participation: Participation, present: int | None) -> int | None:
        """The public number of clients; `present` is how many there are, None where that is not known yet."""
        declared, noise_cohort = self.participation.population, self.participation.noise_cohort
        if noise_cohort is not None:
            return declared if present is None else larger_cohort(participation, noise_cohort, present, declared)[1]
        adjacency = algorithm.adjacency if algorithm.private else "replace-one"
        if adjacency == "replace-one" and present is None:
            return declared
        return public_population(adjacency, participation, present or 0, declared)

    def build_algorithm(self) -> Algorithm:
        return _algorithm(self.algorithm)

    def build_local(self) -> LocalOptimiser:
        return self.local.build()

    def build_execution(self) -> Execution:
        """How the run is computed on this machine: the fields of [run] that `Execution` has."""
        return Execution(**self.run.model_dump(include=_EXECUTION))

    def run_options(self) -> dict[str, Any]:
        """The rest of [run], by the names of `train`'s arguments."""
        return self.run.model_dump(exclude=_EXECUTION)

    def build_participation(self) -> Participation:
        part = self.participation
        if part.kind == "poisson":
            if part.rate is None:
                raise InputError("participation.rate is missing; kind 'poisson' needs a rate between 0 and 1.")
            return Poisson(part.rate)
        if part.kind == "fixed":
            if part.count is None:
                raise InputError("participation.count is missing; kind 'fixed' needs the number of clients per round.")
            return FixedSize(part.count)
        return Full()


def load(path: Path | str, overrides: Sequence[str] = ()) -> Settings:
    """Settings from a file, with `section.key=value` overrides."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"the file {str(path)!r} does not exist; `dpfedexp init` writes one to start from.") from None
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error.strerror}.") from None
    try:
        tree = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the file {str(path)!r} is not valid TOML: {error}.") from None
    for override in overrides:
        apply_override(tree, override)
    return parse(tree)


def parse(tree: dict[str, Any]) -> Settings:
    """Settings from a tree as a TOML file gives it; a sentence for the first setting that is wrong."""
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise InputError(sentence(error, Settings)) from None


def apply_override(tree: dict[str, Any], text: str) -> None:
    """Puts `section.key=value` into a tree of settings."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set is {text!r}; it must look like algorithm.clip=0.3.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *path, last = key.strip().split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise InputError(f"--set is {text!r}, but {part!r} is a value and not a section.")
    tree[last] = parsed


def _algorithm(settings: AlgorithmSettings) -> Algorithm:
    name = settings.name
    if name not in algorithms.ALGORITHMS:
        raise InputError(f"algorithm.name is {name!r}, which does not exist.{nearest(name, algorithms.ALGORITHMS)}")
    elsewhere = {"name", "adaptive", "epsilon0", "epsilon1", "epsilon2", "aggregation"}
    given = settings.model_dump(exclude_none=True, exclude=elsewhere)
    if settings.adaptive is not None or settings.clip == "adaptive":
        given["clip"] = AdaptiveClip(**(settings.adaptive or AdaptiveSettings(quantile="auto")).model_dump())
    epsilons = (settings.epsilon0, settings.epsilon1, settings.epsilon2)
    if any(e is not None for e in epsilons):
        given["epsilons"] = tuple(2.0 if e is None else e for e in epsilons)
    if "clip" not in given and name not in ("fedavg", "fedexp"):
        raise InputError(f"algorithm.clip is missing; {name} needs a positive number or 'adaptive'.")
    takes = inspect.signature(algorithms.ALGORITHMS[name]).parameters
    for wrong in (key for key in given if key not in takes):
        raise InputError(f"algorithm.{wrong} is not a setting of {name}; leave it out.")
    return aggregated(algorithms.ALGORITHMS[name](**given), settings.aggregation or "plain")
