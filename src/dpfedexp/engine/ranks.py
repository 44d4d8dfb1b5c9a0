"""One run over several processes, on one machine or many: the ranks share a cohort's clients and add up their `Sums`.

Rank 0 does what a single process does: it draws the cohort, charges, releases, updates the model, writes and evaluates. In each
round it sends the state to the other ranks, which train their share of the cohort and send back their sums. Every draw is keyed by
client, so the result equals that of one process up to rounding, for any number of ranks.

With SCAFFOLD a client always belongs to the same rank, which keeps its control variate; rank 0 gets a copy for the checkpoint.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dpfedexp.accounting import PrivacyStatement
from dpfedexp.algorithms.probe import CANDIDATE, SCALE, UPDATE
from dpfedexp.algorithms.round import State
from dpfedexp.core.sums import Sums
from dpfedexp.engine.engine import ANCHOR, LOCAL_RATE, Answer, Cohort, Engine, Request
from dpfedexp.engine.simulated import Simulation
from dpfedexp.errors import InputError, RoundFailed, first_line, require

Outcome = tuple[int, Tensor, list[dict[str, Any]], PrivacyStatement, str | None]
"""The candidate, the reported parameters, the history, the privacy statement, and why the run stopped early."""
LONGEST_ROUND = timedelta(hours=12)
"""Timeout for the other ranks' share of a round; a lost rank is detected by its heartbeat or its closed connection."""
_ROWS = 4096


def join() -> bool:
    """Join the process group of `torchrun`, or of any launcher that sets its variables; return whether there is a group."""
    world = os.environ.get("WORLD_SIZE", "1")
    require(world.isdigit() and int(world) >= 1, f"WORLD_SIZE is {world!r}; it must be a positive whole number.")
    if int(world) == 1 or dist.is_initialized():
        return dist.is_initialized()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    require(not missing, f"WORLD_SIZE is {world}, but {', '.join(missing)} is missing; start the ranks with torchrun.")
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(backend, timeout=LONGEST_ROUND)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"rank {os.environ['RANK']} of {world} can't join the others: {error}") from None
    return True


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def share(sizes: Tensor, number: int, of: int) -> Tensor:
    """The positions of the clients that rank `number` of `of` ranks trains.

    Clients are dealt out to the ranks from the largest to the smallest, back and forth, so that all ranks have about equal work.
    """
    order = torch.argsort(sizes, stable=True, descending=True)
    place = torch.arange(len(order))
    turn = place % (2 * of)
    owner = torch.where(turn < of, turn, 2 * of - 1 - turn)
    return order[owner == number].sort().values


