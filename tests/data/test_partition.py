"""Who holds which rows: as users write it, by ids, and dealt out."""

import hashlib
from datetime import date

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp.data import Federation, partition
from dpfedexp.data.partition import Assignment, as_assignment, by_ids, class_labels, generator
from dpfedexp.errors import InputError

LABELS = np.repeat(np.arange(10), 600)


def sizes(split: Assignment) -> np.ndarray:
    return np.diff(split.offsets)


def mixes(split: Assignment, labels: np.ndarray, classes: int) -> np.ndarray:
    """Rows of each class that each client holds."""
    owners = np.repeat(np.arange(len(split.offsets) - 1), sizes(split))
    counts = np.zeros((len(split.offsets) - 1, classes), dtype=int)
    np.add.at(counts, (owners, labels[split.rows]), 1)
    return counts


def test_every_partition_has_the_sizes_of_its_definition() -> None:
    split = partition.iid(1003, 10, generator(0))
    assert len(split.rows) == 1003
    assert set(sizes(split)) == {100, 101}
    assert not np.array_equal(split.rows, np.arange(1003))
    few = partition.shards(LABELS, 100, generator(0), shards_per_client=2)
    assert (mixes(few, LABELS, 10) > 0).sum(axis=1).max() <= 2
    # The last mix sits on one class up to underflow, and late clients find it empty.
    for equal in (few, *(partition.dirichlet(LABELS, 100, alpha, generator(3)) for alpha in (0.3, 1e-8))):
        assert set(sizes(equal)) == {60}
    uneven = partition.dirichlet_per_class(LABELS, 50, 0.3, generator(0))
    assert len(uneven.rows) == len(LABELS)
    assert sizes(uneven).max() > 2 * np.median(sizes(uneven))


@pytest.mark.parametrize("alpha", [0.1, 0.3, 3.0])
def test_dirichlet_class_mix_has_the_variance_of_dirichlet_multinomial(alpha: float) -> None:
    # 200 clients take 4% of the pools, so no pool runs out and counts are Dirichlet-multinomial:
    # Var = n p (1-p) (n + K alpha)/(1 + K alpha) with p = 1/K.
    labels = np.repeat(np.arange(5), 20_000)
    n, K = 20, 5
    counts = mixes(partition.dirichlet(labels, 200, alpha, generator(1), n), labels, K)
    expected = n * 0.2 * 0.8 * (n + K * alpha) / (1 + K * alpha)
    # 1000 counts (800 free): the standard error of a variance estimate is below 8%; 40% is five of them.
    assert ((counts - n / K) ** 2).mean() == pytest.approx(expected, rel=0.4)
    assert abs(counts.mean(axis=0) - n / K).max() < 5 * np.sqrt(expected / 200)


def test_dirichlet_follows_the_sequential_definition() -> None:
    # Two classes of 3 and 1 rows, one client taking 3 with q given by the draw: the count of the small class is
    # P(at least one draw is class 1 before three of class 0) = 1 - E[q^3] with q ~ Beta(1, 1), that is 3/4.
    labels = np.array([0, 0, 0, 1])
    trials = 1000
    hits = sum(1 in labels[partition.dirichlet(labels, 1, 1.0, generator(seed), 3).rows] for seed in range(trials))
    # Five standard errors of a proportion.
    assert abs(hits / trials - 0.75) < 5 * np.sqrt(0.75 * 0.25 / trials)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 12), st.floats(1e-3, 1e3), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_partition_of_anything_gives_a_row_away_twice(
    n: int, classes: int, clients: int, alpha: float, seed: int
) -> None:
    labels = generator(0).integers(0, classes, n)
    splits = [partition.dirichlet_per_class(labels, clients, alpha, generator(seed))]
    if clients <= n:
        splits += [
            partition.iid(n, clients, generator(seed)),
            partition.dirichlet(labels, clients, alpha, generator(seed)),
            partition.shards(labels, clients, generator(seed), 1),
        ]
    for split in splits:
        assert (len(split.offsets), split.offsets[0], split.offsets[-1]) == (clients + 1, 0, len(split.rows))
        assert set(split.rows) <= set(range(n))
        assert len(set(split.rows)) == len(split.rows)


def test_a_seed_gives_the_same_split_on_every_machine() -> None:
    split, other = (partition.dirichlet(LABELS, 100, 0.3, generator(seed)) for seed in (7, 8))
    assert hashlib.sha256(split.rows.astype("<i8").tobytes()).hexdigest()[:16] == "7a79ad124800ce01"
    assert not np.array_equal(split.rows, other.rows)
    assert class_labels([-5, 1000, -5, 7]).tolist() == [0, 2, 0, 1], "any integers serve as labels"


def held(split: Assignment) -> list[list[int]]:
    """The rows of each client."""
    return [part.tolist() for part in np.split(split.rows, split.offsets[1:-1])]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_client_numbers_and_row_indices_may_come_in_any_container(kind) -> None:
    assert held(as_assignment([kind([2, 0]), kind([1])], 3)) == [[2, 0], [1]]
    assert held(as_assignment(kind([1, 0, -1, 1]), 4)) == [[1], [0, 3]]


