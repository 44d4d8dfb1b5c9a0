"""Early ends of a run, by a callback or an interrupt. Both return the run so far."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from dpfedexp.accounting.statement import Source
from dpfedexp.engine.outlets import METRICS, right
from dpfedexp.errors import checked, is_count, is_number, nearest, require

if TYPE_CHECKING:
    from dpfedexp.engine.plan import Advice
    from dpfedexp.engine.run import Run

Record = dict[str, Any]
OnRound = Callable[[Record], object]
"""A callback with a round's record. It ends the run by raising or returning `Stop`."""


@checked
class Stop(Exception):
    """End a run, when raised or returned by `on_round`. The run so far is returned with its statement.

    Args:
        reason: the reason, for `Run.stopped`.
        source: the data that the decision used, for the statement: "private" (values released with noise), "public" (public
            data), "test" (the server's own test data) or "unknown".

    >>> Stop("the loss is low enough", source="public").source
    'public'
    """

    def __init__(self, reason: str = "on_round stopped it", source: Source = "unknown") -> None:
        _check_source(source)
        super().__init__(reason)
        self.reason = reason
        self.source: Source = source


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt whose `run` holds the completed rounds, with their privacy statement."""

    def __init__(self, sentence: str, run: "Run") -> None:
        super().__init__(sentence)
        self.run = run


@checked
@dataclass
class EarlyStopping:
    """End a run when a metric has not improved for a number of measurements; pass an instance as `on_round`.

    The callback reads a round's record, which holds released values and the server's own metrics. The privacy statement names the
    source of the metric, and what follows for the guarantee.

    Args:
        metric: the field of the record to monitor.
        patience: the number of consecutive measurements without improvement after which the run ends.
        min_delta: the smallest change that counts as an improvement.
        better: "lower" or "higher"; by default higher for names that end in accuracy or auc, lower for all others.
        source: the data behind the metric: "private" (released with noise), "public", "test" or "unknown". By default "private" for
            released metrics, "test" for names that start with test_, and "unknown" for others.

    >>> stop = EarlyStopping("test_loss", patience=2)
    >>> [stop({"round": t, "test_loss": loss}) for t, loss in enumerate([3.0, 2.0, 2.5], 1)]
    [None, None, None]
    >>> stop({"round": 4, "test_loss": 2.1}).reason
    'test_loss has not improved on 2 (round 2) for 2 measurements.'
    """

    metric: str = "test_loss"
    patience: int = 5
    min_delta: float = 0.0
    better: Literal["lower", "higher"] | None = None
    source: Source | None = None
    _best: float = field(default=math.nan, init=False, repr=False)
    _best_round: int = field(default=0, init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        require(is_count(self.patience), f"patience is {self.patience!r}; it must be a positive whole number.")
        require(
            is_number(self.min_delta) and self.min_delta >= 0,
            f"min_delta is {self.min_delta!r}; it must be a non-negative number.",
        )
        require(self.better in (None, "lower", "higher"), f"better is {self.better!r}; it must be 'lower' or 'higher'.")
        released = right(METRICS, self.metric) == "released"
        if self.source is None:
            self.source = "private" if released else "test" if self.metric.startswith("test_") else "unknown"
        _check_source(self.source)
        require(
            self.source != "private" or released,
            f"source is 'private', but no mechanism releases {self.metric!r}; write 'public' or 'test', the data it comes from.",
        )

    def __call__(self, record: Record) -> Stop | None:
        """Return a `Stop`, or None to continue. A round without the metric is skipped."""
        if self.metric not in record:
            measured = [name for name in record if name.startswith("test_")]
            require(
                not (measured and self.metric.startswith("test_")),
                f"EarlyStopping monitors {self.metric!r}, which is not measured.{nearest(self.metric, measured)}",
            )
            return None
        value = record[self.metric]
        value = float(value) if isinstance(value, int | float) else math.nan
        if self._improves(value):
            self._best, self._best_round, self._since = value, record["round"], 0
        else:
            self._since += 1
        if self._since < self.patience:
            return None
        best = "no finite value" if math.isnan(self._best) else f"{self._best:.4g} (round {self._best_round})"
        count = f"{self._since} measurement{'' if self._since == 1 else 's'}"
        return Stop(f"{self.metric} has not improved on {best} for {count}.", self.source or "unknown")

    def on_resume(self, history: Sequence[Record]) -> Stop | None:
        """Restore the state after these rounds, so that a resumed run stops where an uninterrupted one would."""
        self._best, self._best_round, self._since = math.nan, 0, 0
        stop = None
        for record in history:
            stop = self(record)
        return stop

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value) or math.isnan(self._best):
            return math.isfinite(value)
        better = self.better or ("higher" if self.metric.endswith(("accuracy", "auc")) else "lower")
        gain = value - self._best if better == "higher" else self._best - value
        return gain > 0.0 and gain >= self.min_delta


@checked
class OnAdvice:
    """A callback for the advice about a run (docs/advice.md), not for its records; pass an instance as `on_round`.

    Any callback may have a method `on_advice`. If no callback has one, warnings become an `AdviceWarning`.

    Args:
        function: called with every `Advice`.
    """

    def __init__(self, function: Callable[["Advice"], object]) -> None:
        require(callable(function), f"OnAdvice is given {function!r}; it must be a function of one advice.")
        self.on_advice = function

    def __call__(self, record: Record) -> None:
        pass


def callbacks_of(on_round: OnRound | Iterable[OnRound] | None) -> tuple[OnRound, ...]:
    """Convert one callback, several or None to a tuple; raises `InputError` for anything else."""
    if on_round is None:
        return ()
    many = tuple(on_round) if isinstance(on_round, list | tuple) else (on_round,)
    for one in many:
        require(
            callable(one) and not isinstance(one, type),
            f"on_round is {one!r}; it must be a function of one record, or a list of such functions.",
        )
    return many


def notify_callbacks(callbacks: Sequence[OnRound], record: Record) -> Stop | None:
    """Call every callback with a round's record; returns the first `Stop`."""
    answers = []
    for callback in callbacks:
        try:
            answers.append(callback(record))
        except Stop as stop:
            answers.append(stop)
    return next((answer for answer in answers if isinstance(answer, Stop)), None)


def call_hook(callbacks: Sequence[OnRound], method: str, value: object) -> Stop | None:
    """Call a hook of all callbacks that define it; returns the first `Stop`.

    `on_train_begin` gets the facts of the run before its first round, `on_resume` the records of the rounds before, `on_advice`
    advice, and `on_train_end` the run.
    """
    asked = [getattr(callback, method, None) for callback in callbacks]
    answers = [one(value) for one in asked if callable(one)]
    return next((stop for stop in answers if isinstance(stop, Stop)), None)


def _check_source(source: object) -> None:
    known = get_args(Source)
    require(source in known, f"source is {source!r}; it must be one of {', '.join(map(repr, known))}.")
