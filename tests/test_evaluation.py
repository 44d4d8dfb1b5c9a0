"""Metrics of a whole test set against NumPy, in batches that do not divide it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfedexp import Federation, Sgd, fedavg, train
from dpfedexp.errors import InputError
from dpfedexp.evaluation import auc, on_test_set
from tests.arguments import arguments

MODEL = nn.Identity()
"""Inputs are the outputs, so that a test says what a model answers."""


def measured(outputs, targets, loss=None, **more):
    return on_test_set(torch.as_tensor(outputs), torch.as_tensor(targets), loss, 7, **more)(MODEL)


def outputs_of(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pairs(scores, positive):
    """AUC by its meaning: every pair."""
    a, b = scores[positive][:, None], scores[~positive][None]
    return ((a > b) + 0.5 * (a == b)).mean()


def test_accuracy_of_labels_and_sequences_is_the_share_of_positions():
    labels = np.random.default_rng(1).integers(0, 5, size=40)
    o = outputs_of(40, 5)
    found = measured(o, labels)
    assert found.keys() == {"test_loss", "test_accuracy"}
    assert found["test_accuracy"] == (o.argmax(1) == labels).mean()
    o, labels = outputs_of(40, 6, 5), np.random.default_rng(1).integers(0, 5, size=(40, 6))
    right = o.argmax(-1) == labels
    for loss in (None, "nll", nn.CrossEntropyLoss()):
        assert measured(o, labels, loss)["test_accuracy"] == pytest.approx(right.mean())
    assert measured(o.transpose(0, 2, 1).copy(), labels)["test_accuracy"] == pytest.approx(right.mean())
    labels[:, 4:] = -100
    assert measured(o, labels)["test_accuracy"] == pytest.approx(right[:, :4].mean())


@pytest.mark.parametrize(("whole", "shape", "loss"), [(True, (50,), "bce"), (False, (50, 1), nn.BCEWithLogitsLoss())])
def test_one_logit_with_binary_targets_has_accuracy_and_auc(whole, shape, loss):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, size=50)
    o = np.round(2 * y - 1 + rng.normal(size=50), 1).astype(np.float32)  # rounded, so that some scores are equal
    found = measured(o.reshape(shape), y if whole else y.astype(np.float32), loss)
    assert found.keys() == {"test_loss", "test_accuracy", "test_auc"}
    assert found["test_accuracy"] == ((o > 0) == (y > 0)).mean() > 0.7
    assert found["test_auc"] == pytest.approx(pairs(o, y > 0), abs=1e-12)
    assert np.isnan(auc(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])))


def test_several_labels_have_their_own_names():
    y, o = np.random.default_rng(1).integers(0, 2, size=(30, 4)), outputs_of(30, 4)
    right = (o > 0) == (y > 0)
    for targets in (y, y.astype(np.float32)):
        found = measured(o, targets, nn.BCEWithLogitsLoss(reduction="none"))
        assert found.keys() == {"test_loss", "test_label_accuracy", "test_exact_match"}
        assert found["test_label_accuracy"] == pytest.approx(right.mean())
        assert found["test_exact_match"] == pytest.approx(right.all(1).mean())


@pytest.mark.parametrize(
    ("columns", "loss"),
    [(None, None), (1, "mae"), (3, nn.HuberLoss()), (3, lambda o, t: (o - t).reshape(len(o), -1).abs().mean(1))],
)
def test_numbers_have_their_errors(columns, loss):
    shape = (50,) if columns is None else (50, columns)
    y, o = 1000 + outputs_of(*shape, seed=1), 1000 + outputs_of(*shape, seed=2)
    found = measured(o, y, loss)
    off = (o.astype(float) - y).reshape(50, -1)
    spread = ((y.astype(float) - y.astype(float).mean(0)) ** 2).reshape(50, -1).sum(0)
    assert found.keys() == {"test_loss", "test_mae", "test_rmse", "test_r2"}
    assert found["test_mae"] == pytest.approx(np.abs(off).mean())
    assert found["test_rmse"] == pytest.approx(np.sqrt((off**2).mean()))
    assert found["test_r2"] == pytest.approx((1 - (off**2).sum(0) / spread).mean())


def test_a_probability_says_one_above_a_half_and_counts_are_compared_with_what_the_log_stands_for():
    y, p = np.array([0, 1, 1, 0]), np.array([0.1, 0.8, 0.4, 0.3], dtype=np.float32)
    assert measured(p, y, nn.BCELoss())["test_accuracy"] == 0.75
    y, o = np.array([1, 2, 5]), np.log(np.array([1.0, 3.0, 3.0], dtype=np.float32))
    assert measured(o, y, "poisson")["test_mae"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("outputs", "targets", "loss", "missing"),
    [
        (outputs_of(9, 3), np.full((9,), 1.0, dtype=np.float32), lambda o, t: (o.sum(1) - t) ** 2, "everything"),
        (outputs_of(9, 1), np.full((9, 1), 2.5, dtype=np.float32), "mse", "test_r2"),
        (outputs_of(9), np.ones(9, dtype=np.int64), "bce", "test_auc"),
        (outputs_of(9), np.full(9, 0.5, dtype=np.float32), "bce", "everything"),
        (outputs_of(9, 3), np.full((9, 3), 1 / 3, dtype=np.float32), "ce", "everything"),
        (outputs_of(9), np.arange(9) % 2, lambda o, t: F.softplus(o * (1 - 2 * t)), "test_accuracy"),
        (outputs_of(9, 2), np.arange(9), lambda o, t: (o[:, 0] - t) ** 2, "everything"),
        (outputs_of(9, 3), np.arange(27).reshape(9, 3) % 2 * 2 - 1, nn.SoftMarginLoss(), "everything"),
    ],
    ids=["sum", "constant", "one class", "soft bits", "soft labels", "own function", "counts", "margin"],
)
def test_what_is_not_defined_is_not_reported(outputs, targets, loss, missing):
    found = measured(outputs, targets, loss)
    assert found.keys() == {"test_loss"} if missing == "everything" else missing not in found
    assert all(np.isfinite(value) for value in found.values())


@pytest.mark.parametrize("part", [0, 1])
def test_a_test_set_with_nan_is_refused(part):
    """Its loss was NaN in every round, and its accuracy a number."""
    arrays = [torch.zeros(4, 2), torch.zeros(4, 2)]
    arrays[part][3] = float("nan")
    with pytest.raises(InputError, match=r"is not finite .* in 1 of 4 rows, first in row 3"):
        on_test_set(*arrays)


def test_own_metrics_see_the_whole_test_set_at_once():
    seen = []

    def median(outputs, targets):
        seen.append((outputs.shape, targets.shape))
        return (outputs - targets).median()

    y, o = outputs_of(30, seed=1), outputs_of(30, seed=2)
    found = measured(o, y, "mse", metrics={"median": median, "test_worst": lambda o, t: (o - t).abs().max().item()})
    assert seen == [((30,), (30,))]
    assert found["test_median"] == pytest.approx(float(torch.median(torch.from_numpy(o - y))))
    assert found["test_worst"] == pytest.approx(np.abs(o - y).max())


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ([len], "metrics is a list; it must be a dict"),
        ({"f1": 3}, r"metrics\['f1'\] is 3; it must be a function"),
        ({"loss": lambda o, t: 0.0}, "give it another name"),
        ({"all": lambda o, t: o - t}, r"metrics\['all'\] returned a Tensor; it must return one number"),
        ({"bad": lambda o, t: o @ t @ o @ t @ 3}, r"metrics\['bad'\] can't be applied to outputs of shape \(4,\)"),
    ],
)
def test_a_wrong_metric_is_one_sentence(metrics, words):
    with pytest.raises(InputError, match=words):
        measured(outputs_of(4), outputs_of(4, seed=1), metrics=metrics)


def test_an_evaluation_begins_anew_and_sees_targets_that_were_changed():
    inputs, targets = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]), torch.tensor([0, 1, 1])
    evaluate = on_test_set(inputs, targets, batch=2)
    flipped = nn.Linear(2, 2, bias=False)
    flipped.weight.data = -torch.eye(2)
    for _ in range(2):
        assert evaluate(MODEL)["test_accuracy"] == pytest.approx(2 / 3)
        assert evaluate(flipped)["test_accuracy"] == pytest.approx(1 / 3)
    numbers = torch.tensor([1.0, 2.0, 3.0])
    measure = on_test_set(numbers.clone(), numbers, "mse", batch=2)
    assert measure(MODEL)["test_r2"] == 1.0
    numbers.mul_(2)
    assert measure(MODEL)["test_r2"] == pytest.approx(1 - 14 / 8)


@pytest.mark.parametrize(
    ("kind", "loss", "rate", "rounds"), [("Linear", "mse", 0.4, 60), ("Logistic", "bce", 2.0, 200)]
)
def test_a_regression_without_privacy_ends_where_scikit_learns_does(kind, loss, rate, rounds):
    """Equal clients that take one full-batch step a round are gradient descent on all rows, and nothing broadcasts."""
    regression = getattr(pytest.importorskip("sklearn.linear_model"), f"{kind}Regression")
    x, noise = torch.from_numpy(outputs_of(40, 10, 3)), torch.from_numpy(outputs_of(40, 10, seed=7))
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + noise - 0.2
    y = (y > 0).long() if kind == "Logistic" else y
    flat, answers = x.flatten(0, 1), y.flatten()
    exact = regression(C=np.inf, tol=1e-10, max_iter=1000) if kind == "Logistic" else regression()
    fitted = exact.fit(flat.double(), answers)
    clients, options = Federation.from_clients(list(zip(x, y, strict=True))), {"execution": "cpu"}
    options |= {"local": Sgd(lr=rate, steps=1), "rounds": rounds, "evaluate_every": rounds, "test": (flat, answers)}
    run = train(nn.Linear(3, 1), clients, fedavg(), loss=loss, **arguments(options))
    np.testing.assert_allclose(run.model.weight.detach().numpy().ravel(), np.ravel(fitted.coef_), rtol=1e-3)
    score = run.history[-1]["test_r2" if kind == "Linear" else "test_accuracy"]
    assert score == pytest.approx(fitted.score(flat.double(), answers), abs=1e-5)
