"""Settings: validated sections of a TOML file, and the objects that they build.

Each section is a pydantic model. The docstring of a setting is its description in the reference and in `schema.json`.
"""

import inspect
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from dpfedexp.accounting import Event
from dpfedexp.algorithms import ALGORITHMS, Algorithm, probe
from dpfedexp.algorithms import round as cohorts
from dpfedexp.algorithms.algorithm import Aggregation, with_aggregation
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local_optimizer import OPTIMIZERS, SCHEDULES, LocalOptimizer, RateSchedule
from dpfedexp.core.losses import by_name
from dpfedexp.data.data_sets import check_kind
from dpfedexp.errors import InputError, check_known, nearest, require
from dpfedexp.evaluation import Evaluation, EvaluationLike
from dpfedexp.trainers.execution import Execution

_EXECUTION = {field.name for field in fields(Execution)}
_KINDS = ("literal", "float", "int", "str", "bool", "constrained-")


class SettingsSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DataSettings(SettingsSection):
    """The clients' data."""

    kind: str = "synthetic"
    """`synthetic`, `mnist`, `cifar10`, `npz` (arrays inputs, targets[, client, test_inputs, test_targets]) or `factory`."""
    clients: int = Field(1000, ge=1)
    """Number of clients."""
    seed: int | None = None
    """Seed of the data and their assignment; by default the run's seed."""
    dimension: int = Field(500, ge=1)
    """Number of parameters of the synthetic problem."""
    path: str | None = None
    """The .npz file, or the folder with the data set's files."""
    partition: Literal["dirichlet", "dirichlet-per-class", "iid", "shards"] = "dirichlet"
    """How rows are assigned to clients if the data do not say it; `dirichlet` gives every client equally many."""
    alpha: float = Field(0.3, gt=0)
    """Concentration of the Dirichlet partitions: the smaller, the fewer classes a client has."""
    shards_per_client: int = Field(2, ge=1)
    """Number of shards that each client gets, for the partition `shards`."""
    samples_per_client: int | None = Field(None, ge=1)
    """Number of rows that each client gets; by default all rows are assigned."""
    standardize: bool = False
    """Whether inputs are standardized by the published mean and deviation of the data set."""
    factory: str | None = None
    """`module:function`, a function (seed) → (Federation, (test_inputs, test_targets) or None)."""

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, kind: str) -> str:
        check_kind(kind)
        return kind


class ModelSettings(SettingsSection):
    """A network by name with its own settings, or your own `factory = "module:function"`."""

    name: str | None = None
    """A network of this library, such as `mlp`; by default the usual one for the data set."""
    factory: str | None = None
    """`module:function`, a function that returns an nn.Module."""
    seed: int | None = None
    """Seed of the initial parameters; by default the run's seed."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the network, such as `{ inputs = 20, hidden = 32, classes = 2 }`."""


class AdaptiveSettings(SettingsSection):
    """Settings of an adaptive clip; with `clip = "adaptive"` and without this section, the quantile is `auto`."""

    initial: float = 1.0
    """The first clip."""
    quantile: float | Literal["auto"] = 0.5
    """The target share of updates within the clip; `auto` computes it from noise, clients and parameters."""
    rate: float = 0.5
    """Learning rate of the clip."""
    count_noise: float | None = None
    """Noise on the number of clients within the clip; by default it adds at most half a percent to the noise on the update."""


