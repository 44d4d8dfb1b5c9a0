"""Isolation: in a secure run, a client's update does not depend on the data of others, bit for bit.

The privacy noise covers one client that changes one row of the sum. Isolation is by construction:

- module, loss, transform and a custom optimizer run on synthetic values only. Their tensor operations are recorded there, and the
  clients' rows go through the recording (`trainers.recording`), which is refused if it could carry anything between clients;
- every client has its own copy of the parameters, and the transform sees one client at a time;
- every shape is fixed by public numbers (`local.max_examples`, or `steps` and `batch_size`), or is one of a few public shapes:
  on a CPU, clients with the same number of rows, rounded up to a power of two, train together. The last chunk is padded;
- the trainer is chosen on synthetic clients, and only if their rows are the same, bit for bit, with other clients in the chunk and
  in other places of the chunk (`is_isolated`), for every shape: kernels are chosen by shapes and addresses, not by values.
"""

import copy
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpfedexp.core.clipping import clip, row_norms
from dpfedexp.core.local_optimizer import LocalOptimizer, Schedule, Sgd, schedule, size_class
from dpfedexp.core.losses import class_dimension, loss_traits, read
from dpfedexp.core.modules import Inputs, call, each
from dpfedexp.core.noise import Streams
from dpfedexp.errors import InputError, first_line, require
from dpfedexp.mechanisms.base import lift
from dpfedexp.trainers.client_losses import ClientLosses, all_rows
from dpfedexp.trainers.draws import seeded_generators, watching_draws
from dpfedexp.trainers.module_checks import StateCheck
from dpfedexp.trainers.recording import Recorded, SyntheticClients, Tape, Unrecordable, adversarial, refusal, same_bits
from dpfedexp.trainers.steps import ByAutograd
from dpfedexp.trainers.task import Task, Trainer, check_task, one_row

log = logging.getLogger("dpfedexp")

WHY = (
    "(A secure run tries everything on synthetic rows first, so that no client's own rows decide: the model must take any numbers, "
    "and tokens and labels 0 and 1.)"
)
_BATCH = 8
"""Rows of the batches on which recordings are compared, and of the largest client that is tried with its own shape."""
_STEPS = 3
"""Local steps of a trial: the first starts from one vector for all clients, later ones from each client's own row."""


def synthetic_clients(task: Task, count: int) -> SyntheticClients:
    """Synthetic clients with the federation's shapes, as large as the public bound allows."""
    x, y = one_row(task.clients)
    like = each(lambda value: value[0, 0].cpu(), x), y[0, 0].cpu()
    size = torch.full((count,), task.local.max_examples or task.local.batch_size or 2)
    # A vocabulary of one word has no token 1.
    for tokens in (2, 1):
        clients = SyntheticClients(like, size, getattr(task.clients, "transform", None), tokens=tokens)
        with suppress(Exception), torch.no_grad(), seeded_generators(task.device):
            x, y = _batches(task, clients)[0]
            task.loss(call(copy.deepcopy(task.model), x), y)
            break
    return clients


def _batches(task: Task, clients: SyntheticClients) -> tuple[tuple[Inputs, Tensor], ...]:
    """Three batches of two rows, one per synthetic client."""
    return _by_client(*replace(task, clients=clients).gather(torch.arange(3), torch.arange(2).expand(3, 2)))


def check_on(clients: SyntheticClients, task: Task) -> None:
    """Check on synthetic clients that model, data and loss fit each other."""
    trial = replace(task, clients=clients)
    try:
        check_task(trial)
        # Computed here on synthetic rows, and shared with the task of the real clients.
        _ = trial.module_traits
    except InputError as error:
        raise InputError(f"{error} {WHY}") from None


def check_rows(task: Task) -> None:
    """Raise `InputError` if reading a client twice gives different rows: how often it is read depends on other clients."""
    # Several clients, because a single client's rows could hide the difference.
    some = torch.nonzero(task.clients.sizes > 0).flatten()[:3]
    read = task.held(some, torch.zeros((len(some), 1, 1), dtype=torch.int64), Streams(0), 0)
    try:
        one, other = (tree_leaves(read(0)) for _ in range(2))
    except Exception:
        # A client whose rows can't be read counts as zero in its rounds.
        return
    require(
        all(map(same_bits, one, other)),
        "a client that is asked twice gives different rows: the code that makes them keeps state between calls, such as a counter "
        "or a random generator, which all clients would share. Compute a client's rows from its number alone: draw with "
        "np.random.default_rng(number).",
    )


def make_state_check(task: Task, clients: SyntheticClients, *, isolated: bool) -> StateCheck:
    """Record the allowed state of a module on synthetic batches; raises `InputError` if training leaves state behind."""
    try:
        return StateCheck.over(task.model, task.loss, _batches(task, clients))
    except InputError:
        raise
    except Exception as error:
        if isolated:
            text = f"the model can't be trained on a batch of synthetic rows: {first_line(error)} {WHY}"
            raise InputError(text) from error
    # The model does not accept synthetic rows: only a simulation may use its clients' rows instead.
    holders = torch.nonzero(task.clients.sizes > 0).flatten()
    some = holders[torch.arange(3) % len(holders)]
    last = (task.clients.sizes[some] - 1)[:, None]
    real = _by_client(*task.gather(some, torch.cat([torch.zeros_like(last), last], dim=1)))
    return StateCheck.over(task.model, task.loss, real)