@dataclass
class RankCohort(Cohort):
    """The cohort of a run whose simulated clients are shared among processes, as seen from one rank."""

    rank: int
    world: int
    heart: "Heartbeat"
    simulation: Simulation = field(init=False, repr=False)
    controls_sent: bool = False
    over: bool = False
    owned: Tensor | None = field(default=None, repr=False)
    failed: Exception | None = None

    @classmethod
    def current(cls) -> Self | None:
        """The cohort of this process's group; None where the process runs alone."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        try:
            return cls(dist.get_rank(), dist.get_world_size(), Heartbeat.start())
        except RuntimeError as error:
            raise RoundFailed(
                f"rank {dist.get_rank()} could not meet the others before the first round: {first_line(error)}"
            ) from None

    @property
    def cpu_is_idle(self) -> bool:  # type: ignore[override]
        return self.simulation.cpu_is_idle

    def control_variates(self, dimension: int) -> Tensor | None:
        return self.simulation.control_variates(dimension)

    def answer(self, request: Request) -> Answer:
        """Answer a request as `Simulation.answer` does, with the work shared among ranks; called on rank 0."""
        state, cohort = request.state, self.simulation.drawn(request)
        players = state.players if request.purpose == CANDIDATE else {state.candidate: state}
        header = {"purpose": request.purpose, "round": request.round, "candidates": list(players)}
        header |= {"clients": len(cohort), "radius": state.radius, "rate": request.local_rate, "shake": request.shake}
        try:
            _send(header)
            _broadcast(cohort)
            for player in players.values():
                _broadcast(player.reported if request.purpose == CANDIDATE else player.w)
            if request.purpose == SCALE:
                _broadcast(state.memory[ANCHOR])
            if state.control is not None and state.client_controls is not None:
                _broadcast(state.control)
                self._share(state.client_controls)
            return self._together(request, cohort)
        except (RuntimeError, ValueError) as error:
            raise self._lost(request.round, error) from None

    def follow(self, engine: Engine) -> Outcome:
        """Compute this rank's share of every round until rank 0 ends the run; return the outcome. Called on ranks above 0."""
        start, number = engine.begin(), 0
        try:
            while True:
                header = _receive()
                self.over = header is None or "history" in header
                if header is None:
                    raise RoundFailed("rank 0 ended the run; see its message.")
                if self.over:
                    candidate, statement = header["candidate"], PrivacyStatement.from_json(header["statement"])
                    w = _broadcast(torch.zeros_like(engine.playing(candidate).start, device="cpu"))
                    return candidate, w, header["history"], statement, header["stopped"]
                purpose, number, radius, rate = (header[name] for name in ("purpose", "round", "radius", "rate"))
                cohort = _broadcast(torch.zeros(header["clients"], dtype=torch.int64))
                models = {one: _broadcast(torch.zeros_like(engine.playing(one).start)) for one in header["candidates"]}
                (candidate, w), *others = models.items()
                rivals = {one: State(number, v, (v,), radius, {}, candidate=one) for one, v in others}
                memory = {} if rate is None else {LOCAL_RATE: torch.tensor(rate)}
                if purpose == SCALE:
                    memory[ANCHOR] = _broadcast(torch.zeros_like(w))
                control = controls = None
                if purpose == UPDATE and start.control is not None and start.client_controls is not None:
                    control, controls = _broadcast(torch.zeros_like(start.control)), start.client_controls
                    self._share(controls)
                state = State(number - 1, w, (w,), radius, {}, control, controls, memory, candidate, rivals)
                playing = engine if purpose == CANDIDATE else engine.playing(candidate)
                request = Request(purpose, number, state, playing.mechanism_of(purpose, radius), shake=header["shake"])
                answer = self._together(request, cohort)
                if controls is not None:
                    for clients, rows in answer.controls:
                        controls[clients] = rows
        except (RuntimeError, ValueError) as error:
            raise self._lost(number, error) from None

    def dismiss(self, outcome: Outcome | None) -> None:
        """Tell the other ranks that the run is over, with its outcome; None for a failed run. Called on rank 0."""
        if self.over:
            return
        self.over = True
        if outcome is None:
            _send(None)
        else:
            candidate, w, history, statement, stopped = outcome
            ended = {"history": history, "statement": statement.to_json(), "stopped": stopped}
            _send({"candidate": candidate, **ended})
            _broadcast(w)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.rank == 0:
                with suppress(RuntimeError):
                    self.dismiss(None)
            raise
        finally:
            self.heart.stopped.set()

    def _lost(self, number: int, error: Exception) -> Exception:
        """Turn a failed collective into a `RoundFailed` with a clear message; return other errors unchanged."""
        if error is self.failed or isinstance(error, InputError | RoundFailed):
            return error
        words = ("connection", "gloo", "nccl", "timed out", "socket", "peer")
        about_connections = any(word in str(error).lower() for word in words)
        if not isinstance(error, dist.DistBackendError | dist.DistNetworkError) and not about_connections:
            return error
        self.over = True
        return RoundFailed(
            f"rank {self.rank} lost another rank in round {number} ({first_line(error)}). Nothing of that round was released. "
            "Repeat the command to resume the run from its checkpoint, on any number of ranks."
        )

    def _mine(self, cohort: Tensor) -> Tensor:
        """Positions of this rank's clients in the cohort: shared by size for even work, or without sizes where they are private."""
        simulation = self.simulation
        sizes = simulation.task.clients.sizes
        isolated = simulation.unit is not None
        if not isolated and not simulation.scaffold:
            return share(sizes[cohort], self.rank, self.world)
        if self.owned is None:
            self.owned = torch.zeros(len(sizes), dtype=torch.bool)
            dealt = torch.ones_like(sizes) if isolated else sizes
            self.owned[share(dealt, self.rank, self.world)] = True
        return torch.nonzero(self.owned[cohort]).flatten()

    def _together(self, request: Request, cohort: Tensor) -> Answer:
        """Compute this rank's part of a round; rank 0 gets the sum of all. An error on one rank ends the round on all ranks.

        An interrupt does not wait for the other ranks; they detect that this rank is gone.
        """
        part = None
        try:
            part = self.simulation.collect(request, cohort[self._mine(cohort)])
        except Exception as error:
            self.failed = error
        except BaseException:
            self.over = True
            raise
        failed = self.failed
        worst = torch.tensor(0 if failed is None else self.rank + 1)
        try:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        except RuntimeError:
            if failed is None:
                raise
        # All ranks know which rank failed, so no message is needed.
        self.over = self.over or bool(worst)
        if failed is not None:
            raise failed
        if part is None or worst:
            raise RoundFailed(
                f"rank {int(worst) - 1} failed in round {request.round}; see its message. Nothing of that round was released."
            )
        return self._add(part)

    def _add(self, part: Answer) -> Answer:
        """Add up the answers of all ranks; only rank 0 gets the sum, and the control variates of all ranks' clients."""
        sums, controls, squares = part.sums, part.controls, part.true_squares
        vector, count = sums.vector.clone(), torch.tensor(sums.count, dtype=torch.int64)
        parts = (sums.squares.reshape(1), torch.tensor([squares]), sums.votes)
        scalars = torch.cat([scalar.cpu().double() for scalar in parts])
        for tensor in (vector, scalars, count):
            dist.reduce(tensor, dst=0)
        if self.rank == 0:
            for other in range(1, self.world):
                controls = controls + _receive_controls(other)
        else:
            _send_controls(controls)
        device = sums.vector.device
        total = Sums(vector, scalars[0].to(device), scalars[2:].to(device), int(count))
        return Answer(total, {}, controls, float(scalars[1]))

    def _share(self, client_controls: Tensor) -> None:
        """Send the clients' control variates from rank 0 to all ranks before the first round, in pieces."""
        if not self.controls_sent:
            for piece in client_controls.split(_ROWS):
                dist.broadcast(piece, src=0)
        self.controls_sent = True


