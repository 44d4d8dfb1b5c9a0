"""What a page names must exist: names of the package, commands and their options, settings, make targets, files."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import click

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "dpfedexp"
REPRODUCTION = ROOT / "reproduction"
FOLDERS = (ROOT, PACKAGE, REPRODUCTION, ROOT / "tests", ROOT / "docs", PACKAGE / "flower" / "template")
"""Where files that a page names may lie."""
OTHERS = {"dpfedexp.helper", "dpfedexp two-party aggregation, version 1"}
"""Strings of protocols, which look like names."""
VARIABLES = {"report", "run"}
"""Names of rooms and sections that pages use for objects too."""
FENCE = re.compile(r"^( *)(```+|~~~+)(.*?)\n(.*?)^\1\2 *$", re.S | re.M)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
INDENTED = re.compile(r"^(?: {4})+\s*((?:dpfedexp|torchrun|srun) .*)$", re.M)
DOTTED = re.compile(r"^[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+$")
CALL = re.compile(r"^([A-Za-z_][\w.]*)\((.*)\)$")
SUFFIX = re.compile(r"\.(toml|jsonl?|md|txt|csv|safetensors|npz|html|pub|key|crt|pem|png|svg)$")


def wrong_names(markdown: str) -> list[str]:
    """A sentence for everything that the page names and that does not exist."""
    found = []
    for fence in FENCE.finditer(markdown):
        if fence[3].strip() in ("bash", "sh", "console"):
            found += [problem for line in joined(fence[4]) if (problem := wrong_command(line))]
    prose = FENCE.sub("", markdown)
    found += [problem for match in INDENTED.finditer(prose) if (problem := wrong_command(match[1]))]
    found += [problem for match in SPAN.finditer(prose) if (problem := wrong_span(match[1].strip()))]
    return found


def joined(block: str) -> Iterator[str]:
    """The lines of a shell block, those that end with a backslash with the next."""
    yield from block.replace("\\\n", " ").splitlines()


def wrong_span(text: str) -> str | None:
    if text in OTHERS or "your_" in text:
        return None
    if text.startswith("make ") and re.fullmatch(r"make [a-z-]+", text):
        return None if text[5:] in make_targets() else f"`{text}`: the Makefile has no such target"
    if re.match(r"dpfedexp[ \[]|python -m reproduction", text):
        return wrong_extra(text) or wrong_command(text)
    if re.fullmatch(r"(?:src|tests|docs|examples|reproduction)/[\w./*-]+|[\w/]+\.py", text):
        return None if file_exists(text) else f"`{text}`: there is no such file"
    if call := CALL.match(text):
        return wrong_call(call[1], call[2])
    if DOTTED.match(text) and not SUFFIX.search(text):
        return wrong_dotted(text)
    return None


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


def wrong_extra(text: str) -> str | None:
    extra = re.match(r"dpfedexp\[([\w,]+)\]", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    missing = [name for name in extra[1].split(",") if name not in known] if extra else []
    return f"`{text}`: the package has no extra {missing[0]!r}" if missing else None


@cache
def file_exists(text: str) -> bool:
    """Whether the repository has it: from its root, the package, the tests, or, for a name alone, anywhere in those."""
    patterns = [text.rstrip("/")] if "/" in text else [text, f"**/{text}"]
    return any(next(folder.glob(pattern), None) for folder in FOLDERS for pattern in patterns)


def of_repository(name: str) -> ModuleType:
    """A module of `reproduction`, which is not installed; mkdocs undoes what a hook adds to the path while it is loaded."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(name)


@cache
def root_command(program: str = "dpfedexp") -> click.Command:
    """The command line of the package, or that of `reproduction`."""
    from typer.main import get_command

    module = {"dpfedexp": "dpfedexp.cli", "reproduction": "reproduction.__main__"}[program]
    return get_command(of_repository(module).app)


