from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from dpfedexp import Sgd, fedavg, train
from dpfedexp.data import Federation
from dpfedexp.errors import InputError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (120, 1, 4, 4), dtype=np.uint8)
LABELS = RNG.integers(0, 5, 120)


def unequal() -> tuple[list[tuple[np.ndarray, np.ndarray]], Federation]:
    clients = [(RNG.normal(size=(size, 3)).astype(np.float32), RNG.integers(0, 4, size)) for size in (3, 0, 5, 1)]
    return clients, Federation.from_clients(clients)


def test_clients_hold_what_they_were_given() -> None:
    clients, federation = unequal()
    assert len(federation) == 4
    assert federation.sizes.tolist() == [3, 0, 5, 1]
    for number, (x, y) in enumerate(clients):
        inputs, targets = federation.client(number)
        assert torch.equal(inputs, torch.from_numpy(x))
        assert torch.equal(targets, torch.from_numpy(y))


def test_gather_returns_the_rows_of_each_client_in_the_order_asked_for() -> None:
    clients, federation = unequal()
    inputs, targets = federation.gather(torch.tensor([2, 0]), torch.tensor([[4, 1, 1], [0, 2, 1]]))
    assert inputs.shape == (2, 3, 3)
    assert np.array_equal(inputs[0], clients[2][0][[4, 1, 1]])
    assert np.array_equal(inputs[1], clients[0][0][[0, 2, 1]])
    assert np.array_equal(targets[1], clients[0][1][[0, 2, 1]])


def test_gather_equals_client_for_a_partitioned_image_set() -> None:
    federation = Federation.dirichlet(IMAGES, LABELS, clients=10, alpha=0.3, seed=1)
    inputs, targets = federation.gather(torch.arange(10), torch.arange(12).expand(10, 12))
    for number in range(10):
        x, y = federation.client(number)
        assert torch.equal(inputs[number], x)
        assert torch.equal(targets[number], y)


def test_images_stay_bytes_in_memory_and_are_scaled_when_gathered() -> None:
    federation = Federation.from_arrays(IMAGES, LABELS, np.arange(120) // 12)
    assert federation.inputs.dtype == torch.uint8
    assert federation.inputs.data_ptr() == IMAGES.ctypes.data
    inputs, targets = federation.client(0)
    assert torch.equal(inputs, torch.from_numpy(IMAGES[:12]).float() / 255)
    assert targets.dtype == torch.int64


def test_double_precision_is_halved_unless_asked_for() -> None:
    x, y = RNG.normal(size=(6, 2)), RNG.normal(size=6)
    assert Federation.iid(x, y, clients=2).inputs.dtype == torch.float32
    federation = Federation.iid(x, y, clients=2, dtype=torch.float64)
    inputs, targets = federation.client(0)
    assert inputs.dtype == targets.dtype == torch.float64
    assert np.array_equal(inputs, x[federation.rows[:3]])


def test_transform_sees_the_cast_batch_and_applies_to_held_out_data_too() -> None:
    federation = Federation.iid(IMAGES, LABELS, clients=4, transform=lambda x: x - 0.5)
    row = torch.from_numpy(IMAGES[int(federation.rows[0])]).float() / 255
    assert torch.equal(federation.client(0)[0][0], row - 0.5)
    # Trainers apply it, to one client at a time.
    assert torch.equal(federation.gather(torch.tensor([0]), torch.tensor([[0]]))[0][0, 0], row)
    held_out, labels = federation.prepare(IMAGES[:2], LABELS[:2])
    assert torch.equal(held_out, torch.from_numpy(IMAGES[:2]).float() / 255 - 0.5)
    assert labels.dtype == torch.int64


def test_data_go_to_a_device_once_and_in_their_compact_type() -> None:
    # The meta device computes shapes and types only, which is all that this needs.
    federation = Federation.iid(IMAGES, LABELS, clients=4)
    inputs, targets = federation.gather(torch.arange(4), torch.zeros(4, 2), device="meta")
    assert inputs.device.type == targets.device.type == "meta"
    assert (inputs.dtype, inputs.shape) == (torch.float32, (4, 2, 1, 4, 4))
    held = federation._on("meta")[0]
    assert held.dtype == torch.uint8
    federation.gather(torch.arange(4), torch.zeros(4, 2), device="meta")
    assert federation._on("meta")[0] is held


def test_a_pickled_federation_leaves_its_device_copies_behind() -> None:
    _, federation = unequal()
    federation.gather([0], torch.tensor([[0]]), device="meta")
    again = pickle.loads(pickle.dumps(federation))
    assert again._resident == {}
    assert torch.equal(again.client(2)[0], federation.client(2)[0])


@pytest.mark.parametrize(
    ("clients", "positions"), [([0], [[3]]), ([0], [[-1]]), ([1], [[0]]), ([3], [[1]]), ([2, 0], [[0], [3]])]
)
def test_a_position_outside_a_client_never_reads_another_clients_row(
    clients: list[int], positions: list[list[int]]
) -> None:
    _, federation = unequal()
    with pytest.raises(InputError, match="positions reach outside"):
        federation.gather(clients, torch.tensor(positions))


@pytest.mark.parametrize("number", [-1, 4])
def test_an_unknown_client_is_named(number: int) -> None:
    _, federation = unequal()
    with pytest.raises(InputError, match=f"client is {number}; this federation has clients 0 to 3"):
        federation.client(number)


def test_row_lists_and_client_numbers_describe_the_same_federation() -> None:
    by_rows = Federation.from_arrays(IMAGES[:6], LABELS[:6], [[0, 3], [], [1, 5]])
    by_owner = Federation.from_arrays(IMAGES[:6], LABELS[:6], np.array([0, 2, -1, 0, -1, 2]))
    assert torch.equal(by_rows.rows, by_owner.rows)
    assert torch.equal(by_rows.offsets, by_owner.offsets)


def test_a_row_may_be_shared_only_when_that_is_said() -> None:
    with pytest.raises(InputError, match=r"assignment gives row 1 to .* several clients"):
        Federation.from_arrays(IMAGES, LABELS, [[0, 1], [1]])
    assert Federation.from_arrays(IMAGES, LABELS, [[0, 1], [1]], allow_shared=True).sizes.tolist() == [2, 1]


def test_nan_is_refused_unless_it_is_asked_for() -> None:
    x = np.ones((4, 2))
    x[2, 1] = np.nan
    with pytest.raises(InputError, match=r"inputs is not finite.*1 of 4 rows, first in row 2"):
        Federation.iid(x, np.zeros(4), clients=2)
    with pytest.raises(InputError, match="targets is not finite"):
        Federation.iid(np.ones((4, 2)), x[:, 1], clients=2)
    assert torch.isnan(Federation.iid(x, np.zeros(4), clients=2, finite=False).inputs).sum() == 1


def test_a_double_that_overflows_float32_is_refused() -> None:
    with pytest.raises(InputError, match=r"beyond float32.*first in row 0"):
        Federation.iid(np.array([[1e300], [0.0]]), np.zeros(2), clients=1)


class Squares(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), index**2, dtype=torch.float32), index % 3


