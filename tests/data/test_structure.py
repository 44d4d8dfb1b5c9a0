"""Several inputs per example."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from dpfedexp.data import Federation
from dpfedexp.errors import InputError

RNG = np.random.default_rng(0)
WORDS, AGES, LABELS = RNG.integers(0, 9, (12, 5)), RNG.normal(size=(12, 2)), RNG.integers(0, 2, 12)


@pytest.mark.parametrize("inputs", [(WORDS, AGES), {"words": WORDS, "ages": AGES}])
def test_a_tuple_or_dict_of_arrays_comes_back_as_such_and_each_is_cast(inputs) -> None:
    federation = Federation.from_arrays(inputs, LABELS, np.arange(12) // 4)
    x, y = federation.gather(torch.tensor([2, 0]), torch.tensor([[3, 1], [0, 0]]))
    assert type(x) is type(inputs)
    words, ages = x.values() if isinstance(x, dict) else x
    rows = [[11, 9], [0, 0]]
    assert torch.equal(words, torch.from_numpy(WORDS[rows]))
    assert torch.equal(ages, torch.from_numpy(AGES[rows]).float())
    assert torch.equal(y, torch.from_numpy(LABELS[rows]))
    one = federation.client(1)[0]
    assert np.array_equal(next(iter(one.values() if isinstance(one, dict) else one)), WORDS[4:8])


def test_every_array_is_part_of_the_contents_and_survives_a_pickle() -> None:
    federation = Federation.iid({"words": WORDS, "ages": AGES}, LABELS, clients=3)
    assert len(list(federation.contents())) == 5
    again = pickle.loads(pickle.dumps(federation))
    assert torch.equal(again.client(0)[0]["ages"], federation.client(0)[0]["ages"])
    assert repr(federation) == "Federation(3 clients, 4 rows each, inputs (5,) int64 and (2,) float32)"


def test_a_transform_sees_the_whole_structure() -> None:
    federation = Federation.iid((WORDS, AGES), LABELS, clients=3, transform=lambda x: (x[0], x[1] + 1))
    prepared, _ = federation.prepare((WORDS, AGES), LABELS)
    assert torch.equal(prepared[1], torch.from_numpy(AGES).float() + 1)


def test_clients_may_bring_several_inputs_and_be_empty() -> None:
    federation = Federation.from_clients(
        [([], []), ((WORDS[:2], AGES[:2]), LABELS[:2]), ((WORDS[2:3], AGES[2:3]), [1])]
    )
    assert federation.sizes.tolist() == [0, 2, 1]
    assert np.array_equal(federation.client(2)[0][0], WORDS[2:3])


def test_a_tuple_of_numbers_or_lists_is_one_array() -> None:
    assert Federation.from_clients([((1.0, 2.0), (0, 1))]).client(0)[0].tolist() == [1.0, 2.0]
    assert Federation.from_clients([(([1.0], [2.0]), (0, 1))]).client(0)[0].tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Federation.iid((WORDS, AGES[:3]), LABELS, clients=2),
            "tuple of arrays with 12, 3 rows, which means several",
        ),
        (lambda: Federation.iid({}, LABELS, clients=2), "inputs is an empty dict"),
        (lambda: Federation.iid({"a": WORDS.astype(str)}, LABELS, clients=2), r"inputs\['a'\] has dtype <U"),
        (lambda: Federation.iid({"a": AGES}, LABELS[:3], clients=2), "inputs has 12 rows and targets has 3"),
        (
            lambda: Federation.from_clients([({"a": AGES}, LABELS), ({"b": AGES}, LABELS)]),
            r"clients\[1\] inputs is a dict of 'b', while that of clients\[0\] is a dict of 'a'",
        ),
        (
            lambda: Federation.from_clients([((AGES, WORDS), LABELS), (AGES, LABELS)]),
            r"clients\[1\] inputs is one array, while that of clients\[0\] is a tuple of 2 arrays",
        ),
        (
            lambda: Federation.from_clients([((AGES, WORDS), LABELS), ((AGES, AGES), LABELS)]),
            r"clients\[1\] inputs\[1\] is float64 of shape \(2,\) per row",
        ),
    ],
)
def test_inputs_that_do_not_fit_together_get_a_sentence(make, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()


def test_infinities_are_found_in_every_array() -> None:
    with pytest.raises(InputError, match="inputs is not finite"):
        Federation.iid((WORDS, np.full((12, 1), np.inf)), LABELS, clients=2)
