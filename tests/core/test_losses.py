"""Losses per example: by name against their formulas, torch's against torch, and wrong uses with the fix."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from dpfedexp import Sgd, fedavg, train
from dpfedexp.config import parse
from dpfedexp.core.losses import ALIASES, LOSSES, by_name, cross_entropy, loss_traits, plain, resolve
from dpfedexp.data import Federation
from dpfedexp.errors import InputError
from dpfedexp.trainers.fast.program import _differentiated, objective
from tests.trainers.shared import secured

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
def test_a_loss_of_numbers_is_its_formula_and_dimensions_of_size_1_never_broadcast(name):
    """One number per example may have a dimension of its own, and a squeezed row none: (b, 1) − (b,) would be [b, b]."""
    shapes = [((7, 3), (7, 3)), ((7, 1), (7,)), ((7,), (7, 1)), ((7, 1, 1), (7, 1)), ((7, 1), (7, 1)), ((), (1,))]
    for output, target in shapes:
        o, t = 2 * numbers(*target), numbers(*target, seed=1)
        for targets in (t.sigmoid(), (t > 0).long()):
            expected = FORMULAS[name](*(x.double().reshape(len(t), -1).numpy() for x in (o, targets)))
            np.testing.assert_allclose(LOSSES[name](o.reshape(output), targets), expected, **CLOSE)


def entropy(o, p):
    """−Σ p·log softmax(o) over the classes, in double precision."""
    o = o.double().numpy()
    return -(p.double().numpy() * (o - np.log(np.exp(o).sum(-1, keepdims=True)))).sum(-1)


def test_cross_entropy_and_nll_of_labels_sequences_and_probabilities_are_their_formulas():
    o, labels, soft = numbers(6, 4), torch.arange(6) % 4, numbers(6, 4, seed=2).softmax(1)
    expected = entropy(o, F.one_hot(labels, 4))
    np.testing.assert_allclose(cross_entropy(o, labels), expected, **CLOSE)
    np.testing.assert_allclose(LOSSES["nll"](o.log_softmax(1), labels), expected, **CLOSE)
    np.testing.assert_allclose(cross_entropy(o, soft), entropy(o, soft), **CLOSE)
    o, labels, soft = numbers(2, 3, 4), torch.tensor([[0, 1, 3], [2, -100, -100]]), numbers(2, 3, 4, seed=2).softmax(-1)
    each = entropy(o, F.one_hot(labels.clamp_min(0), 4))
    expected = [each[0].mean(), each[1, 0]]
    np.testing.assert_allclose(cross_entropy(o, labels), expected, **CLOSE)
    np.testing.assert_allclose(cross_entropy(o.movedim(-1, 1), labels), expected, **CLOSE)
    np.testing.assert_allclose(cross_entropy(o, soft), entropy(o, soft).mean(-1), **CLOSE)
    o, labels = numbers(8, 5, 7), torch.arange(40).reshape(8, 5) % 7
    plain = F.cross_entropy(o.movedim(-1, 1), labels, reduction="none").flatten(1).mean(1)
    assert torch.equal(cross_entropy(o, labels), plain), "where every position counts, bit for bit"


def test_names_may_be_written_in_the_usual_ways_and_a_configuration_takes_every_one():
    usual = {"Cross_Entropy": "cross-entropy", "BCE": "binary-cross-entropy", "smooth l1": "huber", "MSE": "mse"}
    for name, right in (usual | {"ce": "cross-entropy", "l1": "mae"}).items():
        assert by_name(name) is LOSSES[right]
    for name in [*LOSSES, *ALIASES]:
        assert parse({"run": {"loss": name}}).run_options()["loss"] == name
    with pytest.raises(InputError, match=r"loss is 'msee'.*Did you mean 'mse'"):
        parse({"run": {"loss": "msee"}})
    with pytest.raises(InputError, match=r"Known: .*\bbce\b.*cross-entropy.*\bmse\b"):
        resolve("quux", torch.zeros(2))


torch.manual_seed(0)
LOGITS, HALF = torch.randn(5, 3), torch.rand(5, 3)
ZERO_ONE, CLASSES = torch.randint(2, (5, 3)), torch.tensor([0, 2, 1, 1, 0])
ONE_BY_ONE = [
    (nn.MSELoss(), LOGITS, HALF),
    (nn.L1Loss(), LOGITS, HALF),
    (nn.HuberLoss(delta=0.3), LOGITS, HALF),
    (nn.SmoothL1Loss(beta=0.3), LOGITS, HALF),
    (nn.PoissonNLLLoss(), LOGITS, HALF),
    (nn.BCEWithLogitsLoss(), LOGITS, ZERO_ONE),
    (nn.BCEWithLogitsLoss(reduction="none"), LOGITS, ZERO_ONE),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), LOGITS, ZERO_ONE),
    (nn.BCELoss(), LOGITS.sigmoid(), ZERO_ONE),
    (nn.MSELoss(reduction="sum"), LOGITS, HALF),
    (nn.KLDivLoss(reduction="batchmean"), LOGITS.log_softmax(1), HALF.softmax(1)),
    (nn.SoftMarginLoss(), LOGITS, 2 * ZERO_ONE - 1),
    (nn.MultiLabelSoftMarginLoss(), LOGITS, ZERO_ONE),
    (nn.MultiMarginLoss(), LOGITS, CLASSES),
    (nn.CrossEntropyLoss(label_smoothing=0.1), LOGITS, CLASSES),
    (nn.CrossEntropyLoss(), LOGITS, HALF.softmax(1)),
    (nn.NLLLoss(), LOGITS.log_softmax(1), CLASSES),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("module", "outputs", "targets"), ONE_BY_ONE, ids=lambda v: type(v).__name__)
def test_an_example_has_the_loss_that_torch_gives_it_alone_under_vmap_too(module, outputs, targets):
    """float32 in another order: 1e-6 relative is some ten roundings."""
    loss = resolve(module, targets)
    alone = copy.deepcopy(module)
    if alone.reduction == "none":
        alone.reduction = "mean"
    both = targets if module.__class__ is nn.MultiMarginLoss or targets.dim() == 1 else targets.to(outputs.dtype)
    expected = torch.stack([alone(outputs[n : n + 1], both[n : n + 1]) for n in range(5)])
    torch.testing.assert_close(loss(outputs, targets), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(vmap(loss)(outputs[None], targets[None])[0], expected, rtol=1e-6, atol=1e-6)
    assert torch.isfinite(grad(lambda o: loss(o, targets).sum())(outputs)).all()


def test_class_weights_multiply_ignored_positions_do_not_count_and_classes_are_second_where_last_would_fit_too():
    weight = torch.tensor([1.0, 5.0, 0.5])
    losses = resolve(nn.CrossEntropyLoss(weight=weight), CLASSES)(LOGITS, CLASSES)
    torch.testing.assert_close(losses, weight[CLASSES] * cross_entropy(LOGITS, CLASSES))
    loss = resolve(nn.CrossEntropyLoss(ignore_index=2), CLASSES)
    assert (loss(LOGITS, CLASSES) == 0).tolist() == (CLASSES == 2).tolist()
    outputs, labels = torch.randn(2, 4, 3), torch.tensor([[0, 2, 1, 1], [2, 2, 2, 2]])
    expected = F.cross_entropy(outputs[0], labels[0], ignore_index=2)
    torch.testing.assert_close(loss(outputs, labels), torch.stack([expected, torch.zeros(())]))
    torch.testing.assert_close(loss(outputs.movedim(-1, 1), labels), torch.stack([expected, torch.zeros(())]))
    outputs, labels = torch.randn(2, 3, 3), torch.randint(3, (2, 3))
    expected = F.cross_entropy(outputs, labels, reduction="none").mean(1)
    torch.testing.assert_close(resolve(nn.CrossEntropyLoss(), labels)(outputs, labels), expected)
    torch.testing.assert_close(cross_entropy(outputs.movedim(1, -1), labels), expected)


def test_functions_of_torch_and_partial_ones_are_taken():
    torch.testing.assert_close(resolve(F.mse_loss, HALF)(LOGITS, HALF), LOSSES["mse"](LOGITS, HALF))
    smooth = resolve(functools.partial(F.cross_entropy, label_smoothing=0.2, reduction="mean"), CLASSES)
    expected = F.cross_entropy(LOGITS, CLASSES, label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(smooth(LOGITS, CLASSES), expected)
    assert loss_traits(smooth).kind == "classes"


def test_a_losss_own_options_are_in_the_name_by_which_a_run_knows_it():
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), label_smoothing=0.5)
    for loss, name in (
        (nn.MSELoss(), "MSELoss"),
        (nn.MSELoss(reduction="none"), "MSELoss"),
        (nn.MSELoss(reduction="sum"), "MSELoss(reduction=sum)"),
        (weighted, "CrossEntropyLoss(weight=[1.0, 2.0], label_smoothing=0.5)"),
    ):
        assert resolve(loss, HALF).__qualname__ == name
    big = [resolve(nn.CrossEntropyLoss(weight=torch.full((99,), v)), HALF).__qualname__ for v in (1.0, 1.0, 2.0)]
    assert big[0] == big[1] != big[2]


def test_a_loss_without_options_takes_the_programs_of_its_name():
    named = {nn.CrossEntropyLoss: cross_entropy, nn.BCEWithLogitsLoss: by_name("bce"), nn.MSELoss: by_name("mse")}
    for kind, right in (*named.items(), (lambda: F.cross_entropy, cross_entropy)):
        assert plain(resolve(kind(), HALF)) is right
    for other in (nn.CrossEntropyLoss(ignore_index=1), nn.MSELoss(reduction="sum"), nn.BCELoss()):
        assert plain(resolve(other, HALF)) not in named.values()


@pytest.mark.parametrize(
    ("name", "outputs", "targets"),
    [
        ("mse", (4, 6), (4, 6)),
        ("mse", (4, 1, 6), (4, 6)),
        ("mse", (4, 6), (4, 6, 1)),
        ("mse", (4, 3, 6), (4, 6, 3)),
        ("half-squared-error", (4, 1, 6), (4, 6)),
        ("bce", (4, 1, 6), (4, 6)),
        ("bce", (4, 6), (4, 6, 1)),
        ("ce", (4, 3, 6), (4, 6, 3)),
        ("ce", (4, 3, 6), "labels"),
    ],
)
def test_the_gradient_by_hand_is_the_losss_own(name, outputs, targets):
    """[n, …, s] against vmap(grad) of the loss, some labels ignored; 1e-6 is a few roundings of numbers near 1."""
    o, weights = torch.randn(outputs), torch.rand(4, 6)
    t = torch.randint(3, (4, 6)) if targets == "labels" else torch.rand(targets)
    if targets == "labels":
        t[:, 2] = -100
    by_hand, loss = objective(resolve(name, t)), resolve(name, t)
    torch.testing.assert_close(by_hand(o, t, weights), _differentiated(loss)(o, t, weights), rtol=1e-5, atol=1e-6)


rng = np.random.default_rng(0)
X = rng.normal(size=(24, 6)).astype(np.float32)
REAL, LABELS = X[:, 0] * 2, np.arange(24) % 3
BITS, MULTI = LABELS % 2, rng.integers(0, 2, size=(24, 4))
OWNERS = np.arange(24) % 4


def run(model, targets, loss, test=None):
    clients = Federation.from_arrays(X, targets, OWNERS)
    return train(model, clients, fedavg(), loss=loss, evaluate=test, local=Sgd(lr=0.1, steps=1), rounds=1)


def squares(o, t):
    return (o - t).square().reshape(len(o), -1).mean(1)


FLAT = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
FLATTEN = r"end the model with nn.Flatten\(0\), or give targets of shape \(n, 1\)"
WRONG = {
    "a number": (nn.Linear(6, 1), REAL, 3, "loss is 3; give a name such as 'mse'"),
    "three inputs": (nn.Linear(6, 1), REAL, nn.TripletMarginLoss(), "give a function"),
    "own function, one output": (nn.Linear(6, 1), REAL, squares, FLATTEN),
    "own function that gives b × b": (nn.Linear(6, 1), REAL, lambda o, t: (o - t) ** 2, FLATTEN),
    "own function, targets (n, 1)": (FLAT, REAL[:, None], squares, "give the targets the outputs' shape"),
    "a sequence with a dimension too many": (
        nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 1)),
        X * 2,
        lambda o, t: (o - t).square().flatten(1).mean(1),
        r"give the targets the outputs' shape, \(b, 6, 1\)",
    ),
    "as many outputs as rows are tried": (nn.Linear(6, 2), REAL, squares, r"shape \(b, 2\).*give the last layer"),
    "two outputs and one number": (nn.Linear(6, 2), REAL, "mse", "if the targets are classes, make them whole"),
    "three labels and four": (nn.Linear(6, 3), MULTI, "bce", "as many outputs as an example has targets"),
    "one flat output for labels": (FLAT, BITS, "cross-entropy", "choose loss='bce'"),
    "labels (n, 1)": (nn.Linear(6, 3), LABELS[:, None], "ce", r"give the labels as \(n,\)"),
    "real labels": (nn.Linear(6, 3), LABELS.astype(np.float32), "ce", "give whole numbers from 0"),
    "more labels than outputs": (nn.Linear(6, 2), LABELS, "ce", "give the last layer 3 outputs"),
    "a loss per label": (
        nn.Linear(6, 4),
        MULTI,
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.float(), reduction="none"),
        r"losses.flatten\(1\).mean\(1\)",
    ),
    "a float": (nn.Linear(6, 1), REAL, lambda o, t: 1.0, "the loss returned a float; it must return a tensor"),
    "test labels beyond": (nn.Linear(6, 3), LABELS, None, (X, LABELS + 1), "evaluate has .* from 1 to 3, .*number"),
    "a test set that broadcasts": (nn.Linear(6, 1), REAL[:, None], squares, (X, REAL), "evaluate has .*nn.Flatten"),
    "a broadcasting row": (nn.Linear(6, 1), REAL[:, None], squares, (X[:1], REAL[:1]), "evaluate has .*Flat"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_sentence_with_the_fix(case):
    *arguments, words = WRONG[case]
    with pytest.raises(InputError, match=words) as refusal:
        run(*arguments)
    assert "\n" not in str(refusal.value)


RIGHT = {
    "own function that drops the dimension": (nn.Linear(6, 1), REAL, lambda o, t: (o[:, 0] - t).square()),
    "own function, two columns": (nn.Linear(6, 1), np.c_[REAL, REAL], lambda o, t: t[:, 1] * (o[:, 0] - t[:, 0]) ** 2),
    "examples that see each other": (nn.Linear(6, 2), LABELS, lambda o, t: (o - o.mean(0)).square().sum(1) + 0 * t),
    "(n, 1) on both sides": (nn.Linear(6, 1), REAL[:, None], squares),
    "several labels, torch's": (nn.Linear(6, 4), MULTI, nn.BCEWithLogitsLoss(reduction="none")),
    "one logit": (nn.Linear(6, 1), BITS, "bce"),
    "one logit, torch's, real": (nn.Linear(6, 1), BITS.astype(np.float32), nn.BCEWithLogitsLoss()),
    "numbers as labels": (nn.Linear(6, 1), LABELS, "mse"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_use_trains_and_is_measured(case):
    model, targets, loss = RIGHT[case]
    result = run(model, targets, loss, (X, targets))
    assert np.isfinite(result.history[-1]["test_loss"])


def test_a_secure_run_refuses_a_broadcast_without_looking_at_a_client():
    clients = Federation.from_arrays(X, np.zeros(24, dtype=np.float32), OWNERS)
    with pytest.raises(InputError, match=FLATTEN):
        secured(nn.Linear(6, 1), clients, Sgd(lr=0.1, steps=1, max_examples=8), loss=squares)


def test_a_run_goes_on_with_the_same_loss_of_torch_and_not_with_other_options(tmp_path):
    clients = Federation.from_arrays(X, LABELS, OWNERS)
    settings = {"local": Sgd(lr=0.1, steps=1), "rounds": 2, "out": tmp_path / "run"}

    def run(last):
        train(nn.Linear(6, 3), clients, fedavg(), loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, last])), **settings)

    run(3.0)
    run(3.0)
    with pytest.raises(InputError, match=r"loss is 'dpfedexp.CrossEntropyLoss\(weight=\[1.0, 2.0, 4.0\]\)' here"):
        run(4.0)
