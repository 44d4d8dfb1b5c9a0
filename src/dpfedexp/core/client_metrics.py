"""Private evaluation: a bounded vector of metrics per client, and metrics with intervals from the noisy sum.

Each client has the same weight, however many rows it holds. A client without rows sends zeros and is not counted.
"""

import functools
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import torch
from torch import Tensor

from dpfedexp.accounting.events import EVALUATION as EVALUATION
from dpfedexp.core.losses import Loss, class_dimension, loss_traits, match_shapes, output_tensor, read
from dpfedexp.core.sums import MAX_SHARE
from dpfedexp.errors import InputError

Kind = Literal["classes", "binary", "numbers", "loss"]
_SCORES, _MAGNITUDES = 12, 1000
WIDTH = 1 + _MAGNITUDES
"""The length of a client's vector, for all kinds of metrics."""
NORMAL_95 = 1.959964
AT_BOUND = "_at_bound"
"""Suffix of the history field that is 1 where a metric's interval reaches the metric's bound: the true value may be larger."""
_COUNT = 0.2
"""The share of the squared norm that encodes the count of clients; the metrics share the rest."""
_SHARES: dict[Kind, dict[str, float]] = {
    "classes": {"loss": 0.4, "accuracy": 0.4},
    "binary": {"loss": 0.2, "accuracy": 0.2, "auc": 0.4},
    "numbers": {"error": 0.8},
    "loss": {"loss": 0.8},
}
_SMALLEST, _DECADES = -4.0, 10.0
"""Errors and losses are sorted into bins on a logarithmic scale, from 10⁻⁴ to 10⁶: a bin is 2.3% wide."""
_ROUNDING = 1e-6
"""The error of a cumulative share in float32."""
_LEVELS = {"median": 0.5, "p90": 0.9}
_LARGEST_SCORE, _NEAR = 8.0, 0.25
"""Scores are sorted into bins on the scale asinh(score/¼), which is finer near 0, up to ±8."""