def test_a_dataset_becomes_a_federation_by_assignment_or_partition() -> None:
    federation = Federation.from_dataset(Squares(), [[3, 1], [2]])
    assert torch.equal(federation.client(0)[0][:, 0], torch.tensor([9.0, 1.0]))
    assert federation.client(1)[1].tolist() == [2]
    assert Federation.from_dataset(Squares(), partition="dirichlet", clients=3, alpha=1.0).sizes.tolist() == [4, 4, 4]
    tensors = TensorDataset(torch.arange(6.0)[:, None], torch.arange(6))
    assert Federation.from_dataset(tensors, partition="iid", clients=2, seed=3).sizes.tolist() == [3, 3]


def test_the_partitions_are_those_of_the_partitioners() -> None:
    assert Federation.shards(IMAGES, LABELS, clients=6, shards_per_client=2, seed=0).summary()["examples"] == 120
    uneven = Federation.dirichlet_per_class(IMAGES, LABELS, clients=6, alpha=0.3, seed=0)
    assert int(uneven.sizes.sum()) == 120
    few = Federation.dirichlet(IMAGES, LABELS, clients=6, alpha=0.3, seed=0, samples_per_client=5)
    assert few.sizes.tolist() == [5] * 6


def test_summary_counts_what_is_there() -> None:
    federation = Federation.from_clients(
        [([[0.0], [1.0]], [0, 1]), ([], []), ([[2.0], [3.0], [4.0], [5.0]], [1, 1, 1, 1])]
    )
    assert federation.summary() == {
        "clients": 3,
        "examples": 6,
        "size_min": 0,
        "size_median": 2.0,
        "size_max": 4,
        "classes": 2,
        "classes_per_client": 1.0,
    }
    assert Federation.iid(np.ones((4, 1)), np.ones(4), clients=2).summary()["classes"] is None


def test_repr_fits_on_a_line_and_says_what_is_held() -> None:
    assert repr(Federation.iid(IMAGES, LABELS, clients=7)) == (
        "Federation(7 clients, 17 to 18 rows each, inputs (1, 4, 4) uint8)"
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Federation.from_arrays(IMAGES, LABELS[:9], [[0]]), "inputs has 120 rows and targets has 9"),
        (lambda: Federation.dirichlet(IMAGES, LABELS[:9], clients=2, alpha=1), "inputs has 120 rows and targets has 9"),
        (lambda: Federation.from_arrays(IMAGES[:0], LABELS[:0], [[]]), "inputs is empty"),
        (lambda: Federation.iid(IMAGES, LABELS, clients=0), "clients is 0"),
        (lambda: Federation.dirichlet(IMAGES, LABELS * 1.0, clients=2, alpha=1), "integer class labels"),
        (lambda: Federation.from_dataset(Squares()), "partition is missing"),
        (lambda: Federation.from_dataset(Squares(), partition="dirichlt", clients=1), "Did you mean 'dirichlet'"),
        (lambda: Federation.from_dataset(Squares(), [[0]], partition="iid"), "assignment and partition are both given"),
    ],
)
def test_what_cannot_be_a_federation_gets_a_sentence(make, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()


def test_the_page_about_data_names_constructors_that_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    named = set(re.findall(r"Federation\.(\w+)", page))
    assert named >= {"from_pandas", "from_datasets", "from_arrays", "from_clients", "from_loaders", "from_folder"}
    assert [name for name in named if not hasattr(Federation, name)] == []


def test_a_training_run_takes_a_federation_from_a_table() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    table = {
        "user": [f"u{i % 40}" for i in range(400)],
        "a": x[:, 0],
        "b": x[:, 1],
        "y": (x.sum(axis=1) > 0).astype(int),
    }
    clients = Federation.from_pandas(table, by="user", target="y")
    model = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    run = train(model, clients, fedavg(), local=Sgd(lr=0.5, steps=5, max_examples=4), rounds=10)
    correct = run.model(clients.inputs).argmax(dim=1) == clients.targets
    # Separable and without noise, so that nearly all are right; one class for all would be 0.5.
    assert correct.float().mean() > 0.9
