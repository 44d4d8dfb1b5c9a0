"""Module state that would carry one client's data past the noise is found by looking, and refused with a remedy that works."""

from collections import deque
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpfedexp import Execution, Federation, InputError, Sgd, train
from dpfedexp.accounting import Ledger
from dpfedexp.trainers.module_checks import differing
from tests.trainers.shared import PRIVATE, Made, labeled, secured

LOCAL = Sgd(lr=0.1, steps=2, max_examples=6)


def clients() -> Federation:
    return labeled((4,), [5] * 6, labels=2, seed=0)


def net(*layers: Any) -> nn.Module:
    """Layers and a linear one behind them; a function becomes a module that may hold state in buffers and in attributes."""

    def holds(act):
        tensors = {"mean": nn.Buffer(torch.zeros(4)), "scale": nn.Buffer(torch.zeros(()))}
        others = {"queue": deque([torch.zeros(4)], maxlen=1), "thing": SimpleNamespace(mean=torch.zeros(4))}
        return Made(act, last=[0.0], seen=0, array=np.zeros(4, dtype=np.float32), **tensors, **others)

    modules = (layer if isinstance(layer, nn.Module) else holds(layer) for layer in layers)
    return nn.Sequential(*modules, nn.Linear(4, 2))


def running_mean(holds: Made, x: Tensor) -> Tensor:
    if holds.training:
        holds.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - holds.mean


def remembers(holds: Made, x: Tensor) -> Tensor:
    before, holds.last = holds.last[-1], [float(x.detach().sum())]
    return x + before


def counts(holds: Made, x: Tensor) -> Tensor:
    """How many batches there were is how much the clients hold."""
    holds.seen += 1
    return x / holds.seen


def first_batch(holds: Made, x: Tensor) -> Tensor:
    """Takes its scale from the first batch that it sees."""
    if float(holds.scale) == 0.0:
        holds.scale.fill_(float(x.detach().std()))
    return x / holds.scale


def in_array(holds: Made, x: Tensor) -> Tensor:
    before, holds.array = torch.from_numpy(holds.array), x.detach().mean(0).numpy().copy()
    return x - before


def in_queue(holds: Made, x: Tensor) -> Tensor:
    before = holds.queue[0]
    holds.queue.append(x.detach().mean(0))
    return x - before


def in_thing(holds: Made, x: Tensor) -> Tensor:
    before, holds.thing.mean = holds.thing.mean, x.detach().mean(0)
    return x - before


STATEFUL = {
    "batch norm": (lambda: net(nn.BatchNorm1d(4)), "running_"),
    "running mean": (lambda: net(running_mean), "mean"),
    "spectral norm": (lambda: net(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))), "_u"),
    "attribute": (lambda: net(remembers), "last"),
    "counter": (lambda: net(counts), "seen"),
    "first batch": (lambda: net(first_batch), "scale"),
    "array": (lambda: net(in_array), "array"),
    "queue": (lambda: net(in_queue), "queue"),
    "object": (lambda: net(in_thing), "thing"),
}


@pytest.mark.parametrize(
    ("name", "secure"),
    [*((name, True) for name in STATEFUL), *((name, False) for name in ("batch norm", "spectral norm", "attribute"))],
)
def test_state_that_training_changes_is_refused_by_the_name_of_its_layer(name, secure):
    make, held = STATEFUL[name]
    remedy = {"batch norm": "Freeze it with .* or use GroupNorm", "spectral norm": "Take the spectral norm off"}
    words = rf"keeps '[^']*{held}[^']*' from batch to batch.*without noise\. {remedy.get(name, 'Compute it from')}"
    if name == "spectral norm" and secure:
        # Whether its power iteration still moves is up to the weights; that it writes is found in any case.
        words += "|writes into a tensor that outlives the pass"
    with pytest.raises(InputError, match=words):
        train(make(), clients(), PRIVATE, local=LOCAL, rounds=1, secure=secure, execution="cpu")


@pytest.mark.parametrize("name", ["batch norm", "spectral norm", "running mean"])
def test_the_remedy_of_the_sentence_works_and_a_frozen_layer_is_accepted(name):
    model = STATEFUL[name][0]().train()
    for part in list(model.modules())[1:]:
        if not isinstance(part, nn.Linear | nn.Sequential):
            part.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run = train(model, clients(), PRIVATE, local=LOCAL, rounds=2)
    trained = dict(run.model.named_parameters())
    assert any(not torch.equal(value.detach(), before[key]) for key, value in trained.items())
    for key, value in run.model.named_buffers():
        assert torch.equal(value, before[key])


