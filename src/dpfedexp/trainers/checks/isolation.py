"""Isolation: in a run that protects real data, one client's row does not depend on what the others hold, bit for bit.

The noise is made for a sum in which one client moves one row. If rows are computed together, another client can move them too: by
the padding of a batch, by its place in a chunk, by the kernel that a library chooses for a shape. An isolated run therefore

- fixes every shape by public numbers (`local.max_examples`, or `steps` and `batch_size`), fills up the last chunk, and keeps the
  clients in the order of their numbers;
- chooses its trainer on made-up data;
- uses a trainer only if a client's row came out the same, bit for bit, beside other clients, in other places of its chunk.

What holds for made-up clients of a shape holds for real ones: kernels are chosen by shapes and addresses, not by values.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from dpfedexp.batches import Batching, Schedule, schedule
from dpfedexp.clipping import clip, row_norms
from dpfedexp.errors import InputError
from dpfedexp.inputs import Inputs, call, each, leaves
from dpfedexp.local import Sgd
from dpfedexp.mechanisms.free import lift
from dpfedexp.noise.streams import Streams
from dpfedexp.trainers.checks.module_state import Watch, drawing_alike
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.task import Clients, Task, Trainer, check_task, first_line

log = logging.getLogger("dpfedexp")

_MOST_ROWS, _MOST_NUMBERS = 1024, 2**22
"""Of the rows that made-up clients share: enough for all of them to differ, and not many where one is large."""
_TRIED = 24
WHY = (
    "(A secure run tries everything on made-up rows first, so that no client's own rows decide: the model must take any numbers, "
    "and tokens and labels 0 and 1.)"
)
_STEPS = 3
"""Local steps of a trial: the first starts from one vector for all, the later ones from rows of their own."""


class MadeUp:
    """Clients that are nobody: rows of the right shape and type from public numbers alone, of the sizes given."""

    def __init__(self, like: tuple[Inputs, Tensor], sizes: Tensor, seed: int = 0, tokens: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes = sizes
        self.rows = max(16, min(_MOST_ROWS, _MOST_NUMBERS // max(1, sum(part.numel() for part in leaves(like[0])))))
        self.inputs = each(lambda row: _rows(self.rows, row, generator, tokens, torch.randn), like[0])
        # Targets between 0 and 1 suit every loss for floating-point targets, probabilities included.
        self.targets = _rows(self.rows, like[1], generator, tokens, torch.rand)

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(self, clients: Tensor, positions: Tensor, device: torch.device | None = None) -> tuple[Inputs, Tensor]:
        at = (clients.cpu()[:, None] * 7919 + positions.cpu()) % self.rows
        return each(lambda rows: rows[at].to(device), self.inputs), self.targets[at].to(device)

    def batches(self, rows: int, device: torch.device) -> tuple[tuple[Inputs, Tensor], ...]:
        """Three batches of one client's shape."""
        x, y = self.gather(torch.arange(3), torch.arange(rows).expand(3, rows), device)
        return _by_client(x, y)


def _rows(count: int, row: Tensor, generator: torch.Generator, tokens: int, draw: Callable[..., Tensor]) -> Tensor:
    shape = (count, *row.shape)
    if row.is_floating_point():
        return draw(shape, generator=generator).to(row.dtype)
    return torch.randint(0, tokens, shape, generator=generator).to(row.dtype)


def made_up(task: Task, count: int) -> MadeUp:
    """Made-up clients as large as the public bound allows, in place of the real ones."""
    holder = torch.nonzero(task.clients.sizes > 0).flatten()[:1]
    x, y = task.clients.gather(holder, torch.zeros((1, 1), dtype=torch.int64), task.device)
    like = each(lambda value: value[0, 0].cpu(), x), y[0, 0].cpu()
    size = torch.full((count,), task.local.max_examples or task.local.batch_size or 2)
    for tokens in (2, 1):
        clients = MadeUp(like, size, tokens=tokens)
        if _fits(task, clients):
            return clients
    return clients


def _fits(task: Task, clients: MadeUp) -> bool:
    """Whether the model takes these tokens and labels; a vocabulary of one word has no second."""
    x, y = clients.batches(2, task.device)[0]
    try:
        with torch.no_grad():
            task.loss(call(copy.deepcopy(task.model), x), y)
    except Exception:
        return False
    return True