def wrong_command(line: str) -> str | None:
    """What is wrong with a line that calls `dpfedexp`, or `python -m` of it, of `reproduction` or of a benchmark; else None."""
    words = split(line)
    if words[:2] == ["python", "-m"] and words[2].startswith("reproduction."):
        file = ROOT / f"{words[2].replace('.', '/')}.py"
        return None if file.is_file() else f"`{line.strip()}`: there is no module {words[2]}"
    program = next((word for word in words if word in ("dpfedexp", "reproduction")), None)
    if program is None or (words[0] != "dpfedexp" and "-m" not in words):
        return None
    words = words[words.index(program) + 1 :]
    command, path = root_command(program), [program]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] in ("…", "..."):
            return None
        if words[0] not in command.commands:
            return f"`{line.strip()}`: {' '.join(path)} has no command {words[0]!r}"
        path.append(words[0])
        command = command.commands[words.pop(0)]
    if command.context_settings.get("ignore_unknown_options"):
        return None
    known = {"--help", *(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))}
    given = [word.partition("=")[0] for word in words if re.match(r"-{1,2}[a-zA-Z]", word)]
    wrong = [name for name in given if name not in known]
    return f"`{line.strip()}`: {' '.join(path)} has no option {wrong[0]}" if wrong else None


def split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True) or [""]
    except ValueError:
        return line.split() or [""]


def wrong_dotted(text: str) -> str | None:
    """A name of the package, written from its root or from one of its rooms, or a setting of a section."""
    first, *rest = text.split(".")
    if first == "dpfedexp":
        return None if resolves(rest) else f"`{text}`: there is no such name"
    if first in VARIABLES:
        return None
    candidates = [resolves([*room, first, *rest]) for room in homes(first)]
    candidates += [rest[0] in sections()[first]] if first in sections() else []
    return f"`{text}`: there is no such name or setting" if candidates and not any(candidates) else None


def homes(name: str) -> list[list[str]]:
    """The rooms from which a page may write the name: the root, and those of the paper's parts."""
    rooms = [[], ["core"], ["algorithms"]]
    return [room for room in rooms if (not room and name in public()) or _is_module(PACKAGE.joinpath(*room) / name)]


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def resolves(parts: list[str]) -> bool:
    value: object = importlib.import_module("dpfedexp")
    for number, part in enumerate(parts):
        if hasattr_of(value, part):
            value = getattr(value, part, None)
            continue
        try:
            value = importlib.import_module(".".join(["dpfedexp", *parts[: number + 1]]))
        except ImportError:
            return False
    return True


def hasattr_of(value: object, name: str) -> bool:
    return hasattr(value, name) or (is_dataclass(value) and name in {field.name for field in fields(value)})


@cache
def public() -> dict[str, object]:
    package = importlib.import_module("dpfedexp")
    return {name: getattr(package, name) for name in package.__all__}


@cache
def sections() -> dict[str, set[str]]:
    """The settings of every section of a run's file, those of optimizers too."""
    from settings_schema import schema

    tree = schema()
    names = {name: kind["$ref"].rpartition("/")[2] for name, kind in tree["properties"].items()}
    return {name: set(tree["$defs"][kind]["properties"]) for name, kind in names.items()}


def wrong_call(name: str, arguments: str) -> str | None:
    """A call of a public name with keywords that it does not take."""
    first = name.split(".")[0]
    if first not in public() or not resolves(name.split(".")):
        return f"`{name}(…)`: there is no such name" if first in public() else None
    value: object = public()[first]
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    taken = inspect.signature(value).parameters  # type: ignore[arg-type]
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return None
    outside = re.sub(r"\([^()]*\)", "()", re.sub(r"\([^()]*\)", "()", arguments))
    wrong = [key for key in re.findall(r"(?:^|[,(]\s*)(\w+)=", outside) if key not in taken]
    return f"`{name}(…)` takes no argument {wrong[0]!r}" if wrong else None
