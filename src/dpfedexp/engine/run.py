"""The result of a run, and the folder with its configuration, ledger, metrics, model and privacy statement."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from torch import Tensor, nn

from dpfedexp.accounting import Ledger, PrivacyStatement
from dpfedexp.accounting.statement import card, caveats, summary
from dpfedexp.engine import checkpoint, outlets
from dpfedexp.engine.plan import Advice
from dpfedexp.engine.plot import STEERING, figure, metrics_in, run_panels
from dpfedexp.engine.verify import read_claim, recompute
from dpfedexp.errors import InputError, checked, require
from dpfedexp.files import finite, replace_tensors, replace_text, set_dates, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dpfedexp.config import Settings


@checked
@dataclass(frozen=True)
class Run:
    """The result of a run.

    Attributes:
        model: the trained module: the average of the last two iterates for FedEXP variants, the last one otherwise.
        history: one record per round: test metrics, eta_g, clip, update_norm, epsilon_total so far, and seconds if not secure.
        privacy: the privacy statement; print it.
        ledger: the ledger with all charges.
        trainer: how local updates were computed.
        stopped: why the run ended before its last round; None if it did not.
        advice: the advice about the run, before its first round and during it (docs/advice.md).
        facts: the content of `run.json`: algorithm, data, M, d and the call that started the run; None without that file.
    """

    model: nn.Module
    history: list[dict[str, Any]] = field(repr=False)
    privacy: PrivacyStatement = field(repr=False)
    ledger: Ledger = field(repr=False)
    trainer: str = "vectorized"
    stopped: str | None = None
    advice: tuple[Advice, ...] = field(default=(), repr=False)
    facts: RunFacts | None = field(default=None, repr=False)

    @property
    def verdict(self) -> str | None:
        """Why the run learned nothing, or why nothing shows that it learned; None otherwise."""
        return next((advice.sentence for advice in self.advice if advice.code == "dead"), None)

    def save(self, folder: Path | str) -> Path:
        """Write the files that `train(..., out=folder)` writes, for `report`, `privacy verify` and `Run.load`.

        Args:
            folder: a new or an empty folder.

        Returns:
            The folder.
        """
        files = RunFolder(folder, purpose="to save the run in")
        run = str(self.ledger.header.get("run", "")) if self.facts is None else self.facts.run
        with writing(files.path):
            _copy_ledger(files.path, self.ledger, run, checkpoint.digest(model_tensors(self.model)))
        files.facts = self.facts
        files.finish(self)
        return files.path

    @staticmethod
    @checked
    def load(folder: Path | str, model: nn.Module | None = None) -> Run:
        """Load the run of a folder, written by `train(out=…)`, `Run.save`, the command line or a deployment.

        An interrupted or killed run is loaded as of its last complete round.

        Args:
            folder: the run's folder.
            model: a network like the trained one; it is copied, and the copy gets the trained parameters. Without it `Run.model`
                holds the parameters by name and can't be called.

        Returns:
            The run. Its ledger is open for reading only.
        """
        path = Path(folder)
        require(path.is_dir(), f"the folder {str(path)!r} does not exist; pass the folder of a run.")
        require(
            model is None or isinstance(model, nn.Module),
            f"model is a {type(model).__name__}; it must be an nn.Module.",
        )
        tensors = read_parameters(path)
        trained = StoredParameters(tensors) if model is None else _filled(model, tensors, path)
        file, facts = path / outlets.LEDGER, RunFacts.read(path)
        trainer, stopped = ("", "") if facts is None else (facts.trainer, facts.stopped)
        return Run(
            trained,
            [numbers(record) for record in read_history(path)],
            read_claim(path) or recompute(path, killed=True),
            Ledger.open(file, read_only=True) if file.exists() else Ledger.in_memory(),
            trainer or "unknown",
            stopped or None,
            read_advice(path),
            facts,
        )

    @checked
    def plot(self) -> Figure:
        """A matplotlib figure of the metrics, the step size η_g and the clip over rounds; it needs no display."""
        require(len(self.history) > 0, "the run has no rounds to plot; train for at least one round.")
        keys = [*metrics_in(self.history), *(key for key in STEERING if key in self.history[-1])]
        return figure(run_panels(self.history, keys), summary(self.privacy))

    @property
    def baselines(self) -> dict[str, float]:
        """Metric → its value if always the most frequent class of the server's test set is predicted."""
        return {} if self.facts is None else self.facts.baselines

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        shown = {k: round(v, 4) + 0.0 for k, v in last.items() if isinstance(v, float)}
        baselines = "".join(
            f", {key} {shown[key]}{baseline_text(self.baselines, key)}" for key in self.baselines if key in shown
        )
        caveat = "".join(f", epsilon_total: {one}" for one in caveats(self.privacy) if "epsilon_total" in shown)
        stopped = "" if self.stopped is None else f", stopped: {self.stopped}"
        verdict = "" if self.verdict is None else f", {self.verdict}"
        return f"Run({len(self.history)} rounds, {shown}{baselines}{caveat}{stopped}{verdict})"

    def _repr_html_(self) -> str:
        last = self.history[-1] if self.history else {}
        keys = [*metrics_in(self.history), *STEERING]
        known = [key for key in keys if isinstance(last.get(key), int | float)]
        rows = [(key, f"{last[key] + 0.0:.4g}{baseline_text(self.baselines, key)}") for key in known]
        if self.facts is not None:
            rows += [("parameters d", f"{self.facts.parameters:,}")]
        lines = [summary(self.privacy)]
        lines += [] if self.stopped is None else [f"Stopped early: {self.stopped}"]
        lines += [] if self.verdict is None else [f"Failed: {self.verdict}"]
        folded = ("Privacy statement", self.privacy.text)
        return card(
            f"Run of {len(self.history)} rounds", lines, rows=rows, folded=folded, failed=self.verdict is not None
        )


