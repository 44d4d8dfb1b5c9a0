"""A TOML file into frozen, validated settings, and settings into what `train` takes."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from dpfedexp import algorithms
from dpfedexp.accounting import Event
from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.algorithm import Aggregation, aggregated
from dpfedexp.algorithms.probe import asked
from dpfedexp.clipping import AdaptiveClip
from dpfedexp.config.sentences import clause, sentence
from dpfedexp.data.registry import check_kind
from dpfedexp.errors import InputError, nearest
from dpfedexp.local import OPTIMISERS, SCHEDULES, LocalOptimiser, RateSchedule
from dpfedexp.losses import by_name
from dpfedexp.participation import (
    FixedSize,
    Full,
    Participation,
    Poisson,
    larger_cohort,
    larger_sampling,
    public_population,
)
from dpfedexp.trainers.execution import Execution
from dpfedexp.trainers.registry import check_trainer


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DataSettings(Section):
    """Where the clients' data come from."""

    kind: str = "synthetic"
    clients: int = Field(1000, ge=1)
    seed: int | None = None
    dimension: int = Field(500, ge=1)
    path: str | None = None
    partition: Literal["dirichlet", "dirichlet-per-class", "iid", "shards"] = "dirichlet"
    alpha: float = Field(0.3, gt=0)
    shards_per_client: int = Field(2, ge=1)
    samples_per_client: int | None = Field(None, ge=1)
    standardise: bool = False
    factory: str | None = None

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, kind: str) -> str:
        check_kind(kind)
        return kind


class ModelSettings(Section):
    """A network by name with its own settings, or `factory = "module:function"` of the user's."""

    name: str | None = None
    factory: str | None = None
    seed: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class AdaptiveSettings(Section):
    initial: float = 1.0
    quantile: float | Literal["auto"] = 0.5
    rate: float = 0.5
    count_noise: float | None = None


class AlgorithmSettings(Section):
    """What the server runs and what it promises."""

    name: str = "cdp_fedexp"
    clip: float | Literal["adaptive"] | None = None
    adaptive: AdaptiveSettings | None = None
    mechanism: str | None = None
    numerator: str | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_per: Literal["total", "round"] | None = None
    delta: float | None = None
    adjacency: str | None = None
    epsilon0: float | None = None
    epsilon1: float | None = None
    epsilon2: float | None = None
    gamma: str | None = None
    server_rate: float | None = None
    server_momentum: float | None = None
    step: Literal["safe", "paper"] | None = None
    average_last: int | None = None
    control: str | None = None
    aggregation: Aggregation | None = None


class LocalSettings(Section):
    """What a client does in a round: an optimiser by name, the settings that all have, and those of its own."""

    model_config = ConfigDict(extra="allow")

    optimiser: str = "sgd"
    lr: float | Literal["auto"] = 0.1
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    proximal: float = 0.0
    max_examples: int | None = None

    @model_validator(mode="after")
    def _check_own(self) -> LocalSettings:
        """The optimiser exists, and has whatever else was given, of the type that its class says."""
        kind = OPTIMISERS.get(self.optimiser)
        if kind is None:
            near = nearest(self.optimiser, OPTIMISERS)
            raise InputError(f"local.optimiser is {self.optimiser!r}, which does not exist.{near}")
        types = get_type_hints(kind)
        known = {field.name: types[field.name] for field in fields(kind)}
        for name, value in (self.model_extra or {}).items():
            if name not in known:
                raise InputError(
                    f"local.{name} is not a setting of {self.optimiser!r}.{nearest(name, ['optimiser', *known])}"
                )
            if name == "schedule":
                _schedule(value)
                continue
            try:
                TypeAdapter(known[name]).validate_python(value, strict=True)
            except ValidationError as error:
                wanted = " or ".join(clause(kind["msg"]) for kind in error.errors())
                raise InputError(f"local.{name} is {value!r}; it must be {wanted}.") from None
        return self

    def build(self) -> LocalOptimiser:
        """The optimiser: ten steps where the file says neither steps nor epochs."""
        given = self.model_dump(exclude={"optimiser"})
        if self.steps is None and self.epochs is None:
            given["steps"] = 10
        if "schedule" in given:
            given["schedule"] = _schedule(given["schedule"])
        return OPTIMISERS[self.optimiser](**given)


def _schedule(value: Any) -> RateSchedule:
    """The schedule that a file describes, such as {kind = "cosine", rounds = 50}."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise InputError(
            f'local.schedule is {value!r}; it must name its kind, such as {{kind = "cosine", rounds = 50}}.'
        )
    given = dict(value)
    name = given.pop("kind")
    if name not in SCHEDULES:
        raise InputError(f"local.schedule.kind is {name!r}, which does not exist.{nearest(name, SCHEDULES)}")
    known = [field.name for field in fields(SCHEDULES[name])]
    for wrong in (key for key in given if key not in known):
        raise InputError(f"local.schedule.{wrong} is not a setting of {name!r}.{nearest(wrong, known)}")
    return SCHEDULES[name](**given)


class ParticipationSettings(Section):
    """Who takes part, and the public number of clients, which add-remove adjacency does not allow to be counted."""

    kind: Literal["full", "poisson", "fixed"] = "full"
    rate: float | None = None
    count: int | None = None
    population: int | None = Field(None, ge=1)
    noise_cohort: int | None = Field(None, ge=1)


class RunSettings(Section):
    rounds: int = Field(50, ge=1)
    seed: int = Field(0, ge=0)
    device: str | None = None
    chunk_size: int | None = Field(None, ge=1)
    loss: str | None = None
    evaluate_every: int = Field(1, ge=1)
    budget: float | None = Field(None, gt=0)
    trainer: str = "auto"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    memory: str | int | None = None
    secure: bool | Literal["strict"] = False

    @field_validator("loss")
    @classmethod
    def _loss_exists(cls, loss: str | None) -> str | None:
        if loss is not None:
            by_name(loss)
        return loss

    @field_validator("trainer")
    @classmethod
    def _trainer_exists(cls, trainer: str) -> str:
        check_trainer(trainer)
        return trainer


_EXECUTION = {field.name for field in fields(Execution)}


class Resolved(Section):
    """Facts of a finished run that its privacy statement rests on, written into its copy of the configuration.

    All are public: `clients` is the declared population where the number of clients is private.
    """

    parameters: int
    clients: int
    cohort: float


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
        run = self.model_copy(update={"resolved": facts})
        return run._with_step(self.build_algorithm().step)._with_quantile("auto")

    def _with_quantile(self, quantile: float | Literal["auto"]) -> Settings:
        """The same settings, with this quantile where the file says no more than that the clip is adaptive."""
        if self.algorithm.clip != "adaptive" or self.algorithm.adaptive is not None:
            return self
        adaptive = AdaptiveSettings(quantile=quantile)
        return self.model_copy(update={"algorithm": self.algorithm.model_copy(update={"adaptive": adaptive})})

    def _with_step(self, step: str) -> Settings:
        """The same settings, with this step where the file leaves it to the algorithm."""
        takes = inspect.signature(algorithms.ALGORITHMS.get(self.algorithm.name, algorithms.fedavg)).parameters
        if self.algorithm.step is not None or "step" not in takes:
            return self
        return self.model_copy(update={"algorithm": self.algorithm.model_copy(update={"step": step})})

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
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise InputError(sentence(error, Settings)) from None
    # The folder of a run that does not name its step is from before there was another one than the paper's; so for the quantile.
    return settings if settings.resolved is None else settings._with_step("paper")._with_quantile(0.5)


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