def _by_client(x: Inputs, y: Tensor) -> tuple[tuple[Inputs, Tensor], ...]:
    return tuple((each(lambda value, at=at: value[at], x), y[at]) for at in range(len(y)))  # type: ignore[misc]


def check_recordings(trial: Task, streams: Streams) -> None:
    """Raise `InputError` if a client's programs can't be recorded, or change after they have seen other rows.

    They are tried on ordinary and on adversarial rows of synthetic clients, forward and backward.
    """
    clients = cast(SyntheticClients, trial.clients)
    count = min(int(clients.sizes[0]), _BATCH)
    one, positions = torch.zeros(1, dtype=torch.int64), torch.arange(count)[None]
    raw, y = (each(lambda value: value[0], part) for part in clients.gather(one, positions, trial.device))
    if (transform := trial.client_transform) is not None:
        key = torch.ones((), dtype=torch.int64, device=trial.device)
        _check_program("the federation's transform", transform.alone, [(x, key) for x, _ in _variants(raw, y, 2, 2)])
    x, _ = trial.gather(one, positions, streams)
    own = each(lambda value: value[0], x)
    keys = trial.keys(streams, 0, one)
    params = trial.layout.unflatten(trial.layout.read(trial.model).float().to(trial.device))
    rest = torch.full((count,), 1 / count, device=trial.device), *(() if keys is None else (keys[0],))
    variants = _variants(own, y, *_known_numbers(trial, own, y))
    program = Recorded(ByAutograd(trial).gradients, own=lambda inputs: inputs[0].values(), held=trial.module_tensors)
    _check_program("the model or its loss", program, [(params, *rows, *rest) for rows in variants])


def _variants(x: Inputs, y: Tensor, words: int, labels: int) -> list[tuple[Inputs, Tensor]]:
    """An ordinary batch twice, adversarial ones, and the ordinary one again. The first pass may fill caches of public values."""
    return [(x, y), (x, y), *adversarial(x, y, words, labels), (x, y)]


def _check_program(what: str, program: Recorded, inputs: list[tuple[Any, ...]]) -> None:
    """Record a program on several inputs; raises `InputError` unless all recordings are the same."""
    tapes, drawn = watching_draws(lambda: _tapes(what, program, inputs))
    shared = f"{what} draws random numbers from NumPy or Python's random, which all clients would share"
    require(not drawn, f"{shared}; draw with torch.rand, torch.randn or dropout, which have a key for each client.")
    require(
        all(tapes[1].same(tape) for tape in tapes[2:]),
        f"{what} computes something else after it has seen other rows: it keeps state from batch to batch, leaves torch, or draws "
        "from a generator of its own, which all clients would share. Compute it from the batch alone.",
    )


def _tapes(what: str, program: Recorded, inputs: list[tuple[Any, ...]]) -> list[Tape]:
    tapes: list[Tape] = []
    for number, given in enumerate(inputs):
        try:
            tapes.append(program.record(given))
        except Unrecordable as reason:
            raise refusal(what, reason) from None
        except InputError:
            raise
        except Exception as error:
            # A program may refuse extreme values, words or labels; it must accept ordinary ones.
            if number in (0, 1, len(inputs) - 1):
                text = f"{what} can't be computed on a batch of synthetic rows: {first_line(error)} {WHY}"
                raise InputError(text) from error
    return tapes


