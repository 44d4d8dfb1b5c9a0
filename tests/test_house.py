"""The structure of the package: every import points down, and there is no circle."""

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import dpfedexp

ROOT = Path(dpfedexp.__file__).parent
LAYERS = [
    {"errors"},
    {"files", "lazy", "machine"},
    {"accounting", "core", "models"},
    {"mechanisms"},
    {"algorithms", "data", "evaluation"},
    {"trainers"},
    {"config"},
    {"engine"},
    {"report", "sinks"},
    {"flower"},
    {"audit"},
    {"cli"},
]
"""Rooms and single files, the lowest first. What stands in one layer knows the layers below, and its own."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        inside = path.relative_to(ROOT).with_suffix("")
        if "template" not in inside.parts:
            found[".".join(part for part in inside.parts if part != "__init__")] = path
    return found


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}


@cache
def imports() -> dict[str, frozenset[str]]:
    """Of every module, the modules of this package that it imports anywhere, those inside functions and for type checkers too."""
    known = modules()
    graph = {}
    for name, tree in trees().items():
        used = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dpfedexp":
                module = node.module.removeprefix("dpfedexp").removeprefix(".")
                for alias in node.names:
                    inner = f"{module}.{alias.name}".removeprefix(".")
                    used.add(inner if inner in known else module)
        graph[name] = frozenset(used - {name, ""})
    return graph


def layer(module: str) -> int:
    room = module.partition(".")[0]
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def test_every_room_has_a_place():
    rooms = {name.partition(".")[0] for name in modules()} - {"", "__main__"}
    assert rooms == set().union(*LAYERS)


def test_every_import_points_down():
    for name, many in imports().items():
        up = [] if name in ("", "__main__") else [used for used in many if layer(used) > layer(name)]
        assert up == [], name


def test_neither_modules_nor_rooms_import_in_a_circle():
    rooms = defaultdict(set)
    for name, many in imports().items():
        if name:
            rooms[name.partition(".")[0]] |= {used.partition(".")[0] for used in many} - {name.partition(".")[0]}
    for graph in (imports(), rooms):
        TopologicalSorter(graph).prepare()


def test_no_assertion_guards_the_library():
    """`python -O` takes assertions away, so nothing may rest on one."""
    for name, tree in trees().items():
        assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] == [], name
