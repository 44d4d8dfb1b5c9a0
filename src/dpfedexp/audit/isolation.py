"""The isolation audit: a client's row is a function of the released model, its own data, its own stream and public numbers.

Secure sums are exact, so the sum of the other clients must be the same, bit for bit, when one client's data are replaced. A network
that amplifies the last bit of every step makes the smallest dependence large. A secure run must refuse modules that keep state from
batches; if it accepts one, neither the others' sum nor an evaluation at fixed parameters may depend on a client's data.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

from dpfedexp.algorithms import dp_fedavg
from dpfedexp.algorithms.probe import UPDATE
from dpfedexp.audit.bounds import Result, skip
from dpfedexp.core.local_optimizer import Sgd
from dpfedexp.core.noise import Streams
from dpfedexp.data import Federation
from dpfedexp.engine.engine import Request
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.train import train
from dpfedexp.errors import InputError
from dpfedexp.trainers.execution import Execution

KIND = "isolation"
CLIENTS, LARGEST, OUTSIZE = 16, 12, 60
"""Clients hold up to LARGEST examples; the client that is replaced holds OUTSIZE in one of its versions."""


def audit_isolation(seed: int, trainer: str, *, steps: int) -> list[Result]:
    """Audit a trainer as a secure run uses it on this machine, with whole data sets and with batches."""
    federations = [_federation(seed, own) for own in (5, OUTSIZE, 1)]
    # Shapes from public numbers, by a batch size or by a bound on the examples; and clients computed one by one.
    work = {
        "batches": Sgd(lr=3.0, steps=steps, batch_size=8),
        "whole data sets": Sgd(lr=3.0, steps=steps, max_examples=2 * LARGEST),
        "one by one": Sgd(lr=3.0, steps=steps),
    }
    name = f"trainer {trainer!r}"
    results = [_audit(f"{name}, {how}", trainer, local, federations, seed) for how, local in work.items()]
    # A trainer that is not available at all gets one line.
    return [result for result in results if not result.skipped] or [replace(results[0], name=name)]


def _federation(seed: int, own: int) -> Federation:
    """A federation whose first client holds `own` examples; all other clients are the same for every `own`."""

    def data(size: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 6, generator=chance), torch.randint(0, 3, (size,), generator=chance)

    chance = torch.Generator().manual_seed(seed)
    others = [data(2 + i % (LARGEST - 1), chance) for i in range(CLIENTS - 1)]
    return Federation.from_clients([data(own, torch.Generator().manual_seed(seed + own)), *others])


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _audit(name: str, trainer: str, local: Sgd, federations: list[Federation], seed: int) -> Result:
    unit = "others' sum moves by, in C"
    try:
        sums = [others_and_own(_seeded(seed, network), federation, local, trainer, seed) for federation in federations]
    except InputError as reason:
        return skip(KIND, name, f"refused: {reason}")
    others, own = ([pair[n] for pair in sums] for n in (0, 1))
    moved = max(float((one - others[0]).norm()) for one in others[1:])
    reference = min(float((one - own[0]).norm()) for one in own[1:])
    # The client's own row must change, otherwise its data were not replaced.
    detects = f"any bit (own row: {reference:.2f})" if reference > 0 else ""
    return Result(KIND, name, unit, moved, 0.0, 1.0, f"{CLIENTS} clients, one replaced twice", detects=detects)


def others_and_own(
    model: nn.Module, federation: Federation, local: Sgd, trainer: str, seed: int
) -> tuple[Tensor, Tensor]:
    """The secure sum of all clients but the first, and the first client's own row, in units of the clip."""
    algorithm, how = dp_fedavg(clip=1.0, noise_multiplier=1.0), Execution(trainer=trainer, seed=seed)
    engine, _ = prepare(model, federation, algorithm, local=local, rounds=1, execution=how, secure=True)
    # A secure run draws new shuffles; two runs can be compared only with the same shuffles.
    cohort = replace(engine.cohort, streams=Streams(seed))  # type: ignore[type-var]
    request = Request(UPDATE, 1, engine.begin(), engine.mechanism)

    def total(clients: Tensor) -> Tensor:
        vector: Tensor = cohort.collect(request, clients).sums.vector  # type: ignore[attr-defined]
        return vector.cpu()

    own = total(torch.arange(1))
    return total(torch.arange(len(federation))) - own, own


