"""`run.json`: what a run is, in a few public facts, and what it was started with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from dpfedexp.engine.file_names import FACTS
from dpfedexp.engine.outlets import recorded
from dpfedexp.errors import InputError
from dpfedexp.files import replace_text
from dpfedexp.json_values import finite

FORMAT, VERSION = "dpfedexp-run", 1


@dataclass(frozen=True)
class RunFacts:
    """Public facts of a run.

    Attributes:
        run: the name that the ledger knows it by.
        algorithm: its name.
        data: what the clients' data are, in words.
        model: the name of the network's class.
        clients: M, the public number of clients.
        parameters: d, the number of trained parameters.
        rounds: how many rounds are planned.
        delta: δ of the promise.
        secure: whether it protects real data.
        command: the command, or the call from Python, that made it.
        trainer: how local updates were computed; empty in a secure run, where it depends on the data.
        stopped: why it ended before its last round; empty where it did not.
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

    def write(self, folder: Path) -> None:
        """Writes `run.json`; `OSError` where it can't be written."""
        values = {name: value for name, value in asdict(self).items() if value != ""}
        content = {"format": FORMAT, "version": VERSION, **recorded(FACTS, values, secure=self.secure)}
        replace_text(folder / FACTS, json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n")

    @staticmethod
    def read(folder: Path) -> RunFacts | None:
        """The facts that the folder holds; None where it has none, as that of a deployment."""
        path = folder / FACTS
        if not path.is_file():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            kinds = {field.name: str(field.type) for field in fields(RunFacts)}
            values = {name: content[name] for name in kinds if name in content}
            for name in ("data", "model", "command"):
                values.setdefault(name, "")
            wrong = [name for name, value in values.items() if not _fits(value, kinds[name])]
            if content["format"] != FORMAT or wrong:
                raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r}" if wrong else "it is of another format")
            return RunFacts(**values)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"the file {str(path)!r} does not describe a run ({error}); delete it.") from None


def _fits(value: object, kind: str) -> bool:
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (float, int)}
    wanted = kinds[kind]
    return isinstance(value, wanted) and (kind == "bool" or not isinstance(value, bool))


def call_text(name: str, given: Mapping[str, object]) -> str:
    """A call by its named arguments, as somebody would have typed it."""
    return f"{name}({', '.join(f'{key}={argument_text(value)}' for key, value in given.items())})"


def argument_text(value: object) -> str:
    """Numbers and names as they are, settings by the fields that are not the usual ones, all others by their class."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if not is_dataclass(value) or isinstance(value, type):
        return str(name)
    own = {one.name: getattr(value, one.name) for one in fields(value) if one.init and one.repr}
    usual = {one.name: one.default for one in fields(value)}
    return call_text(name, {key: item for key, item in own.items() if item != usual[key] and not callable(item)})
