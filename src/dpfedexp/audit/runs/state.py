"""The state audit: nothing that a module remembers may travel from client to client, or into a metric.

Modules that remember what they saw, each in another way: a secure run must refuse them, or neither the others' sum nor what the
evaluation shows at fixed parameters may depend on a client's data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from dpfedexp.algorithms import dp_fedavg
from dpfedexp.audit.result import Result
from dpfedexp.audit.runs.isolation import KIND, others_and_own
from dpfedexp.core.local import Sgd
from dpfedexp.data import Federation
from dpfedexp.engine.train import train
from dpfedexp.errors import InputError

WIDTH = 4
_LOCAL = Sgd(lr=0.1, steps=3, batch_size=4)


class RunningMean(nn.Module):
    """Subtracts a mean of everything that it has seen, kept in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class Memory(nn.Module):
    """Adds the mean of the last batch that it saw, kept in a plain attribute that no list of buffers shows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        before = self.last
        if self.training:
            self.last = float(x.detach().mean())
        return x + before


class Normalised(nn.Module):
    """InstanceNorm over three positions per example, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(torch.stack([x, 2 * x, x * x], dim=-1))
        return normed.sum(-1)


def modules() -> dict[str, Callable[[], nn.Module]]:
    def under(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return nn.Sequential(layer(), nn.Linear(WIDTH, 1), nn.Flatten(0))

        return make

    return {
        "InstanceNorm1d with running statistics": under(Normalised),
        "a running mean in a buffer": under(RunningMean),
        "spectral_norm": under(lambda: spectral_norm(nn.Linear(WIDTH, WIDTH))),
        "a plain attribute that remembers": under(Memory),
        "a module without state": under(lambda: nn.Linear(WIDTH, WIDTH)),
    }


def audit_state(seed: int) -> list[Result]:
    return [result for name, make in modules().items() for result in _audit(name, make, seed)]


def _audit(name: str, make: Callable[[], nn.Module], seed: int) -> list[Result]:
    pair = [_federation(seed, value) for value in (1.0, -3.0)]
    units = {"others' sum moves by, in C": others_move, "metric moves by, at fixed parameters": metric_moves}
    stateless = name == "a module without state"
    found = []
    for unit, measure in units.items():
        try:
            moved, seen = measure(make, pair, seed), "any bit"
            detail = "accepted by a secure run"
        except InputError as reason:
            moved, seen, detail = 0.0, "any bit", f"refused: {reason}"
            if stateless:
                # A library that refuses everything is not safe but useless, and would pass all of this.
                moved, detail = 1.0, f"refused without a reason: {reason}"
        except Exception as error:
            # Nothing was released, but nothing was measured either.
            moved, seen, detail = 0.0, "", f"stopped by {type(error).__name__}: {str(error)[:80]}"
        found.append(Result(KIND, name, unit, moved, 0.0, 1.0, detail, sees=seen))
    return found


def _federation(seed: int, value: float) -> Federation:
    """Twelve clients of four examples; only the first one's values differ."""
    chance = torch.Generator().manual_seed(seed)
    clients = []
    for i in range(12):
        x = torch.randn(4, WIDTH, generator=chance)
        clients.append((x if i else value * (1 + x.abs()), torch.randn(4, generator=chance)))
    return Federation.from_clients(clients)


def others_move(make: Callable[[], nn.Module], pair: list[Federation], seed: int) -> float:
    """How far the others' exact secure sum moves with the first client's data. A short run first: it may refuse on the way."""
    metric_of(make(), pair[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = (others_and_own(make(), federation, _LOCAL, "auto", seed)[0] for federation in pair)
    return float((one - other).norm())


def metric_moves(make: Callable[[], nn.Module], pair: list[Federation], seed: int) -> float:
    one, other = (metric_of(make(), federation) for federation in pair)
    return abs(one - other)


def metric_of(model: nn.Module, federation: Federation) -> float:
    """What the evaluation of a secure run shows, after setting all parameters to the same values: so no noise is in it."""
    probe = torch.linspace(-1.0, 1.0, 8 * WIDTH).reshape(8, WIDTH)

    def evaluate(module: nn.Module) -> dict[str, float]:
        before = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
            shown = float(module(probe).double().sum())
            for p, value in zip(module.parameters(), before, strict=True):
                p.copy_(value)
        return {"shown": shown}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = train(
            model,
            federation,
            dp_fedavg(clip=1.0, noise_multiplier=1.0),
            local=_LOCAL,
            rounds=2,
            device="cpu",
            evaluate=evaluate,
            secure=True,
            progress=False,
        )
    return float(run.history[-1]["shown"])