def _broadcast(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=0)
    return tensor


def _send_controls(controls: list[tuple[Tensor, Tensor]]) -> None:
    dist.send(torch.tensor([len(controls)]), 0)
    for clients, rows in controls:
        dist.send(torch.tensor([len(clients), rows.shape[1]]), 0)
        dist.send(clients.contiguous(), 0)
        dist.send(rows.contiguous(), 0)


def _receive_controls(other: int) -> list[tuple[Tensor, Tensor]]:
    count = torch.zeros(1, dtype=torch.int64)
    dist.recv(count, other)
    controls = []
    for _ in range(int(count)):
        shape = torch.zeros(2, dtype=torch.int64)
        dist.recv(shape, other)
        clients, rows = torch.zeros(int(shape[0]), dtype=torch.int64), torch.zeros(int(shape[0]), int(shape[1]))
        dist.recv(clients, other)
        dist.recv(rows, other)
        controls.append((clients, rows))
    return controls


LONGEST = 2**30


def _send(content: Any) -> None:
    """Send content as JSON from rank 0 to the other ranks, which call `_receive`."""
    data = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    _broadcast(torch.tensor([len(data)]))
    _broadcast(data)


def _receive() -> Any:
    length = _broadcast(torch.zeros(1, dtype=torch.int64))
    if not 0 < int(length) <= LONGEST:
        raise RoundFailed(f"rank 0 announced a message of {int(length)} bytes; it must have between 1 and {LONGEST}.")
    return json.loads(_broadcast(torch.zeros(int(length), dtype=torch.uint8)).numpy().tobytes())


EVERY, GONE_AFTER = 2.0, 20.0
EXIT_CODE = 3


@dataclass
class Heartbeat:
    """Detect within seconds that another rank is lost, even if its machine did not close the connection.

    A round may take hours, so a slow rank is not a lost rank. A thread of each rank writes a counter to rank 0's TCPStore every
    few seconds; a rank whose counter stands still is lost. Rank 0 watches all other ranks, and they watch rank 0.
    """

    store: dist.TCPStore
    rank: int
    world: int
    stopped: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(cls) -> Self:
        """Start the heartbeat; a collective call of all ranks."""
        rank, world = dist.get_rank(), dist.get_world_size()
        patience = timedelta(seconds=GONE_AFTER)
        if rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience)
            _send([host, server.port])
        else:
            host, port = _receive()
            server = dist.TCPStore(host, port, is_master=False, timeout=patience)
        heart = cls(server, rank, world)
        server.set(f"beat/{rank}", "0")
        dist.barrier()
        threading.Thread(target=heart._run, name="heartbeat", daemon=True).start()
        return heart

    def _run(self) -> None:
        others = range(1, self.world) if self.rank == 0 else [0]
        seen = {other: ("", time.monotonic()) for other in others}
        count = 0
        while not self.stopped.wait(EVERY):
            count += 1
            try:
                self.store.set(f"beat/{self.rank}", str(count))
                beats = {other: self.store.get(f"beat/{other}").decode() for other in others}
            except RuntimeError:
                # Rank 0's store is gone. The run may be over, and this rank about to be told.
                if not self.stopped.wait(EVERY):
                    self._give_up(0)
                return
            now = time.monotonic()
            for other, beat in beats.items():
                if beat != seen[other][0]:
                    seen[other] = (beat, now)
                elif now - seen[other][1] > GONE_AFTER:
                    self._give_up(other)
                    return

    def _give_up(self, other: int) -> None:
        """End this process: its main thread waits in a collective that nothing else can interrupt.

        The files on disk are complete at every moment, so the run can be resumed.
        """
        if self.stopped.is_set():
            return
        sys.stderr.write(
            f"Stopped: rank {other} of {self.world} is gone (noticed by rank {self.rank}). Nothing of the round was released. "
            "Repeat the command to resume the run from its checkpoint, on any number of ranks.\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_CODE)
