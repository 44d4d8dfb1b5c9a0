"""`python docs/hooks/settings_schema.py`: write the JSON schema of a run's TOML file, for editors, from the settings."""

import ast
import json
from dataclasses import fields
from inspect import cleandoc, getsource
from itertools import pairwise
from textwrap import dedent
from typing import Any

from dpfedexp.algorithms import ALGORITHMS
from dpfedexp.cli.train import SCHEMA
from dpfedexp.config.settings import Settings, SettingsSection
from dpfedexp.core.local_optimizer import OPTIMIZERS
from dpfedexp.data.data_sets import DATA_SETS, OTHER_KINDS
from dpfedexp.mechanisms import MECHANISMS

CHOICES = {
    ("DataSettings", "kind"): (OTHER_KINDS, DATA_SETS),
    ("AlgorithmSettings", "name"): (ALGORITHMS,),
    ("AlgorithmSettings", "mechanism"): (MECHANISMS,),
    ("LocalSettings", "optimizer"): (OPTIMIZERS,),
}
"""Settings whose values are the names in a table: (section, setting) → tables."""


def schema() -> dict[str, Any]:
    """Return pydantic's schema without null, which TOML does not have, and with the names in the tables as choices."""
    made = Settings.model_json_schema()
    for kind in SettingsSection.__subclasses__():
        properties = made["$defs"].get(kind.__name__, {}).get("properties", {})
        for name, described in docstrings(kind).items() if properties else ():
            properties[name] = dict(sorted({**properties[name], "description": described}.items()))
    tree: dict[str, Any] = _without_null(made)
    sections = tree["$defs"]
    for (section, name), tables in CHOICES.items():
        sections[section]["properties"][name]["enum"] = [known for table in tables for known in table]
    own = {field.name for kind in OPTIMIZERS.values() for field in fields(kind)}
    local = sections["LocalSettings"]
    local["properties"] |= {name: {} for name in sorted(own - set(local["properties"]))}
    local["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "A run of dpfedexp"}


def text() -> str:
    """Return the content of `schema.json`."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def docstrings(kind: type) -> dict[str, str]:
    """Return the docstring of every setting of a section. pydantic would read them at every import, which is slow."""
    (written,) = ast.parse(dedent(getsource(kind))).body
    found = {}
    for line, below in pairwise(written.body if isinstance(written, ast.ClassDef) else ()):
        if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(line.target)] = cleandoc(str(below.value.value))
    return found


def _without_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null(one) for one in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _without_null(one) for key, one in value.items() if not (key == "default" and one is None)}
    if "anyOf" in inner:
        kinds = [one for one in inner.pop("anyOf") if one.get("type") != "null"]
        inner |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return inner


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