def check_on(clients: MadeUp, task: Task) -> None:
    """Model, data and loss fit each other, as seen on made-up clients."""
    try:
        check_task(replace(task, clients=clients))
    except InputError as error:
        raise InputError(f"{error} {WHY}") from None


def watched(task: Task, clients: MadeUp, *, isolated: bool) -> Watch:
    """What the module's state may be, seen on made-up batches; raises `InputError` where training leaves anything behind."""

    def losses(module: nn.Module, x: Inputs, y: Tensor) -> Tensor:
        return task.loss(call(module, x), y)

    try:
        return Watch.over(task.model, losses, clients.batches(2, task.device))
    except InputError:
        raise
    except Exception as error:
        if isolated:
            raise InputError(
                f"the model can't be trained on a batch of made-up rows: {first_line(error)} {WHY}"
            ) from error
    return Watch.over(task.model, losses, _real_batches(task))


def _real_batches(task: Task) -> tuple[tuple[Inputs, Tensor], ...]:
    """Three batches of clients that hold data, for models that take no made-up ones; a simulation may look at its clients."""
    holders = torch.nonzero(task.clients.sizes > 0).flatten()
    some = holders[torch.arange(3) % len(holders)]
    last = (task.clients.sizes[some] - 1)[:, None]
    x, y = task.clients.gather(some, torch.cat([torch.zeros_like(last), last], dim=1), task.device)
    return _by_client(x, y)


def _by_client(x: Inputs, y: Tensor) -> tuple[tuple[Inputs, Tensor], ...]:
    return tuple((each(lambda value, at=at: value[at], x), y[at]) for at in range(len(y)))  # type: ignore[misc]


def check_rows_apart(clients: Clients) -> None:
    """Raises `InputError` where the federation's transform lets one row change another; seen on made-up rows.

    Rows of many clients are transformed together, so a mean over the batch would be a mean over clients.
    """
    raw = getattr(clients, "inputs", None)
    if raw is None or getattr(clients, "transform", None) is None:
        return
    generator = torch.Generator().manual_seed(0)
    targets = clients.targets[:1]  # type: ignore[attr-defined]
    if raw.is_floating_point():
        rows = torch.randn(_TRIED, *raw.shape[1:], generator=generator).to(raw.dtype)
    else:
        rows = torch.randint(0, 256 if raw.dtype == torch.uint8 else 2, (_TRIED, *raw.shape[1:]), generator=generator)
        rows = rows.to(raw.dtype)
    half, labels = _TRIED // 3, torch.zeros_like(targets).expand(2 * _TRIED // 3, *targets.shape[1:])
    one, two, three = rows.split(half)

    def seen(*parts: Tensor) -> Tensor:
        with drawing_alike(torch.device("cpu")):
            prepared: Tensor = clients.prepare(torch.cat(parts), labels)[0]  # type: ignore[attr-defined]
        return prepared

    before = seen(one, two)
    if not (
        torch.equal(before[:half], seen(one, three)[:half])
        and torch.equal(before[half:], seen(three, two)[half:])
        and torch.equal(before, seen(one, two))
    ):
        raise InputError(
            "the federation's transform lets the rows of a batch change each other, or remembers what it has seen; rows of several "
            "clients are transformed together, so a secure run needs one that takes every row on its own."
        )


def check_training(trial: Task, streams: Streams) -> None:
    """Raises `InputError` where a made-up client can't be trained: what fails on real ones is about them, and is not shown."""
    one = torch.zeros(1, dtype=torch.int64)
    w = trial.layout.read(trial.model).float().to(trial.device)
    plan = schedule(trial.local, trial.clients.sizes[one], lambda row: np.random.default_rng(0))
    try:
        Loop(trial, streams)(
            w, one, Schedule(plan.positions[:, :1], plan.weights[:, :1], torch.ones_like(plan.steps)), 1
        )
    except Exception as error:
        raise InputError(f"the model can't be trained on a batch of made-up rows: {first_line(error)}") from error


