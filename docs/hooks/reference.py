"""Pages that are generated: the API, the command line, the configuration and the examples, each from the thing itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import click
from pydantic import BaseModel
from rich.text import Text
from settings_schema import docstrings

import dpfedexp

ROOT = Path(__file__).parents[2]
FILES_INTRODUCTION = """# Files

The files of a run's folder, the same for a simulation, `dpfedexp train` and the server of a deployment. All of them are
released, public, or the server's own. [Runs](../runs.md) says how to use them, and
[security](../security.md#ledger-anchor-and-private-folder) what is kept in the private folder.

"""


def on_files(files, config):
    from mkdocs.structure.files import File

    pages = {f"reference/api/{name}.md": package_page(name) for name in packages()}
    pages["reference/command-line.md"] = command_page()
    pages["reference/configuration.md"] = configuration_page()
    pages["reference/files.md"] = files_page()
    pages["examples.md"] = examples_page()
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


@cache
def packages() -> list[str]:
    """Every package, and module of the root, with a table of public names; the one that most people need first."""
    found = pkgutil.walk_packages(dpfedexp.__path__, "dpfedexp.")
    names = [one.name for one in found if (one.ispkg or one.name.count(".") == 1) and ".template" not in one.name]
    shown = [
        name for name in names if name != "dpfedexp.__main__" and hasattr(importlib.import_module(name), "__all__")
    ]
    return ["dpfedexp", *shown]


def public_names(package: str) -> list[str]:
    """The names of a package that no package before it documents."""
    before = {
        id(getattr(importlib.import_module(other), name))
        for other in packages()[: packages().index(package)]
        for name in importlib.import_module(other).__all__
    }
    room = importlib.import_module(package)
    return [name for name in room.__all__ if name != "__version__" and id(getattr(room, name)) not in before]


def package_page(package: str) -> str:
    room = importlib.import_module(package)
    names = public_names(package)
    equations = equations_of()
    lines = [f"# {package}", "", inspect.cleandoc(room.__doc__ or ""), ""]
    for name in names:
        lines += [*identifier(room, name), ""]
        lines += equations.get(f"{package}.{name}", [])
    return "\n".join(lines)


def identifier(room: ModuleType, name: str) -> list[str]:
    """What mkdocstrings is asked for: the name, or its home where a module beside it has the same one."""
    public = f"{room.__name__}.{name}"
    if not (Path(str(room.__file__)).parent / f"{name}.py").exists():
        return [f"::: {public}"]
    home = getattr(room, name).__module__
    return [f"::: {home}.{name}", "    options:", f"      heading: {public}", f"      toc_label: {name}"]


def equations_of() -> dict[str, list[str]]:
    """The equations of the page on the paper, by the public names that it says compute them."""
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for section in re.split(r"\n###? ", text)[1:]:
        title, _, body = section.partition("\n")
        formula = re.search(r"\$\$.*?\$\$", body, re.S)
        if formula:
            for name in re.findall(r"`(dpfedexp(?:\.\w+)+)`", body):
                found.setdefault(name, []).extend(
                    ["", f"[{title.strip('`')}](../../paper.md#{anchor(title)}):", "", formula[0], ""]
                )
    return found


def anchor(title: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def commands(command: click.Command, words: tuple[str, ...]) -> list[tuple[tuple[str, ...], click.Command]]:
    """A command and all below it, by their words."""
    found = [(words, command)]
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            found += commands(inner, (*words, name))
    return found


def command_tree() -> list[tuple[tuple[str, ...], click.Command]]:
    from typer.main import get_command

    from dpfedexp.cli import app

    return commands(get_command(app), ("dpfedexp",))


def command_page() -> str:
    lines = ["# Command line", "", "Every command and option, as `--help` shows them.", ""]
    for words, command in command_tree():
        context = click.Context(command, info_name=" ".join(words))
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [
            f"## {' '.join(words)}",
            "",
            said(command.help),
            "",
            "```text",
            f"{' '.join(words)} {usage}",
            "```",
            "",
        ]
        rows = [row(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)]
        if rows:
            lines += ["| | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def row(parameter: click.Parameter, context: click.Context) -> str:
    if isinstance(parameter, click.Option):
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        value = "" if parameter.is_flag else f" {cell(kind_of_option(parameter, context))}"
    else:
        names, value = f"`{parameter.make_metavar(context)}`", ""
    plain = parameter.get_default(context, call=False)
    flag = getattr(parameter, "is_flag", False)
    shown = "required" if parameter.required else "" if plain is None or callable(plain) or flag else f"`{plain}`"
    return f"| {names}{value} | {shown} | {cell(said(getattr(parameter, 'help', '')))} |"


def kind_of_option(option: click.Option, context: click.Context) -> str:
    """The values that an option takes: its choices, or its kind with its range."""
    if isinstance(option.type, click.Choice):
        return " \\| ".join(str(getattr(choice, "value", choice)) for choice in option.type.choices)
    bounds = option.type._describe_range() if hasattr(option.type, "_describe_range") else ""
    words = option.make_metavar(context).removesuffix(" RANGE")
    return f"{words} ({bounds.replace('x', '')})" if bounds else words


def said(text: str | None) -> str:
    """Help as plain text: typer writes it with rich's markup."""
    return Text.from_markup(inspect.cleandoc(text or "")).plain


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def configuration_page() -> str:
    from dpfedexp.config import Settings

    lines = [
        "# Configuration",
        "",
        "Every setting of the file that `dpfedexp train` and `dpfedexp sweep` take; `dpfedexp init` writes one to start from.",
        "Editors that know TOML schemas complete and check it with [schema.json](../../src/dpfedexp/config/schema.json), which the",
        "package ships: the first line of the file is `#:schema` and its path, as `dpfedexp init` prints it.",
        "",
    ]
    for name, field in Settings.model_fields.items():
        kind = model_of(field.annotation)
        if kind is not None:
            lines += section_lines(name, kind)
    return "\n".join(lines)


def model_of(annotation: object) -> type[BaseModel] | None:
    kinds = [annotation, *getattr(annotation, "__args__", ())]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def section_lines(name: str, kind: type[BaseModel]) -> list[str]:
    schema = kind.model_json_schema()
    lines = [
        f"## [{name}]",
        "",
        inspect.cleandoc(kind.__doc__ or ""),
        "",
        "| setting | type | default | |",
        "|---|---|---|---|",
    ]
    inner: list[str] = []
    described = docstrings(kind)
    for key, field in kind.model_fields.items():
        nested = model_of(field.annotation)
        if nested is not None:
            inner += section_lines(f"{name}.{key}", nested)
            continue
        default = "required" if field.is_required() else toml(field.get_default(call_default_factory=True))
        lines.append(
            f"| `{key}` | {cell(kind_of(schema['properties'][key]))} | {default} | {cell(described.get(key, ''))} |"
        )
    return [*lines, "", *inner]


def kind_of(schema: dict) -> str:
    """A JSON schema's type in words."""
    if "anyOf" in schema:
        return " or ".join(kind_of(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(f'`"{value}"`' for value in schema.get("enum", [schema.get("const")]))
    words = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "object": "table",
    }
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bound = [f"{sign} {schema[key]:g}" for key, sign in limits.items() if key in schema]
    return " ".join([words[schema["type"]], *bound])


def toml(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def files_page() -> str:
    """Every file of a run's folder, from the module that names them."""
    body = ast.parse((ROOT / "src" / "dpfedexp" / "engine" / "outlets.py").read_text(encoding="utf-8")).body
    rows = [
        f"| `{ast.literal_eval(name.value)}` | {cell(ast.literal_eval(meaning.value))} |"
        for name, meaning in pairwise(body)
        if isinstance(name, ast.Assign) and isinstance(meaning, ast.Expr)
    ]
    return "\n".join([FILES_INTRODUCTION, "| file | what it holds |", "|---|---|", *rows, ""])


def examples_page() -> str:
    lines = ["# Examples", "", "Whole programs, one idea each; the tests run all of them.", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        title, _, rest = (ast.get_docstring(ast.parse(text)) or path.stem).partition("\n")
        lines += [f"## {path.stem.replace('_', ' ').capitalize()}", "", title, rest, "", f"`examples/{path.name}`", ""]
        lines += ["```{.python .example}", text.rstrip(), "```", ""]
    return "\n".join(lines)
