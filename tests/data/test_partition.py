from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp.data import partition
from dpfedexp.data.partition import Assignment, class_labels, generator
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


def assert_disjoint(split: Assignment, examples: int) -> None:
    assert split.offsets[0] == 0
    assert split.offsets[-1] == len(split.rows)
    assert len(np.unique(split.rows)) == len(split.rows)
    assert len(split.rows) == 0 or (split.rows.min() >= 0 and split.rows.max() < examples)


def test_iid_uses_every_row_once_and_sizes_differ_by_at_most_one() -> None:
    split = partition.iid(1003, 10, generator(0))
    assert_disjoint(split, 1003)
    assert len(split.rows) == 1003
    assert set(sizes(split)) == {100, 101}
    assert not np.array_equal(split.rows, np.arange(1003))


def test_dirichlet_gives_every_client_the_same_number_of_rows() -> None:
    split = partition.dirichlet(LABELS, 10, 100, 0.3, generator(0))
    assert_disjoint(split, len(LABELS))
    assert set(sizes(split)) == {60}
    # 100 · 60 rows are all there are, so every pool ends empty and nothing is lost.
    assert len(split.rows) == len(LABELS)


def test_dirichlet_rows_that_do_not_divide_are_left_out() -> None:
    split = partition.dirichlet(LABELS[:5999], 10, 100, 0.3, generator(0))
    assert set(sizes(split)) == {59}
    assert_disjoint(split, 5999)


def test_dirichlet_samples_per_client_is_honoured() -> None:
    assert set(sizes(partition.dirichlet(LABELS, 10, 100, 0.3, generator(0), samples_per_client=7))) == {7}


@pytest.mark.parametrize("alpha", [0.1, 0.3, 3.0])
def test_dirichlet_class_mix_has_the_variance_of_dirichlet_multinomial(alpha: float) -> None:
    # 200 clients take 4% of the pools, so no pool runs out and counts are Dirichlet-multinomial:
    # Var = n p (1-p) (n + K alpha)/(1 + K alpha) with p = 1/K.
    labels = np.repeat(np.arange(5), 20_000)
    n, K = 20, 5
    counts = mixes(partition.dirichlet(labels, K, 200, alpha, generator(1), n), labels, K)
    expected = n * 0.2 * 0.8 * (n + K * alpha) / (1 + K * alpha)
    # 1000 counts (800 free): the standard error of a variance estimate is below 8%; 40% is five of them.
    assert ((counts - n / K) ** 2).mean() == pytest.approx(expected, rel=0.4)
    assert abs(counts.mean(axis=0) - n / K).max() < 5 * np.sqrt(expected / 200)


def test_dirichlet_large_alpha_is_nearly_uniform_and_small_alpha_nearly_one_class() -> None:
    even = mixes(partition.dirichlet(LABELS, 10, 20, 1e6, generator(0), 100), LABELS, 10)
    assert (even > 0).sum(axis=1).min() >= 8
    lonely = mixes(partition.dirichlet(LABELS, 10, 20, 1e-3, generator(0), 60), LABELS, 10)
    assert np.median((lonely > 0).sum(axis=1)) == 1


def test_dirichlet_survives_a_mix_whose_classes_have_all_run_out() -> None:
    # Every q_i sits on one class up to underflow, and late clients find it empty.
    split = partition.dirichlet(LABELS, 10, 100, 1e-8, generator(3))
    assert set(sizes(split)) == {60}
    assert_disjoint(split, len(LABELS))


def test_dirichlet_follows_the_sequential_definition() -> None:
    # Two classes of 3 and 1 rows, one client taking 3 with q given by the draw: the count of the small class is
    # P(at least one draw is class 1 before three of class 0) = 1 - E[q^3] with q ~ Beta(1, 1), that is 3/4.
    labels = np.array([0, 0, 0, 1])
    trials = 4000
    hits = sum(1 in labels[partition.dirichlet(labels, 2, 1, 1.0, generator(seed), 3).rows] for seed in range(trials))
    # Five standard errors of a proportion.
    assert abs(hits / trials - 0.75) < 5 * np.sqrt(0.75 * 0.25 / trials)


def test_dirichlet_picks_rows_of_a_class_at_random() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    rows = partition.dirichlet(labels, 1, 1, 1.0, generator(0), 500).rows
    # 500 of 1000 at random: the mean row is 499.5 with a standard deviation of 9.1.
    assert abs(rows.mean() - 499.5) < 5 * 9.2


