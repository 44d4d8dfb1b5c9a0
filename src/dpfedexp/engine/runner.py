"""The run loop: all rounds of an engine, with checkpoints, callbacks, evaluation and output files."""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from dpfedexp.accounting import Budget, GaussianEvent, Ledger, PrivacyStatement, compose
from dpfedexp.accounting.statement import Source
from dpfedexp.algorithms.round import State
from dpfedexp.core.client_metrics import AT_BOUND
from dpfedexp.engine.advice import Advisor, beyond_budget
from dpfedexp.engine.checkpoint import Checkpoint
from dpfedexp.engine.engine import Engine, evaluation_is_due
from dpfedexp.engine.open_run import OpenRun, RunDescription
from dpfedexp.engine.outlets import METRICS, recorded
from dpfedexp.engine.plan import Advice, Plan
from dpfedexp.engine.run import Run, RunFacts, RunFolder, Status
from dpfedexp.engine.stopping import Interrupted, OnRound, Stop, call_hook, notify_callbacks
from dpfedexp.errors import AdviceWarning, BudgetExceeded, InputError, LedgerError, RoundFailed, require, warn

Measure = Callable[[State], dict[str, float]]


def run_to_end(
    engine: Engine,
    description: RunDescription,
    facts_of: Callable[[OpenRun], RunFacts],
    model_of: Callable[[State], nn.Module],
    *,
    files: RunFolder | None,
    last: Checkpoint | None,
    ledger: Ledger | Path | str | None = None,
    measure: Measure | None = None,
    evaluate_every: int = 1,
    budget: float | None = None,
    callbacks: Sequence[OnRound] = (),
    progress: bool = False,
    trainer: str = "",
) -> Run:
    """Run the remaining rounds and write all files.

    Args:
        facts_of: returns public facts for `run.json`.
        model_of: builds the module that the run returns from a state.
        files: the folder that the files of the run are written to; None for a run without a folder.
        last: the checkpoint to resume from; None for a new run.
        ledger: a ledger to use instead of the folder's.
        measure: computes metrics of the released model from the server's own data, every `evaluate_every` rounds.
        budget: the ε, at the algorithm's δ, that the run must not exceed.

    Raises:
        Interrupted: a KeyboardInterrupt; its `run` holds the completed rounds.
        RoundFailed: a round failed; the completed rounds are on disk.
    """
    folder, rounds, remote = None if files is None else files.path, description.rounds, engine.cohort.is_remote
    with (
        OpenRun.open(description, ledger, folder, last) as open_run,
        round_progress(engine, rounds, enabled=progress) as show_progress,
    ):
        engine = replace(engine, run=open_run.name)
        who = (engine.participation, engine.population)
        plan = Plan.of(engine.algorithm, *who, len(engine.start), rounds, mechanism=engine.mechanism)
        heard = any(hasattr(one, "on_advice") for one in callbacks)
        on_advice: Callable[[Advice], object] = partial(call_hook, callbacks, "on_advice") if heard else _warn
        more = None
        if budget is not None and open_run.state.round < rounds:
            planned = statement_of(open_run, RunEnd("it is not complete.")).planned_epsilon_total or 0.0
            more = beyond_budget(planned, budget)
        advisor = Advisor(plan, description.start, on_advice, more, engine.evaluation)
        facts = facts_of(open_run)

        def write_status(status: Status, reason: str = "", epsilon: float | None = None) -> None:
            if files is not None:
                if epsilon is None:
                    epsilon = compose(open_run.ledger.charges(), engine.algorithm.delta).epsilon
                files.write_status(status, open_run.state.round, rounds, epsilon, reason)

        def running(epsilon: float | None = None) -> None:
            """Write the status; in a deployment also the statement."""
            if files is not None and remote:
                files.state(statement_of(open_run, RunEnd("it is not complete.")))
            write_status("running", epsilon=None if remote else epsilon)

        def run_so_far(end: RunEnd) -> Run:
            return Run(
                model_of(open_run.state),
                open_run.history,
                statement_of(open_run, end),
                open_run.ledger,
                trainer,
                end.reason,
                advisor.advice,
                facts,
            )

        def voted(state: State) -> None:
            open_run.voted(state)
            running()

        def completed(record: dict[str, Any]) -> Stop | None:
            if files is not None:
                files.record(record)
            running(record["epsilon_total"])
            with _callers_code():
                stop = notify_callbacks(callbacks, record)
            show_progress(record)
            advisor.after(record, open_run.state)
            return stop

        def finish(end: RunEnd, status: Status, reason: str = "") -> Run:
            open_run.end(end.stop_source)
            run = run_so_far(end)
            open_run.seal(run.model)
            if files is not None:
                files.finish(run)
            write_status(status, end.reason or reason, run.privacy.epsilon_total)
            return run

        try:
            if files is not None:
                if open_run.state.round < rounds:
                    files.remove_results()
                files.begin(facts)
                running()
                if remote:
                    # Reports of local DP are spent when they are sent, even if the server crashes before the round ends.
                    engine = replace(engine, on_charge=running)
            with _callers_code():
                advisor.begin(open_run.history)
                call_hook(callbacks, "on_train_begin", facts)
                stop = call_hook(callbacks, "on_resume", open_run.history)
            if stop is None or open_run.state.round == rounds:
                limit = None if budget is None else Budget(budget, engine.algorithm.delta)
                end = _rounds(engine, open_run, limit, measure, evaluate_every, voted, completed, advisor.evaluated)
            else:
                end = RunEnd(stop.reason, stop.source)
            advisor.end(open_run.state)
            run = finish(end, "completed" if end.reason is None else "stopped")
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            # Any other text could hold something about the clients' data.
            own = isinstance(error, RoundFailed | LedgerError) and not hasattr(error, CALLER_ERROR)
            why = str(error) if own else "it was interrupted." if interrupted else "see the log of the run."
            # An error in the caller's code may depend on private values, and then it is a decision to stop.
            source: Literal["hand", "unknown", ""] = "hand" if interrupted else "" if own else "unknown"
            end = RunEnd() if open_run.state.round == rounds else RunEnd(why, source)
            with suppress(InputError, LedgerError, OSError):
                write_status("failed", why)
                finish(end, "failed", why)
            if not interrupted:
                if files is not None:
                    error.add_note(f"The rounds so far are in {str(folder)!r}; {files.how_to_resume}.")
                raise
            where = "" if files is None else f"; {files.how_to_resume}"
            raise Interrupted(
                f"interrupted after {open_run.state.round} of {rounds} rounds; this exception's `run` holds them{where}.",
                run_so_far(end),
            ) from None
    call_hook(callbacks, "on_train_end", run)
    return run