def _known_numbers(task: Task, x: Inputs, y: Tensor) -> tuple[int, int]:
    """The number of words that the model's embeddings know, and the number of labels that its loss knows."""
    tokens = cast(SyntheticClients, task.clients).tokens
    tables = [part.num_embeddings for part in task.model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    with torch.no_grad(), seeded_generators(task.device):
        outputs = read(task.loss, call(copy.deepcopy(task.model), x))
    traits = loss_traits(task.loss)
    at = class_dimension(outputs, y, second=traits.second) if isinstance(outputs, Tensor) else None
    labels = outputs.shape[at] if at is not None and traits.kind in ("classes", "unknown") else tokens
    return min(tables, default=tokens), labels


def widths(cohort: float, most: int, unit: int | None, fixed: bool) -> tuple[int, int]:
    """The clients per chunk, and the clients per shape, from public numbers.

    `cohort` clients are expected (exactly, if `fixed`), `most` fit the memory, and a trainer takes `unit` clients or all at once.
    """
    clients = max(1, int(np.ceil(cohort)))
    if unit is not None:
        return max(unit, most - most % unit), unit
    # If the number varies, the last chunk is only partly real: several small chunks waste less than one large one.
    chunks = -(-clients // most) if fixed else max(8, -(-clients // most))
    width = max(1, min(most, -(-clients // chunks)))
    return width, width


def classes_of(task: Task) -> list[int]:
    """The size classes of a task with synthetic clients, the largest first; one class if shapes do not follow from them."""
    most = int(task.clients.sizes[0])
    return size_class(torch.arange(1, most + 1), most).unique().tolist()[::-1] if task.shapes_by_class else [most]


def is_isolated(trainer: Trainer, task: Task, width: int, rows: int | None = None) -> bool:
    """Whether synthetic clients' rows are the same, bit for bit, with other clients and in every place of a chunk of `width`.

    `task` has synthetic clients, of size class `rows` (the largest by default). Rows are compared as trained, and clipped and
    lifted; so are the losses by which clients vote. A client that is trained alone must not depend on earlier
    clients either.
    """
    draw = np.random.default_rng(0)
    everyone = draw.permutation(2 * width)
    # Where threads share an operation, only rows at their borders may differ: every place is tried with several clients.
    orders = [everyone[:width], everyone[:width][::-1], np.roll(everyone[:width], 1), everyone[width // 2 :][:width]]
    orders += [draw.permutation(everyone[:width]), draw.permutation(everyone)[:width]]
    if width == 1:
        orders = [everyone[:1], everyone[1:], everyone[:1]]
    most = rows or int(task.clients.sizes[0])
    least = int(size_class(torch.tensor(most))) // 2 + 1 if task.shapes_by_class else 1
    sizes = torch.from_numpy(draw.integers(least, most + 1, size=2 * width))
    w = task.layout.read(task.model).float().to(task.device)
    radius: float | None = None
    seen: dict[int, list[Tensor]] = {}
    asked = ClientLosses(task, trainer, Streams(0), unit=trainer.unit or width)
    for order in orders:
        clients = torch.from_numpy(order.copy())
        # A step with a rate per client is another operation than a step with the optimizer's rate, and rounds differently.
        own = (None, 0.1 + clients.float().to(w.device) / (20 * width)) if task.has_client_rates else ()
        updates = trainer(w, clients, _short(task, sizes[clients], clients), 1, *own)
        if radius is None:
            radius = max(1e-6, float(row_norms(updates).median()))
        lifted = lift(clip(updates, radius).vectors, radius)
        everything = _plan(task, all_rows(task.local.max_examples), sizes[clients], clients)
        losses = asked(w, updates, clients, everything, 1)[:, None]
        for client, *found in zip(order.tolist(), updates, lifted, losses, strict=True):
            before = seen.setdefault(client, found)
            if not all(map(same_bits, before, found)):
                off = float((before[0] - found[0]).abs().max())
                said = "%s: the update of a synthetic client of %d rows differs by up to %g between two chunks of %d"
                log.info(said, trainer.name, most, off, width)
                return False
    return True


def _plan(task: Task, local: LocalOptimizer, sizes: Tensor, clients: Tensor) -> Schedule:
    def draws(row: int) -> np.random.Generator:
        return np.random.default_rng(int(clients[row]))

    return schedule(local, sizes, draws, public=True, by_class=task.shapes_by_class)


def _short(task: Task, sizes: Tensor, clients: Tensor) -> Schedule:
    """The first steps of a schedule; all steps for a custom optimizer, whose steps may differ from one another."""
    plan = _plan(task, task.local, sizes, clients)
    if type(task.local) is not Sgd:
        return plan
    steps = plan.steps.clamp_max(_STEPS)
    return Schedule(plan.positions[:, :_STEPS], plan.weights[:, :_STEPS], steps, plan.most and min(plan.most, _STEPS))


def padded(clients: Tensor, sizes: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Pad the clients of a chunk to a multiple of `unit`; returns them and which rows are real clients with data.

    Empty clients and unused places are trained with another client's data, and their rows are dropped.
    """
    holders = torch.nonzero(sizes[clients] > 0).flatten()
    someone = clients[holders[0]] if len(holders) else torch.nonzero(sizes > 0).flatten()[0]
    room = -(-len(clients) // unit) * unit
    filled = someone.repeat(room)
    filled[holders] = clients[holders]
    real = torch.zeros(room, dtype=torch.bool)
    real[holders] = True
    return filled, real


def train_isolated(
    learn: Callable[[Tensor], Tensor], clients: Tensor, unit: int, *, like: Tensor, public: bool, fill: float = 0.0
) -> Tensor:
    """Train clients; a client on whose data the model or the loss fails gets a row of `fill` and does not stop the others.

    A run that stops would reveal something about the client's data. After a failure every client is trained alone in the same
    shape, where its row is the same bit for bit. `learn` returns the rows of a multiple of `unit` clients, `like` are the
    parameters. If shapes are `public`, running out of memory reveals nothing and is raised.
    """
    try:
        return learn(clients)
    except Exception as error:
        _about_the_run(error, public)
    rows = torch.full((len(clients), len(like)), fill, device=like.device)
    for row, client in zip(rows, clients, strict=True):
        try:
            row.copy_(learn(client.repeat(unit))[0])
        except Exception as error:
            _about_the_run(error, public)
    return rows


def _about_the_run(error: Exception, public: bool) -> None:
    if public and isinstance(error, MemoryError | torch.OutOfMemoryError):
        raise error