@dataclass(frozen=True)
class ClientMetrics:
    """The metrics that every client measures.

    Formal guarantee: a client's vector has a norm of at most ½ for any data, the bound to which `Mechanism.asking` clips. So one
    client changes a mean that is computed from the sum by at most the metric's range over the number of clients, times a constant
    of this file.

    Args:
        kind: "classes" (loss, accuracy), "binary" (loss, accuracy, AUC), "numbers" (median and 90% quantile of the absolute error),
            or "loss" (median and 90% quantile of the loss) for any other loss.
        classes: the number of classes, which bounds the loss.
    """

    kind: Kind
    classes: int = 2

    @classmethod
    def parse(cls, text: str) -> Self:
        """Make the metrics that the setting `evaluate` names: "10 classes", "binary", "numbers" or "loss"."""
        text = text.strip()
        if text in ("binary", "numbers", "loss"):
            return cls(text)  # type: ignore[arg-type]
        many = re.fullmatch(r"(\d+) classes", text)
        if many is None or int(many[1]) < 2:
            kinds = '"10 classes", "binary", "numbers" or "loss"'
            raise InputError(f"evaluate is {text!r}; it must say what clients measure, such as {kinds}.")
        return cls("classes", int(many[1]))

    @classmethod
    def of(cls, loss: Loss, outputs: Any, targets: Tensor) -> Self:
        """Choose the metrics for a loss, from the shapes and types of outputs and targets; their values are not read."""
        traits, outputs = loss_traits(loss), read(loss, outputs)
        if not isinstance(outputs, Tensor):
            return cls("loss")
        at = class_dimension(outputs, targets, second=traits.second)
        if traits.kind == "classes" and not targets.is_floating_point() and at is not None:
            return cls("classes", outputs.shape[at])
        return cls(traits.kind if traits.kind in ("binary", "numbers") else "loss")

    def __str__(self) -> str:
        return f"{self.classes} classes" if self.kind == "classes" else self.kind

    @property
    def largest_loss(self) -> float:
        """The bound to which losses are clamped: twice the loss of a uniform prediction."""
        return 2.0 * math.log(self.classes)

    def vectors(self, loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
        """One vector per example, [b, WIDTH]; a client sends the mean of its examples' vectors, `encode`d."""
        losses = torch.nan_to_num(loss(outputs, targets).float(), nan=torch.inf)
        outputs, traits, shares = read(loss, outputs), loss_traits(loss), _SHARES[self.kind]
        columns = [torch.full_like(losses, MAX_SHARE * math.sqrt(_COUNT))[:, None]]
        if self.kind in ("classes", "binary"):
            bounded = losses.clamp(0.0, self.largest_loss) / self.largest_loss
            right = self._right(loss, output_tensor(outputs), targets)
            columns += [math.sqrt(shares["loss"]) * (bounded - MAX_SHARE)[:, None]]
            columns += [math.sqrt(shares["accuracy"]) * (right - MAX_SHARE)[:, None]]
        if self.kind == "binary":
            scores, wanted = match_shapes("binary", output_tensor(outputs).float(), targets)
            scores = scores.logit() if traits.threshold else scores
            limit = math.asinh(_LARGEST_SCORE / _NEAR)
            place = (torch.asinh(torch.nan_to_num(scores, nan=0.0) / _NEAR) / limit + 1.0) * (_SCORES / 2)
            both = [_in_bins(place, _SCORES, (wanted > 0.5) == positive) for positive in (True, False)]
            columns.append(MAX_SHARE * math.sqrt(shares["auc"]) * torch.cat(both, dim=1))
        if self.kind in ("numbers", "loss"):
            values, (share,) = losses, shares.values()
            if self.kind == "numbers":
                found, wanted = match_shapes("numbers", output_tensor(outputs).float(), targets)
                values = ((found.exp() if traits.log else found) - wanted).abs()
            place = (torch.log10(torch.nan_to_num(values, nan=torch.inf).abs()) - _SMALLEST) * (_MAGNITUDES / _DECADES)
            columns.append(MAX_SHARE * math.sqrt(share) * _in_bins(place, _MAGNITUDES))
        found = torch.cat(columns, dim=1)
        if self.kind == "classes":
            # A row whose labels are all ignored abstains.
            found = found * (targets != traits.ignored).reshape(len(targets), -1).any(1)[:, None]
        return torch.nn.functional.pad(found, (0, WIDTH - found.shape[1]))

    def encode(self, means: Tensor) -> Tensor:
        """What clients send, [n, WIDTH], from the means of their examples' vectors.

        A histogram is sent as its half sums. The half sums of noisy half sums are its cumulative shares, with noise that grows with
        the logarithm of the number of bins, where sums over noisy bins have noise that grows with its root (Fichtenberger,
        Henzinger and Upadhyay 2023). A client's norm is at most that of a histogram with one bin.
        """
        if self.kind not in ("numbers", "loss"):
            return means
        half = _half_sums().to(means)
        return torch.cat([means[:, :1], means[:, 1:] @ half.T / half[:, 0].norm()], dim=1)

    def _right(self, loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
        """The share of each example's labels that the model predicts correctly, [b]."""
        traits = loss_traits(loss)
        if self.kind == "binary":
            found, wanted = match_shapes("binary", outputs, targets)
            right = ((found > traits.threshold) == (wanted > 0.5)) & found.isfinite()
            return right.float().reshape(len(targets), -1).mean(1)
        at = class_dimension(outputs, targets, second=traits.second) or 1
        right = ((outputs.argmax(at) == targets) & outputs.isfinite().all(at)).reshape(len(targets), -1).float()
        counted = (targets != traits.ignored).reshape(len(targets), -1).float()
        return (right * counted).sum(1) / counted.sum(1).clamp_min(1.0)

    def read(self, mean: Tensor, deviation: float, spread: float = 0.0) -> dict[str, float]:
        """Compute the metrics and their 95% intervals, by field of the history.

        Args:
            mean: the noisy sum of the clients' vectors over the public number of clients, [WIDTH].
            deviation: the standard deviation of the noise in each coordinate of `mean`.
            spread: (1 − q)/M if clients are sampled at rate q and M of them are expected; 0 if all take part. The
                sampling variance of a metric with mean p in [0, 1] is at most spread·p(1 − p), its value for a metric
                that is 0 or 1 for each client.

        Returns:
            The metrics; {} if the noise hides how many clients answered.
        """
        values = mean.double().cpu()
        unit = MAX_SHARE * math.sqrt(_COUNT)
        answered, noise = float(values[0]) / unit, deviation / unit
        if not answered > 4.0 * noise or answered <= 0.0:
            return {}
        found: dict[str, float] = {}
        spread = spread / answered
        if self.kind in ("classes", "binary"):
            for at, (name, high) in enumerate({"loss": self.largest_loss, "accuracy": 1.0}.items(), 1):
                scale = math.sqrt(_SHARES[self.kind][name])
                share = float(values[at]) / scale / answered
                variance = (deviation / scale / answered) ** 2 + (share * noise / answered) ** 2
                variance += spread * max(0.0, 0.25 - share * share)
                found |= _interval(name, share + MAX_SHARE, math.sqrt(variance), high)
            if found["clients_loss_high"] >= self.largest_loss:
                found[f"clients_loss{AT_BOUND}"] = 1.0
        if self.kind == "binary":
            unit = MAX_SHARE * math.sqrt(_SHARES["binary"]["auc"])
            positive, negative = (values[3 : 3 + 2 * _SCORES] / unit).split(_SCORES)
            found |= _auc(positive / answered, negative / answered, deviation / unit / answered, spread)
        if self.kind in ("numbers", "loss"):
            ((name, share),) = _SHARES[self.kind].items()
            unit = MAX_SHARE * math.sqrt(share) / float(_half_sums()[:, 0].norm())
            noises = (deviation / unit / answered, noise / answered, spread)
            for label, level in _LEVELS.items():
                found |= _quantile(f"{name}_{label}", values[1:] / unit / answered, level, *noises)
        return found

    def half_width(self, deviation: float) -> float:
        """Half the width of the 95% interval that the noise gives a share in [0, 1], if every client answers."""
        noise = NORMAL_95 * deviation / math.sqrt(max(_SHARES[self.kind].values()))
        in_bins = self.kind in ("numbers", "loss")
        return noise * float(_half_sums()[:, 0].square().sum()) / MAX_SHARE if in_bins else noise


def _in_bins(place: Tensor, bins: int, counted: Tensor | None = None) -> Tensor:
    """The share of an example's values in each bin, [b, bins]; values beyond the ends fall into the end bins."""
    at = place.reshape(len(place), -1).floor().clamp(0, bins - 1)
    ones = torch.ones_like(at) if counted is None else counted.reshape(len(place), -1).to(at)
    return at.new_zeros(len(at), bins).scatter_add(1, at.long(), ones) / at.shape[1]


@functools.cache
def _half_sums() -> Tensor:
    """The square root of the matrix of cumulative sums over the bins, lower triangular with equal diagonals."""
    index = torch.arange(_MAGNITUDES)
    steps = 1.0 - 0.5 / index.double().clamp_min(0.5)
    column = torch.where(index > 0, steps, 1.0).cumprod(0)
    back = index[:, None] - index
    return torch.where(back >= 0, column[back.clamp_min(0)], 0.0)


def _interval(name: str, share: float, deviation: float, high: float = 1.0) -> dict[str, float]:
    """The history fields of a metric in [0, `high`]: its value and both ends of its 95% interval, clamped to the range."""
    low, middle, top = (high * min(max(share + sign * NORMAL_95 * deviation, 0.0), 1.0) for sign in (-1.0, 0.0, 1.0))
    return {f"clients_{name}": middle, f"clients_{name}_low": low, f"clients_{name}_high": top}


def _auc(positive: Tensor, negative: Tensor, deviation: float, spread: float) -> dict[str, float]:
    """The AUC and its interval from noisy histograms of scores, ties within a bin count half; {} where noise or ties hide it.

    Scores within a bin may have any order, so the variance includes that of a uniform value between the best and the worst order.
    """
    p, n = float(positive.sum()), float(negative.sum())
    if min(p, n) <= 3.0 * deviation * math.sqrt(_SCORES):
        return {}
    below = negative.cumsum(0) - negative / 2
    above = p - positive.cumsum(0) + positive / 2
    value = float(positive @ below) / (p * n)
    slope = torch.cat([(below / n - value) / p, (above / p - value) / n])
    ties = float((positive.clamp_min(0.0) * negative.clamp_min(0.0)).sum()) / (p * n)
    if ties > 0.5:
        return {}
    variance = deviation**2 * float(slope.square().sum()) + ties**2 / 12.0
    variance += spread * max(0.0, value * (1.0 - value)) * (1.0 / p + 1.0 / n)
    return _interval("auc", value, math.sqrt(variance))


def _quantile(name: str, sums: Tensor, level: float, deviation: float, noise: float, spread: float) -> dict[str, float]:
    """A quantile and its interval from noisy half sums; {} where the cumulative share reaches the level in the last bin only.

    Noisy shares that decrease are averaged (isotonic regression). The interval has all bins in which the quantile may be, whole, so
    it covers at least 95% for any errors, and more where bins are wide for the noise, as for errors that are all equal.
    """
    from scipy.optimize import isotonic_regression

    root = _half_sums()
    rising = isotonic_regression((root @ sums).numpy())

    def width(weights: Tensor) -> float:
        variance = float(weights @ weights) * deviation**2 + (level * noise) ** 2 + spread * level * (1.0 - level)
        return NORMAL_95 * math.sqrt(variance) + _ROUNDING

    lows, places, high, widest = [], [], 0, width(root[-1])
    for first, end in pairwise(rising.blocks.tolist()):
        share = float(rising.x[first])
        near = abs(share - level) <= widest
        wide = width(root[first:end].mean(0)) if near else 0.0
        lows += [first] * (share + wide >= level)
        places += [first] * (share + _ROUNDING >= level)
        high = end if share - wide < level else high
    if not places or places[0] == _MAGNITUDES - 1:
        return {}  # the last bin has no upper end

    def value(at: float) -> float:
        return math.pow(10.0, _SMALLEST + at * (_DECADES / _MAGNITUDES))

    return {
        f"clients_{name}": value(places[0] + 0.5),
        f"clients_{name}_low": value(lows[0]) if lows[0] else 0.0,
        f"clients_{name}_high": value(min(high + 1, _MAGNITUDES)),
    }
