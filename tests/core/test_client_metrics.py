"""What clients measure: bounded whatever they hold, right without noise, and intervals that cover with it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from dpfedexp.core.client_metrics import WIDTH, ClientMetrics
from dpfedexp.core.losses import LOSSES, resolve
from dpfedexp.errors import InputError
from dpfedexp.evaluation import auc
from tests.sizes import sized

KINDS = {
    "10 classes": ("cross-entropy", (6, 10), lambda draw: torch.randint(0, 10, (6,), generator=draw)),
    "3 classes": ("cross-entropy", (6, 4, 3), lambda draw: torch.randint(0, 3, (6, 4), generator=draw)),
    "binary": ("binary-cross-entropy", (6, 1), lambda draw: torch.randint(0, 2, (6,), generator=draw).float()),
    "numbers": ("mse", (6, 2), lambda draw: torch.randn(6, 2, generator=draw)),
    "loss": (lambda o, t: (o.flatten(1).mean(1) - t).abs(), (6, 2), lambda draw: torch.randn(6, generator=draw)),
}


def batch(name, scale=1.0, seed=0):
    """A loss with outputs and targets of six rows."""
    (loss, shape, targets), draw = KINDS[name], torch.Generator().manual_seed(seed)
    return resolve(loss, None), scale * torch.randn(shape, generator=draw), targets(draw)


def sent_of(errors):
    """The mean of what clients with one row each send about these errors, [WIDTH]."""
    metrics = ClientMetrics("numbers")
    rows = metrics.vectors(LOSSES["mse"], errors, torch.zeros(len(errors))).mean(0, keepdim=True)
    return metrics.encode(rows)[0].double()


def noisy(metrics, mean, deviation, draws, seed):
    """What is read with so many draws of the noise."""
    noise = deviation * torch.randn(draws, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    return [metrics.read(mean + one, deviation) for one in noise]


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_follows_from_loss_and_shapes_and_reads_back_from_its_text(name):
    loss, outputs, targets = batch(name)
    metrics = ClientMetrics.of(loss, outputs, targets)
    assert str(metrics) == name
    assert ClientMetrics.parse(name) == metrics
    for text in ("classes", "1 classes", "ten classes", ""):
        with pytest.raises(InputError, match=r'such as "10 classes"'):
            ClientMetrics.parse(text)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(KINDS)),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e4, 1e30, math.inf, math.nan]),
    seed=st.integers(0, 1000),
)
def test_a_clients_vector_has_norm_at_most_a_half_whatever_the_model_says(name, scale, seed):
    loss, outputs, targets = batch(name, scale, seed)
    rows = ClientMetrics.parse(name).vectors(loss, outputs, targets)
    assert rows.shape == (6, WIDTH)
    assert bool(rows.isfinite().all())
    sent = ClientMetrics.parse(name).encode(torch.cat([rows, rows.mean(0, keepdim=True)]))
    assert float(sent.norm(dim=1).max()) <= 0.5 + 1e-6


def test_without_noise_loss_and_accuracy_are_the_means_over_clients():
    loss, outputs, targets = batch("10 classes")
    metrics = ClientMetrics("classes", 10)
    # Two clients of two and four rows have the same weight; one without rows is not counted.
    clients = [metrics.vectors(loss, outputs[a:b], targets[a:b]).mean(0) for a, b in ((0, 2), (2, 6))]
    found = metrics.read(torch.stack([*clients, torch.zeros(WIDTH)]).sum(0) / 3, 0.0)
    parts = [(outputs[a:b], targets[a:b]) for a, b in ((0, 2), (2, 6))]
    accuracy = sum(float((o.argmax(1) == t).float().mean()) for o, t in parts) / 2
    bounded = [F.cross_entropy(o, t, reduction="none").clamp_max(2 * math.log(10)) for o, t in parts]
    assert found["clients_accuracy"] == pytest.approx(accuracy, abs=1e-5)
    assert found["clients_loss"] == pytest.approx(sum(float(one.mean()) for one in bounded) / 2, abs=1e-4)
    assert found["clients_loss_low"] == pytest.approx(found["clients_loss_high"])


def test_without_noise_auc_is_that_of_scores_in_bins_and_what_bins_hide_is_not_claimed():
    """The attack: the scores of a rare event share a bin, and the interval of 0.51 was a point."""
    metrics, draw = ClientMetrics("binary"), torch.Generator().manual_seed(4)
    positive = torch.rand(4000, generator=draw) < 0.3
    for shift, scale, apart in ((-5.5, 0.3, 2.0), (0.0, 0.03, 2.0), (0.0, 1.0, 2.0), (-0.5, 1.0, 1.2)):
        scores = shift + scale * (torch.randn(4000, generator=draw) + apart * positive)
        row = metrics.vectors(LOSSES["binary-cross-entropy"], scores, positive.float()).mean(0)
        found = metrics.read(row, 0.0)
        if "clients_auc" in found:
            assert found["clients_auc_low"] <= auc(scores, positive) <= found["clients_auc_high"]
    # The last scores are spread over many bins.
    assert found["clients_auc"] == pytest.approx(auc(scores, positive), abs=0.01)
    assert found["clients_accuracy"] == pytest.approx(float(((scores > 0) == positive).float().mean()), abs=1e-5)


def test_without_noise_quantiles_are_those_of_the_errors():
    draw = torch.Generator().manual_seed(2)
    error = torch.randn(4000, generator=draw)
    found = ClientMetrics("numbers").read(sent_of(error), 0.0)
    assert found["clients_error_median"] == pytest.approx(float(error.abs().median()), rel=0.024)
    assert found["clients_error_p90"] == pytest.approx(float(error.abs().quantile(0.9)), rel=0.024)


def test_rows_without_a_label_that_counts_say_nothing_and_what_is_not_a_number_is_wrong():
    metrics, loss = ClientMetrics("classes", 3), LOSSES["cross-entropy"]
    outputs = torch.tensor([[[9.0, 0, 0], [0, 9.0, 0]]] * 2)
    targets = torch.tensor([[0, 1], [-100, -100]])
    assert metrics.read(metrics.vectors(loss, outputs, targets).mean(0), 0.0)["clients_accuracy"] == pytest.approx(1.0)
    broken = metrics.vectors(loss, outputs * math.nan, torch.zeros(2, 2, dtype=torch.int64)).mean(0)
    assert metrics.read(broken, 0.0)["clients_accuracy"] == pytest.approx(0.0, abs=1e-6)


def clients_of(name, count, seed=0):
    """The vectors of so many clients with rows of their own, [count, WIDTH]."""
    rows = []
    for client in range(count):
        loss, outputs, targets = batch(name, 1.0, seed * 10_000 + client)
        outputs = outputs + (2.0 * targets[:, None] - 1.0 if name == "binary" else 0.0)
        rows.append(ClientMetrics.parse(name).vectors(loss, outputs, targets).mean(0))
    return ClientMetrics.parse(name).encode(torch.stack(rows)).double()


@pytest.mark.parametrize("name", ["10 classes", "3 classes", "binary"])
def test_intervals_cover_what_there_is_without_noise(name):
    """95% of 2000 draws: 92 to 98% is more than six standard errors on either side. Quantiles have a test of their own."""
    mean, metrics = clients_of(name, 300).mean(0), ClientMetrics.parse(name)
    truth = metrics.read(mean, 0.0)
    found = noisy(metrics, mean, 2.0 / 300, 2000, seed=3)
    values = [key for key in truth if not key.endswith(("_low", "_high"))]
    assert values
    for key in values:
        seen = [one for one in found if key in one]
        assert len(seen) > 0.9 * len(found)
        share = sum(one[f"{key}_low"] <= truth[key] <= one[f"{key}_high"] for one in seen) / len(seen)
        # An AUC whose bins hide something may cover more.
        assert 0.92 <= share <= (1.0 if key.endswith("auc") else 0.98), key


@pytest.mark.parametrize("name", ["10 classes", "binary"])
def test_a_hostile_client_moves_a_metric_by_no_more_than_its_bound(name):
    """A vector of norm ½ in place of another: each mean moves by at most its range over √share and the number of clients."""
    rows, metrics = clients_of(name, 200), ClientMetrics.parse(name)
    before = metrics.read(rows.mean(0), 0.0)
    bounds = {"clients_loss": metrics.largest_loss / math.sqrt(0.2), "clients_accuracy": 1 / math.sqrt(0.2)}
    for seed in range(50):
        hostile = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        after = metrics.read(torch.cat([rows[1:], 0.5 * hostile[None] / hostile.norm()]).mean(0), 0.0)
        for key, bound in bounds.items():
            # A little more than the range: the count moves too.
            assert abs(after[key] - before[key]) <= 1.6 * bound / 200


def test_nothing_is_said_where_noise_hides_how_many_clients_answered():
    rows = clients_of("10 classes", 20)
    assert ClientMetrics("classes", 10).read(rows.mean(0), 0.2) == {}
    assert ClientMetrics("classes", 10).read(torch.zeros(WIDTH), 0.0) == {}


def test_sampled_clients_have_wider_intervals():
    mean = clients_of("10 classes", 100).mean(0)
    metrics = ClientMetrics("classes", 10)
    alone, sampled = metrics.read(mean, 0.001), metrics.read(mean, 0.001, spread=0.9 / 100)
    assert sampled["clients_accuracy_high"] > alone["clients_accuracy_high"]


def test_without_noise_the_interval_of_a_quantile_is_its_bin():
    """All errors are equal, so nothing tells where in the bin they are: the interval was the middle of the bin alone."""
    for error in (0.0, 1.1e-4, 0.32, 0.55, 1.0, 17.0):
        found = ClientMetrics("numbers").read(sent_of(torch.full((50,), error)), 0.0)
        for name in ("clients_error_median", "clients_error_p90"):
            low, high = found[f"{name}_low"], found[f"{name}_high"]
            assert low * (1 - 1e-9) <= error <= high, (error, found)
            assert high <= max(1.024 * low, 1.024e-4), "there are 100 bins a decade"


def test_the_width_that_is_announced_is_that_of_the_share_below_a_quantile():
    """Errors spread evenly over the ten decades: a share of 0.1 is a decade."""
    metrics = ClientMetrics("numbers")
    found = noisy(metrics, sent_of(10 ** torch.linspace(-4, 6, 5000)), 0.005, 50, seed=8)
    widths = [math.log10(one["clients_error_median_high"] / one["clients_error_median_low"]) / 20 for one in found]
    assert 0.8 < sum(widths) / 50 / metrics.half_width(0.005) < 1.1


NORMAL = torch.randn(2000, generator=torch.Generator().manual_seed(5))
UNIFORM = torch.rand(2000, generator=torch.Generator().manual_seed(6))
ERRORS = {
    "normal": 0.6 * NORMAL.abs(),
    "cauchy": (math.pi * (UNIFORM - 0.5)).tan().abs(),
    "lognormal": 1000 * (2 * NORMAL).exp(),
    "mixture": torch.where(UNIFORM < 0.7, 0.1, 30.0) * NORMAL.abs(),
    "integers": (2 * NORMAL).round().abs(),
    "equal": torch.full((2000,), 0.32),
}
SHARED = ("integers", "equal")
"""Errors that repeat their values."""


@pytest.mark.parametrize("deviation", sized([0.004], [0.004, 0.006]))
@pytest.mark.parametrize("errors", sized(["mixture", "integers"], [*ERRORS]))
def test_intervals_of_quantiles_cover_the_errors_of_all_rows(errors, deviation):
    """The quantile of the rows themselves, not of their bins. 92 to 98% of 1000 draws is four standard errors on either side.

    Where a bin holds a large share of the rows (`SHARED`), the interval cannot be narrower than the bin, and covers more.
    """
    values = ERRORS[errors]
    found = noisy(ClientMetrics("numbers"), sent_of(values), deviation, 1000, seed=7)
    for name, level in (("median", 0.5), ("p90", 0.9)):
        true, key = float(values.double().quantile(level, interpolation="higher")), f"clients_error_{name}"
        seen = [(one[f"{key}_low"] * (1 - 1e-6), one[f"{key}_high"] * (1 + 1e-6)) for one in found if key in one]
        assert len(seen) > 900
        share = sum(low <= true <= high for low, high in seen) / len(seen)
        assert 0.92 <= share <= (1.0 if errors in SHARED else 0.98), (key, share)
