"""`Federation`: a data set, and which rows of it each client holds."""

from __future__ import annotations  # `checked` reads Unpack[…] as text

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from dpfedexp.core.modules import each, leaves
from dpfedexp.data import arrays
from dpfedexp.data import partition as dealing
from dpfedexp.data.tables import Columns, Names, as_names, client_files, client_ids_of, partitions, read_files
from dpfedexp.errors import InputError, checked, require


class DataOptions(TypedDict, total=False):
    """Options of every constructor; see `Federation`."""

    dtype: torch.dtype | None
    transform: arrays.Transform | None
    finite: bool


TABLE_HINTS = {
    **dict.fromkeys(("user", "client", "client_id", "client_ids", "group"), "by='user', the column of client ids"),
    **dict.fromkeys(("label", "labels", "y", "targets"), "target='label', the column to predict"),
}
OTHER_CONSTRUCTORS = {
    "from_csv": "from_pandas(pandas.read_csv('rows.csv'), by='user', target='y')",
    "from_dataframe": "from_pandas(df, by='user', target='y')",
    "from_numpy": "from_arrays(inputs, targets, client_ids=ids)",
}


class _NamesConstructors(type):
    def __getattr__(cls, name: str) -> Any:
        hint = f" Write Federation.{OTHER_CONSTRUCTORS[name]}." if name in OTHER_CONSTRUCTORS else ""
        # `name` without `obj` keeps Python from adding its own suggestion to the message.
        raise AttributeError(f"{cls.__name__} has no attribute {name!r}.{hint}", name=name)