WIDTH = 4
_STEPS = Sgd(lr=0.1, steps=3, batch_size=4)


class RunningMean(nn.Module):
    """A module that subtracts a running mean of its inputs, kept in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class LastBatchMemory(nn.Module):
    """A module that adds the mean of its last batch, kept in a plain attribute that is not among its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        before = self.last
        if self.training:
            self.last = float(x.detach().mean())
        return x + before


class Normalized(nn.InstanceNorm1d):
    """InstanceNorm over three positions per example, with running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.stack([x, 2 * x, x * x], dim=-1)).sum(-1)


def modules() -> dict[str, Callable[[], nn.Module]]:
    def under(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: _seeded(0, lambda: nn.Sequential(layer(), nn.Linear(WIDTH, 1), nn.Flatten(0)))

    return {
        "InstanceNorm1d with running statistics": under(lambda: Normalized(WIDTH, track_running_stats=True)),
        "a running mean in a buffer": under(RunningMean),
        "spectral_norm": under(lambda: spectral_norm(nn.Linear(WIDTH, WIDTH))),
        "a plain attribute that remembers": under(LastBatchMemory),
        "a module without state": under(lambda: nn.Linear(WIDTH, WIDTH)),
    }


def audit_state(seed: int) -> list[Result]:
    return [result for name, make in modules().items() for result in audit_module(name, make, seed)]


def audit_module(name: str, make: Callable[[], nn.Module], seed: int) -> list[Result]:
    pair = [_small_federation(seed, value) for value in (1.0, -3.0)]

    def others_move() -> float:
        """How far the others' exact secure sum moves with the first client's data. A short run first, which may be refused."""
        metric_of(make(), pair[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one, other = (others_and_own(make(), federation, _STEPS, "auto", seed)[0] for federation in pair)
        return float((one - other).norm())

    def metric_moves() -> float:
        one, other = (metric_of(make(), federation) for federation in pair)
        return abs(one - other)

    units = {"others' sum moves by, in C": others_move, "metric moves by, at fixed parameters": metric_moves}
    found = []
    for unit, measure in units.items():
        try:
            moved, seen, detail = measure(), "any bit", "accepted by a secure run"
        except InputError as reason:
            moved, seen, detail = 0.0, "any bit", f"refused: {reason}"
            if name == "a module without state":
                # A library that refuses every module would pass this audit; a module without state must be accepted.
                moved, detail = 1.0, f"refused without a reason: {reason}"
        except Exception as error:
            # Nothing was released, but nothing was measured either, so the result has no power.
            moved, seen, detail = 0.0, "", f"stopped by {type(error).__name__}: {str(error)[:80]}"
        found.append(Result(KIND, name, unit, moved, 0.0, 1.0, detail, detects=seen))
    return found


def _small_federation(seed: int, value: float) -> Federation:
    """Twelve clients with four examples each; only the first client's inputs depend on `value`."""
    chance = torch.Generator().manual_seed(seed)
    clients = []
    for i in range(12):
        x = torch.randn(4, WIDTH, generator=chance)
        clients.append((x if i else value * (1 + x.abs()), torch.randn(4, generator=chance)))
    return Federation.from_clients(clients)


def metric_of(model: nn.Module, federation: Federation) -> float:
    """A secure run's evaluation metric, measured with all parameters set to fixed values, so that it contains no noise."""
    probe = torch.linspace(-1.0, 1.0, 8 * WIDTH).reshape(8, WIDTH)

    def evaluate(module: nn.Module) -> dict[str, float]:
        fixed = {name: torch.linspace(-0.5, 0.5, p.numel()).view_as(p) for name, p in module.named_parameters()}
        return {"shown": float(functional_call(module, fixed, (probe,)).double().sum())}

    algorithm, how = dp_fedavg(clip=1.0, noise_multiplier=1.0), Execution("cpu", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = train(model, federation, algorithm, local=_STEPS, rounds=2, evaluate=evaluate, execution=how, secure=True)
    return float(run.history[-1]["shown"])