def test_clients_without_rows_are_kept_and_count_where_their_number_is_given() -> None:
    assert held(as_assignment([[], [0], []], 1)) == [[], [0], []]
    assert held(as_assignment(np.array([2, 0]), 2)) == [[1], [], [0]]
    assert held(as_assignment(np.array([0, 1, 0]), 3, clients=4)) == [[0, 2], [1], [], []]
    with pytest.raises(InputError, match="clients is 1"):
        as_assignment(np.array([0, 1, 0]), 3, clients=1)


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (["b", "a", "b"], ("a", "b")),
        (np.array(["b", "a", "b"], dtype=object), ("a", "b")),
        (np.array([10**12, 7, 10**12]), (7, 10**12)),
        (torch.tensor([9, -5, 9]), (-5, 9)),
        ([torch.tensor(9), torch.tensor(5), torch.tensor(9)], (5, 9)),
        ([("x", 2), ("x", 1), ("x", 2)], (("x", 1), ("x", 2))),
        ([date(2026, 1, 2), date(2026, 1, 1), date(2026, 1, 2)], (date(2026, 1, 1), date(2026, 1, 2))),
    ],
)
def test_ids_of_any_kind_number_the_clients_in_sorted_order(ids, names) -> None:
    split, found = by_ids("client_ids", ids, 3)
    assert found == names
    assert held(split) == [[1], [0, 2]]


def test_ids_that_cannot_be_sorted_are_numbered_as_they_appear() -> None:
    split, names = by_ids("client_ids", ["b", 3, "b", (1,)], 4)
    assert names == ("b", 3, (1,))
    assert held(split) == [[0, 2], [1], [3]]


def test_a_federation_by_ids_holds_the_rows_of_each_and_keeps_the_names() -> None:
    x, ids = np.arange(6.0)[:, None], ["zoe", "al", "zoe", "bo", "al", "zoe"]
    federation = Federation.from_arrays(x, np.zeros(6), client_ids=ids)
    assert federation.names == ("al", "bo", "zoe")
    assert federation.client(2)[0].flatten().tolist() == [0.0, 2.0, 5.0]
    for options, sizes, names in (
        ({"client_ids": ["b", "a"], "clients": 4}, [1, 1, 0, 0], ("a", "b", None, None)),
        ({"assignment": np.array([3, 0])}, [1, 0, 0, 1], None),
    ):
        federation = Federation.from_arrays(np.ones((2, 1)), np.zeros(2), **options)
        assert federation.sizes.tolist() == sizes
        assert federation.names == names
    with pytest.raises(InputError, match="names has 1 entries and there are 2 clients"):
        Federation(np.ones((2, 1)), np.zeros(2), [[0], [1]], names=["a"])


def of_ten(assignment: object) -> Assignment:
    return as_assignment(assignment, 10)


def of_two(**options) -> Federation:
    return Federation.from_arrays(np.ones((2, 1)), np.zeros(2), **options)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: partition.iid(10, 0, generator(0)), "clients is 0; it must be a whole number of at least 1"),
        (lambda: partition.dirichlet(LABELS, 5, 0, generator(0)), "alpha is 0; it must be a number greater than 0"),
        (lambda: partition.dirichlet(LABELS, 5, "0.3", generator(0)), "alpha is '0.3'"),
        (lambda: partition.dirichlet(LABELS, 5, 1, generator(0), 1201), "samples_per_client is 1201.*up to 1200"),
        (lambda: partition.shards(LABELS, 5, generator(0), 0), "shards_per_client is 0"),
        (lambda: partition.shards(LABELS, 5000, generator(0), 2), "clients is 5000; 6000 rows can't"),
        (lambda: class_labels(np.array([0.0, 1.0])), "targets has dtype float64.*integer class labels"),
        (lambda: class_labels(np.zeros((4, 2), dtype=int)), r"targets has shape \(4, 2\).*one label per row"),
        (lambda: of_ten([[0, 10]]), "assignment holds row 10; inputs has rows 0 to 9"),
        (lambda: of_ten(Assignment(np.array([10]), np.array([0, 1]))), "assignment holds row 10"),
        (
            lambda: of_ten(Assignment(np.array([0, 1]), np.array([0, 1]))),
            "offsets that do not rise from 0 to its 2 rows",
        ),
        (lambda: of_ten(Assignment(np.array([], dtype=int), np.array([0]))), "offsets that do not rise"),
        (lambda: of_ten([[0.5]]), r"assignment\[0\] has dtype float64; it must hold whole numbers"),
        (lambda: of_ten([[0], [[1]]]), r"assignment\[1\] has shape \(1, 1\)"),
        (lambda: of_ten([]), "assignment is empty"),
        (lambda: of_ten("iid"), "assignment is a str"),
        (lambda: of_ten(np.zeros(9, dtype=int)), "assignment has 9 client numbers for 10 rows"),
        (lambda: of_ten(np.full(10, -2)), "assignment holds the client number -2"),
        (lambda: of_ten(np.full(10, -1)), "assignment gives no row to any client"),
        (lambda: of_ten(np.full(10, 10**12)), "assignment holds the client number 1000000000000 for 10 rows"),
        (lambda: of_ten(np.zeros(10, dtype=bool)), "assignment has dtype bool"),
        (lambda: of_two(client_ids=np.zeros((2, 2))), "client_ids is a ndarray; give one client id per row"),
        (lambda: of_two(client_ids=["a", None]), "client_ids has no id in row 1; drop the rows"),
        (lambda: of_two(client_ids=[["a"], ["b"]]), "holds an id that is no key .*; give strings, numbers or tuples"),
        (lambda: of_two(client_ids="ab"), "client_ids is a str; give one client id per row"),
        (lambda: of_two(assignment=[0, 10**9]), "give ids as client_ids="),
        (lambda: of_two(client_ids=["a", "b"], clients=1), "clients is 1, but there are 2 already"),
    ],
)
def test_what_can_not_be_split_or_assigned_gets_a_sentence(call, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call()