CALLER_ERROR = "of_callers_code"
"""Attribute that marks errors raised by a callback or by `measure`. Their text may hold anything, so no file gets it."""


@contextmanager
def _callers_code() -> Iterator[None]:
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        setattr(error, CALLER_ERROR, True)
        raise


class RunEnd(NamedTuple):
    """How the run ended: complete, or early with a reason and the source of that decision."""

    reason: str | None = None
    stop_source: Source | Literal["hand", ""] = ""


def _warn(advice: Advice) -> None:
    """Issue an `AdviceWarning` for a warning; notes are only in `Run.advice`."""
    if advice.level == "warning":
        warn(advice.sentence, AdviceWarning)


def _rounds(
    engine: Engine,
    open_run: OpenRun,
    budget: Budget | None,
    measure: Measure | None,
    evaluate_every: int,
    voted: Callable[[State], None],
    completed: Callable[[dict[str, Any]], Stop | None],
    evaluated: Callable[[bool], None],
) -> RunEnd:
    rounds, delta = open_run.description.rounds, engine.algorithm.delta

    def due(number: int) -> bool:
        return engine.evaluation is not None and evaluation_is_due(number, engine.evaluation.every, rounds)

    def evaluate() -> None:
        """Ask the clients to evaluate the model. The round is saved before, so a crash here loses no round."""
        try:
            found = engine.evaluate(open_run.state, open_run.ledger, budget)
        except RoundFailed as reason:
            # Training continues without these metrics.
            warn(str(reason), AdviceWarning)
            return
        if found is not None:
            evaluated(bool(found))
            epsilon = epsilon_so_far(open_run.ledger, delta, last=open_run.state.round == rounds)
            open_run.add_to_last_record(recorded(METRICS, {**found, "epsilon_total": epsilon}, secure=engine.secure))

    try:
        # A complete run sends no request to its clients.
        begun = 0 < open_run.state.round < rounds and due(open_run.state.round)
        if begun and not any(key.startswith("clients_") for key in open_run.history[-1]):
            evaluate()
        for number in range(open_run.state.round + 1, rounds + 1):
            engine.choose(open_run.state, open_run.ledger, budget, save=voted)
            # Stops an outdated copy of the run before its clients train.
            open_run.ledger.check_newest()
            state, result = engine.step(open_run.state, open_run.ledger, budget)
            last = number == rounds
            epsilon = epsilon_so_far(open_run.ledger, delta, last=last)
            record = result.record(epsilon, {})
            failure: BaseException | None = None
            if measure is not None and (number % evaluate_every == 0 or last):
                try:
                    with _callers_code():
                        measured = measure(state)
                        for name in measured:
                            require(
                                not name.startswith("clients_"),
                                f"a metric is called {name!r}; names that begin with clients_ are for what clients measure.",
                            )
                        record = result.record(epsilon, measured)
                except (Exception, KeyboardInterrupt, SystemExit) as error:
                    failure = error
            open_run.complete(state, recorded(METRICS, record, secure=engine.secure), last=last)
            if failure is None and due(number):
                try:
                    evaluate()
                except (Exception, KeyboardInterrupt, SystemExit) as error:
                    failure = error
            try:
                stop = completed(open_run.history[-1])
            finally:
                if failure is not None:
                    # Raised after the callbacks, because the round is charged and released even if its evaluation failed.
                    raise failure
            # A stop after the last round has no effect.
            if stop is not None and number < rounds:
                open_run.stop()
                return RunEnd(stop.reason, stop.source)
    except BudgetExceeded as reason:
        open_run.stop()
        return RunEnd(str(reason))
    return RunEnd()


