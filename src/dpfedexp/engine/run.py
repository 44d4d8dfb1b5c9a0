"""What a run returns."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dpfedexp.accounting import Ledger, PrivacyStatement
from dpfedexp.accounting.wording import card, caveats, summary
from dpfedexp.arguments import checked
from dpfedexp.engine.advice.message import Advice
from dpfedexp.engine.facts import RunFacts
from dpfedexp.engine.file_names import LEDGER
from dpfedexp.engine.outlets import OUTLETS
from dpfedexp.engine.plot import STEERING, figure_of, metrics_in
from dpfedexp.engine.results import (
    numbers,
    read_advice,
    read_history,
    read_parameters,
    write_ledger,
    write_results,
    write_statement,
)
from dpfedexp.engine.verify import CONTEXT, read_claim, recompute
from dpfedexp.errors import InputError, require
from dpfedexp.files import undate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@checked
@dataclass(frozen=True)
class Run:
    """What a run returns.

    Attributes:
        model: the trained module: the average of the last two iterates for FedEXP variants, the last one otherwise.
        history: one record per round: test metrics, eta_g, clip, update_norm, epsilon_total so far, and seconds if not secure.
        privacy: the statement of what was promised to whom; print it.
        ledger: what was charged.
        trainer: how local updates were computed.
        stopped: why the run ended before its last round, None if it did not.
        advice: what there was to say about the run, before it and while it went on (docs/advice.md).
        facts: algorithm, data, M, d and the call that made it, as `run.json` holds them; None for a run without that file.
    """

    model: nn.Module
    history: list[dict[str, Any]] = field(repr=False)
    privacy: PrivacyStatement = field(repr=False)
    ledger: Ledger = field(repr=False)
    trainer: str = "vectorised"
    stopped: str | None = None
    advice: tuple[Advice, ...] = field(default=(), repr=False)
    facts: RunFacts | None = field(default=None, repr=False)

    @property
    def verdict(self) -> str | None:
        """Why the run learnt nothing, or nothing shows that it did; None where there is no reason to say so."""
        return next((advice.sentence for advice in self.advice if advice.code == "dead"), None)

    def save(self, folder: Path | str) -> Path:
        """Writes the run as `train(..., out=folder)` does, so that `report`, `privacy verify` and `Run.load` read it.

        Args:
            folder: a new or an empty folder.

        Returns:
            The folder.
        """
        path, began, secure = Path(folder), time.time(), not self.privacy.simulated
        try:
            require(not path.is_file(), f"{str(path)!r} is a file; name a new folder to save the run in.")
            path.mkdir(parents=True, exist_ok=True)
            require(
                not any(path.iterdir()), f"the folder {str(path)!r} is not empty; name a new one to save the run in."
            )
            statement = self.privacy
            header = {
                "algorithm": statement.algorithm,
                "clients": statement.clients,
                "delta": statement.delta,
                "simulated": statement.simulated,
                **({} if self.facts is None else {"run": self.facts.run}),
                **{name: value for name in CONTEXT if (value := getattr(statement, name)) is not None},
            }
            write_ledger(path, self.ledger, header)
            write_results(path, self.model, self.history, self.advice, secure=secure)
            write_statement(path, statement)
            if self.facts is not None:
                replace(self.facts, stopped=self.stopped or "").write(path)
            if secure:
                undate(path, OUTLETS, began)
        except OSError as error:
            raise InputError(f"the folder {str(path)!r} can't be written: {error.strerror}.") from None
        return path

    @staticmethod
    @checked
    def load(folder: Path | str, model: nn.Module | None = None) -> Run:
        """The run that a folder holds, whoever wrote it: `train(out=…)`, `Run.save` or the command line.

        Args:
            folder: the run's folder.
            model: a network like the trained one; it is copied, and the copy gets the trained parameters. Without it `Run.model`
                holds the parameters by name and can't be called.

        Returns:
            The run. Its ledger is open for reading only.
        """
        path = Path(folder)
        require(path.is_dir(), f"the folder {str(path)!r} does not exist; name one that a run was written to.")
        require(
            model is None or isinstance(model, nn.Module),
            f"model is a {type(model).__name__}; it must be an nn.Module.",
        )
        tensors = read_parameters(path)
        trained = StoredParameters(tensors) if model is None else _filled(model, tensors, path)
        ledger = Ledger.open(path / LEDGER, read_only=True) if (path / LEDGER).exists() else Ledger.in_memory()
        facts = RunFacts.read(path)
        return Run(
            trained,
            [numbers(record) for record in read_history(path)],
            read_claim(path) or recompute(path),
            ledger,
            (facts.trainer if facts is not None else "") or "unknown",
            (facts.stopped if facts is not None else "") or None,
            read_advice(path),
            facts,
        )

    @checked
    def plot(self) -> Figure:
        """A matplotlib figure of the metrics, the step size η_g and the clip over rounds; it needs no display."""
        return figure_of(self.history, summary(self.privacy))

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        shown = {k: round(v, 4) + 0.0 for k, v in last.items() if isinstance(v, float)}
        caveat = "".join(f", epsilon_total: {one}" for one in caveats(self.privacy) if "epsilon_total" in shown)
        ended = caveat + ("" if self.stopped is None else f", stopped: {self.stopped}")
        ended += "" if self.verdict is None else f", {self.verdict}"
        return f"Run({len(self.history)} rounds, {shown}{ended})"

    def _repr_html_(self) -> str:
        last = self.history[-1] if self.history else {}
        keys = [*metrics_in(self.history), *STEERING]
        rows = [(key, f"{last[key] + 0.0:.4g}") for key in keys if isinstance(last.get(key), int | float)]
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
    """Parameters by their names, without the network that they belong to."""

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
            "the run was loaded without its network; write Run.load(folder, model=…) with one like the trained."
        )


def _filled(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> nn.Module:
    trained = copy.deepcopy(model)
    own = trained.state_dict()
    for name in sorted({*own, *tensors}):
        here, there = (f"of shape {tuple(held[name].shape)}" if name in held else "missing" for held in (own, tensors))
        require(
            here == there,
            f"model is not the network whose parameters {str(folder)!r} holds: {name!r} is {here} in the model and {there} in the "
            "folder; give a model that was built the same way.",
        )
    trained.load_state_dict(tensors)
    return trained
