"""In a secure run a client's row depends on nothing that the others hold, bit for bit, whatever trains it."""

import math
import random
import threading
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from dpfedexp import AdamW, Federation, FixedSize, InputError, Poisson, Sgd, cdp_fedexp, dp_scaffold, train
from dpfedexp.accounting import Ledger
from dpfedexp.algorithms.probe import UPDATE
from dpfedexp.core.local_optimizer import schedule
from dpfedexp.core.modules import Layout
from dpfedexp.engine.engine import Request
from dpfedexp.errors import RoundFailed
from dpfedexp.trainers import isolation
from dpfedexp.trainers.draws import watching_draws
from dpfedexp.trainers.isolation import classes_of, is_isolated, padded, synthetic_clients, train_isolated, widths
from dpfedexp.trainers.steps import Vectorized
from dpfedexp.trainers.task import Task
from tests.trainers.shared import PRIVATE, Made, bound, secured

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
REPLACED = 7
pytestmark = pytest.mark.usefixtures("same_streams")


def federation(size: int, seed: int, clients: int = 16) -> Federation:
    """Clients of unequal sizes, some empty, one of which is replaced by one of `size` made from `seed`."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 9, (clients,), generator=generator)
    sizes[[3, 11]] = 0
    rows = [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes.tolist()
    ]
    other = torch.Generator().manual_seed(seed)
    rows[REPLACED] = (10 * torch.randn(size, 6, generator=other), torch.randint(0, 3, (size,), generator=other))
    return Federation.from_clients(rows)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


def drawing() -> nn.Module:
    """A network that draws for each client: before, between and within the steps of a recurrent layer."""
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, 2, dropout=0.4, batch_first=True)
    parts = {"drop": nn.Dropout(0.3), "layer": layer, "head": nn.Linear(4, 3)}
    return Made(lambda self, x: self.head(self.drop(self.layer(self.drop(x).view(-1, 2, 3))[0][:, -1])), **parts)


def others(clients: Federation, algorithm, local, trainer: str, device: str = "cpu", make=net) -> torch.Tensor:
    """The exact sum of all clients but the one that is replaced, before noise; secure sums are whole numbers of steps."""
    engine = bound(make(), clients, local, trainer, algorithm=algorithm, device=device, secure=True)
    request = Request(UPDATE, 1, engine.begin(), engine.mechanism)
    everyone = engine.cohort.collect(request, torch.arange(len(clients))).sums
    alone = engine.cohort.collect(request, torch.tensor([REPLACED])).sums
    return everyone.vector - alone.vector


LOCALS = {
    "full batch": Sgd(lr=3.0, steps=6, max_examples=6),
    "batches": Sgd(lr=3.0, steps=6, batch_size=4),
    "epochs": Sgd(lr=3.0, epochs=3, batch_size=3, max_examples=40),
    "proximal": Sgd(lr=1.0, steps=5, max_examples=50, proximal=0.1),
    "classes": Sgd(lr=1.0, steps=4, max_examples=100),
    "draws": AdamW(lr=0.05, steps=2, max_examples=4, clip_gradient=1.0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("trainer", "how"),
    [
        *((trainer, "full batch") for trainer in ("loop", "tiled-loop", "vectorized", "tiled-vectorized", "fast")),
        *(("vectorized", "epochs"), ("tiled-vectorized", "batches"), ("vectorized", "draws")),
        *(("fast", "proximal"), ("fast", "classes")),
    ],
)
def test_replacing_one_client_moves_no_other_row(trainer, how, device):
    if device == "cuda" and trainer.startswith("tiled"):
        pytest.skip("a GPU has no tiles")
    replacements = ((4, 1), (333, 2), (0, 3)) if (trainer, how) == ("vectorized", "full batch") else ((4, 1), (333, 2))
    make = drawing if how == "draws" else net
    try:
        sums = [others(federation(*one), PRIVATE, LOCALS[how], trainer, device, make) for one in replacements]
    except InputError as reason:
        # Every device can keep clients apart that it trains one at a time.
        if "loop" in trainer or "depends on other clients" not in str(reason):
            raise
        return
    assert float(sums[0].abs().max()) > 0
    assert all(torch.equal(sums[0], other) for other in sums[1:])


UNBOUNDED = Sgd(lr=0.3, epochs=2, batch_size=8)


def test_without_a_bound_on_rows_a_secure_run_has_public_shapes_and_says_so():
    with pytest.warns(UserWarning, match="at most 512 rows of a client"):
        train(net(), federation(4, 1), PRIVATE, local=UNBOUNDED, rounds=1, secure=True)
    algorithm = cdp_fedexp(clip=1.0, noise_multiplier=2.0)
    sums = [others(federation(*how), algorithm, UNBOUNDED, "auto") for how in ((4, 1), (900, 2))]
    assert torch.equal(*sums)


@pytest.mark.parametrize(
    ("local", "trainer"),
    [(UNBOUNDED, "auto"), (Sgd(lr=0.3, steps=2), "loop"), (Sgd(lr=0.3, steps=2, max_examples=64), "auto")],
    ids=["epochs", "full batch", "bounded"],
)
def test_programs_are_recorded_in_shapes_that_no_client_decides(local, trainer):
    """One client with many rows decided which shapes the caller's code saw; with state, it moved the votes of others."""
    seen: list[set[int]] = []

    def watched(self, x):
        seen[-1].add(len(x))
        return self.net(x)

    for rows in (4, 900):
        seen.append(set())
        others(federation(rows, 1), PRIVATE, local, trainer, make=lambda: Made(watched, net=net()))
    assert seen[0] == seen[1]