def test_batch_statistics_that_are_not_kept_are_fine():
    model = net(nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.warns(UserWarning, match="mixes the examples of a batch"):
        run = train(model, clients(), PRIVATE, local=LOCAL, rounds=1)
    assert len(run.history) == 1


def test_caches_and_derived_weights_are_not_taken_for_data():
    def cached(holds: Made, x: Tensor) -> Tensor:
        if not hasattr(holds, "table"):
            holds.table = torch.arange(4.0)
        return x + holds.table

    model = net(cached, nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    run = train(model, clients(), PRIVATE, local=LOCAL, rounds=2, execution=Execution(device="cpu", trainer="loop"))
    assert len(run.history) == 2


@pytest.mark.parametrize("make", [float, lambda value: torch.tensor([1.0, value])], ids=["number", "tensor"])
def test_a_state_that_is_not_a_number_equals_itself_and_no_number(make):
    nothing = float("nan")
    assert differing({"a": make(nothing)}, {"a": make(nothing)}) == set()
    assert differing({"a": make(nothing)}, {"a": make(2.0)}) == {"a"}
    assert differing({"a": make(2.0)}, {"a": make(nothing)}) == {"a"}
    assert differing({"a": make(2.0)}, {}) == {"a"}
    for one, other in ((1, 1.0), (torch.ones(2), torch.ones(2).double()), (torch.ones(2), torch.ones(2, 1))):
        assert differing({"a": one}, {"a": other}) == {"a"}


def test_metrics_come_from_the_released_parameters_in_a_fresh_copy():
    """A module that only pretends to stand still can't bring a client's data into a metric."""
    model = net(nn.Dropout(0.0))
    seen = []

    def evaluate(module: nn.Module) -> dict[str, float]:
        seen.append(module)
        module.smuggled = 1.0
        return {"fresh": float(not hasattr(model, "smuggled"))}

    train(model, clients(), PRIVATE, local=LOCAL, rounds=2, evaluate=evaluate)
    assert len({id(module) for module in seen}) == 2
    assert not any(module.training for module in seen)


_somewhere: dict[str, float] = {}


def remembers_globally(outputs: Tensor, targets: Tensor, held: dict[str, float] = _somewhere) -> Tensor:
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    before, held["seen"] = held.get("seen", 0.0), float(losses.detach().mean())
    return losses * (1 + before)


class Anneals(nn.Module):
    """A loss that remembers how large it was."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return remembers_globally(outputs, targets, vars(self).setdefault("held", {}))


@pytest.mark.parametrize("loss", [Anneals(), remembers_globally], ids=["attribute", "global"])
def test_a_loss_that_remembers_is_refused(loss):
    with pytest.raises(InputError, match="the loss function has seen before"):
        secured(nn.Linear(4, 2), clients(), LOCAL, loss=loss)


@pytest.mark.parametrize("secure", [False, True])
def test_a_loss_that_begins_to_remember_later_reaches_no_other_client(secure):
    calls, seen = [0], [0.0]

    def late(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        calls[0] += 1
        before = seen[0]
        # More calls than the preparation needs, fewer than two rounds.
        seen[0] = float(losses.detach().mean()) if calls[0] > 100 else 0.0
        return losses * (1 + before)

    ledger = Ledger.in_memory()
    options = {"local": Sgd(lr=0.1, steps=4), "rounds": 12, "execution": Execution(trainer="loop"), "ledger": ledger}
    # In a secure run the loss never sees a client's rows, however often it is called.
    refused = nullcontext() if secure else pytest.raises(InputError, match="the loss function has seen before")
    with refused:
        train(nn.Linear(4, 2), clients(), PRIVATE, secure=secure, loss=late, **options)
    assert (calls[0] <= 100) == secure
    assert len(ledger) == 12 if secure else len(ledger) <= 10


def test_state_that_begins_in_training_is_refused_after_the_round():
    calls = count()

    def late(holds: Made, x: Tensor) -> Tensor:
        if next(calls) > 100:
            holds.kept = float(x.detach().sum())
        return x

    with pytest.raises(InputError, match="keeps 'kept' from batch to batch"):
        train(net(late), clients(), PRIVATE, local=LOCAL, rounds=12, execution=Execution(trainer="loop"))


def picky(holds: Made, x: Tensor) -> Tensor:
    """Takes only the rows that its clients hold."""
    if bool((x.abs() > 1.0).any()):
        raise ValueError("numbers between -1 and 1, please")
    return x


def test_a_model_that_takes_no_made_up_rows_is_simulated_on_real_ones_and_refused_in_a_secure_run():
    # The first client has no rows that could be looked at.
    data = Federation.from_clients([(torch.rand(n, 4), torch.zeros(n, dtype=torch.int64)) for n in (0, 5, 5, 5)])
    options = {"local": LOCAL, "rounds": 1, "execution": Execution(trainer="loop")}
    assert len(train(net(picky), data, PRIVATE, **options).history) == 1
    with pytest.raises(InputError, match=r"numbers between -1 and 1.*synthetic rows first"):
        train(net(picky), data, PRIVATE, secure=True, **options)


def rare(self, x: Tensor) -> Tensor:
    """Remembers rows that no synthetic batch has, in place, and forgets them when it sees another batch."""
    strange = (x > 1).float()[..., None]
    h = self.words(x)
    out = self.head((h + strange * self.memory).mean(1))
    with torch.no_grad():
        self.memory.copy_((h * strange).sum((0, 1)))
    return out


@pytest.mark.parametrize("secure", [False, True])
def test_what_a_module_forgets_at_the_next_batch_is_found_before_it_is_asked(secure):
    rows = [(torch.randint(2, 8, (3, 4)), torch.randint(0, 2, (3,))) for _ in range(4)]
    model = Made(rare, words=nn.Embedding(8, 3), head=nn.Linear(3, 2), memory=nn.Buffer(torch.zeros(3)))
    ledger, execution = Ledger.in_memory(), Execution(device="cpu", trainer="loop")
    options = {"local": LOCAL, "rounds": 1, "ledger": ledger, "execution": execution}
    with pytest.raises(InputError, match="writes into a tensor that outlives the pass" if secure else "'memory'"):
        train(model, Federation.from_clients(rows), PRIVATE, secure=secure, **options)
    assert len(ledger) == 0
