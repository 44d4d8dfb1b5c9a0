"""The template's app, with other settings and, where a test asks for it, with nodes that misbehave."""

from __future__ import annotations

import tomllib
from pathlib import Path

import tomli_w

from dpfedexp.flower.new import new_app


def make_app(folder: Path, *, hostile: bool = False, **sections: dict) -> Path:
    """`sections` replace or add to the app's configuration; a value of None removes a setting."""
    new_app(folder)
    path = folder / "pyproject.toml"
    content = tomllib.loads(path.read_text())
    config = content["tool"]["flwr"]["app"]["config"]
    for name, values in sections.items():
        merged = {**config.get(name, {}), **values}
        config[name] = {key: value for key, value in merged.items() if value is not None}
    path.write_text(tomli_w.dumps(content))
    if hostile:
        client = folder / "federation" / "client_app.py"
        text = client.read_text()
        changed = text.replace("mods=[private_training]", "mods=[hostile, private_training]")
        assert changed != text
        client.write_text(
            changed.replace(
                "from federation import task", "from federation import task\nfrom federation.hostile_mod import hostile"
            )
        )
        (folder / "federation" / "hostile_mod.py").write_text((Path(__file__).with_name("hostile_mod.py")).read_text())
    return folder
