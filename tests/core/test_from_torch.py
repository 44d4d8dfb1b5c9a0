"""torch's losses per example against torch's own reduction of each example."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from dpfedexp.core.losses import binary_cross_entropy, cross_entropy, mean_squared_error, plain, reading_of, resolve
from dpfedexp.errors import InputError
from dpfedexp.trainers.fast.program import _differentiated, objective

torch.manual_seed(0)
LOGITS, REAL = torch.randn(5, 3), torch.rand(5, 3)
BITS, LABELS = torch.randint(2, (5, 3)), torch.tensor([0, 2, 1, 1, 0])
ONE_BY_ONE = [
    (nn.MSELoss(), LOGITS, REAL),
    (nn.L1Loss(), LOGITS, REAL),
    (nn.HuberLoss(delta=0.3), LOGITS, REAL),
    (nn.SmoothL1Loss(beta=0.3), LOGITS, REAL),
    (nn.PoissonNLLLoss(), LOGITS, REAL),
    (nn.BCEWithLogitsLoss(), LOGITS, BITS),
    (nn.BCEWithLogitsLoss(reduction="none"), LOGITS, BITS),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), LOGITS, BITS),
    (nn.BCELoss(), LOGITS.sigmoid(), BITS),
    (nn.MSELoss(reduction="sum"), LOGITS, REAL),
    (nn.KLDivLoss(reduction="batchmean"), LOGITS.log_softmax(1), REAL.softmax(1)),
    (nn.SoftMarginLoss(), LOGITS, 2 * BITS - 1),
    (nn.MultiLabelSoftMarginLoss(), LOGITS, BITS),
    (nn.MultiMarginLoss(), LOGITS, LABELS),
    (nn.CrossEntropyLoss(label_smoothing=0.1), LOGITS, LABELS),
    (nn.CrossEntropyLoss(), LOGITS, REAL.softmax(1)),
    (nn.NLLLoss(), LOGITS.log_softmax(1), LABELS),
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


def test_the_module_that_was_given_stays_as_it_is():
    module = nn.MSELoss()
    resolve(module, REAL)(LOGITS, REAL)
    assert module.reduction == "mean"


def test_class_weights_multiply_and_are_not_divided_by():
    weight = torch.tensor([1.0, 5.0, 0.5])
    losses = resolve(nn.CrossEntropyLoss(weight=weight), LABELS)(LOGITS, LABELS)
    torch.testing.assert_close(losses, weight[LABELS] * cross_entropy(LOGITS, LABELS))


def test_ignored_positions_of_a_sequence_do_not_count_and_an_ignored_example_has_no_loss():
    loss = resolve(nn.CrossEntropyLoss(ignore_index=2), LABELS)
    assert (loss(LOGITS, LABELS) == 0).tolist() == (LABELS == 2).tolist()
    outputs, labels = torch.randn(2, 4, 3), torch.tensor([[0, 2, 1, 1], [2, 2, 2, 2]])
    expected = F.cross_entropy(outputs[0], labels[0], ignore_index=2)
    torch.testing.assert_close(loss(outputs, labels), torch.stack([expected, torch.zeros(())]))
    torch.testing.assert_close(loss(outputs.movedim(-1, 1), labels), torch.stack([expected, torch.zeros(())]))


def test_torchs_own_loss_has_classes_second_where_last_would_fit_too():
    outputs, labels = torch.randn(2, 3, 3), torch.randint(3, (2, 3))
    expected = F.cross_entropy(outputs, labels, reduction="none").mean(1)
    torch.testing.assert_close(resolve(nn.CrossEntropyLoss(), labels)(outputs, labels), expected)
    torch.testing.assert_close(cross_entropy(outputs.movedim(1, -1), labels), expected)


def test_functions_of_torch_and_partial_ones_are_taken():
    torch.testing.assert_close(resolve(F.mse_loss, REAL)(LOGITS, REAL), mean_squared_error(LOGITS, REAL))
    smooth = resolve(functools.partial(F.cross_entropy, label_smoothing=0.2, reduction="mean"), LABELS)
    expected = F.cross_entropy(LOGITS, LABELS, label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(smooth(LOGITS, LABELS), expected)
    assert reading_of(smooth).kind == "classes"


def test_a_losss_own_options_are_in_the_name_by_which_a_run_knows_it():
    names = [
        resolve(m, REAL).__qualname__
        for m in (
            nn.MSELoss(),
            nn.MSELoss(reduction="none"),
            nn.MSELoss(reduction="sum"),
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), label_smoothing=0.5),
        )
    ]
    assert names[:3] == ["MSELoss", "MSELoss", "MSELoss(reduction=sum)"]
    assert names[3] == "CrossEntropyLoss(weight=[1.0, 2.0], label_smoothing=0.5)"
    big = [resolve(nn.CrossEntropyLoss(weight=torch.full((99,), v)), REAL).__qualname__ for v in (1.0, 1.0, 2.0)]
    assert big[0] == big[1] != big[2]


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()])
def test_a_loss_without_options_takes_the_programs_of_its_name(loss):
    named = {
        "CrossEntropyLoss": cross_entropy,
        "BCEWithLogitsLoss": binary_cross_entropy,
        "MSELoss": mean_squared_error,
    }
    assert plain(resolve(loss, REAL)) is named[type(loss).__name__]


def test_a_loss_with_options_does_not():
    for loss in (nn.CrossEntropyLoss(ignore_index=1), nn.MSELoss(reduction="sum"), nn.BCELoss()):
        assert plain(resolve(loss, REAL)) not in (cross_entropy, binary_cross_entropy, mean_squared_error)


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


def test_a_loss_of_three_inputs_says_what_to_give():
    with pytest.raises(InputError, match="GaussianNLLLoss, which takes more than outputs and targets; give a function"):
        resolve(nn.GaussianNLLLoss(), REAL)
