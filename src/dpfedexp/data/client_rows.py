"""Rows held once, and which of them belong to each client."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfedexp.data import partition, structure
from dpfedexp.data.arrays import Transform, as_tensor, cast_inputs, cast_targets, check_finite
from dpfedexp.data.assignment import as_assignment
from dpfedexp.errors import require
from dpfedexp.inputs import each, leaves


@dataclass(frozen=True, eq=False)
class Edition:
    """Tensors as they were at a moment: the same only while they are the same ones, unchanged."""

    held: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def same(self, other: Edition | None) -> bool:
        return other is not None and self.versions == other.versions and all(map(operator.is_, self.held, other.held))


class ClientRows:
    """The storage of a `Federation`: what is held, and the rows of some clients in the types that a model takes."""

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        assignment: Any,
        *,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
        names: Sequence[Hashable] | None = None,
    ) -> None:
        self.inputs: Any = each(lambda part: _compact(part, dtype), structure.as_inputs("inputs", inputs))
        self.targets = _compact(as_tensor("targets", targets), dtype)
        examples = structure.rows(self.inputs)
        require(examples > 0, "inputs is empty; a federation needs at least one row.")
        require(
            examples == len(self.targets),
            f"inputs has {examples} rows and targets has {len(self.targets)}; there must be one target per row.",
        )
        if finite:
            for part in leaves(self.inputs):
                check_finite("inputs", part)
            check_finite("targets", self.targets)
        split = as_assignment(assignment, examples)
        if not allow_shared:
            holders = np.bincount(split.rows, minlength=examples)
            require(
                int(holders.max(initial=0)) <= 1,
                f"assignment gives row {int(holders.argmax())} to a client more than once or to several clients; "
                "each row belongs to one client (allow_shared=True permits otherwise).",
            )
        self.rows = torch.from_numpy(np.ascontiguousarray(split.rows, dtype=np.int64))
        self.offsets = torch.from_numpy(np.ascontiguousarray(split.offsets, dtype=np.int64))
        self.sizes = self.offsets.diff()
        self.dtype = dtype
        self.transform = transform
        self.names = None if names is None else tuple(names)
        require(
            self.names is None or len(self.names) == len(self),
            f"names has {len(self.names or ())} entries and there are {len(self)} clients; give one name per client.",
        )
        self._resident: dict[torch.device, tuple[Any, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None = None
    ) -> tuple[Any, Tensor]:
        """Rows `positions[i]` (0 … size-1) of client `clients[i]`, cast: inputs [n, s, …] and targets [n, s, …].

        Where there are several inputs per example, their tuple or dict comes back, each tensor [n, s, …]. The transform is not
        applied: trainers apply it to one client at a time, with that client's own random stream.
        """
        return self._read(clients, torch.as_tensor(positions).unsqueeze(1), device)(0)

    def reading(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None = None
    ) -> Callable[[int], tuple[Any, Tensor]]:
        """From a step k to rows `positions[i, k]` of client `clients[i]`, as `gather` gives them, for positions [n, steps, s].

        Which rows these are goes to the device once: a copy at every step would make a GPU wait for the processor.
        """
        if self.gathers_itself:
            return self._read(clients, positions, device)
        return lambda step: self.gather(clients, positions[:, step], device)

    @property
    def gathers_itself(self) -> bool:
        """Whether rows come from the tensors held here, and from no method that a subclass or an instance has replaced."""
        used = ("gather", "reading", "_read", "_picked", "_cast", "_on", "gathers_itself")
        own = all(getattr(type(self), name) is getattr(ClientRows, name) for name in used)
        return own and not any(name in vars(self) for name in used)

    def _read(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None
    ) -> Callable[[int], tuple[Any, Tensor]]:
        clients = torch.as_tensor(clients, dtype=torch.int64).cpu()
        positions = torch.as_tensor(positions, dtype=torch.int64).cpu()
        inside = (positions >= 0) & (positions < self.sizes[clients][:, None, None])
        require(
            bool(inside.all()), "positions reach outside the rows that a client holds; they run from 0 to its size - 1."
        )
        n, steps, s = positions.shape
        held = self.rows[self.offsets[clients][:, None, None] + positions].transpose(0, 1).reshape(steps, n * s)
        rows = held.to(self._on(device)[1].device)

        def read(step: int) -> tuple[Any, Tensor]:
            inputs, targets = self._picked(rows[step], device)
            return each(lambda part: part.unflatten(0, (n, s)), inputs), targets.unflatten(0, (n, s))

        return read

    @property
    def edition(self) -> Edition | None:
        """What is held, and how often torch has changed it in place; None where a row may be another at every reading.

        Memory that torch does not know of, such as a NumPy array that was given, must not be written during a run.
        """
        held = list(self.contents())
        if self.transform is not None or not self.gathers_itself or any(part.is_inference() for part in held):
            return None
        return Edition(tuple(held), tuple(part._version for part in held))

    def client(self, index: int, device: torch.device | str | None = None) -> tuple[Any, Tensor]:
        """All that one client holds, cast and transformed as a model takes it."""
        require(-1 < index < len(self), f"client is {index}; this federation has clients 0 to {len(self) - 1}.")
        inputs, targets = self._picked(self.rows[int(self.offsets[index]) : int(self.offsets[index + 1])], device)
        return self._transformed(inputs), targets

    def prepare(self, inputs: Any, targets: Any, device: torch.device | str | None = None) -> tuple[Any, Tensor]:
        """Other data, such as a test set, cast and transformed as the clients' are."""
        inputs, targets = structure.as_inputs("inputs", inputs), as_tensor("targets", targets)
        inputs, targets = self._cast(each(lambda part: part.to(device), inputs), targets.to(device))
        return self._transformed(inputs), targets

    def contents(self) -> Iterator[Tensor]:
        """Everything that decides which rows a client holds and what is in them, as it is stored."""
        yield from (*leaves(self.inputs), self.targets, self.rows, self.offsets)

    def summary(self) -> dict[str, Any]:
        """Clients, rows, sizes, and for class labels how many classes a client holds on average."""
        sizes = self.sizes.numpy()
        facts: dict[str, Any] = {
            "clients": len(self),
            "examples": len(self.rows),
            "size_min": int(sizes.min()),
            "size_median": float(np.median(sizes)),
            "size_max": int(sizes.max()),
            "classes": None,
            "classes_per_client": None,
        }
        if self.targets.dim() == 1 and not self.targets.is_floating_point():
            labels, classes = partition.class_labels(self.targets)
            held = np.unique(np.repeat(np.arange(len(self)), sizes) * classes + labels[self.rows.numpy()])
            facts |= {"classes": classes, "classes_per_client": len(held) / len(self)}
        return facts

    def __repr__(self) -> str:
        low, high = int(self.sizes.min()), int(self.sizes.max())
        each = f"{low}" if low == high else f"{low} to {high}"
        shapes = [f"{tuple(part.shape[1:])} {str(part.dtype).removeprefix('torch.')}" for part in leaves(self.inputs)]
        return f"{type(self).__name__}({len(self)} clients, {each} rows each, inputs {' and '.join(shapes)})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_resident": {}}

    def _picked(self, rows: Tensor, device: torch.device | str | None) -> tuple[Any, Tensor]:
        inputs, targets = self._on(device)
        rows = rows.to(targets.device)
        return self._cast(each(lambda part: part.index_select(0, rows), inputs), targets.index_select(0, rows))

    def _on(self, device: torch.device | str | None) -> tuple[Any, Tensor]:
        """The data on a device, in their compact type; copied there once."""
        device = torch.device(device or "cpu")
        if device.type == "cpu":
            return self.inputs, self.targets
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._resident:
            self._resident[device] = each(lambda part: part.to(device), self.inputs), self.targets.to(device)
        return self._resident[device]

    def _cast(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        return each(lambda part: cast_inputs(part, self.dtype), inputs), cast_targets(targets, self.dtype)

    def _transformed(self, inputs: Any) -> Any:
        return inputs if self.transform is None else self.transform(inputs)


def _compact(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Double precision is kept only where it was asked for."""
    return tensor.float() if tensor.dtype == torch.float64 and dtype != torch.float64 else tensor
