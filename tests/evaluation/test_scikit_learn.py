"""Metrics and a regression beside scikit-learn's figures for the same rows."""

import numpy as np
import pytest
import torch
from torch import nn

from dpfedexp import Federation, Sgd, fedavg, train
from dpfedexp.evaluation import on_test_set

linear_model = pytest.importorskip("sklearn.linear_model", reason="needs pip install scikit-learn")
measured = pytest.importorskip("sklearn.metrics")
ROWS = 5000
"""More than one batch of an evaluation."""


class Given(nn.Module):
    """Returns its inputs: the scores are the test."""

    def forward(self, x):
        return x


def metrics(scores: torch.Tensor, targets: torch.Tensor, loss: str) -> dict[str, float]:
    return on_test_set(scores, targets, loss, batch=512)(Given())


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(value: float) -> object:
    """Scores are float32, sums of them are not: 1e-6 is the rounding of the former."""
    return pytest.approx(value, rel=1e-6, abs=1e-9)


def test_accuracy_and_loss_of_classes():
    scores, labels = draws(ROWS, 5), (draws(ROWS, seed=1).abs() * 2).long().clamp_max(4)
    found = metrics(scores, labels, "cross-entropy")
    assert found["test_accuracy"] == close(measured.accuracy_score(labels, scores.argmax(1)))
    assert found["test_loss"] == close(measured.log_loss(labels, scores.double().softmax(1), labels=range(5)))


def test_accuracy_of_sequences_is_over_all_positions_that_count():
    scores, labels = draws(700, 9, 6), torch.randint(0, 6, (700, 9), generator=torch.Generator().manual_seed(2))
    labels[::3, 4:] = -100
    counted = labels != -100
    expected = measured.accuracy_score(labels[counted], scores.argmax(-1)[counted])
    assert metrics(scores, labels, "cross-entropy")["test_accuracy"] == close(expected)


@pytest.mark.parametrize("ties", [False, True])
def test_accuracy_and_auc_of_two_classes_by_one_logit_or_two(ties):
    labels = (draws(ROWS, seed=3) > 0.7).long()
    scores = draws(ROWS) + labels
    scores = scores.round() if ties else scores
    one = metrics(scores[:, None], labels, "bce")
    assert one["test_accuracy"] == close(measured.accuracy_score(labels, scores > 0))
    assert one["test_auc"] == close(measured.roc_auc_score(labels, scores))
    assert one["test_loss"] == close(measured.log_loss(labels, scores.double().sigmoid()))
    two = metrics(torch.stack([torch.zeros_like(scores), scores], 1), labels, "cross-entropy")
    assert two["test_auc"] == close(one["test_auc"])


def test_several_labels():
    labels = (draws(ROWS, 4, seed=4) > 0).float()
    scores = draws(ROWS, 4) + labels
    found = metrics(scores, labels, "bce")
    assert found["test_exact_match"] == close(measured.accuracy_score(labels, scores > 0))
    assert found["test_label_accuracy"] == close(1 - measured.hamming_loss(labels, scores > 0))


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 3)])
def test_errors_of_numbers(shape):
    targets = 3 * draws(*shape, seed=5) + 100
    scores = targets + draws(*shape)
    found = metrics(scores, targets, "mse")
    t, s = targets.double(), scores.double()
    assert found["test_mae"] == close(measured.mean_absolute_error(t, s))
    assert found["test_rmse"] == close(np.sqrt(measured.mean_squared_error(t, s)))
    assert found["test_r2"] == close(measured.r2_score(t, s))


@pytest.mark.parametrize("targets", ["(n,)", "(n, 1)"])
def test_a_regression_without_privacy_ends_at_the_least_squares(targets):
    """Equal clients that take one full-batch step a round are gradient descent on all rows, and nothing broadcasts."""
    x = draws(40, 10, 4)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 1.5 + 0.5 * draws(40, 10, seed=6)
    flat, numbers = x.flatten(0, 1), y.flatten()
    fitted = linear_model.LinearRegression().fit(flat.double(), numbers.double())
    given = y if targets == "(n,)" else y[..., None]
    run = train(
        nn.Linear(4, 1),
        Federation.from_clients(list(zip(x, given, strict=True))),
        fedavg(),
        local=Sgd(lr=0.4, steps=1),
        rounds=60,
        loss="mse",
        test=(flat, given.flatten(0, 1)),
        evaluate_every=60,
        progress=False,
        device="cpu",
    )
    # The slowest direction shrinks by (1 − 2·0.4·λ) a round, λ > 0.7 of these rows: after 60 rounds only float32 is left.
    np.testing.assert_allclose(run.model.weight.detach().numpy()[0], fitted.coef_, atol=1e-5)
    assert float(run.model.bias.detach()[0]) == pytest.approx(fitted.intercept_, abs=1e-5)
    assert run.history[-1]["test_r2"] == pytest.approx(fitted.score(flat.double(), numbers.double()), abs=1e-5)


def test_a_logistic_regression_without_privacy_ends_where_scikit_learns_does():
    x = draws(40, 10, 3)
    y = (x @ torch.tensor([1.0, -1.0, 0.5]) + draws(40, 10, seed=7) > 0.2).long()
    flat, labels = x.flatten(0, 1), y.flatten()
    fitted = linear_model.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(flat.double(), labels)
    run = train(
        nn.Linear(3, 1),
        Federation.from_clients(list(zip(x, y, strict=True))),
        fedavg(),
        local=Sgd(lr=2.0, steps=1),
        rounds=200,
        loss="bce",
        test=(flat, labels),
        evaluate_every=200,
        progress=False,
        device="cpu",
    )
    np.testing.assert_allclose(run.model.weight.detach().numpy(), fitted.coef_, rtol=1e-3)
    assert run.history[-1]["test_accuracy"] == pytest.approx(fitted.score(flat.double(), labels), abs=1e-9)
    scores = fitted.decision_function(flat.double())
    assert run.history[-1]["test_auc"] == pytest.approx(measured.roc_auc_score(labels, scores), abs=1e-4)