def test_a_trainer_is_tried_in_the_shape_of_every_size_class(monkeypatch):
    """On a CPU, clients of one size class train together; a trainer that mixes them in one class alone is not used."""

    class MixesFew(Vectorized):
        def __call__(self, w, clients, plan, *rest):
            call = Coupled.__call__ if plan.positions.shape[2] == 4 else Vectorized.__call__
            return call(self, w, clients, plan, *rest)

    assert classes_of(secured(net(), federation(4, 1), replace(LOCALS["classes"], max_examples=5)).task) == [5, 4, 2, 1]
    monkeypatch.setattr("dpfedexp.trainers.select.Vectorized", MixesFew)
    with pytest.raises(InputError, match="depends on other clients of its chunk"):
        secured(net(), federation(4, 1), LOCALS["classes"], "vectorized")
    with pytest.raises(InputError, match="different size classes"):
        schedule(LOCALS["classes"], torch.tensor([2, 3]), np.random.default_rng, public=True, by_class=True)


class Coupled(Vectorized):
    """A trainer in which every row is nudged by its neighbors."""

    def __call__(self, *given):
        rows = Vectorized.__call__(self, *given)
        return rows + 1e-7 * rows.roll(1, 0)


class Bordered(Vectorized):
    """A trainer whose rows differ only in one place of a chunk, as where two threads share an operation."""

    def __call__(self, *given):
        rows = super().__call__(*given)
        rows[len(rows) // 3] *= 1 + 2**-20
        return rows


class BorderedAtRates(Bordered):
    """A trainer whose rows depend on their place only where clients bring rates of their own."""

    def __call__(self, w, clients, schedule, round, correction=None, rates=None):
        call = Vectorized.__call__ if rates is None else Bordered.__call__
        return call(self, w, clients, schedule, round, correction, rates)


@pytest.mark.parametrize(
    ("kind", "apart", "apart_at_rates"),
    [(Vectorized, True, True), (Coupled, False, False), (Bordered, False, False), (BorderedAtRates, True, False)],
)
def test_the_check_notices_rows_that_depend_on_neighbors_or_places(kind, apart, apart_at_rates):
    task = secured(net(), federation(4, 1), LOCALS["full batch"]).task
    for with_rates, expected in ((False, apart), (True, apart_at_rates)):
        asked = replace(task, has_client_rates=with_rates)
        made = replace(asked, clients=synthetic_clients(asked, 30))
        assert is_isolated(kind(made), made, 15) is expected


def test_a_trainer_that_couples_clients_is_not_used_in_a_secure_run(monkeypatch):
    monkeypatch.setattr("dpfedexp.trainers.select.Vectorized", Coupled)
    given = net(), federation(4, 1), LOCALS["full batch"]
    with pytest.raises(InputError, match="depends on other clients of its chunk"):
        secured(*given, "vectorized")
    assert "vectorized" not in secured(*given).trainer.name
    assert isinstance(secured(*given, secure=False).trainer, Coupled)


@pytest.mark.parametrize("participation", [None, Poisson(0.5), FixedSize(10)])
def test_sizes_of_chunks_and_shapes_come_from_public_numbers_alone(participation):
    shapes = set()
    for how in ((4, 1), (3000, 2)):
        given = net(), federation(*how), LOCALS["full batch"]
        simulation = secured(*given, rounds=50, participation=participation)
        shapes.add((simulation.chunk_size, simulation.unit))
    assert len(shapes) == 1


@pytest.mark.parametrize("control", [None, "scaffold"])
def test_secure_rows_equal_seeded_rows_to_rounding(control):
    algorithm = dp_scaffold(clip=1.0, noise_multiplier=2.0) if control else PRIVATE
    clients, local, found = federation(4, 1), Sgd(lr=0.1, steps=4, max_examples=8), []
    orders = torch.argsort(clients.sizes, stable=True)[2:], torch.arange(len(clients))
    for secure, order in enumerate(orders):
        engine = bound(net(), clients, local, "vectorized", algorithm=algorithm, secure=bool(secure))
        request = Request(UPDATE, 1, engine.begin(), engine.mechanism)
        found.append(engine.cohort.updates(request, request.state.w.float(), order)[: len(order)])
    torch.testing.assert_close(found[1][orders[0]], found[0], rtol=1e-4, atol=1e-6)
    assert float(found[1][3].abs().max()) == 0.0


def test_empty_places_do_not_count_and_empty_clients_do():
    algorithm = cdp_fedexp(clip=1.0, noise_multiplier=2.0)
    engine = bound(net(), federation(4, 1), LOCALS["full batch"], algorithm=algorithm, secure=True)
    simulation, some = engine.cohort, torch.tensor([3, 11, 12])
    request = Request(UPDATE, 1, engine.begin(), engine.mechanism)
    sums = simulation.collect(request, some).sums
    assert sums.count == 3
    # Two empty clients have u = (0, C), shrunk by the clip's margin; the third adds to it, no other client does.
    assert 2.0 * (1 - 2e-6) <= float(sums.vector[-1]) <= 3.0


def test_a_client_above_the_bound_uses_a_sample_of_its_own_every_round():
    local = Sgd(lr=0.1, steps=2, max_examples=5)
    sizes = torch.tensor([3, 5, 50])
    draws = [lambda row, seed=seed: np.random.default_rng([seed, row]) for seed in (0, 1)]
    plans = [schedule(local, sizes, draw, public=True) for draw in draws]
    for plan in plans:
        assert plan.positions.shape == (3, 1, 5)
        torch.testing.assert_close(plan.weights.sum(2), torch.ones(3, 1))
        assert len(set(plan.positions[2, 0].tolist())) == 5
        assert plan.positions[1, 0].tolist() == [0, 1, 2, 3, 4]
    assert plans[0].positions[2, 0].tolist() != plans[1].positions[2, 0].tolist()


def test_padding_fills_the_last_shape_and_marks_what_is_real():
    sizes = torch.tensor([2, 0, 3, 4, 0])
    filled, real = padded(torch.tensor([1, 2, 3]), sizes, 4)
    assert filled.tolist() == [2, 2, 3, 2]
    assert real.tolist() == [False, True, True, False]
    filled, real = padded(torch.tensor([1, 4]), sizes, 2)
    assert filled.tolist() == [0, 0]
    assert not bool(real.any())


@pytest.mark.parametrize(
    ("cohort", "most", "unit", "fixed"), [(100, 30, None, True), (100, 500, None, False), (7, 64, 4, True)]
)
def test_widths_hold_the_cohort_and_fit_the_memory(cohort, most, unit, fixed):
    chunk, shape = widths(cohort, most, unit, fixed)
    assert shape <= chunk <= most
    assert chunk % shape == 0
    if fixed and unit is None:
        assert math.ceil(cohort / chunk) * chunk - cohort < chunk / 2


@pytest.mark.parametrize("trainer", ["tiled-loop", "fast"])
def test_a_client_that_nothing_can_be_learned_from_stops_no_client_and_moves_no_other_row(trainer):
    sums = []
    for impossible in (False, True):
        clients = federation(4, 1)
        if impossible:
            # The network has three classes: every loss raises an error.
            clients.targets[int(clients.offsets[REPLACED])] = 99
        sums.append(others(clients, PRIVATE, LOCALS["full batch"], trainer))
    assert torch.equal(*sums)


def test_the_rows_of_the_first_clients_are_not_named_in_an_error():
    rows = [(torch.randn(3, 6), torch.full((3,), 99)), *((torch.randn(3, 6), torch.zeros(3).long()) for _ in range(5))]
    options = {"local": Sgd(lr=0.1, steps=2, max_examples=3), "rounds": 1, "execution": "cpu"}
    assert len(train(net(), Federation.from_clients(rows), PRIVATE, secure=True, **options).history) == 1
    with pytest.raises(InputError, match="99"):
        train(net(), Federation.from_clients(rows), PRIVATE, **options)


def test_shapes_that_do_not_fit_the_memory_end_the_run_where_they_are_public():
    learn = Mock(side_effect=torch.OutOfMemoryError)
    like, clients = torch.zeros(3), torch.arange(4)
    with pytest.raises(torch.OutOfMemoryError):
        train_isolated(learn, clients, 2, like=like, public=True)
    assert torch.equal(train_isolated(learn, clients, 2, like=like, public=False), torch.zeros(4, 3))


def test_shapes_that_follow_from_a_clients_size_class_do_not_end_the_run():
    """A client with 8 rows needs more memory than one with 4: the end of the run would tell which one it has."""
    run, trained = secured(net(), federation(8, 1), Sgd(lr=0.1, steps=2, max_examples=8)), set()
    trainer = run.trainer

    def small(w, clients, plan, *more):
        if plan.positions.shape[-1] > 4:
            raise MemoryError
        return trainer(w, clients, plan, *more)

    run = replace(run, trainer=Mock(side_effect=small))
    w, sizes = run.task.layout.read(run.task.model).float(), run.task.clients.sizes
    request = Mock(purpose=UPDATE, round=1, local_rate=None, state=Mock(control=None))
    for chunk in run.chunks(torch.arange(16)):
        rows = run.updates(request, w, chunk)
        trained |= {client for client, row in zip(chunk.tolist(), rows, strict=False) if bool(row.any())}
    assert trained == set(torch.nonzero((sizes > 0) & (sizes <= 4)).flatten().tolist())


def test_a_model_that_is_written_while_clients_train_ends_the_round_before_it_is_charged():
    engine = bound(net(), federation(4, 1), LOCALS["full batch"], algorithm=PRIVATE, secure=True)
    trainer, ledger = engine.cohort.trainer, Ledger.in_memory()

    def writes(w, *rest):
        w[0] += 1
        return trainer(w, *rest)

    with pytest.raises(RoundFailed, match="changed while clients trained"):
        replace(engine, cohort=replace(engine.cohort, trainer=Mock(side_effect=writes))).step(engine.begin(), ledger)
    assert len(ledger) == 0


def test_a_model_that_no_client_could_train_is_refused_before_anything_is_charged():
    fails = Made(lambda self, x: self.layer(x.double()), layer=nn.Linear(6, 3).double())
    ledger = Ledger.in_memory()
    options = {"local": LOCALS["full batch"], "rounds": 1, "ledger": ledger}
    with pytest.raises(InputError, match="can't be computed on a batch of synthetic rows"):
        train(fails, federation(4, 1), PRIVATE, secure=True, **options)
    assert len(ledger) == 0


def test_a_loss_that_looks_at_values_once_in_a_while_is_refused():
    calls = count(1)

    def looks(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if next(calls) % 8 == 0 and outputs.mean().item() > 100:
            outputs = -outputs
        return nn.functional.cross_entropy(outputs, y, reduction="none")

    with pytest.raises(InputError, match="looks at values while it runs"):
        secured(net(), federation(4, 1), LOCALS["full batch"], loss=looks)


@pytest.mark.parametrize("words", [1, 2, 50])
def test_synthetic_clients_hold_words_that_the_model_knows(words):
    """Two different ones where it knows two, so that a probe sees more than one value."""
    model, clients = torch.nn.Embedding(words, 1), Federation.from_clients([(torch.zeros(3, 4).long(), torch.zeros(3))])
    loss, local = lambda output, y: output.flatten(1).mean(1), Sgd(lr=0.1, steps=1, max_examples=8)
    task = Task(model, Layout.of(model), loss, local, clients, torch.device("cpu"))
    clients = synthetic_clients(task, 3)
    assert clients.sizes.tolist() == [8, 8, 8]
    seen, _ = clients.gather(torch.arange(3), torch.arange(2).expand(3, 2))
    assert set(seen.flatten().tolist()) == set(range(min(words, 2)))


def test_programs_are_tried_with_every_class_that_the_loss_knows(monkeypatch):
    known = []
    monkeypatch.setattr(isolation, "adversarial", lambda x, y, words, labels: known.append((words, labels)) or [(x, y)])
    secured(net(), federation(4, 1), LOCALS["full batch"])
    assert known == [(2, 3)], "two words where there is no embedding, and the three outputs of the network"


def test_rows_that_are_not_a_number_are_the_same_when_they_are_asked_for_again():
    model, clients = nn.Linear(2, 1), Federation.from_clients([(torch.ones(3, 2), torch.zeros(3))])
    clients.targets.fill_(math.nan)
    local = Sgd(lr=0.1, steps=1, max_examples=3)
    isolation.check_rows(Task(model, Layout.of(model), nn.MSELoss(), local, clients, torch.device("cpu")))


@pytest.mark.parametrize("every", [False, True])
def test_what_another_thread_draws_is_not_taken_for_the_models_draw(every):
    """Flower's heartbeat draws from Python's generator in a thread of its own, and nodes with many clients refused their model."""

    def drawn():
        calls = count()
        return watching_draws(lambda: random.random() if every or next(calls) == 0 else None)[1]

    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert drawn() == every
    finally:
        done.set()
        other.join()
    # Where there is no other thread, the model itself has drawn.
    assert threading.active_count() > 1 or drawn()
