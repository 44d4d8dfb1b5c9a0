"""What pydantic found wrong with settings, as a sentence for whoever wrote them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from dpfedexp.errors import nearest

_KINDS = ("literal", "float", "int", "str", "bool")


def sentence(error: ValidationError, section: type[BaseModel], prefix: str = "") -> str:
    """The first wrong setting as a sentence that names the field, the value and what would be right.

    Args:
        error: what validating `section` raised.
        section: the settings that were validated, for the nearest right name.
        prefix: where the section lies in the file, such as "federation."; empty for a whole file.
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
    # A setting that may be of several kinds has an error for each of them.
    clauses = [clause(other["msg"]) for other in errors if _place(other) == place]
    return f"{field} is {first['input']!r}; it must be {' or '.join(clauses)}."


def places(section: type[BaseModel], name: str) -> list[str]:
    """Where in the sections of a file there is a setting of this name, such as "algorithm.clip"."""
    rooms = [room for room in section.model_fields if room != "resolved"]
    return [f"{room}.{name}" for room in rooms if name in _section_at(section, [room]).model_fields]


def _place(error: Any) -> list[str]:
    """Where a setting is, without the kinds that a union of kinds tried there."""
    return [str(part) for part in error["loc"] if not str(part).startswith(_KINDS)]


def clause(message: str) -> str:
    """What a setting must be, of pydantic's message, without what pydantic tried."""
    return message.removeprefix("Input should be ").partition(", unable")[0].partition(", got")[0]


def _section_at(section: type[BaseModel], place: list[str]) -> type[BaseModel]:
    for part in place:
        annotation = section.model_fields[part].annotation
        kinds = (annotation, *getattr(annotation, "__args__", ()))
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)
    return section
