"""A round's `State` as named tensors and back: the part that the checkpoints of simulations and deployments share.

w                  the parameters
recent.<number>    the earlier iterates that the reported model averages, oldest first; the newest of them is w itself
server.<name>      the server optimiser's own state
memory.<name>      what the step-size rule and others remember of earlier rounds
control            SCAFFOLD's server control variate

The clients' own control variates are no part of it: they are as private as the clients' data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from dpfedexp.algorithms.round import State
from dpfedexp.errors import InputError, require


def earlier(number: int) -> str:
    """The name of the earlier iterate with this number."""
    return f"recent.{number}"


def state_tensors(state: State) -> dict[str, Tensor]:
    """The tensors of a state, on the CPU."""
    named = {"w": state.w}
    named |= {earlier(number): value for number, value in enumerate(state.recent[:-1])}
    named |= {f"server.{name}": value for name, value in state.server.items()}
    named |= {f"memory.{name}": value for name, value in state.memory.items()}
    if state.control is not None:
        named["control"] = state.control
    return {name: value.detach().cpu().contiguous() for name, value in named.items()}


def state_from(tensors: Mapping[str, Tensor], round: int, radius: float) -> State:
    """The state that `state_tensors` wrote.

    Args:
        tensors: what the file holds.
        round: the last completed round.
        radius: the clip in force.

    Raises:
        InputError: these are other tensors than a state's. Whether they fit a model is `check_fits`' question.
    """
    count = sum(name.startswith("recent.") for name in tensors)
    recent = [earlier(number) for number in range(count)]
    known = {"w", "control", *recent}
    foreign = [name for name in tensors if name not in known and not name.startswith(("server.", "memory."))]
    require("w" in tensors and not foreign, "it holds other tensors than a state")
    w = tensors["w"]
    return State(
        round=round,
        w=w,
        recent=(*(tensors[name] for name in recent), w),
        radius=radius,
        server=_part(tensors, "server."),
        control=tensors.get("control"),
        memory=_part(tensors, "memory."),
    )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check_fits(state: State, start: State) -> None:
    """Refuses a state whose tensors have other names, shapes or types than those that the run starts with."""
    pairs = [("parameters", state.w, start.w)]
    pairs += [("earlier parameters", value, start.w) for value in state.recent]
    if set(state.server) != set(start.server):
        raise InputError("it lacks the server's own state, or holds another server's")
    pairs += [("server state", value, start.server[name]) for name, value in state.server.items()]
    if set(state.memory) != set(start.memory):
        raise InputError("it lacks what the step size remembers, or holds another rule's memory")
    pairs += [("memory", value, start.memory[name]) for name, value in state.memory.items()]
    if state.control is not None and start.control is not None:
        pairs.append(("control variate", state.control, start.control))
    if state.client_controls is not None and start.client_controls is not None:
        pairs.append(("clients' control variates", state.client_controls, start.client_controls))
    for name, value, like in pairs:
        if value.shape != like.shape or value.dtype != like.dtype:
            raise InputError(f"its {name} does not fit the model")


def digest(tensors: Mapping[str, Tensor], kind: str = "sha256") -> str:
    """A hash of names, types, shapes and values; `kind` as hashlib calls it."""
    total = hashlib.new(kind)
    for name, value in sorted(tensors.items()):
        total.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        total.update(value.numpy().data.cast("B") if value.numel() else b"")
    return total.hexdigest()