def widths(cohort: float, most: int, unit: int | None, fixed: bool) -> tuple[int, int]:
    """Clients per chunk, and how many of them make a shape, from public numbers.

    Args:
        cohort: the expected number of clients of a round.
        most: clients that fit the memory.
        unit: clients that the trainer takes at a time, None where it takes the whole chunk.
        fixed: whether every round has exactly `cohort` clients.
    """
    clients = max(1, int(np.ceil(cohort)))
    if unit is not None:
        return max(unit, most - most % unit), unit
    # Where the number varies, the last chunk is only partly real: several small chunks waste less than one large one.
    chunks = -(-clients // most) if fixed else max(8, -(-clients // most))
    width = max(1, min(most, -(-clients // chunks)))
    return width, width


def is_isolated(trainer: Trainer, task: Task, width: int) -> bool:
    """Whether made-up clients' rows are the same, bit for bit, beside other clients and in every place of a chunk of `width`.

    `task` has made-up clients. Rows are compared as trained, and clipped and lifted. A client that is trained alone must not depend
    on those before it either.
    """
    draw = np.random.default_rng(0)
    everyone = draw.permutation(2 * width)
    # Where threads share an operation, only the rows at their borders may differ: every place is tried with several clients.
    orders = [everyone[:width], everyone[:width][::-1], np.roll(everyone[:width], 1), everyone[width // 2 :][:width]]
    orders += [draw.permutation(everyone[:width]), draw.permutation(everyone)[:width]]
    if width == 1:
        orders = [everyone[:1], everyone[1:], everyone[:1]]
    most = int(task.clients.sizes[0])
    sizes = torch.from_numpy(draw.integers(1, most + 1, size=2 * width))
    w = task.layout.read(task.model).float().to(task.device)
    radius: float | None = None
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for order in orders:
        clients = torch.from_numpy(order.copy())
        # A step at a rate of the client's own is another operation than one at the optimiser's, and rounds in its own way.
        own = (None, 0.1 + clients.float().to(w.device) / (20 * width)) if task.rated else ()
        rows = trainer(w, clients, _short(task.local, sizes[clients], clients), 1, *own)
        if radius is None:
            radius = max(1e-6, float(row_norms(rows).median()))
        lifted = lift(clip(rows, radius).vectors, radius)
        for client, row, other in zip(order.tolist(), rows, lifted, strict=True):
            before = seen.setdefault(client, (row, other))
            if not (torch.equal(before[0], row) and torch.equal(before[1], other)):
                off = float((before[0] - row).abs().max())
                log.info(
                    "%s: a made-up client's row differs by up to %g between two chunks of %d", trainer.name, off, width
                )
                return False
    return True


def _short(local: Batching, sizes: Tensor, clients: Tensor) -> Schedule:
    """The first steps of a public schedule; all of them for an optimiser of which it is not known that every step is alike."""
    plan = schedule(local, sizes, lambda row: np.random.default_rng(int(clients[row])), public=local.shape_is_public)
    if type(local) is not Sgd:
        return plan
    steps = plan.steps.clamp_max(_STEPS)
    return Schedule(plan.positions[:, :_STEPS], plan.weights[:, :_STEPS], steps, plan.most and min(plan.most, _STEPS))


def padded(clients: Tensor, sizes: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Clients of a chunk filled up to a multiple of `unit`, and which of the rows are real and hold data.

    An empty client, and a place that nobody fills, is trained as some client that holds data; its row is thrown away.
    """
    holders = torch.nonzero(sizes[clients] > 0).flatten()
    someone = clients[holders[0]] if len(holders) else torch.nonzero(sizes > 0).flatten()[0]
    room = -(-len(clients) // unit) * unit
    filled = someone.repeat(room)
    filled[holders] = clients[holders]
    real = torch.zeros(room, dtype=torch.bool)
    real[holders] = True
    return filled, real


def learnt_apart(
    learn: Callable[[Tensor], Tensor], clients: Tensor, unit: int, *, like: Tensor, public: bool
) -> Tensor:
    """Rows of clients, where one on whose data the model or the loss fails has learnt nothing and stops nobody.

    That a run ends, and with which sentence, would tell what a client holds. After a failure every client is trained in a shape
    that it fills alone, in which its row is the same bit for bit.

    Args:
        learn: the rows of some clients, a multiple of `unit` of them.
        like: the parameters, a vector of a row's length on its device.
        public: whether shapes are, so that running out of memory tells nothing.
    """
    try:
        return learn(clients)
    except Exception as error:
        _about_the_run(error, public)
    rows = torch.zeros(len(clients), len(like), device=like.device)
    for row, client in zip(rows, clients, strict=True):
        try:
            row.copy_(learn(client.repeat(unit))[0])
        except Exception as error:
            _about_the_run(error, public)
    return rows


def _about_the_run(error: Exception, public: bool) -> None:
    if public and isinstance(error, MemoryError | torch.OutOfMemoryError):
        raise error
