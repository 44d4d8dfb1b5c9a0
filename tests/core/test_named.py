"""Losses by name, each against its formula in NumPy."""

import numpy as np
import pytest
import torch

from dpfedexp import Sgd, fedavg, train
from dpfedexp.config import parse
from dpfedexp.core.losses import ALIASES, LOSSES, by_name, cross_entropy, half_squared_error, resolve
from dpfedexp.data import Federation
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import InputError

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""float32 against float64: some ten roundings."""


def numbers(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def softplus(x):
    return np.logaddexp(0, x)


FORMULAS = {
    "half-squared-error": lambda o, t: 0.5 * ((o - t) ** 2).sum(1),
    "mse": lambda o, t: ((o - t) ** 2).mean(1),
    "mae": lambda o, t: np.abs(o - t).mean(1),
    "huber": lambda o, t: np.where(np.abs(o - t) < 1, 0.5 * (o - t) ** 2, np.abs(o - t) - 0.5).mean(1),
    "binary-cross-entropy": lambda o, t: (softplus(o) - t * o).mean(1),
    "poisson": lambda o, t: (np.exp(o) - t * o).mean(1),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("whole", [False, True], ids=["real targets", "whole targets"])
def test_a_loss_of_numbers_is_its_formula(name, whole):
    o, t = 2 * numbers(7, 3), numbers(7, 3, seed=1)
    t = (t > 0).long() if whole else t.sigmoid()
    expected = FORMULAS[name](o.double().numpy(), t.double().numpy())
    np.testing.assert_allclose(LOSSES[name](o, t), expected, **CLOSE)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("output", "target"), [((7, 1), (7,)), ((7,), (7, 1)), ((7, 1, 1), (7, 1)), ((7, 1), (7, 1))])
def test_one_number_per_example_may_have_a_dimension_of_its_own(name, output, target):
    """Where (b, 1) − (b,) broadcast, every output was compared with every target."""
    o, t = numbers(7), numbers(7, seed=1).sigmoid()
    expected = FORMULAS[name](o.double().numpy()[:, None], t.double().numpy()[:, None])
    np.testing.assert_allclose(LOSSES[name](o.reshape(output), t.reshape(target)), expected, **CLOSE)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_single_row_that_squeeze_left_without_dimensions_is_one_example(name):
    o, t = torch.tensor(0.3), torch.tensor([0.8])
    np.testing.assert_allclose(LOSSES[name](o, t), FORMULAS[name](np.array([[0.3]]), np.array([[0.8]])), **CLOSE)


def log_softmax(o):
    return o - np.log(np.exp(o).sum(-1, keepdims=True))


def test_cross_entropy_and_nll_of_labels_sequences_and_probabilities_are_their_formulas():
    o, labels = numbers(6, 4), torch.arange(6) % 4
    log_p = log_softmax(o.double().numpy())
    expected = -log_p[np.arange(6), labels.numpy()]
    np.testing.assert_allclose(cross_entropy(o, labels), expected, **CLOSE)
    np.testing.assert_allclose(LOSSES["nll"](o.log_softmax(1), labels), expected, **CLOSE)
    soft = numbers(6, 4, seed=2).softmax(1)
    np.testing.assert_allclose(cross_entropy(o, soft), -(soft.double().numpy() * log_p).sum(1), **CLOSE)
    o, labels = numbers(2, 3, 4), torch.tensor([[0, 1, 3], [2, -100, -100]])
    each = -np.take_along_axis(log_softmax(o.double().numpy()), labels.clamp_min(0).numpy()[..., None], -1)[..., 0]
    expected = [each[0].mean(), each[1, 0]]
    np.testing.assert_allclose(cross_entropy(o, labels), expected, **CLOSE)
    np.testing.assert_allclose(cross_entropy(o.movedim(-1, 1), labels), expected, **CLOSE)
    soft = numbers(2, 3, 4, seed=2).softmax(-1)
    expected = -(soft.double().numpy() * log_softmax(o.double().numpy())).sum(-1).mean(-1)
    np.testing.assert_allclose(cross_entropy(o, soft), expected, **CLOSE)


def test_a_sequence_of_which_every_position_counts_has_the_plain_mean_bit_for_bit():
    o, labels = numbers(8, 5, 7), torch.arange(40).reshape(8, 5) % 7
    plain = torch.nn.functional.cross_entropy(o.movedim(-1, 1), labels, reduction="none").flatten(1).mean(1)
    assert torch.equal(cross_entropy(o, labels), plain)


def test_names_may_be_written_in_the_usual_ways():
    assert {by_name(alias) for alias in ALIASES} <= set(LOSSES.values())
    for name, right in {
        "Cross_Entropy": "cross-entropy",
        "ce": "cross-entropy",
        "BCE": "binary-cross-entropy",
        "l1": "mae",
        "smooth_l1": "huber",
        "MSE": "mse",
    }.items():
        assert by_name(name) is LOSSES[right]


def test_the_usual_loss_follows_from_the_targets():
    assert resolve(None, torch.zeros(2)) is half_squared_error
    assert resolve(None, torch.zeros(2, dtype=torch.int64)) is cross_entropy


def test_a_configuration_takes_every_name_and_refuses_others():
    for name in [*LOSSES, *ALIASES]:
        assert parse({"run": {"loss": name}}).run_options()["loss"] == name
    with pytest.raises(InputError, match=r"loss is 'msee'.*Did you mean 'mse'"):
        parse({"run": {"loss": "msee"}})
    with pytest.raises(InputError, match=r"Known: .*\bbce\b.*cross-entropy.*\bmse\b"):
        resolve("quux", torch.zeros(2))


@pytest.mark.parametrize("flat", [False, True], ids=["(n, 1) outputs", "(n,) outputs"])
@pytest.mark.parametrize("loss", [None, "mse", torch.nn.MSELoss(), torch.nn.functional.mse_loss])
def test_regression_with_one_output_finds_least_squares(loss, flat):
    """The table's first row. With all rows at one client FedAvg is gradient descent, so it ends where least squares is."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 12))
    y = x @ rng.normal(size=12) + 0.7 + 0.1 * rng.normal(size=60)
    solution = np.linalg.lstsq(np.c_[x, np.ones(60)], y, rcond=None)[0]
    model = torch.nn.Linear(12, 1)
    model = torch.nn.Sequential(model, torch.nn.Flatten(0)) if flat else model
    test = (x.astype(np.float32), y.astype(np.float32))
    clients = Federation.from_clients([test])
    run = train(model, clients, fedavg(), local=Sgd(lr=0.2, steps=200), rounds=3, loss=loss, test=test, progress=False)
    layer = run.model[0] if flat else run.model
    found = np.r_[layer.weight.detach().numpy().ravel(), layer.bias.detach().numpy()]
    np.testing.assert_allclose(found, solution, atol=1e-4)
    off = y - np.c_[x, np.ones(60)] @ solution
    last = run.history[-1]
    assert last["test_rmse"] == pytest.approx(np.sqrt((off**2).mean()), rel=1e-3)
    assert last["test_mae"] == pytest.approx(np.abs(off).mean(), rel=1e-3)
    assert last["test_r2"] == pytest.approx(1 - (off**2).sum() / ((y - y.mean()) ** 2).sum(), rel=1e-4)
    assert "test_accuracy" not in last


def test_no_trainer_is_lost_to_a_name_that_means_the_same():
    clients = Federation.from_clients([(numbers(4, 6, seed=s), torch.arange(4) % 3) for s in range(4)])
    chosen = set()
    for loss in ("cross-entropy", "ce", torch.nn.CrossEntropyLoss(), torch.nn.functional.cross_entropy):
        simulation, _ = prepare(
            torch.nn.Linear(6, 3), clients, fedavg(), local=Sgd(lr=0.1, steps=2), rounds=1, loss=loss
        )
        chosen.add(simulation.trainer.name)
    assert len(chosen) == 1