class AlgorithmSettings(SettingsSection):
    """The algorithm and its privacy guarantee."""

    name: str = "cdp_fedexp"
    """`cdp_fedexp`, `ldp_fedexp`, `dp_fedavg`, `dp_fedadam`, `dp_scaffold`, `fedavg` or `fedexp`."""
    clip: float | Literal["adaptive"] | None = None
    """The radius C of the ball that updates are clipped to, or `adaptive` (central privacy only)."""
    adaptive: AdaptiveSettings | None = None
    """Settings of an adaptive clip."""
    mechanism: str | None = None
    """The mechanism, for ldp_fedexp, dp_fedavg and dp_scaffold: `central-gaussian`, `local-gaussian` or `privunit`."""
    numerator: str | None = None
    """The source of ‖Δ‖² for the step size: `free` (the default with Gaussian noise), `paper` or `naive`."""
    noise_multiplier: float | None = None
    """z, the standard deviation of the noise over C, on the sum (central) or on each report (local). Or set `target_epsilon`."""
    target_epsilon: float | None = None
    """The largest ε of the run; the noise is calibrated to it."""
    target_per: Literal["total", "round"] | None = None
    """`total` (the default): the target is for all rounds together; `round`: for each round."""
    delta: float | None = None
    """The δ at which ε is stated; 1e-5 by default."""
    adjacency: str | None = None
    """`replace-one` (the default) hides the data of a client, `add-remove` whether it takes part: see `participation`."""
    epsilon0: float | None = None
    """PrivUnit's ε₀ per round, for the side of the cap, used without `target_epsilon`; 2 by default."""
    epsilon1: float | None = None
    """PrivUnit's ε₁ per round, for the cap itself; 2 by default."""
    epsilon2: float | None = None
    """PrivUnit's ε₂ per round, for the norm; 2 by default."""
    gamma: str | None = None
    """The rule for PrivUnit's cap: `exact` (the default), `paper` or `optimal`."""
    server_rate: float | None = None
    """The fixed server step of dp_fedavg, or the rate of Adam in dp_fedadam."""
    server_momentum: float | None = None
    """Momentum of the server, for dp_fedavg."""
    step: Literal["safe", "paper"] | None = None
    """`safe` (the default) caps the step size by the progress that the releases show; `paper` uses the step size of the rule."""
    average_last: int | None = None
    """The reported model is the mean of this many last iterates, at no cost in privacy."""
    control: str | None = None
    """The vector that a client's control variate follows in dp_scaffold: its clipped `update` (the default) or its `report`."""
    aggregation: Aggregation | None = None
    """`plain`: one server that is trusted with the updates. `two-party`: a server and a helper that can't read any update."""


class LocalSettings(SettingsSection):
    """Local training: the optimizer and its settings."""

    model_config = ConfigDict(extra="allow")

    optimizer: str = "sgd"
    """`sgd` or `adamw`. The own settings of the optimizer, `clip_gradient` and `schedule` are in this section too."""
    lr: float | Literal["auto"] = 0.1
    """η_l, the local rate; `auto` lets the clients' votes choose it (central privacy only)."""
    steps: int | None = None
    """Number of local steps in a round; ten if neither this nor `epochs` is given."""
    epochs: int | None = None
    """Number of passes over the rows of a client in a round."""
    batch_size: int | None = None
    """Number of rows in one local step; by default all rows of the client."""
    proximal: float = 0.0
    """μ of the FedProx pull towards the global model."""
    max_examples: int | None = None
    """A public bound on the rows of a client; without it, secure runs are slow."""

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        check_known("local.optimizer", self.optimizer, OPTIMIZERS)
        kind = OPTIMIZERS[self.optimizer]
        types = get_type_hints(kind)
        known = {field.name: types[field.name] for field in fields(kind)}
        for name, value in (self.model_extra or {}).items():
            near = nearest(name, ["optimizer", *known])
            require(name in known, f"local.{name} is not a setting of {self.optimizer!r}.{near}")
            if name == "schedule":
                _schedule(value)
                continue
            try:
                TypeAdapter(known[name]).validate_python(value, strict=True)
            except ValidationError as error:
                wanted = " or ".join(clause(kind["msg"]) for kind in error.errors())
                raise InputError(f"local.{name} is {value!r}; it must be {wanted}.") from None
        return self


