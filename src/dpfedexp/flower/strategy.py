"""`DpFedExp`: the Flower strategy that runs the engine with nodes as clients."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from dpfedexp.accounting import PrivacyStatement, compose
from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.algorithm import resolve_algorithm
from dpfedexp.algorithms.probe import Extras, bind, evaluation_count, evaluation_interval
from dpfedexp.algorithms.round import Full, Poisson, State
from dpfedexp.core.client_metrics import EVALUATION, ClientMetrics
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.core.losses import Loss
from dpfedexp.core.noise import ChaChaNoise, SystemStreams
from dpfedexp.engine.checkpoint import load
from dpfedexp.engine.engine import ClientEvaluation, Engine
from dpfedexp.engine.fit import FIT_ROUNDS, describe_choices, with_choices
from dpfedexp.engine.open_run import OpenRun, RunDescription, facts_of, settings_of
from dpfedexp.engine.plan import log
from dpfedexp.engine.run import Run, RunFacts, RunFolder, StoredParameters
from dpfedexp.engine.runner import RunEnd, run_to_end, show, statement_of
from dpfedexp.engine.stopping import OnAdvice, OnRound, callbacks_of
from dpfedexp.engine.tournament import Candidate, candidates_of, compared
from dpfedexp.errors import InputError, RoundFailed, checked, require
from dpfedexp.evaluation import Evaluation, on_test_set
from dpfedexp.flower.access import read_nodes
from dpfedexp.flower.app_settings import model_named, models_by_name, read_candidates, read_settings
from dpfedexp.flower.cohort import FlowerCohort, Participants, TwoPartyCohort
from dpfedexp.flower.messages import layout_of, to_arrays, to_flat
from dpfedexp.mechanisms import mechanism_class

_log = logging.getLogger("flwr")

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
Arrays = ArrayRecord | dict[str, ArrayRecord]
TRUSTED_NODES = (
    "the clients that share a node, against its operator: the node sees their reports, and sends only the sum"
)
WHETHER_IT_FAILED = "whether a round failed because too few of the clients that were drawn for it answered"
FIXED_NUMBER = (
    "the number of participants is fixed, and a run shows how many answer; a participant that leaves changes that too"
)
WHO_ANSWERS = "whether and when a client answers, which the server and the network can see"


@checked(hints={"resume": "the same folder: an interrupted run goes on there"})
class DpFedExp(Strategy):
    """A Flower strategy for differentially private training. The guarantee holds for any replies, also missing ones.

    Args:
        clients: the public number of clients, fixed in advance: sums are divided by it (by rate·clients with
            `Poisson`). Under replace-one adjacency and in local DP this many clients take part, and the nodes of the first
            round stay. Under add-remove adjacency every connected node takes part, whatever their number.
        rounds: the number of rounds, for which the noise is calibrated.
        folder: the folder for ledger, checkpoint, model and statement; a run that was interrupted goes on in its folder.
        participation: `Full()` or `Poisson(rate)`, sampled over the connected nodes from system entropy.
        clients_per_node: more than 1 for nodes that simulate many clients each.
        min_reply_fraction: the fraction of the asked clients with valid answers below which the round fails and releases nothing.
        budget: stop before the round that would raise ε above this value.
        node_timeout: seconds to wait for nodes before a round.
        local: the local optimizer, for DP-SCAFFOLD's control variates and an automatic rate.
        noise: creates the source of noise; the default uses the operating system.
        nodes: a file with the public keys of the participating nodes, one per line (`access.py`): no other node is ever
            asked, and a resumed run needs the same list.
        on_round: callbacks, called with every completed round's record, as in `train`.
        evaluate: the metrics that clients measure on their own rows, with noise within the same ε: such as "10 classes",
            "binary", "numbers" or "loss"; empty for none. The app's train function must return `answer(…)`.
        evaluate_every: rounds between evaluations by the clients; by default ten evaluations in a run.
        held_out: the share of a client's rows for evaluation only, as in the run's configuration on the nodes.
        candidates: settings to choose from during training, as in the run's configuration on the nodes (docs/tuning.md).

    Formal guarantee: in central DP, noise of a fixed size is added to the sum of replies that the server has clipped itself, and
    the denominator is public. So a missing, late, repeated or malformed reply does not change the guarantee: it counts as zero. A
    central round is charged, on disk, after the replies arrive and before anything is released. A local round is charged before it
    is sent, because the reports themselves are the release.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        clients: int,
        rounds: int = FIT_ROUNDS,
        folder: Path | str,
        participation: Full | Poisson | None = None,
        clients_per_node: int = 1,
        min_reply_fraction: float = 0.6,
        budget: float | None = None,
        node_timeout: float = 300.0,
        local: LocalOptimizer | None = None,
        noise: Callable[[], ChaChaNoise] = ChaChaNoise,
        nodes: Path | str | None = None,
        on_round: OnRound | Sequence[OnRound] | None = None,
        evaluate: str = "",
        evaluate_every: int | None = None,
        held_out: float = 0.0,
        candidates: Sequence[Candidate] | None = None,
    ) -> None:
        for name, count in (("clients", clients), ("rounds", rounds), ("clients_per_node", clients_per_node)):
            require(isinstance(count, int) and count >= 1, f"{name} is {count!r}; it must be a positive whole number.")
        require(
            clients % clients_per_node == 0,
            f"clients is {clients} and clients_per_node is {clients_per_node}; the first must be a multiple of the second.",
        )
        fraction = f"min_reply_fraction is {min_reply_fraction}; it must be above 0 and at most 1."
        require(0 < min_reply_fraction <= 1, fraction)
        require(node_timeout > 0, f"node_timeout is {node_timeout}; it must be positive.")
        self.participation: Full | Poisson = participation or Full()
        if not isinstance(self.participation, Full | Poisson):
            raise InputError("participation must be Full() or Poisson(rate); a deployment has no other sampling.")
        self.candidates = candidates_of(candidates)
        every = [algorithm, *(one.algorithm for one in self.candidates if one.algorithm is not None)]
        require(
            clients_per_node == 1 or not any(mechanism_class(one.mechanism).needs_helper for one in every),
            "two-party aggregation needs one client per node; set clients_per_node to 1.",
        )
        self.algorithm, self.clients, self.rounds = algorithm, clients, rounds
        self.folder = Path(folder).expanduser().absolute()
        self.clients_per_node, self.min_reply_fraction = clients_per_node, min_reply_fraction
        open_to_all, allowed = algorithm.adjacency == "add-remove", read_nodes(nodes) if nodes else None
        count = clients // clients_per_node
        self.participants = Participants(count, min_reply_fraction, node_timeout, open_to_all, allowed)
        self.budget = budget
        self.noise, self.callbacks = noise, callbacks_of(on_round)
        self.local = local
        self.metrics, self.evaluate_every = ClientMetrics.parse(evaluate) if evaluate else None, evaluate_every
        self.held_out = held_out
        require(bool(evaluate) or not (held_out or evaluate_every), "held_out and evaluate_every need evaluate.")
        self.tau_eta_l: float | None = None
        if algorithm.scaffold:
            require(algorithm.scaffold == "update", "control is 'report', which is for simulations; use 'update'.")
            require(clients_per_node == 1, "dp_scaffold keeps a control variate per client: use one client per node.")
            if local is None or local.steps is None:
                raise InputError(
                    "dp_scaffold needs the clients' local steps: set lr and steps in the section local, or pass local=Sgd(…)."
                )
            self.tau_eta_l = local.tau_eta_l(local.steps)
        self.run: Run | None = None
        """The result of the run, once `start` has returned."""
        self.delta_given: bool | None = None
        """Whether the settings give δ; None for a run that does not choose its own settings."""
        self._open: OpenRun | None = None

    @property
    def opened(self) -> OpenRun:
        """The open run: its state, history and ledger."""
        if self._open is None:
            raise InputError("the run has not started; call start first.")
        return self._open

    @property
    def state(self) -> State:
        return self.opened.state

    @property
    def history(self) -> list[dict[str, Any]]:
        return [] if self._open is None else self._open.history

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement from the charges so far, with what it does not cover."""
        if self.run is not None:
            return self.run.privacy
        unfinished = None if self.opened.state.round == self.rounds else "it is not complete."
        return statement_of(self.opened, RunEnd(unfinished))

    def engine(self, grid: Grid, initial_arrays: Arrays, timeout: float, config: ConfigRecord) -> Engine:
        """Build the engine: the algorithm bound to the model, with the nodes as its cohort."""
        layouts = tuple(layout_of(model_named(initial_arrays, one)) for one in self.candidates or (Candidate(),))
        sampling, cohort = self.participation.sampling(self.clients), self.participation.expected(self.clients)
        interval, metrics = evaluation_interval(self.rounds, self.evaluate_every), self.metrics

        def prepared(one: Candidate, extras: Extras) -> tuple[Engine, None]:
            algorithm, local = one.algorithm or self.algorithm, one.local or self.local
            arrays = model_named(initial_arrays, one)
            w = to_flat(arrays, layout_of(arrays))
            many = 0 if metrics is None else evaluation_count(self.rounds, interval)
            whole = (len(w), self.clients, self.participation, self.rounds, algorithm.private)
            mechanism, probe, others = bind(algorithm, local, *whole, extras=replace(extras, evaluations=many))
            evaluation = None
            if metrics is not None:
                evaluation = ClientEvaluation(others[EVALUATION], metrics, interval, self.held_out)
            kind: Any = partial(TwoPartyCohort, noise=self.noise) if mechanism.needs_helper else FlowerCohort
            given = (self.participants, self.clients, sampling, self.rounds, self.min_reply_fraction, timeout)
            engine = Engine(
                resolve_algorithm(algorithm, local, mechanism, len(w), cohort),
                mechanism,
                self.participation,
                self.clients,
                kind(grid, layouts, *given, self.clients_per_node, self.tau_eta_l, config),
                start=w,
                noise=SystemStreams(self.noise()),
                tau_eta_l=self.tau_eta_l,
                probe=probe,
                evaluation=evaluation,
            )
            return engine, None

        if not self.candidates:
            return prepared(Candidate(), Extras())[0]
        return compared(self.candidates, self.local, self.rounds, prepared)[0]

    def describe(self, engine: Engine) -> RunDescription:
        """The description of the run: settings that must not change when it is resumed, and facts for its statement."""
        settings = settings_of(
            engine,
            engine.cohort.layouts,  # type: ignore[attr-defined]
            [one.local for one in self.candidates],
            rounds=self.rounds,
            clients_per_node=self.clients_per_node,
            nodes=None if self.participants.allowed is None else list(self.participants.allowed),
        )
        left_out = [WHO_ANSWERS]
        if self.clients_per_node > 1:
            left_out.append(TRUSTED_NODES)
        if not engine.mechanism.counts_are_public(engine.sampling):
            left_out.append(WHETHER_IT_FAILED)
        needed = math.ceil(self.min_reply_fraction * self.clients)
        return RunDescription(
            engine,
            self.rounds,
            settings,
            engine.begin(),
            not_covered=tuple(left_out),
            # A resumed run may have another fraction. The history has counts where they are public, as in every local run.
            reporting=lambda history: min([needed, *(line["valid"] for line in history if "valid" in line)]),
            no_other_adjacency="" if self.algorithm.adjacency == "add-remove" else FIXED_NUMBER,
        )

    def start(
        self,
        grid: Grid,
        initial_arrays: Arrays,
        num_rounds: int | None = None,
        timeout: float = 3600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run the remaining rounds, after those that the folder holds; return Flower's result.

        `initial_arrays`: the model, or several by name for candidates.
        `timeout`: seconds to wait for replies in a round. `evaluate_fn`: computes metrics after a round on the server's data.
        """
        require(
            num_rounds in (None, self.rounds),
            f"num_rounds is {num_rounds}, but the strategy was made for {self.rounds} rounds; its noise depends on it.",
        )
        engine = self.engine(grid, initial_arrays, timeout, train_config or ConfigRecord())
        layouts = engine.cohort.layouts  # type: ignore[attr-defined]
        description = self.describe(engine)
        result = Result()

        def measure(state: State) -> dict[str, float]:
            layout = layouts[state.candidate]
            scores = None if evaluate_fn is None else evaluate_fn(state.round, to_arrays(state.reported, layout))
            if scores is None:
                return {}
            result.evaluate_metrics_serverapp[state.round] = scores
            _log.info("Round %d of %d, on the server's own data: %s", state.round, self.rounds, dict(scores))
            return {name: float(value) for name, value in scores.items() if isinstance(value, int | float)}

        def completed(record: dict[str, Any]) -> None:
            counts = "".join(
                f", {name} {value}" for name, value in record.items() if type(value) is int and name != "round"
            )
            _log.info("Round %d of %d: %s%s", record["round"], self.rounds, show(record), counts)
            result.train_metrics_clientapp[record["round"]] = _record(record)

        how = {"command": "flwr run", "data": "a Flower federation", "purpose": "in federation.folder"}
        files = RunFolder(self.folder, resume=True, **how)

        def facts(open_run: OpenRun) -> RunFacts:
            self._open = open_run
            result.train_metrics_clientapp = {line["round"]: _record(line) for line in open_run.history}
            self._announce(engine, open_run)
            return facts_of(engine, open_run, files, model="a Flower app's", data="", options={})

        def stored(state: State) -> StoredParameters:
            return StoredParameters(dict(layouts[state.candidate].unflatten(state.reported.cpu().float())))

        try:
            self.run = run_to_end(
                engine,
                description,
                facts,
                stored,
                files=files,
                last=load(self.folder),
                measure=measure,
                budget=self.budget,
                callbacks=(completed, OnAdvice(partial(log, _log)), *self.callbacks),
            )
        except RoundFailed as reason:
            _log.error("Stopped: %s", reason)
            raise
        if self.delta_given is not None:
            own = self.delta_given
            choices = describe_choices(self.run, self.algorithm, delta_given=own, candidates=self.candidates)
            self.run = with_choices(self.run, choices, self.folder)
        if self.run.stopped:
            _log.warning("Stopped: %s", self.run.stopped)
        result.arrays = ArrayRecord(dict(self.run.model.state_dict()))
        return result

    def _announce(self, engine: Engine, open_run: OpenRun) -> None:
        """Log a summary of the run, with the ε at its end."""
        sampling, algorithm = engine.sampling, engine.algorithm
        who = "all of them" if sampling.kind == "full" else f"each with probability {sampling.rate:g}"
        _log.info("%s over %d clients, %s in every round, %d rounds", algorithm.name, self.clients, who, self.rounds)
        done, charges = open_run.state.round, open_run.ledger.charges()
        if done == self.rounds:
            _log.warning("The folder holds this run, which is complete: no round is made")
        elif done:
            _log.info("Resuming after round %d of %d", done, self.rounds)
        if algorithm.private:
            votes = [
                (event, 1) for event in engine.answers_left(open_run.state, self.rounds, open_run.ledger, open_run.name)
            ]
            plan = compose([*charges, *votes, (engine.event, self.rounds - done)], algorithm.delta)
            _log.info("Planned: epsilon %.4f at delta %g (%s)", plan.epsilon, algorithm.delta, plan.accountant)
        else:
            _log.warning("This federation is NOT private: the server sees every update and adds no noise")
        _log.info("Ledger, checkpoint, model, statement and status go to %s", self.folder)

    def configure_train(self, *_: Any, **__: Any) -> Any:
        """Raise `InputError`: Flower's own loop is not used, because the engine charges and releases rounds in `start`."""
        raise InputError("DpFedExp runs its rounds itself; call start(grid, arrays).")

    aggregate_train = configure_evaluate = aggregate_evaluate = configure_train

    def summary(self) -> None:
        """Log the settings of the run (called by Flower; `start` logs the plan)."""
        _log.info("%s over %d clients, %d rounds", self.algorithm.name, self.clients, self.rounds)


