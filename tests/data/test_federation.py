"""What a federation holds and gives back: arrays in their compact type, cast where they are used."""

import pickle

import numpy as np
import pytest
import torch

from dpfedexp.data import Federation, synthetic_regression
from dpfedexp.data.arrays import as_tensor, cast_inputs, cast_targets, check_finite
from dpfedexp.errors import InputError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (120, 1, 4, 4), dtype=np.uint8)
LABELS = RNG.integers(0, 5, 120)
WORDS, AGES, BITS = RNG.integers(0, 9, (12, 5)), RNG.normal(size=(12, 2)), RNG.integers(0, 2, 12)


def unequal() -> tuple[list[tuple[np.ndarray, np.ndarray]], Federation]:
    clients = [(RNG.normal(size=(size, 3)).astype(np.float32), RNG.integers(0, 4, size)) for size in (3, 0, 5, 1)]
    return clients, Federation.from_clients(clients)


def test_clients_hold_what_they_were_given_and_gather_returns_the_rows_asked_for() -> None:
    clients, federation = unequal()
    assert federation.sizes.tolist() == [3, 0, 5, 1]
    for number, (x, y) in enumerate(clients):
        inputs, targets = federation.client(number)
        assert torch.equal(inputs, torch.from_numpy(x))
        assert torch.equal(targets, torch.from_numpy(y))
    inputs, targets = federation.gather(torch.tensor([2, 0]), torch.tensor([[4, 1, 1], [0, 2, 1]]))
    assert inputs.shape == (2, 3, 3)
    assert np.array_equal(inputs[0], clients[2][0][[4, 1, 1]])
    assert np.array_equal(inputs[1], clients[0][0][[0, 2, 1]])
    assert np.array_equal(targets[1], clients[0][1][[0, 2, 1]])


def test_double_precision_is_halved_unless_asked_for() -> None:
    assert Federation.iid(AGES, AGES[:, 0], clients=2).inputs.dtype == torch.float32
    federation = Federation.iid(AGES, AGES[:, 0], clients=2, dtype=torch.float64)
    inputs, targets = federation.client(0)
    assert inputs.dtype == targets.dtype == torch.float64
    assert np.array_equal(inputs, AGES[federation.rows[:6]])


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
    for _ in range(2):
        inputs, targets = federation.gather(torch.arange(4), torch.zeros(4, 2), device="meta")
        assert inputs.device.type == targets.device.type == "meta"
        assert (inputs.dtype, inputs.shape) == (torch.float32, (4, 2, 1, 4, 4))
        ((held, _),) = federation._resident.values()
        assert held.dtype == torch.uint8
    assert pickle.loads(pickle.dumps(federation))._resident == {}


def test_a_position_outside_a_client_never_reads_another_clients_row() -> None:
    _, federation = unequal()
    for clients, positions in (([0], [[3]]), ([0], [[-1]]), ([1], [[0]]), ([3], [[1]]), ([2, 0], [[0], [3]])):
        with pytest.raises(InputError, match="positions reach outside"):
            federation.gather(clients, torch.tensor(positions))
    for number in (-1, 4):
        with pytest.raises(InputError, match=f"client is {number}; this federation has clients 0 to 3"):
            federation.client(number)