def statement_of(open_run: OpenRun, end: RunEnd) -> PrivacyStatement:
    run, engine, charges = open_run.description, open_run.description.engine, open_run.ledger.charges()
    # An interrupt may come between the charge and the release.
    charged = {entry.round for entry in open_run.ledger.entries if entry.run == open_run.name and entry.round > 0}
    missing = run.rounds - max(open_run.state.round, len(charged))
    votes = [(event, 1) for event in engine.answers_left(open_run.state, run.rounds, open_run.ledger, open_run.name)]
    return PrivacyStatement.from_charges(
        charges,
        engine.algorithm.delta,
        algorithm=engine.algorithm.name,
        clients=engine.population,
        simulated=not engine.secure,
        # The missing rounds on top of all charges in the ledger, because other runs may share the ledger.
        planned=[*charges, *votes, (engine.event, missing)] if end.reason else None,
        not_covered=run.not_covered,
        reporting=open_run.ledger.terms(open_run.name)["reporting"],
        no_other_adjacency=run.no_other_adjacency,
        stopping=(end.stop_source or open_run.stop_source) if end.reason else "",  # type: ignore[arg-type]
        **engine.larger_deployment,
    )


OF_LARGER_DEPLOYMENT = "of the larger deployment"
"""Says in the progress bar that ε is that of the larger deployment (`LargerCohort`)."""


@contextmanager
def round_progress(engine: Engine, rounds: int, *, enabled: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that shows a record in a progress bar; it does nothing when disabled or without a terminal.

    The bar of a secure run shows no durations, which depend on the clients' data.
    """
    # Without a bar, `rich` need not be installed.
    notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None
    if not enabled or not (sys.stdout.isatty() or notebook):
        yield lambda record: None
        return
    from rich import progress

    times = recorded("terminal", {"elapsed": None}, secure=engine.secure)
    whose = "" if engine.larger is None else OF_LARGER_DEPLOYMENT
    with progress.Progress(
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        *([progress.TimeElapsedColumn(), progress.TimeRemainingColumn()] if times else []),
        progress.TextColumn("{task.fields[shown]}"),
        transient=True,
    ) as bar:
        row = bar.add_task(engine.algorithm.name, total=rounds, shown="")
        yield lambda record: bar.update(row, completed=record["round"], shown=show(record, whose))


def show(record: dict[str, Any], whose: str = "") -> str:
    """The public values of a round in one line; `whose` says to whom ε belongs, if not to the run's own clients."""
    metrics = [
        f"{key.removeprefix('test_')} {value:.4g}"
        for key, value in recorded("terminal", record, secure=True).items()
        if isinstance(value, float)
        and key not in ("eta_g", "clip", "update_norm", "noisy_mean_within_clip", "epsilon_total")
        and not key.endswith(("_low", "_high", AT_BOUND))
    ]
    epsilon = record["epsilon_total"]
    privacy = "not private" if math.isinf(epsilon) else f"ε {whose}{' ' if whose else ''}{epsilon:.3f}"
    return "  ".join([*metrics, f"η_g {record['eta_g']:.2f}", privacy])


EXACT_ROUNDS = 8
"""Up to this number of sampled rounds, every record has the exact ε."""
EPSILON_GRID_RATIO = 1.25
"""Ratio between consecutive numbers of rounds for which ε is computed in longer runs."""


def epsilon_so_far(ledger: Ledger, delta: float, *, last: bool) -> float:
    """ε of all charges, or an upper bound where ε is slow to compute: the ε of up to a quarter more rounds.

    For Poisson sampling, ε takes a tenth of a second or more to compute for each number of rounds. After the first rounds it is
    computed only on a fixed grid of numbers of rounds, and a record gets the ε of the next grid point, which is larger. The grid
    does not depend on the run, so a resumed run records the same values. The `last` record and every statement have the exact ε.
    """
    charges = ledger.charges()
    sampled = [
        (n, event) for event, n in charges if isinstance(event, GaussianEvent) and event.sampling.kind == "poisson"
    ]
    _, event = max(sampled, key=lambda pair: pair[0], default=(0, None))
    if event is None or last or event.setting == "local":
        return compose(charges, delta).epsilon
    return compose([(one, next_known(n) if one == event else n) for one, n in charges], delta).epsilon


def next_known(rounds: int) -> int:
    """The smallest grid point for ε that is not below this number of rounds."""
    known = EXACT_ROUNDS
    while known < rounds:
        known = max(known + 1, int(known * EPSILON_GRID_RATIO))
    return known if rounds > EXACT_ROUNDS else rounds
