"""Wrong uses of losses and test sets, each answered by one sentence with the fix; and right ones that look wrong."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfedexp import Sgd, cdp_fedexp, fedavg, train
from dpfedexp.data import Federation
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import InputError
from dpfedexp.trainers.execution import Execution

rng = np.random.default_rng(0)
X = rng.normal(size=(24, 6)).astype(np.float32)
REAL, LABELS = X[:, 0] * 2, np.arange(24) % 3
BITS, MULTI = LABELS % 2, rng.integers(0, 2, size=(24, 4))
OWNERS = np.arange(24) % 4


def run(model, targets, loss, test=None, metrics=None, **more):
    clients = Federation.from_arrays(X, targets, OWNERS)
    settings = {"local": Sgd(lr=0.1, steps=1), "rounds": 1, "progress": False}
    return train(model, clients, fedavg(), loss=loss, test=test, metrics=metrics, **settings, **more)


def squares(o, t):
    return (o - t).square().reshape(len(o), -1).mean(1)


def hinge(o, t):
    return (1 - (2 * t - 1) * o).clamp_min(0).mean(-1)


FLATTEN = r"end the model with nn.Flatten\(0\), or give targets of shape \(n, 1\)"
WRONG = {
    "a name that does not exist": (nn.Linear(6, 1), REAL, "mse2", None, "Did you mean 'mse'"),
    "a class": (nn.Linear(6, 1), REAL, nn.MSELoss, None, r"the class MSELoss; give one of it, MSELoss\(\)"),
    "a number": (nn.Linear(6, 1), REAL, 3, None, "loss is 3; it must be a name such as 'mse'"),
    "three inputs": (nn.Linear(6, 1), REAL, nn.TripletMarginLoss(), None, "give a function"),
    "own function, one output": (nn.Linear(6, 1), REAL, squares, None, FLATTEN),
    "own function that gives b × b": (nn.Linear(6, 1), REAL, lambda o, t: (o - t) ** 2, None, FLATTEN),
    "own function, whole targets": (nn.Linear(6, 1), BITS, hinge, None, FLATTEN),
    "own function, targets (n, 1)": (
        nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)),
        REAL[:, None],
        squares,
        None,
        "give the targets the outputs' shape",
    ),
    "a sequence with a dimension too many": (
        nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 1)),
        X * 2,
        lambda o, t: (o - t).square().flatten(1).mean(1),
        None,
        r"give the targets the outputs' shape, \(b, 6, 1\)",
    ),
    "a test set without targets": (nn.Linear(6, 1), REAL, "mse", (X,), r"a tuple of 1; it must be a pair \(inputs,"),
    "as many outputs as rows are tried": (
        nn.Linear(6, 2),
        REAL,
        squares,
        None,
        r"outputs of shape \(b, 2\).*give the last layer",
    ),
    "two outputs and one number": (nn.Linear(6, 2), REAL, "mse", None, "if the targets are classes, make them whole"),
    "torch's, two outputs and one number": (nn.Linear(6, 2), REAL, nn.MSELoss(), None, "as many outputs as an example"),
    "three labels and four": (nn.Linear(6, 3), MULTI, "bce", None, "as many outputs as an example has targets"),
    "one class": (nn.Linear(6, 1), BITS, None, None, "choose loss='bce' for 0/1 labels"),
    "one flat output for labels": (
        nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)),
        BITS,
        "cross-entropy",
        None,
        "choose loss='bce'",
    ),
    "labels (n, 1)": (nn.Linear(6, 3), LABELS[:, None], "ce", None, r"give the labels as \(n,\)"),
    "real labels": (nn.Linear(6, 3), LABELS.astype(np.float32), "ce", None, "give whole numbers from 0"),
    "more labels than outputs": (nn.Linear(6, 2), LABELS, "ce", None, "give the last layer 3 outputs"),
    "labels from 1": (nn.Linear(6, 3), LABELS + 1, nn.CrossEntropyLoss(), None, "number them from 0"),
    "labels −1 and 1": (nn.Linear(6, 1), 2 * BITS - 1, "bce", None, r"give \(targets \+ 1\) / 2"),
    "a reduced loss": (nn.Linear(6, 3), LABELS, lambda o, t: F.cross_entropy(o, t), None, "reduction='none'"),
    "a loss per label": (
        nn.Linear(6, 4),
        MULTI,
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.float(), reduction="none"),
        None,
        r"losses.flatten\(1\).mean\(1\)",
    ),
    "a float": (nn.Linear(6, 1), REAL, lambda o, t: 1.0, None, "the loss returned a float; it must return a tensor"),
    "test labels beyond": (nn.Linear(6, 3), LABELS, None, (X, LABELS + 1), "test has .* from 1 to 3, .*number them"),
    "test targets of another shape": (nn.Linear(6, 1), REAL, "mse", (X, MULTI * 1.0), "test has .* as many outputs"),
    "a test set that broadcasts": (
        nn.Linear(6, 1),
        REAL[:, None],
        squares,
        (X, REAL),
        r"test has .*end the model with nn.Flatten\(0\)",
    ),
    "a broadcasting test set of one row": (
        nn.Linear(6, 1),
        REAL[:, None],
        squares,
        (X[:1], REAL[:1]),
        "test has .*Flat",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_sentence_with_the_fix(case):
    model, targets, loss, test, words = WRONG[case]
    with pytest.raises(InputError, match=words) as refusal:
        run(model, targets, loss, test)
    assert "\n" not in str(refusal.value)


def test_metrics_need_a_test_set():
    with pytest.raises(InputError, match=r"give test=\(inputs, targets\) with them"):
        run(nn.Linear(6, 1), REAL, "mse", metrics={"bias": lambda o, t: (o - t).mean()})


RIGHT = {
    "own function that drops the dimension": (nn.Linear(6, 1), REAL, lambda o, t: (o[:, 0] - t).square()),
    "own function of two columns": (
        nn.Linear(6, 1),
        np.c_[REAL, REAL],
        lambda o, t: t[:, 1] * (o[:, 0] - t[:, 0]) ** 2,
    ),
    "examples that see each other": (nn.Linear(6, 2), LABELS, lambda o, t: (o - o.mean(0)).square().sum(1) + 0 * t),
    "(n, 1) on both sides": (nn.Linear(6, 1), REAL[:, None], squares),
    "several labels, torch's": (nn.Linear(6, 4), MULTI, nn.BCEWithLogitsLoss(reduction="none")),
    "one logit": (nn.Linear(6, 1), BITS, "bce"),
    "one logit, torch's, real": (nn.Linear(6, 1), BITS.astype(np.float32), nn.BCEWithLogitsLoss()),
    "numbers as labels": (nn.Linear(6, 1), LABELS, "mse"),
}


@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.parametrize("trainer", ["auto", "loop"])
def test_a_right_use_trains_and_is_measured(case, trainer):
    model, targets, loss = RIGHT[case]
    result = run(model, targets, loss, (X, targets), execution=Execution(trainer=trainer))
    assert np.isfinite(result.history[-1]["test_loss"])


def test_a_secure_run_refuses_a_broadcast_without_looking_at_a_client():
    clients = Federation.from_arrays(X, np.zeros(24, dtype=np.float32), OWNERS)
    with pytest.raises(InputError, match=FLATTEN):
        prepare(
            nn.Linear(6, 1),
            clients,
            cdp_fedexp(clip=1.0, noise_multiplier=1.0),
            local=Sgd(lr=0.1, steps=1, max_examples=8),
            rounds=1,
            loss=squares,
            secure=True,
        )


def test_a_character_model_has_its_accuracy_in_the_history():
    """It was 0.0 whatever the model said."""
    text = rng.integers(0, 5, size=(24, 7))
    clients = Federation.from_arrays(text[:, :-1], text[:, 1:], OWNERS)
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    test = (text[:, :-1], text[:, 1:])
    result = train(model, clients, fedavg(), local=Sgd(lr=0.5, steps=3), rounds=2, test=test, progress=False)
    with torch.no_grad():
        right = result.model(torch.from_numpy(test[0])).argmax(-1).numpy() == test[1]
    assert result.history[-1]["test_accuracy"] == pytest.approx(right.mean())
    assert right.any()


def test_own_metrics_are_in_the_history():
    bias = lambda o, t: (o - t).mean()  # noqa: E731
    result = run(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), REAL, "mse", (X, REAL), {"bias": bias})
    with torch.no_grad():
        off = result.model(torch.from_numpy(X)).numpy() - REAL
    assert result.history[-1]["test_bias"] == pytest.approx(off.mean(), abs=1e-6)


@pytest.mark.parametrize("real", [False, True], ids=["whole targets", "real targets"])
@pytest.mark.parametrize("loss", ["bce", nn.BCEWithLogitsLoss()])
def test_one_logit_and_several_have_right_numbers_in_the_history(real, loss):
    """They were an accuracy of 0.0 and of 1.5."""
    for outputs, bits in ((1, X[:, 0] > 0), (4, X[:, :4] > 0)):
        targets = bits.astype(np.float32 if real else np.int64)
        result = run(nn.Linear(6, outputs), targets, loss, (X, targets))
        with torch.no_grad():
            right = (result.model(torch.from_numpy(X)).numpy().reshape(bits.shape) > 0) == bits
        last = result.history[-1]
        if outputs == 1:
            assert last["test_accuracy"] == pytest.approx(right.mean())
            assert 0 <= last["test_auc"] <= 1
        else:
            assert last["test_label_accuracy"] == pytest.approx(right.mean())
            assert last["test_exact_match"] == pytest.approx(right.all(1).mean())
            assert "test_accuracy" not in last


def test_a_run_goes_on_with_the_same_loss_of_torch_and_not_with_other_options(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "private"))
    clients = Federation.from_arrays(X, LABELS, OWNERS)
    settings = {"local": Sgd(lr=0.1, steps=1), "rounds": 2, "progress": False, "checkpoint": tmp_path / "run"}

    def weighted(last):
        return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, last]))

    model = nn.Linear(6, 3)
    first = train(model, clients, fedavg(), loss=weighted(3.0), **settings)
    again = train(model, clients, fedavg(), loss=weighted(3.0), resume=True, **settings)
    assert torch.equal(first.model.weight, again.model.weight)
    with pytest.raises(InputError, match=r"loss is 'dpfedexp.CrossEntropyLoss\(weight=\[1.0, 2.0, 4.0\]\)' here"):
        train(model, clients, fedavg(), loss=weighted(4.0), resume=True, **settings)