class StoredParameters(nn.Module):
    """Named parameters without the network that they belong to."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            *path, last = name.split(".")
            room: nn.Module = self
            for part in path:
                if part not in room._modules:
                    room.add_module(part, nn.Module())
                room = room.get_submodule(part)
            room.register_buffer(last, value)

    def forward(self, *_: object, **__: object) -> Tensor:
        raise InputError(
            "the run was loaded without a network; use Run.load(folder, model=…) with a network of the same architecture."
        )


def _filled(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> nn.Module:
    trained = copy.deepcopy(model)
    whole = (folder / outlets.MODEL).is_file()
    # A checkpoint holds only trained parameters; frozen ones and buffers stay as in `model`.
    own = trained.state_dict() if whole else {name: p for name, p in trained.named_parameters() if p.requires_grad}
    for name in sorted({*own, *tensors}):
        here, there = (f"of shape {tuple(held[name].shape)}" if name in held else "missing" for held in (own, tensors))
        require(
            here == there,
            f"model is not the network whose parameters {str(folder)!r} holds: {name!r} is {here} in the model and {there} in "
            "the folder; pass a model with the same architecture.",
        )
    trained.load_state_dict(tensors, strict=whole)
    return trained


def baseline_text(baselines: Mapping[str, float], key: str) -> str:
    """The baseline of a metric, to be shown after its value; empty without one."""
    return f" (always the most frequent class: {baselines[key]:.4g})" if key in baselines else ""


FORMAT, VERSION = "dpfedexp-run", 1
Status = Literal["running", "completed", "stopped", "failed"]
_READ_AS = {"str": ("str",), "int": ("int",), "bool": ("bool",), "float": ("float", "int"), "dict[str, Any]": ("dict",)}


@dataclass(frozen=True)
class RunFacts:
    """The public facts of a run in `run.json`.

    `clients` is M, `parameters` is d, and `command` is the command or the Python call that started the run. `trainer` is empty in
    a secure run, where it depends on the data; `stopped` is empty in a run that completed all rounds. `settings` are the settings
    that the result depends on. `baselines` is metric → its value on the server's test set if always the most frequent class is
    predicted.
    """

    run: str
    algorithm: str
    data: str
    model: str
    clients: int
    parameters: int
    rounds: int
    delta: float
    secure: bool
    command: str
    trainer: str = ""
    stopped: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    baselines: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        values = {name: value for name, value in asdict(self).items() if value not in ("", {}, [])}
        content = {"format": FORMAT, "version": VERSION, **outlets.recorded(outlets.FACTS, values, secure=self.secure)}
        replace_text(folder / outlets.FACTS, json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n")

    @staticmethod
    def read(folder: Path) -> RunFacts | None:
        """Read `run.json`; None where the folder has none, as in a deployment."""
        path = folder / outlets.FACTS
        if not path.is_file():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            kinds = {field.name: str(field.type) for field in fields(RunFacts)}
            values = {name: content[name] for name in kinds if name in content}
            for name in ("data", "model", "command"):
                values.setdefault(name, "")
            # Compare exact types: isinstance accepts True as an int.
            wrong = [name for name, value in values.items() if type(value).__name__ not in _READ_AS[kinds[name]]]
            if content["format"] != FORMAT or wrong:
                raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r}" if wrong else "it is of another format")
            return RunFacts(**values)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"the file {str(path)!r} does not describe a run ({error}); delete it.") from None


def call_text(name: str, given: Mapping[str, object], *first: str) -> str:
    return f"{name}({', '.join([*first, *(f'{key}={argument_text(value)}' for key, value in given.items())])})"


def argument_text(value: object) -> str:
    """Format an argument: numbers and strings by repr, dataclasses by their non-default fields, others by class name."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if not is_dataclass(value) or isinstance(value, type):
        return str(name)
    own = {one.name: getattr(value, one.name) for one in fields(value) if one.init and one.repr}
    usual = {one.name: one.default for one in fields(value)}
    return call_text(name, {key: item for key, item in own.items() if item != usual[key] and not callable(item)})