@checked
def serve(
    grid: Grid,
    context: Context,
    model: nn.Module | dict[str, nn.Module],
    evaluate: Callable[[nn.Module], dict[str, float]] | tuple[Any, Tensor] | None = None,
    loss: str | Loss | None = None,
) -> Run:
    """Run a deployment with the settings of the app's configuration; call it in the main function of the server app.

    Args:
        grid: Flower's connection to the nodes.
        context: Flower's context, with the run's configuration.
        model: the model with the initial parameters; a resumed run uses its checkpoint's. Or several by name, for candidates.
        evaluate: (inputs, targets) of a test set on the server, measured after every round; or a function (model) → dict.
        loss: the loss for the test set, as in `answer`.

    Returns:
        The run: its model, history and privacy statement. Raises `RoundFailed` after a run that stopped early, whose files are
        complete, so that Flower does not call it completed.
    """
    strategy = strategy_from(context.run_config)
    models = models_by_name(model)
    start = {name: ArrayRecord(one.state_dict()) for name, one in models.items()}
    score = None if evaluate is None else Evaluation(evaluate).on
    require(score != "clients", "evaluate is 'clients'; on Flower this is the setting federation.evaluate.")
    if isinstance(score, tuple):
        score = on_test_set(score[0], score[1], loss)
        for one in models.values():
            score(one.eval())  # a test set that does not fit the model raises before the first round

    def measure(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net = model_named(models, (strategy.candidates or (Candidate(),))[strategy.state.candidate])
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            return MetricRecord({**cast(Any, score)(net.eval())})

    timeout = read_settings(context.run_config)[0].round_timeout
    strategy.start(grid, start, timeout=timeout, evaluate_fn=None if score is None else measure)
    run = cast(Run, strategy.run)
    if run.stopped:
        raise RoundFailed(f"the run stopped after {len(run.history)} of {strategy.rounds} rounds: {run.stopped}")
    return run


def _record(shown: dict[str, Any]) -> MetricRecord:
    return MetricRecord({name: math.inf if value is None else value for name, value in shown.items()})


def strategy_from(run_config: Mapping[str, Any]) -> DpFedExp:
    """Build the strategy from an app's configuration.

    Args:
        run_config: Flower's flattened configuration: sections `federation`, `algorithm`, `local`, `participation`, `candidates`.
    """
    federation, settings = read_settings(run_config)
    given = federation.model_dump(exclude={"round_timeout", "epsilon"})
    given |= {"budget": federation.budget or None, "candidates": read_candidates(run_config) or None}
    given |= {"participation": settings.build_participation(), "local": settings.build_local()}
    strategy = DpFedExp(settings.build_algorithm(), **given)
    sections = {key for key in run_config if key.startswith(("algorithm.", "local."))}
    own = sections - {"algorithm.delta", "algorithm.aggregation"}
    if federation.epsilon is not None and not own:
        strategy.delta_given = "algorithm.delta" in run_config
    return strategy
