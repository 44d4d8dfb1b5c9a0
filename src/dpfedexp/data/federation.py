"""A data set held once, and which rows of it each client holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfedexp.data import structure
from dpfedexp.data.arrays import Transform
from dpfedexp.data.assignment import as_assignment
from dpfedexp.data.partition import Assignment
from dpfedexp.data.partitioned import Partitioned
from dpfedexp.data.sources import folder, readers
from dpfedexp.data.sources.ids import by_ids, is_text
from dpfedexp.data.sources.stacking import concatenate_clients, stack_dataset
from dpfedexp.data.sources.tables import Columns, Names, client_ids_of, listed, partitions
from dpfedexp.errors import InputError, checked, nearest, require


@checked
class Federation(Partitioned):
    """Clients and their data; images stay bytes and are cast on the device, so that memory stays small.

    Build one with `from_clients`, `from_loaders`, `from_arrays`, `from_dataset`, `from_pandas`, `from_datasets`, `from_folder`,
    `iid`, `dirichlet`, `dirichlet_per_class` or `shards`. They take these options: `dtype` (a floating type other than float32,
    or int64 for bytes that are tokens), `transform` (applied to the cast batch of inputs), `finite` (False keeps NaN and
    infinities instead of refusing them) and, where rows are dealt out, `allow_shared` (a row may belong to several clients).

    Inputs may be several: a dict, or a tuple of arrays, with the same number of rows. How many rows of a client are used in a
    round is bounded in one place, `max_examples` of the local optimiser; a federation holds them all.

    `names` are the clients' own ids in order of their numbers, None where they have none. They are private: a run never reads
    them, and whoever writes them down tells who took part.

    >>> images, labels = torch.zeros(60, 28, 28, dtype=torch.uint8), torch.arange(60) % 10
    >>> Federation.dirichlet(images, labels, clients=6, alpha=0.3, seed=0)
    Federation(6 clients, 10 rows each, inputs (28, 28) uint8)
    """

    @classmethod
    @checked
    def from_clients(
        cls,
        clients: Iterable[Any] | Mapping[Any, Any],
        *,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """From one client after the other; sizes may differ and a client may be empty.

        Args:
            clients: for each a pair (inputs, targets), a torch `Dataset`, a `DataLoader` or an iterator of rows (input, target); a
                dict of these by client id.
            dtype: see `Federation`.
            transform: see `Federation`.
            allow_shared: see `Federation`.
            finite: see `Federation`.
        """
        names = tuple(clients) if isinstance(clients, Mapping) else None
        given = clients.values() if isinstance(clients, Mapping) else clients
        inputs, targets, sizes = concatenate_clients(readers.pairs(given))
        return cls(
            inputs,
            targets,
            _one_after_the_other(sizes),
            dtype=dtype,
            transform=transform,
            allow_shared=allow_shared,
            finite=finite,
            names=names,
        )

    @classmethod
    @checked
    def from_loaders(
        cls,
        loaders: Iterable[Any] | Mapping[Any, Any],
        *,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        finite: bool = True,
    ) -> Federation:
        """From one `DataLoader`, torch `Dataset` or iterable of rows (input, target) per client, each read once.

        A loader is read in the order of its data set, so that the same data always make the same federation: `shuffle` has no
        effect, and `drop_last` and samplers of one's own are refused. Batches are made by the local optimiser's `batch_size`.

        Args:
            loaders: one per client, or a dict of them by client id.
            dtype: see `Federation`.
            transform: see `Federation`.
            finite: see `Federation`.
        """
        names = tuple(loaders) if isinstance(loaders, Mapping) else None
        given = loaders.values() if isinstance(loaders, Mapping) else loaders
        inputs, targets, sizes = concatenate_clients(readers.row_pairs(given))
        split = _one_after_the_other(sizes)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, finite=finite, names=names)

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
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Federation:
        """From one data set and who holds which rows.

        Args:
            inputs: one row per example.
            targets: one per row.
            assignment: row indices per client, or a client number per row (-1: nobody holds it), where a number that holds no row
                is an empty client. Strings are ids.
            client_ids: instead of it, the client's own id per row: strings, numbers with gaps, tuples. Clients are numbered in the
                order of their sorted ids, and `names` keeps these.
            clients: how many there are, whether they hold rows or not. Without it a last client that holds none is not there at
                all, and a mean over clients would tell.
            dtype: see `Federation`.
            transform: see `Federation`.
            allow_shared: see `Federation`.
            finite: see `Federation`.
        """
        require(
            (assignment is None) != (client_ids is None),
            "who holds which row is given twice or not at all; give assignment or client_ids, one of them.",
        )
        examples = structure.rows(structure.as_inputs("inputs", inputs))
        field, ids = ("assignment", assignment) if is_text(assignment) else ("client_ids", client_ids)
        names: Sequence[Hashable] | None = None
        if ids is None:
            split = as_assignment(assignment, examples, clients)
        else:
            split, names = by_ids(field, ids, examples, clients)
        return cls(
            inputs,
            targets,
            split,
            dtype=dtype,
            transform=transform,
            allow_shared=allow_shared,
            finite=finite,
            names=names,
        )

    @classmethod
    @checked
    def from_pandas(
        cls,
        df: Any,
        *,
        by: Names,
        target: Names,
        features: Names | None = None,
        categories: Mapping[Any, Sequence[Any]] | None = None,
        clients: int | None = None,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        finite: bool = True,
    ) -> Federation:
        """From a table with a column that says whose row it is; a dict of columns will do, too.

        Nothing is learned from the rows. Numbers and booleans are taken as they are, and become floats. Text and categories are
        refused unless their public list is given; missing values are refused. Categories, means or scales that are computed from
        the clients' rows tell about the clients outside the accounting: standardise with public numbers, in `transform`.

        Args:
            df: the DataFrame.
            by: the column of client ids, of any type that can be hashed; several for ids that are tuples.
            target: the column to be predicted; a list of columns for targets [n, k].
            features: the columns of the inputs [n, k], by default all the others; one column of arrays gives inputs of their shape.
            categories: by column the public list of what may be in it. A feature becomes one input per category (1 where it is),
                a target the place in the list.
            clients: how many clients there are, those without rows included; a secure run's is declared, not counted.
            dtype: see `Federation`; with torch.int64 whole numbers stay whole, as indices of an embedding.
            transform: see `Federation`.
            finite: see `Federation`.

        >>> table = {"user": ["b", "a", "b"], "age": [31, 54, 31], "y": [0, 1, 1]}
        >>> Federation.from_pandas(table, by="user", target="y").names
        ('a', 'b')
        """
        ids = client_ids_of(df, by)
        inputs, targets, _ = Columns(target, features, categories, dtype, finite, listed(by)).of([df])
        split, names = by_ids("by", ids, len(targets), clients)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, finite=finite, names=names)

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
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        finite: bool = True,
    ) -> Federation:
        """From a Hugging Face data set with a column of client ids, from one such data set per client, or from a partitioner.

        As in `from_pandas` nothing is learned from the rows.

        Args:
            dataset: a `datasets.Dataset` (give `by`), a list of them, or an object with `load_partition(i)`, such as a partitioner
                or a `FederatedDataset` of flwr-datasets.
            target: see `from_pandas`.
            by: the column of client ids, where there is one table.
            features: see `from_pandas`; one column of images, tokens or vectors gives inputs of their shape.
            categories: see `from_pandas`.
            clients: how many clients there are; of a partitioner without `num_partitions`, how many partitions.
            dtype: see `Federation`.
            transform: see `Federation`.
            finite: see `Federation`.
        """
        tables = partitions(dataset, clients)
        if tables is None:
            if by is None:
                raise InputError(
                    "by is missing; name the column that says which client holds a row, or give one data set per client."
                )
            return cls.from_pandas(
                dataset,
                by=by,
                target=target,
                features=features,
                categories=categories,
                clients=clients,
                dtype=dtype,
                transform=transform,
                finite=finite,
            )
        require(by is None, f"by is {by!r}, but every client has a data set of its own; leave by out.")
        inputs, targets, sizes = Columns(target, features, categories, dtype, finite).of(tables)
        split = as_assignment(_one_after_the_other(sizes), len(targets), clients)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, finite=finite)

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
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        finite: bool = True,
    ) -> Federation:
        """From a folder with one file per client, whose name without its ending is the client's id.

        Args:
            path: the folder.
            files: which files of it, as a pattern: .npz, .safetensors, and .csv with a line of column names.
            target: the array or column to be predicted; see `from_pandas`.
            features: see `from_pandas`; by default all that is in a file beside the target.
            categories: see `from_pandas`.
            dtype: see `Federation`.
            transform: see `Federation`.
            finite: see `Federation`.
        """
        found = folder.client_files(path, files)
        names = [file.stem for file in found]
        columns = Columns(target, features, categories, dtype, finite)
        inputs, targets, sizes = columns.of(folder.read_files(found), names)
        return cls(
            inputs,
            targets,
            _one_after_the_other(sizes),
            dtype=dtype,
            transform=transform,
            finite=finite,
            names=names,
        )

    @classmethod
    @checked
    def from_dataset(
        cls,
        dataset: Any,
        assignment: Any = None,
        *,
        client_ids: Any = None,
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
        """From a torch `Dataset` of pairs (input, target) and an assignment or ids, or `partition="iid", clients=…, …`."""
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
        if assignment is not None or client_ids is not None:
            require(partition is None, "assignment and partition are both given; give one of them.")
            return cls.from_arrays(inputs, targets, assignment, client_ids=client_ids, **given, **options)
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


def _one_after_the_other(sizes: Sequence[int]) -> Assignment:
    """Rows that lie in order of client."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Assignment(np.arange(offsets[-1]), offsets)