class RunFolder:
    """Write the files of a run: metrics after every round, the rest at the end (`engine.outlets` lists them).

    With `resume` the folder may hold the same run, which is then resumed. Its metrics are cut back to its checkpoint when the
    first new round is recorded: by then the run holds the ledger's lock and is the only writer.

    Args:
        path: the folder.
        resume: whether to resume the run in the folder, if there is one; if False, the folder must be empty.
        command: the command line that started the run; empty for a call from Python.
        call: the Python call that started the run, if it is not one of `train`.
        data: a description of the clients' data.
        purpose: text for error messages about a folder that is not named by `out` or `--out`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        resume: bool = False,
        command: str = "",
        call: str = "",
        data: str = "",
        purpose: str = "",
    ) -> None:
        self.path, self.command, self.data = Path(path), command or call, data
        self.how_to_resume = f"{'repeat the command' if command else 'make the same call again'} to resume"
        where = purpose or f"with {'--out' if command else 'out'}"
        with writing(self.path):
            require(not self.path.is_file(), f"{str(self.path)!r} is a file; name a new folder {where}.")
            self.path.mkdir(parents=True, exist_ok=True)
            used = any(self.path.iterdir())
            require(resume or not used, f"the folder {str(self.path)!r} is not empty; name a new one {where}.")
            traces = (outlets.CONFIG, outlets.FACTS, outlets.LEDGER, outlets.CHECKPOINT)
            require(
                not used or any(any(self.path.glob(f"{one}*")) for one in traces),
                f"the folder {str(self.path)!r} holds files but no run; name a new one {where}.",
            )
        self._metrics: TextIO | None = None
        self.facts: RunFacts | None = None
        self._began = time.time()

    def write_config(self, settings: Settings) -> None:
        """Write `config.toml`; raises `InputError` if the folder holds another run's settings."""
        from dpfedexp.config import load

        path = self.path / outlets.CONFIG
        if path.exists():
            may_change: Any = {"resolved": True, "run": {"device", "chunk_size", "memory", "budget"}}
            here, there = (one.model_dump(mode="json", exclude=may_change) for one in (settings, load(path)))
            changed = checkpoint.differences(checkpoint.flatten(here), checkpoint.flatten(there))
            require(
                not changed,
                f"the folder {str(self.path)!r} holds another run: {changed}. Resume with its settings, or name another folder.",
            )
        with writing(self.path):
            replace_text(path, settings.to_toml())

    def begin(self, facts: RunFacts) -> None:
        self.facts = facts
        with writing(self.path):
            facts.write(self.path)

    def record(self, record: Record) -> None:
        with writing(self.path):
            if self._metrics is None:
                done = checkpoint.read_progress(self.path)
                history = done.history[:-1] if done else []
                replace_text(self.path / outlets.METRICS, "".join(map(line, history)))
                self._metrics = (self.path / outlets.METRICS).open("a", encoding="utf-8")
            self._metrics.write(line(record))
            self._metrics.flush()

    def finish(self, run: Run) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(key for record in run.history for key in record)))
        writer.writeheader()
        writer.writerows(run.history)
        secure = not run.privacy.simulated
        advice = (line(outlets.recorded(outlets.ADVICE, one.to_json(), secure=secure)) for one in run.advice)
        with writing(self.path):
            replace_text(self.path / outlets.METRICS, "".join(map(line, run.history)))
            replace_text(self.path / outlets.METRICS_TABLE, table.getvalue())
            replace_tensors(self.path / outlets.MODEL, model_tensors(run.model))
            replace_text(self.path / outlets.ADVICE, "".join(advice))
            if self.facts is not None:
                replace(self.facts, stopped=run.stopped or "").write(self.path)
        self.state(run.privacy)

    def write_status(self, status: Status, round: int, rounds: int, epsilon: float, reason: str = "") -> None:
        """Write `status.json`. It has no times, because the duration of a round depends on the clients' data."""
        delta = None if self.facts is None else self.facts.delta
        content = {"status": status, "round": round, "rounds": rounds, "epsilon": epsilon, "delta": delta}
        with writing(self.path):
            recorded = outlets.recorded(outlets.STATUS, {**content, "reason": reason}, secure=True)
            replace_text(self.path / outlets.STATUS, line(recorded))

    def state(self, privacy: PrivacyStatement) -> None:
        rewrite_statement(self.path, privacy, self._began)

    def remove_results(self) -> None:
        with writing(self.path):
            for name in (outlets.MODEL, outlets.STATEMENT, outlets.STATEMENT_TEXT, outlets.METRICS_TABLE):
                (self.path / name).unlink(missing_ok=True)