def _schedule(value: Any) -> RateSchedule:
    """Build the schedule that a file describes, such as {kind = "cosine", rounds = 50}."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise InputError(
            f'local.schedule is {value!r}; it must name its kind, such as {{kind = "cosine", rounds = 50}}.'
        )
    given = dict(value)
    name = given.pop("kind")
    check_known("local.schedule.kind", name, SCHEDULES)
    known = [field.name for field in fields(SCHEDULES[name])]
    for key in given:
        require(key in known, f"local.schedule.{key} is not a setting of {name!r}.{nearest(key, known)}")
    return SCHEDULES[name](**given)


class ParticipationSettings(SettingsSection):
    """How the clients of a round are drawn, and the public number of clients, which must be declared under add-remove adjacency."""

    kind: Literal["full", "poisson", "fixed"] = "full"
    """`full`: all clients; `poisson`: each client with probability `rate`; `fixed`: `count` clients, drawn in every round."""
    rate: float | None = None
    """The sampling rate of `poisson`, above 0 and at most 1."""
    count: int | None = None
    """The number of clients in a round of `fixed`."""
    population: int | None = Field(None, ge=1)
    """The public number of clients, required for add-remove adjacency, where the actual number is private."""
    noise_cohort: int | None = Field(None, ge=1)
    """Use the noise of a deployment with this many clients in a round; the guarantee is for that deployment."""


class RunSettings(SettingsSection):
    """Number of rounds, evaluation and execution."""

    rounds: int = Field(50, ge=1)
    """Number of rounds."""
    seed: int = Field(0, ge=0)
    """Seed of all random draws of a simulation."""
    device: str | None = None
    """A torch device such as `cpu` or `cuda:1`; by default the GPU if there is one."""
    chunk_size: int | None = Field(None, ge=1)
    """Number of clients that are computed together; automatic by default."""
    loss: str | None = None
    """The loss by name, such as `mse`; by default the usual one for the targets."""
    evaluate: Literal["clients"] | None = None
    """`clients`: the clients evaluate the model on their own rows too, with noise within the same ε."""
    evaluate_every: int = Field(1, ge=1)
    """Number of rounds between evaluations; by default 1, and for evaluation by clients ten evaluations in a run."""
    held_out: float | None = Field(None, gt=0, lt=1)
    """The share of its rows on which every client evaluates and never trains."""
    budget: float | None = Field(None, gt=0)
    """Stop before the round that would take ε above this."""
    trainer: str = "auto"
    """`fast`, `vectorized`, `loop`, or `auto` for the fastest of them."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of local training; `tf32` and `bf16` need a GPU."""
    memory: str | int | None = None
    """Memory for the clients of a chunk in bytes, such as `4GB`; automatic by default."""
    secure: bool | Literal["strict"] = False
    """For real data: noise from the operating system, on a grid; `strict`: exact discrete noise, far slower."""

    @field_validator("loss")
    @classmethod
    def _loss_exists(cls, loss: str | None) -> str | None:
        if loss is not None:
            by_name(loss)
        return loss

    @field_validator("trainer")
    @classmethod
    def _trainer_exists(cls, trainer: str) -> str:
        # Imported here: a node reads its settings for every message and does not need all trainers.
        from dpfedexp.trainers.select import check_trainer

        check_trainer(trainer)
        return trainer


class Resolved(SettingsSection):
    """Facts of a finished run that its privacy statement rests on, written into its copy of the configuration.

    All are public: `clients` is the declared population where the number of clients is private.
    """

    parameters: int
    """d, the number of trained parameters."""
    clients: int
    """M, the public number of clients."""
    cohort: float
    """The expected number of clients in a round."""