@checked
class Federation(metaclass=_NamesConstructors):
    """The clients and their data. Images are kept as bytes and cast on the device to save memory.

    Build one with `from_clients`, `from_arrays`, `from_pandas`, `from_datasets`, `from_folder`, `iid`, `dirichlet`,
    `dirichlet_per_class` or `shards`. They take these options: `dtype` (a floating type other than float32, or int64 for bytes
    that are tokens), `transform` (applied to the cast batch of inputs) and `finite` (False keeps NaN and infinities instead of
    refusing them).

    An example may have several inputs: a dict, or a tuple of arrays, with the same number of rows. A federation holds all rows of
    a client; `max_examples` of the local optimizer bounds how many are used in a round.

    `names` are the clients' own ids in the order of clients; None if they have none. They are private: a run never reads them,
    and a file that holds them would reveal who took part.

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
        transform: arrays.Transform | None = None,
        finite: bool = True,
        names: Sequence[Hashable] | None = None,
    ) -> None:
        self.inputs: Any = each(lambda part: _compact(part, dtype), arrays.as_inputs("inputs", inputs))
        self.targets = _compact(arrays.as_tensor("targets", targets), dtype)
        examples = arrays.rows(self.inputs)
        require(examples > 0, "inputs is empty; a federation needs at least one row.")
        count = len(self.targets)
        require(examples == count, f"inputs has {examples} rows and targets has {count}; give one target per row.")
        if finite:
            for part in leaves(self.inputs):
                arrays.check_finite("inputs", part)
            arrays.check_finite("targets", self.targets)
        split = dealing.as_assignment(assignment, examples)
        holders = np.bincount(split.rows, minlength=examples)
        twice = f"assignment gives row {int(holders.argmax())} to a client more than once or to several clients"
        require(int(holders.max(initial=0)) <= 1, f"{twice}; each row belongs to one client.")
        self.rows = torch.from_numpy(np.ascontiguousarray(split.rows, dtype=np.int64))
        self.offsets = torch.from_numpy(np.ascontiguousarray(split.offsets, dtype=np.int64))
        self.sizes = self.offsets.diff()
        self.dtype = dtype
        self.transform = transform
        self.names = None if names is None else tuple(names)
        counted = f"names has {len(self.names or ())} entries and there are {len(self)} clients"
        require(self.names is None or len(self.names) == len(self), f"{counted}; give one name per client.")
        self._resident: dict[torch.device, tuple[Any, Tensor]] = {}

    @classmethod
    @checked
    def from_clients(cls, clients: Iterable[Any] | Mapping[Any, Any], **options: Unpack[DataOptions]) -> Self:
        """Build a federation from a list of clients. Sizes may differ, and a client may be empty.

        A loader is read in the order of its data set, so that the same data always make the same federation: `shuffle` has no
        effect, and `drop_last` and custom samplers are refused. Batches are made by the local optimizer's `batch_size`.

        Args:
            clients: for each client a pair (inputs, targets), a torch `Dataset`, a `DataLoader` or an iterator of rows
                (input, target); or a dict of these by client id.
            options: see `Federation`.
        """
        names, given = (tuple(clients), clients.values()) if isinstance(clients, Mapping) else (None, clients)
        inputs, targets, sizes = arrays.concatenate_clients(given)
        return cls(inputs, targets, dealing.consecutive_rows(sizes), names=names, **options)

    @classmethod
    @checked
    def from_arrays(
        cls,
        inputs: Any,
        targets: Any,
        assignment: Any = None,
        *,
        client_ids: Any = None,
        clients: int | None = None,
        **options: Unpack[DataOptions],
    ) -> Self:
        """Build a federation from one data set and an assignment of its rows.

        Args:
            inputs: one row per example.
            targets: one target per row.
            assignment: row indices per client, or a client number per row (-1: unassigned), where a number without any row is an
                empty client.
            client_ids: instead of `assignment`, the client's own id per row: strings, numbers with gaps, tuples. Clients are
                numbered in the order of their sorted ids, and `names` keeps the ids.
            clients: the number of clients, with or without rows. Without it, clients after the last one with rows do not exist,
                and a mean over clients would reveal that.
            options: see `Federation`.
        """
        require((assignment is None) != (client_ids is None), "pass exactly one of assignment and client_ids.")
        # If one row is missing in one of them, the constructor says in which.
        examples = max(arrays.rows(arrays.as_inputs("inputs", inputs)), len(arrays.as_tensor("targets", targets)))
        if client_ids is None:
            return cls(inputs, targets, dealing.as_assignment(assignment, examples, clients), **options)
        split, names = dealing.by_ids("client_ids", client_ids, examples, clients)
        return cls(inputs, targets, split, names=names, **options)

    @classmethod
    @checked(hints=TABLE_HINTS)
    def from_pandas(
        cls,
        df: Any,
        *,
        by: Names,
        target: Names,
        features: Names | None = None,
        categories: Mapping[Any, Sequence[Any]] | None = None,
        clients: int | None = None,
        **options: Unpack[DataOptions],
    ) -> Self:
        """Build a federation from a DataFrame, or a dict of columns, with a column of client ids.

        No statistics are computed from the rows. Numbers and booleans become floats. Text and categories are refused unless their
        public list is given; missing values are refused. Categories, means or scales computed from the clients' rows would reveal
        something about them outside the accounting: standardize with public numbers, in `transform`.

        Args:
            df: the DataFrame.
            by: the column of client ids, of any hashable type; several columns for ids that are tuples.
            target: the column to predict; a list of columns for targets [n, k].
            features: the columns of the inputs [n, k], by default all others; one column of arrays gives inputs of their shape.
            categories: for each column of text, the public list of its possible values. A feature becomes one 0/1 input per
                category, a target becomes its index in the list.
            clients: the number of clients, including those without rows; a secure run declares its number and does not count.
            options: see `Federation`; with dtype=torch.int64 whole numbers stay whole, as indices of an embedding.

        >>> table = {"user": ["b", "a", "b"], "age": [31, 54, 31], "y": [0, 1, 1]}
        >>> Federation.from_pandas(table, by="user", target="y").names
        ('a', 'b')
        """
        ids = client_ids_of(df, by)
        columns = Columns(target, features, categories or {}, options.get("dtype"), as_names(by))
        inputs, targets, _ = columns.read([df])
        split, names = dealing.by_ids("by", ids, len(targets), clients)
        return cls(inputs, targets, split, names=names, **options)

    @classmethod
    @checked
    def from_datasets(
        cls,
        dataset: Any,
        *,
        target: Names,
        by: Names | None = None,
        features: Names | None = None,
        categories: Mapping[Any, Sequence[Any]] | None = None,
        clients: int | None = None,
        **options: Unpack[DataOptions],
    ) -> Self:
        """Build a federation from a Hugging Face data set with a column of client ids, one data set per client, or a partitioner.

        As in `from_pandas`, no statistics are computed from the rows.

        Args:
            dataset: a `datasets.Dataset` (give `by`), a list of them, or an object with `load_partition(i)`, such as a partitioner
                or a `FederatedDataset` of flwr-datasets.
            target: see `from_pandas`.
            by: the column of client ids, if there is one table for all clients.
            features: see `from_pandas`; one column of images, tokens or vectors gives inputs of their shape.
            categories: see `from_pandas`.
            clients: the number of clients; for a partitioner without `num_partitions`, the number of partitions.
            options: see `Federation`.
        """
        tables = partitions(dataset, clients)
        if tables is None:
            if by is None:
                raise InputError("by is missing; name the column of client ids, or give one data set per client.")
            return cls.from_pandas(
                dataset, by=by, target=target, features=features, categories=categories, clients=clients, **options
            )
        require(by is None, f"by is {by!r}, but there is one data set per client; leave by out.")
        columns = Columns(target, features, categories or {}, options.get("dtype"))
        inputs, targets, sizes = columns.read(tables)
        return cls(
            inputs, targets, dealing.as_assignment(dealing.consecutive_rows(sizes), len(targets), clients), **options
        )

    @classmethod
    @checked
    def from_folder(
        cls,
        path: str | Path,
        *,
        files: str = "*",
        target: Names = "targets",
        features: Names | None = None,
        categories: Mapping[Any, Sequence[Any]] | None = None,
        **options: Unpack[DataOptions],
    ) -> Self:
        """Build a federation from a folder with one file per client. The file's stem is the client's id.

        Args:
            path: the folder.
            files: a pattern for the files to read: .npz, .safetensors, and .csv with a line of column names.
            target: the array or column to predict; see `from_pandas`.
            features: see `from_pandas`; by default everything in a file except the target.
            categories: see `from_pandas`.
            options: see `Federation`.
        """
        found = client_files(path, files)
        names = [file.stem for file in found]
        columns = Columns(target, features, categories or {}, options.get("dtype"))
        inputs, targets, sizes = columns.read(read_files(found), names)
        return cls(inputs, targets, dealing.consecutive_rows(sizes), names=names, **options)

    @classmethod
    @checked
    def iid(cls, inputs: Any, targets: Any, *, clients: int, seed: int = 0, **options: Unpack[DataOptions]) -> Self:
        """Split the rows uniformly at random into clients whose sizes differ by at most one."""
        inputs = arrays.as_inputs("inputs", inputs)
        return cls(inputs, targets, dealing.iid(arrays.rows(inputs), clients, dealing.generator(seed)), **options)

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
        **options: Unpack[DataOptions],
    ) -> Self:
        """Split into clients of equal size, each with its own class mix ~ Dirichlet(alpha) (Hsu et al. 2019)."""
        labels, rng = dealing.class_labels(targets), dealing.generator(seed)
        return cls(inputs, targets, dealing.dirichlet(labels, clients, alpha, rng, samples_per_client), **options)

    @classmethod
    @checked
    def dirichlet_per_class(
        cls, inputs: Any, targets: Any, *, clients: int, alpha: float, seed: int = 0, **options: Unpack[DataOptions]
    ) -> Self:
        """Split into clients of unequal size: each class is divided among the clients in Dirichlet(alpha) proportions."""
        labels, rng = dealing.class_labels(targets), dealing.generator(seed)
        return cls(inputs, targets, dealing.dirichlet_per_class(labels, clients, alpha, rng), **options)

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
        **options: Unpack[DataOptions],
    ) -> Self:
        """Give each client a few shards of the label-sorted data (McMahan et al. 2017)."""
        labels, rng = dealing.class_labels(targets), dealing.generator(seed)
        return cls(inputs, targets, dealing.shards(labels, clients, rng, shards_per_client), **options)

    @checked
    def hold_out(self, share: float) -> tuple[Self, Self]:
        """Split every client's rows into rows for training and rows that are held out.

        Every client holds out this share of its rows, spread evenly over their order, so the choice is the same for the same order
        of rows. A client with fewer than 1/share rows holds out none.

        Args:
            share: above 0 and below 1.

        Returns:
            The federation to train on, and the federation to evaluate on.

        >>> training, held = Federation.from_clients([(torch.zeros(5, 1), torch.zeros(5))] * 2).hold_out(0.2)
        >>> training.sizes.tolist(), held.sizes.tolist()
        ([4, 4], [1, 1])
        """
        require(0 < share < 1, f"held_out is {share!r}; it must be above 0 and below 1.")
        position = torch.arange(len(self.rows)) - torch.repeat_interleave(self.offsets[:-1], self.sizes)
        held = ((position + 1) * share).floor() > (position * share).floor()
        return self._with(~held), self._with(held)

    def _with(self, kept: Tensor) -> Self:
        """The same clients with only the rows where `kept` is true."""
        part = copy.copy(self)
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
        part.rows, part.offsets, part._resident = self.rows[kept], counts[self.offsets], self._resident
        part.sizes = part.offsets.diff()
        return part

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None = None
    ) -> tuple[Any, Tensor]:
        """Return rows `positions[i]` (0 … size-1) of client `clients[i]`, cast: inputs [n, s, …] and targets [n, s, …].

        Several inputs per example are returned as their tuple or dict, each tensor [n, s, …]. The transform is not applied:
        trainers apply it to one client at a time, with that client's own random stream.
        """
        return self._read(clients, torch.as_tensor(positions).unsqueeze(1), device)(0)

    def row_reader(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None = None
    ) -> Callable[[int], tuple[Any, Tensor]]:
        """A function from a step k to rows `positions[i, k]` of client `clients[i]`, as in `gather`; positions [n, steps, s].

        The indices are copied to the device once: a copy at every step would make a GPU wait for the CPU.
        """
        if self.gathers_itself:
            return self._read(clients, positions, device)
        return lambda step: self.gather(clients, positions[:, step], device)

    @property
    def gathers_itself(self) -> bool:
        """Whether rows come from this object's tensors, by methods that no subclass or instance has replaced."""
        used = ("gather", "row_reader", "_read", "_picked", "_cast", "_on", "gathers_itself")
        own = all(getattr(type(self), name) is getattr(Federation, name) for name in used)
        return own and not any(name in vars(self) for name in used)

    def _read(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None
    ) -> Callable[[int], tuple[Any, Tensor]]:
        clients = torch.as_tensor(clients, dtype=torch.int64).cpu()
        positions = torch.as_tensor(positions, dtype=torch.int64).cpu()
        inside = (positions >= 0) & (positions < self.sizes[clients][:, None, None])
        require(bool(inside.all()), "positions reach outside the rows that a client holds (0 to its size - 1).")
        n, steps, s = positions.shape
        held = self.rows[self.offsets[clients][:, None, None] + positions].transpose(0, 1).reshape(steps, n * s)
        rows = held.to(self._on(device)[1].device)

        def read(step: int) -> tuple[Any, Tensor]:
            inputs, targets = self._picked(rows[step], device)
            return each(lambda part: part.unflatten(0, (n, s)), inputs), targets.unflatten(0, (n, s))

        return read

    def client(self, index: int, device: torch.device | str | None = None) -> tuple[Any, Tensor]:
        """All rows of one client, cast and transformed for a model."""
        require(-1 < index < len(self), f"client is {index}; this federation has clients 0 to {len(self) - 1}.")
        inputs, targets = self._picked(self.rows[int(self.offsets[index]) : int(self.offsets[index + 1])], device)
        return self._transformed(inputs), targets

    def prepare(self, inputs: Any, targets: Any, device: torch.device | str | None = None) -> tuple[Any, Tensor]:
        """Cast and transform other data, such as a test set, like the clients' data."""
        inputs, targets = arrays.as_inputs("inputs", inputs), arrays.as_tensor("targets", targets)
        inputs, targets = self._cast(each(lambda part: part.to(device), inputs), targets.to(device))
        return self._transformed(inputs), targets

    def contents(self) -> Iterator[Tensor]:
        """The stored tensors that determine which rows a client holds and what they contain."""
        yield from (*leaves(self.inputs), self.targets, self.rows, self.offsets)

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
        """The data on a device, in their compact type; copied once per device."""
        device = torch.device(device or "cpu")
        if device.type == "cpu":
            return self.inputs, self.targets
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._resident:
            self._resident[device] = each(lambda part: part.to(device), self.inputs), self.targets.to(device)
        return self._resident[device]

    def _cast(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        return each(lambda part: arrays.cast_inputs(part, self.dtype), inputs), arrays.cast_targets(targets, self.dtype)

    def _transformed(self, inputs: Any) -> Any:
        return inputs if self.transform is None else self.transform(inputs)


def _compact(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float64 and dtype != torch.float64 else tensor