def rewrite_statement(folder: Path, privacy: PrivacyStatement, when: float | None = None) -> None:
    """Write the privacy statement. A run that protects real data hides its duration: all its files get one date, `when` or now."""
    with writing(folder):
        replace_text(folder / outlets.STATEMENT, privacy.to_json() + "\n")
        replace_text(folder / outlets.STATEMENT_TEXT, privacy.text + "\n")
        if not privacy.simulated:
            set_dates(folder, outlets.OUTLETS, time.time() if when is None else when)


Record = dict[str, Any]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors for `model.safetensors`. Parameters that share storage, such as tied embeddings, are stored twice."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}


def _copy_ledger(folder: Path, ledger: Ledger, run: str, model: str) -> None:
    """Copy a ledger into a folder, record by record, and seal the copy with the digest of the run's model."""
    own = {name: value for name, value in ledger.header.items() if name not in ("format", "version")}
    with Ledger.create(folder / outlets.LEDGER, **own) as copy:
        # All records keep their order, so that the copy holds the marks of the original's anchors.
        for number, entry in enumerate([None, *ledger.entries]):
            if entry is not None:
                copy.charge(entry.round, entry.event, run=entry.run, noise=entry.noise)
            for _, note in (one for one in ledger.notes if one[0] == number):
                copy.add(note)
        copy.seal(run, model=model)


def read_history(folder: Path) -> list[Record]:
    """The records of all rounds, from the metrics file, or from the checkpoint where it has more rounds after a crash."""
    path = folder / outlets.METRICS
    history: list[Record] = []
    lines = read_text(path).splitlines()
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
            record["round"] = int(record["round"])
            history.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            # A crash may have cut the last line.
            if number < len(lines):
                raise InputError(f"the file {str(path)!r} has no round in line {number}: {text[:60]!r}.") from None
    progress = checkpoint.read_progress(folder)
    return history if progress is None or len(progress.history) <= len(history) else list(progress.history)


def numbers(record: Record) -> Record:
    """The record with null replaced by what JSON can't write: infinity for `epsilon_total`, NaN for other fields."""
    absent = {"epsilon_total": math.inf}
    return {name: absent.get(name, math.nan) if value is None else value for name, value in record.items()}


def read_advice(folder: Path) -> tuple[Advice, ...]:
    path = folder / outlets.ADVICE
    try:
        return tuple(Advice(**json.loads(one)) for one in read_text(path).splitlines())
    except (ValueError, TypeError):
        raise InputError(f"the file {str(path)!r} does not hold advice, one JSON object to a line.") from None


def read_parameters(folder: Path) -> dict[str, Tensor]:
    """The parameters of a finished run, or those after the last complete round of an unfinished one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / outlets.MODEL
    try:
        if path.is_file():
            return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error}.") from None
    if (last := checkpoint.load(folder)) is not None:
        return checkpoint.reported(last)
    raise InputError(
        f"the folder {str(folder)!r} has neither {outlets.MODEL} nor {outlets.CHECKPOINT}; no run was begun in it."
    )


def read_text(path: Path) -> str:
    """The text of a file; empty where there is no file."""
    if not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error}.") from None


def line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(dict(record))) + "\n"
