"""A data set held once, and which rows of it each client holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfedexp.arguments import checked
from dpfedexp.data import partition
from dpfedexp.data.arrays import Transform, as_tensor, cast_inputs, cast_targets, check_finite
from dpfedexp.data.assignment import as_assignment
from dpfedexp.data.partition import Assignment
from dpfedexp.data.stacking import concatenate_clients, stack_dataset
from dpfedexp.errors import InputError, nearest, require


@checked
class Federation:
    """Clients and their data; images stay bytes and are cast on the device, so that memory stays small.

    Build one with `from_clients`, `from_arrays`, `from_dataset`, `iid`, `dirichlet`, `dirichlet_per_class` or `shards`.
    All of them take these options: `dtype` (a floating type other than float32, or int64 for bytes that are tokens),
    `transform` (applied to the cast batch of inputs), `allow_shared` (a row may belong to several clients) and
    `finite` (False keeps NaN and infinities instead of refusing them).

    >>> images, labels = torch.zeros(60, 28, 28, dtype=torch.uint8), torch.arange(60) % 10
    >>> Federation.dirichlet(images, labels, clients=6, alpha=0.3, seed=0)
    Federation(6 clients, 10 rows each, inputs (28, 28) uint8)
    """

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
    ) -> None:
        self.inputs = _compact(as_tensor("inputs", inputs), dtype)
        self.targets = _compact(as_tensor("targets", targets), dtype)
        examples = len(self.inputs)
        require(examples > 0, "inputs is empty; a federation needs at least one row.")
        require(
            examples == len(self.targets),
            f"inputs has {examples} rows and targets has {len(self.targets)}; there must be one target per row.",
        )
        if finite:
            check_finite("inputs", self.inputs)
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
        self._resident: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @classmethod
    @checked
    def from_clients(
        cls,
        clients: Iterable[tuple[Any, Any]],
        *,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """From one (inputs, targets) pair per client; sizes may differ and a client may be empty."""
        inputs, targets, sizes = concatenate_clients(clients)
        split = Assignment(np.arange(len(inputs)), np.concatenate([[0], np.cumsum(sizes)]))
        return cls(inputs, targets, split, dtype=dtype, transform=transform, allow_shared=allow_shared, finite=finite)

    @classmethod
    @checked
    def from_arrays(
        cls,
        inputs: Any,
        targets: Any,
        assignment: Any,
        *,
        clients: int | None = None,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """From one data set and row indices per client, or a client number per row (-1: nobody holds it).

        `clients` says how many there are, whether they hold rows or not. Without it a last client that holds none is not there at
        all, and a mean over clients would tell.
        """
        split = as_assignment(assignment, len(as_tensor("inputs", inputs)), clients)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, allow_shared=allow_shared, finite=finite)

    @classmethod
    @checked
    def from_dataset(
        cls,
        dataset: Any,
        assignment: Any = None,
        *,
        partition: str | None = None,
        clients: int | None = None,
        alpha: float | None = None,
        seed: int | None = None,
        samples_per_client: int | None = None,
        min_size: int | None = None,
        shards_per_client: int | None = None,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """From a torch `Dataset` of pairs (input, target) and an assignment, or `partition="iid", clients=…, …`."""
        inputs, targets = stack_dataset(dataset)
        given: dict[str, Any] = {
            "clients": clients,
            "alpha": alpha,
            "seed": seed,
            "samples_per_client": samples_per_client,
            "min_size": min_size,
            "shards_per_client": shards_per_client,
        }
        given = {name: value for name, value in given.items() if value is not None}
        options: dict[str, Any] = {
            "dtype": dtype,
            "transform": transform,
            "allow_shared": allow_shared,
            "finite": finite,
        }
        if assignment is not None:
            require(partition is None, "assignment and partition are both given; give one of them.")
            return cls.from_arrays(inputs, targets, assignment, **given, **options)
        makers: dict[str, Callable[..., Federation]] = {
            "iid": cls.iid,
            "dirichlet": cls.dirichlet,
            "dirichlet_per_class": cls.dirichlet_per_class,
            "shards": cls.shards,
        }
        if partition is None:
            raise InputError(f"partition is missing; give an assignment or one of {', '.join(makers)}.")
        if partition not in makers:
            raise InputError(f"partition is {partition!r}, which is unknown.{nearest(partition, makers)}")
        return makers[partition](inputs, targets, **given, **options)

    @classmethod
    @checked
    def iid(
        cls,
        inputs: Any,
        targets: Any,
        *,
        clients: int,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """A uniformly random split into clients whose sizes differ by at most one."""
        inputs = as_tensor("inputs", inputs)
        return cls(
            inputs,
            targets,
            partition.iid(len(inputs), clients, partition.generator(seed)),
            dtype=dtype,
            transform=transform,
            allow_shared=allow_shared,
            finite=finite,
        )

    @classmethod
    @checked
    def dirichlet(
        cls,
        inputs: Any,
        targets: Any,
        *,
        clients: int,
        alpha: float,
        seed: int = 0,
        samples_per_client: int | None = None,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """Equal sizes, class mix of each client ~ Dirichlet(alpha) (Hsu et al. 2019)."""
        labels, classes = _labels(inputs, targets)
        rng = partition.generator(seed)
        split = partition.dirichlet(labels, classes, clients, alpha, rng, samples_per_client)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, allow_shared=allow_shared, finite=finite)

    @classmethod
    @checked
    def dirichlet_per_class(
        cls,
        inputs: Any,
        targets: Any,
        *,
        clients: int,
        alpha: float,
        seed: int = 0,
        min_size: int = 0,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """Unequal sizes: each class is split over the clients in Dirichlet(alpha) proportions."""
        labels, classes = _labels(inputs, targets)
        rng = partition.generator(seed)
        split = partition.dirichlet_per_class(labels, classes, clients, alpha, rng, min_size)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, allow_shared=allow_shared, finite=finite)

    @classmethod
    @checked
    def shards(
        cls,
        inputs: Any,
        targets: Any,
        *,
        clients: int,
        shards_per_client: int = 2,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """A few shards of the label-sorted data per client (McMahan et al. 2017)."""
        labels, _ = _labels(inputs, targets)
        split = partition.shards(labels, clients, partition.generator(seed), shards_per_client)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, allow_shared=allow_shared, finite=finite)

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows `positions[i]` (0 … size-1) of client `clients[i]`, cast: inputs [n, s, …] and targets [n, s, …]."""
        clients = torch.as_tensor(clients, dtype=torch.int64).cpu()
        positions = torch.as_tensor(positions, dtype=torch.int64).cpu()
        inside = (positions >= 0) & (positions < self.sizes[clients].unsqueeze(1))
        require(
            bool(inside.all()), "positions reach outside the rows that a client holds; they run from 0 to its size - 1."
        )
        flat = self.rows[(self.offsets[clients].unsqueeze(1) + positions).flatten()]
        inputs, targets = self._on(device)
        flat = flat.to(inputs.device, non_blocking=True)
        picked = self._cast(inputs.index_select(0, flat), targets.index_select(0, flat))
        return picked[0].unflatten(0, positions.shape), picked[1].unflatten(0, positions.shape)

    def client(self, index: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """All that one client holds, cast as in `gather`."""
        require(-1 < index < len(self), f"client is {index}; this federation has clients 0 to {len(self) - 1}.")
        rows = self.rows[int(self.offsets[index]) : int(self.offsets[index + 1])]
        inputs, targets = self._on(device)
        rows = rows.to(inputs.device)
        return self._cast(inputs.index_select(0, rows), targets.index_select(0, rows))

    def prepare(self, inputs: Any, targets: Any, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Other data, such as a test set, cast and transformed as the clients' are."""
        inputs, targets = as_tensor("inputs", inputs), as_tensor("targets", targets)
        return self._cast(inputs.to(device), targets.to(device))

    def contents(self) -> Iterator[Tensor]:
        """Everything that decides which rows a client holds and what is in them, as it is stored."""
        yield from (self.inputs, self.targets, self.rows, self.offsets)

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
        shape = tuple(self.inputs.shape[1:])
        dtype = str(self.inputs.dtype).removeprefix("torch.")
        return f"Federation({len(self)} clients, {each} rows each, inputs {shape} {dtype})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_resident": {}}

    def _on(self, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        """The data on a device, in their compact type; copied there once."""
        device = torch.device(device or "cpu")
        if device.type == "cpu":
            return self.inputs, self.targets
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._resident:
            self._resident[device] = self.inputs.to(device), self.targets.to(device)
        return self._resident[device]

    def _cast(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        inputs = cast_inputs(inputs, self.dtype)
        return self.transform(inputs) if self.transform else inputs, cast_targets(targets, self.dtype)


def _compact(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Double precision is kept only where it was asked for."""
    return tensor.float() if tensor.dtype == torch.float64 and dtype != torch.float64 else tensor


def _labels(inputs: Any, targets: Any) -> tuple[Any, int]:
    labels, classes = partition.class_labels(targets)
    rows = len(as_tensor("inputs", inputs))
    require(
        rows == len(labels), f"inputs has {rows} rows and targets has {len(labels)}; there must be one target per row."
    )
    return labels, classes