def test_dirichlet_per_class_uses_every_row_once_with_unequal_sizes() -> None:
    split = partition.dirichlet_per_class(LABELS, 10, 50, 0.3, generator(0))
    assert_disjoint(split, len(LABELS))
    assert len(split.rows) == len(LABELS)
    assert sizes(split).max() > 2 * np.median(sizes(split))


def test_shards_give_each_client_few_classes_and_use_every_row() -> None:
    split = partition.shards(LABELS, 100, generator(0), shards_per_client=2)
    assert_disjoint(split, len(LABELS))
    assert set(sizes(split)) == {60}
    assert (mixes(split, LABELS, 10) > 0).sum(axis=1).max() <= 2


def test_shards_that_do_not_divide_still_use_every_row() -> None:
    split = partition.shards(LABELS[:5987], 100, generator(0), shards_per_client=3)
    assert sorted(split.rows) == list(range(5987))


@given(
    st.integers(1, 60),
    st.integers(1, 6),
    st.integers(1, 12),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_partition_of_anything_is_disjoint(n: int, classes: int, clients: int, alpha: float, seed: int) -> None:
    labels = generator(0).integers(0, classes, n)
    splits = [partition.dirichlet_per_class(labels, classes, clients, alpha, generator(seed))]
    if clients <= n:
        splits += [
            partition.iid(n, clients, generator(seed)),
            partition.dirichlet(labels, classes, clients, alpha, generator(seed)),
            partition.shards(labels, clients, generator(seed), 1),
        ]
    for split in splits:
        assert len(split.offsets) == clients + 1
        assert_disjoint(split, n)


def test_a_seed_gives_the_same_split_on_every_machine() -> None:
    split = partition.dirichlet(LABELS, 10, 100, 0.3, generator(7))
    again = partition.dirichlet(LABELS, 10, 100, 0.3, generator(7))
    other = partition.dirichlet(LABELS, 10, 100, 0.3, generator(8))
    assert np.array_equal(split.rows, again.rows)
    assert not np.array_equal(split.rows, other.rows)
    assert hashlib.sha256(split.rows.astype("<i8").tobytes()).hexdigest()[:16] == "7a79ad124800ce01"


def test_sixty_thousand_rows_split_over_a_thousand_clients_in_well_under_a_second() -> None:
    labels = np.repeat(np.arange(10), 6000)
    start = time.process_time()
    partition.dirichlet(labels, 10, 1000, 0.3, generator(0))
    # 0.02 s on an idle core.
    assert time.process_time() - start < 0.5


def test_any_integers_serve_as_labels() -> None:
    labels, classes = class_labels([-5, 1000, -5, 7])
    assert labels.tolist() == [0, 2, 0, 1]
    assert classes == 3


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: partition.iid(10, 0, generator(0)), "clients is 0; it must be a whole number of at least 1"),
        (lambda: partition.iid(10, 2.0, generator(0)), "clients is 2.0"),
        (lambda: partition.iid(10, True, generator(0)), "clients is True"),
        (lambda: partition.iid(10, 11, generator(0)), "clients is 11; 10 rows cannot give each of them at least 1"),
        (lambda: partition.dirichlet(LABELS, 10, 5, 0, generator(0)), "alpha is 0; it must be a number greater than 0"),
        (lambda: partition.dirichlet(LABELS, 10, 5, -1.0, generator(0)), "alpha is -1.0"),
        (lambda: partition.dirichlet(LABELS, 10, 5, float("nan"), generator(0)), "alpha is nan"),
        (lambda: partition.dirichlet(LABELS, 10, 5, float("inf"), generator(0)), "alpha is inf"),
        (lambda: partition.dirichlet(LABELS, 10, 5, "0.3", generator(0)), "alpha is '0.3'"),
        (lambda: partition.dirichlet(LABELS, 10, 5, 1, generator(0), 1201), "samples_per_client is 1201.*up to 1200"),
        (lambda: partition.dirichlet(LABELS, 10, 5, 1, generator(0), 0), "samples_per_client is 0"),
        (lambda: partition.shards(LABELS, 5, generator(0), 0), "shards_per_client is 0"),
        (lambda: partition.shards(LABELS, 5000, generator(0), 2), "clients is 5000; 6000 rows cannot"),
        (lambda: generator(-1), "seed is -1"),
        (lambda: generator(2**64), "seed is 18446744073709551616"),
        (lambda: class_labels(np.array([0.0, 1.0])), "targets has dtype float64.*integer class labels"),
        (lambda: class_labels(np.zeros((4, 2), dtype=int)), r"targets has shape \(4, 2\).*one label per row"),
    ],
)
def test_impossible_requests_get_a_sentence(call, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call()
