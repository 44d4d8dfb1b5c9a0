"""Runs of a few milliseconds, and crashes, for tests of what becomes of a run."""

import hashlib
import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from dpfedexp import Federation, Sgd, cdp_fedexp, train
from dpfedexp.accounting import Ledger
from dpfedexp.engine.checkpoint import digest
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.models import linear_regression
from tests.arguments import arguments

ALGORITHM = cdp_fedexp(clip=0.3, noise_multiplier=4.0)
ROUNDS = 6


class Crash(BaseException):
    """Stands for a power failure: nothing may catch it."""


def federation():
    draws = torch.Generator().manual_seed(1)
    w = torch.tensor([1.0, -2.0, 0.5])
    inputs = [torch.randn(5, 3, generator=draws) for _ in range(12)]
    return Federation.from_clients([(x, x @ w) for x in inputs])


def random_rows(sizes, width, seed=0):
    """Clients of these sizes with normal inputs and targets."""
    draws = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, width, generator=draws), torch.randn(n, generator=draws)) for n in sizes]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def small_run(**options):
    test = (torch.eye(3), torch.tensor([1.0, -2.0, 0.5]))
    usual = {"local": Sgd(lr=0.05, steps=2), "rounds": ROUNDS, "execution": "cpu", "test": test}
    algorithm = options.pop("algorithm", ALGORITHM)
    return train(options.pop("model", None) or network(), federation(), algorithm, **arguments(usual | options))


def sealed_model(folder, ledger, run=""):
    """A small model in a folder, to which the ledger is bound."""
    model = {"w": torch.arange(3.0)}
    save_file(model, folder / "model.safetensors")
    ledger.seal(run, model=digest(model))


class BareClients:
    """What the simulator asks of clients, and no more."""

    def __init__(self, rows):
        inner = Federation.from_clients(rows)
        self.sizes, self.gather = inner.sizes, inner.gather

    def __len__(self):
        return len(self.sizes)


def regression_run(problem, algorithm, **options):
    """A run on a synthetic regression problem that records the distance to its optimum."""
    d = len(problem.optimum)
    usual = {"local": Sgd(lr=0.02, steps=3), "rounds": ROUNDS, "execution": "cpu"}
    usual["evaluate"] = lambda m: {"distance": problem.distance(next(m.parameters()))}
    return train(linear_regression(d), problem.federation, algorithm, **arguments(usual | options))


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def entries(folder):
    return Ledger.open(folder / "ledger.jsonl", read_only=True).entries


def path_content(folder):
    """The text of a checkpoint."""
    with safe_open(folder / CHECKPOINT, "pt") as file:
        return json.loads(file.metadata()["content"])


def forge(folder, tensors=None, **fields):
    """Puts other tensors or another text into a checkpoint, with hashes that fit."""
    tensors = load_file(folder / CHECKPOINT) if tensors is None else tensors
    text = json.dumps(path_content(folder) | fields | {"tensors": digest(tensors)})
    save_file(tensors, folder / CHECKPOINT, {"content": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def crash_after(number, error=Crash):
    """A callback that crashes the run, or raises something else, once this round is complete."""

    def crash(record):
        if record["round"] == number:
            raise error

    return crash


def crash_in(monkeypatch, owner, name, when, before, error=Crash):
    """`owner.name` fails at its call number `when`, before or after its work is done."""
    original, calls = getattr(owner, name), []

    def failing(*given, **more):
        calls.append(None)
        if len(calls) == when and before:
            raise error
        value = original(*given, **more)
        if len(calls) == when:
            raise error
        return value

    monkeypatch.setattr(owner, name, failing)
