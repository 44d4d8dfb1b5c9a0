"""What a run says about itself from start to end: the preflight, the watch, the verdict. The same for all runtimes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial

from torch import Tensor

from dpfedexp.engine.advice.message import Advice
from dpfedexp.engine.advice.plan import Plan
from dpfedexp.engine.advice.preflight import preflight
from dpfedexp.engine.advice.watch import Record, Watch


def silence(advice: Advice) -> None:
    """For runs whose settings nobody chose to be good ones, such as those of an audit."""


@dataclass(frozen=True)
class Commentary:
    """Tells whoever listens what there is to say, each thing once.

    Formal guarantee: that of `preflight` and `Watch`: public numbers, records of rounds and norms of the released model enter, and
    nothing else.

    Attributes:
        plan: the run by its public numbers.
        start: the parameters before the first round.
        tell: gets every advice that is new.
    """

    plan: Plan
    start: Tensor
    tell: Callable[[Advice], None] = field(repr=False)

    @cached_property
    def watch(self) -> Watch:
        return Watch(self.plan, float(self.start.norm()))

    @cached_property
    def before(self) -> list[Advice]:
        """The preflight's advice."""
        return preflight(self.plan)

    @property
    def advice(self) -> list[Advice]:
        """Everything that there was to say so far."""
        return [*self.before, *self.watch.advice]

    def begin(self, history: Iterable[Record] = ()) -> None:
        """Before the first round, or before those that are left of a run with this history; tells the preflight."""
        self.watch.replay(history)
        self._say(self.before)

    def after(self, record: Record, w: Tensor) -> None:
        """A round is complete, and the parameters are w."""
        self._say(self.watch.seen(record, partial(self._norms, w)))

    def end(self, w: Tensor) -> None:
        """No round comes after this."""
        self._say(self.watch.end(partial(self._norms, w)))

    def _norms(self, w: Tensor) -> tuple[float, float]:
        return float((w - self.start).norm()), float(w.norm())

    def _say(self, advice: Iterable[Advice]) -> None:
        for one in advice:
            self.tell(one)