def test_nan_is_refused_unless_it_is_asked_for() -> None:
    x = np.ones((4, 2))
    x[2, 1] = np.nan
    with pytest.raises(InputError, match=r"inputs is not finite.*1 of 4 rows, first in row 2"):
        Federation.iid(x, np.zeros(4), clients=2)
    with pytest.raises(InputError, match="targets is not finite"):
        Federation.iid(np.ones((4, 2)), x[:, 1], clients=2)
    assert torch.isnan(Federation.iid(x, np.zeros(4), clients=2, finite=False).inputs).sum() == 1
    with pytest.raises(InputError, match=r"beyond float32.*first in row 0"):
        Federation.iid((WORDS, np.full((12, 1), 1e300)), BITS, clients=2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Federation.from_arrays(IMAGES[:0], LABELS[:0], [[]]), "inputs is empty"),
        (lambda: Federation.from_arrays(IMAGES, LABELS, [[0, 1], [1]]), "assignment gives row 1 to .* several clients"),
        (lambda: Federation.iid((WORDS, AGES[:3]), BITS, clients=2), "tuple of arrays with 12, 3 rows, which means se"),
        (lambda: Federation.iid({}, BITS, clients=2), "inputs is an empty dict"),
        (lambda: Federation.iid({"a": WORDS.astype(str)}, BITS, clients=2), r"inputs\['a'\] has dtype <U"),
        (
            lambda: Federation.from_clients([({"a": AGES}, BITS), ({"b": AGES}, BITS)]),
            r"clients\[1\] inputs is a dict of 'b', while that of clients\[0\] is a dict of 'a'",
        ),
        (
            lambda: Federation.from_clients([((AGES, WORDS), BITS), (AGES, BITS)]),
            r"clients\[1\] inputs is one array, while that of clients\[0\] is a tuple of 2 arrays",
        ),
        (
            lambda: Federation.from_clients([((AGES, WORDS), BITS), ((AGES, AGES), BITS)]),
            r"\[1\] inputs\[1\] is float64",
        ),
        (lambda: as_tensor("x", np.array(["a", "b"])), "x has dtype <U1"),
        (lambda: as_tensor("x", np.array([1j])), "x has dtype complex128"),
        (lambda: as_tensor("x", 3.0), "x is a single number"),
        (lambda: as_tensor("x", np.array([2**63], dtype=np.uint64)), "x holds values of 2\\^63 or more"),
        (lambda: synthetic_regression(0, 5), "clients is 0"),
        (lambda: synthetic_regression(5, 5, seed=-1), "seed is -1"),
    ],
)
def test_what_cannot_be_a_federation_gets_a_sentence(call, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call()


@pytest.mark.parametrize("inputs", [(WORDS, AGES), {"words": WORDS, "ages": AGES}])
def test_a_tuple_or_dict_of_arrays_comes_back_as_such_and_each_is_cast(inputs) -> None:
    federation = Federation.from_arrays(inputs, BITS, np.arange(12) // 4)
    x, y = federation.gather(torch.tensor([2, 0]), torch.tensor([[3, 1], [0, 0]]))
    assert type(x) is type(inputs)
    words, ages = x.values() if isinstance(x, dict) else x
    rows = [[11, 9], [0, 0]]
    assert torch.equal(words, torch.from_numpy(WORDS[rows]))
    assert torch.equal(ages, torch.from_numpy(AGES[rows]).float())
    assert torch.equal(y, torch.from_numpy(BITS[rows]))


def test_several_inputs_are_all_stored_transformed_and_may_come_client_by_client() -> None:
    federation = Federation.iid({"words": WORDS, "ages": AGES}, BITS, clients=3)
    assert len(list(federation.contents())) == 5
    assert repr(federation) == "Federation(3 clients, 4 rows each, inputs (5,) int64 and (2,) float32)"
    federation = Federation.iid((WORDS, AGES), BITS, clients=3, transform=lambda x: (x[0], x[1] + 1))
    prepared, _ = federation.prepare((WORDS, AGES), BITS)
    assert torch.equal(prepared[1], torch.from_numpy(AGES).float() + 1)
    federation = Federation.from_clients([([], []), ((WORDS[:2], AGES[:2]), BITS[:2]), ((WORDS[2:3], AGES[2:3]), [1])])
    assert federation.sizes.tolist() == [0, 2, 1]
    assert np.array_equal(federation.client(2)[0][0], WORDS[2:3])
    # A tuple of numbers or lists is one array.
    assert Federation.from_clients([((1.0, 2.0), (0, 1))]).client(0)[0].tolist() == [1.0, 2.0]
    assert Federation.from_clients([(([1.0], [2.0]), (0, 1))]).client(0)[0].tolist() == [[1.0], [2.0]]


def test_tokens_and_labels_become_int64_and_everything_else_float32_unless_another_type_is_asked_for() -> None:
    tokens = torch.tensor([0, 7, 255], dtype=torch.uint8)
    assert torch.equal(cast_inputs(tokens, torch.int64), torch.tensor([0, 7, 255]))
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        assert torch.equal(cast_inputs(torch.tensor([0, 5, 100], dtype=dtype)), torch.tensor([0, 5, 100]))
    for asked, made in ((None, torch.float32), (torch.float64, torch.float64)):
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.bool):
            assert cast_inputs(torch.tensor([0, 1], dtype=dtype), asked).dtype == made
        assert cast_targets(torch.tensor([0.5], dtype=torch.float64), asked).dtype == made
        assert cast_targets(torch.tensor([3], dtype=torch.uint8), asked).dtype == torch.int64


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", ">i4", ">f4", "longdouble", "bool", "uint8"])
def test_numpy_values_survive_whatever_their_type(dtype: str) -> None:
    assert as_tensor("x", np.array([0, 1, 1], dtype=dtype)).tolist() == [0, 1, 1]


@pytest.mark.filterwarnings("error")
def test_a_numpy_array_is_shared_not_copied_even_when_it_is_read_only() -> None:
    for writeable in (True, False):
        array = np.zeros((4, 2), dtype=np.float32)
        array.flags.writeable = writeable
        assert as_tensor("x", array).data_ptr() == array.ctypes.data


def test_non_finite_rows_are_counted_and_the_first_is_named_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad, shape in ((np.nan, (10,)), (np.inf, (10, 3)), (-np.inf, (10, 2, 2))):
        values = torch.zeros(shape)
        values[4], values[7] = bad, bad
        with pytest.raises(InputError, match=r"inputs is not finite.*in 2 of 10 rows, first in row 4"):
            check_finite("inputs", values)
    monkeypatch.setattr("dpfedexp.data.arrays._CHECK_ELEMENTS", 6)
    for row in range(10):
        values = torch.zeros(10, 3)
        values[row, row % 3] = torch.nan
        with pytest.raises(InputError, match=f"1 of 10 rows, first in row {row};"):
            check_finite("inputs", values)


def test_inputs_have_the_papers_moments_and_targets_are_exact_at_the_optimum() -> None:
    n, d = 4000, 50
    problem = synthetic_regression(n, d, 3)
    inputs, targets = problem.federation.gather(torch.arange(n), torch.zeros(n, 1))
    assert inputs.dtype == targets.dtype == problem.optimum.dtype == torch.float32
    assert (inputs.shape, targets.shape) == ((n, 1, d), (n, 1))
    x, optimum = inputs[:, 0].double(), problem.optimum.double()
    # A target is one float32 rounding of x·w*.
    assert torch.allclose(x @ optimum, targets[:, 0].double(), rtol=2**-23, atol=1e-6)
    # x = u·1 + N(0, 2I), u ~ N(0, 0.01): coordinates have variance 2.01 and covariance 0.01, so that ‖x‖² ≈ 2.01 d.
    assert x.mean().abs() < 5 * np.sqrt((2 / d + 0.01) / n)
    assert x.square().mean() == pytest.approx(2.01, abs=5 * np.sqrt(2 * 2.01**2 / (n * d)))
    # A client's mean coordinate has variance 0.01 + 2/d; a missing u would give 2/d, 20% less.
    spread = x.mean(dim=1).square().mean()
    assert spread == pytest.approx(0.01 + 2 / d, rel=5 * np.sqrt(2 / n))
    assert optimum.square().mean() == pytest.approx(1.0, abs=5 * np.sqrt(2 / d))


def test_a_seed_decides_the_problem_and_the_distance_is_that_to_its_optimum() -> None:
    first, again, other = (synthetic_regression(20, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(first.optimum, again.optimum)
    assert torch.equal(first.federation.client(3)[0], again.federation.client(3)[0])
    assert not torch.equal(first.federation.client(3)[0], other.federation.client(3)[0])
    assert first.distance(first.optimum[None] + torch.tensor([3.0, 0, 4.0, 0])) == pytest.approx(5.0, rel=1e-6)
    with pytest.raises(InputError, match="w has 3 numbers; this problem has dimension 4"):
        first.distance(torch.zeros(3))