class Settings(SettingsSection):
    """A whole run."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    local: LocalSettings = LocalSettings()
    participation: ParticipationSettings = ParticipationSettings()
    run: RunSettings = RunSettings()
    resolved: Resolved | None = None

    def with_seed(self, seed: int) -> Self:
        """Return the settings with another seed for noise, data and initial model."""
        return self.model_copy(update={"run": self.run.model_copy(update={"seed": seed})})

    def to_toml(self) -> str:
        # Imported here: a run without a file does not need a TOML writer.
        import tomli_w

        return tomli_w.dumps(self.model_dump(exclude_none=True, exclude_defaults=False))

    def as_run(self, facts: Resolved) -> Self:
        """Return the settings for the folder of a run: with its facts, and with the step size and quantile that it uses."""
        takes = inspect.signature(ALGORITHMS[self.algorithm.name]).parameters
        chosen: dict[str, Any] = {"step": self.build_algorithm().step} if "step" in takes else {}
        if self.algorithm.clip == "adaptive" and self.algorithm.adaptive is None:
            chosen["adaptive"] = AdaptiveSettings(quantile="auto")
        run = self.run
        if run.evaluate:
            run = run.model_copy(update={"evaluate_every": probe.evaluation_interval(run.rounds, self.interval)})
        return self.model_copy(
            update={"resolved": facts, "run": run, "algorithm": self.algorithm.model_copy(update=chosen)}
        )

    def planned_events(self) -> list[Event]:
        """Return the event of one round, followed by the events that are charged once in the run.

        Empty if the file does not have the sizes of model and federation (`resolved`).
        """
        if self.resolved is None:
            return []
        facts, algorithm = self.resolved, self.build_algorithm()
        participation = self.build_participation()
        sampling = participation.sampling(facts.clients)
        rounds, secure = self.run.rounds, self.run.secure
        many = probe.evaluation_count(rounds, self.interval) if self.run.evaluate else 0
        local, dimension, cohort = self.build_local(), facts.parameters, facts.cohort
        extras = probe.with_scale_votes(
            probe.Extras(many), algorithm, local, dimension, cohort, sampling, rounds, secure
        )
        votes, one_time = probe.extra_releases(algorithm, local, rounds, sampling, extras)
        mechanism = algorithm.bind(dimension, cohort, sampling, rounds, secure, votes=votes, one_time=one_time)
        return [mechanism.event(sampling), *(one_time(mechanism) if one_time is not None else ())]

    @property
    def interval(self) -> int | None:
        """Number of rounds between evaluations; None if the clients evaluate and no number is set."""
        chosen = "evaluate_every" in self.run.model_fields_set or not self.run.evaluate
        return self.run.evaluate_every if chosen else None

    def check(self) -> None:
        """Raise `InputError` for wrong settings that can be found without data, before any folder is made."""
        algorithm, participation = self.build_algorithm(), self.build_participation()
        self.build_local()
        self.build_population(algorithm, participation, present=None)

    def build_population(
        self, algorithm: Algorithm, participation: cohorts.Participation, present: int | None
    ) -> int | None:
        """Return the public number of clients; `present` is the actual number, None if it is not known yet."""
        declared = self.participation.population
        if isinstance(participation, cohorts.LargerCohort):
            return declared if present is None else cohorts.larger_cohort(participation, present)[1]
        adjacency = algorithm.adjacency if algorithm.private else "replace-one"
        if adjacency == "replace-one" and present is None:
            return declared
        return cohorts.public_population(adjacency, participation, present or 0)

    def build_algorithm(self) -> Algorithm:
        settings, name = self.algorithm, self.algorithm.name
        check_known("algorithm.name", name, ALGORITHMS)
        elsewhere = {"name", "adaptive", "epsilon0", "epsilon1", "epsilon2", "aggregation"}
        given = settings.model_dump(exclude_none=True, exclude=elsewhere)
        if settings.adaptive is not None or settings.clip == "adaptive":
            given["clip"] = AdaptiveClip(**(settings.adaptive or AdaptiveSettings(quantile="auto")).model_dump())
        epsilons = (settings.epsilon0, settings.epsilon1, settings.epsilon2)
        if any(e is not None for e in epsilons):
            given["epsilons"] = tuple(2.0 if e is None else e for e in epsilons)
        require(
            "clip" in given or name in ("fedavg", "fedexp"),
            f"algorithm.clip is missing; {name} needs a positive number or 'adaptive'.",
        )
        takes = inspect.signature(ALGORITHMS[name]).parameters
        for key in given:
            require(key in takes, f"algorithm.{key} is not a setting of {name}; leave it out.")
        return with_aggregation(ALGORITHMS[name](**given), settings.aggregation or "plain")

    def build_local(self) -> LocalOptimizer:
        """Build the local optimizer, with ten steps if the file sets neither steps nor epochs."""
        given = self.local.model_dump(exclude={"optimizer"})
        if self.local.steps is None and self.local.epochs is None:
            given["steps"] = 10
        if "schedule" in given:
            given["schedule"] = _schedule(given["schedule"])
        return OPTIMIZERS[self.local.optimizer](**given)

    def build_execution(self) -> Execution:
        return Execution(**self.run.model_dump(include=_EXECUTION))

    def run_options(self) -> dict[str, Any]:
        """Return the other settings of [run], which are arguments of `train`."""
        return self.run.model_dump(exclude={*_EXECUTION, "evaluate", "evaluate_every", "held_out"})

    def build_evaluate(self, on: Any = None) -> list[EvaluationLike]:
        """Return the argument `evaluate` of `train`.

        It has an evaluation on the server's data if `on` is given, and one by the clients if `run.evaluate` is set.
        """
        found: list[EvaluationLike] = [] if on is None else [Evaluation(on, every=self.run.evaluate_every)]
        if self.run.evaluate:
            found.append(Evaluation(self.run.evaluate, every=self.interval, held_out=self.run.held_out or 0.0))
        return found

    def build_participation(self) -> cohorts.Participation:
        part = self.participation
        population = None if part.noise_cohort else part.population
        simulated: cohorts.Participation = cohorts.Full(population)
        if part.kind == "poisson" and part.rate is not None:
            simulated = cohorts.Poisson(part.rate, population)
        elif part.kind == "fixed" and part.count is not None:
            simulated = cohorts.FixedSize(part.count, population)
        elif part.kind != "full":
            missing = "rate" if part.kind == "poisson" else "count"
            raise InputError(f"participation.{missing} is missing; participation.kind {part.kind!r} needs it.")
        if part.noise_cohort is None:
            return simulated
        return cohorts.LargerCohort(simulated, part.noise_cohort, part.population)


def load(path: Path | str, overrides: Sequence[str] = ()) -> Settings:
    """Read settings from a file, with `section.key=value` overrides."""
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise InputError(f"the file {str(path)!r} does not exist; `dpfedexp init` writes one to start from.") from None
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the file {str(path)!r} is not valid TOML: {error}.") from None
    for override in overrides:
        apply_override(tree, override)
    return parse(tree)


def parse(tree: dict[str, Any]) -> Settings:
    """Make settings from a parsed TOML file; raise `InputError` for the first wrong setting."""
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise InputError(sentence(error, Settings)) from None


def apply_override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    require(bool(equals and key.strip()), f"--set is {text!r}; it must look like algorithm.clip=0.3.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *path, last = key.strip().split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        require(isinstance(tree, dict), f"--set is {text!r}, but {part!r} is a value and not a section.")
    tree[last] = parsed


def sentence(error: ValidationError, section: type[BaseModel], prefix: str = "") -> str:
    """Return a message for the first wrong setting of `section`, with the field, its value and what is allowed.

    `prefix` is the position of the section in the file, such as "federation."; empty for a whole file.
    """
    errors = error.errors()
    first = errors[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    place = _place(first)
    field = prefix + ".".join(place)
    if first["type"] == "extra_forbidden":
        if len(place) == 1 and (found := places(section, place[0])):
            return f"{field} is not a setting. Did you mean {' or '.join(map(repr, found))}?"
        return f"{field} is not a setting.{nearest(place[-1], _section_at(section, place[:-1]).model_fields)}"
    if first["type"] == "missing":
        return f"{field} is missing."
    # A setting with a union type has one error for each type.
    clauses = [clause(other["msg"]) for other in errors if _place(other) == place]
    return f"{field} is {first['input']!r}; it must be {' or '.join(clauses)}."


def places(section: type[BaseModel], name: str) -> list[str]:
    """Return the full names of all settings called `name`, such as "algorithm.clip"."""
    rooms = [room for room in section.model_fields if room != "resolved"]
    return [f"{room}.{name}" for room in rooms if name in _section_at(section, [room]).model_fields]


def _place(error: Any) -> list[str]:
    """Return the path of a setting, without the types of a union that pydantic adds to it."""
    return [str(part) for part in error["loc"] if not str(part).startswith(_KINDS)]


def clause(message: str) -> str:
    """Return the part of pydantic's message that says what a setting must be."""
    return message.removeprefix("Input should be ").partition(", unable")[0].partition(", got")[0]


def _section_at(section: type[BaseModel], place: list[str]) -> type[BaseModel]:
    for part in place:
        annotation = section.model_fields[part].annotation
        kinds = (annotation, *getattr(annotation, "__args__", ()))
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)
    return section
