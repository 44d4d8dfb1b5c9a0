"""The isolation audit: a client's row is a function of the released model, its own data, its own stream and public numbers.

Secure sums are whole numbers of steps, so they are exact: the sum of the others, with and without another data set in the client's
place, must agree bit for bit, whatever its size. A network that amplifies the last bit of every step makes the smallest dependence
large. What moves is in units of the clip; a claim of 2C for the client itself leaves nothing for the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from dpfedexp.algorithms import dp_fedavg
from dpfedexp.audit.result import Result, skip
from dpfedexp.core.local import Sgd
from dpfedexp.core.noise.streams import Streams
from dpfedexp.data import Federation
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import InputError
from dpfedexp.trainers.execution import Execution
from dpfedexp.trainers.select import trainer_names

KIND = "isolation"
CLIENTS, LARGEST, OUTSIZE = 16, 12, 60
"""Clients hold up to LARGEST examples; the one that is replaced holds OUTSIZE in one of its versions."""

Data = tuple[Tensor, Tensor]


def audit_isolation(seed: int, *, trainers: tuple[str, ...] | None = None, steps: int = 40) -> list[Result]:
    """Every trainer that a secure run may use on this machine, with whole data sets and with batches."""
    federations = [_federation(seed, own) for own in (5, OUTSIZE, 1)]
    found = []
    for trainer in trainers or trainer_names():
        results = [
            _audit(f"trainer {trainer!r}, {how}", trainer, local, federations, seed)
            for how, local in local_steps(steps).items()
        ]
        # A trainer that is not to be had at all is one line.
        found += [result for result in results if not result.skipped] or [
            replace(results[0], name=f"trainer {trainer!r}")
        ]
    return found


def local_steps(steps: int) -> dict[str, Sgd]:
    """Local work whose shapes follow from public numbers, by a batch size or by a bound on the examples."""
    return {
        "batches": Sgd(lr=3.0, steps=steps, batch_size=8),
        "whole data sets": Sgd(lr=3.0, steps=steps, max_examples=2 * LARGEST),
        "one by one": Sgd(lr=3.0, steps=steps),
    }


def _federation(seed: int, own: int) -> Federation:
    """The first client holds `own` examples; all others are the same in every version."""
    chance = torch.Generator().manual_seed(seed)
    others = [_data(2 + i % (LARGEST - 1), chance) for i in range(CLIENTS - 1)]
    return Federation.from_clients([_data(own, torch.Generator().manual_seed(seed + own)), *others])


def _data(size: int, chance: torch.Generator) -> Data:
    x = torch.randn(size, 6, generator=chance)
    return x, torch.randint(0, 3, (size,), generator=chance)


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _audit(name: str, trainer: str, local: Sgd, federations: list[Federation], seed: int) -> Result:
    unit = "others' sum moves by, in C"
    try:
        sums = [others_and_own(network(seed), federation, local, trainer, seed) for federation in federations]
    except InputError as reason:
        return skip(KIND, name, f"refused: {reason}")
    others, own = ([pair[n] for pair in sums] for n in (0, 1))
    moved = max(float((one - others[0]).norm()) for one in others[1:])
    reference = min(float((one - own[0]).norm()) for one in own[1:])
    # The client's own row must move, else nothing was replaced.
    sees = f"any bit (own row: {reference:.2f})" if reference > 0 else ""
    return Result(KIND, name, unit, moved, 0.0, 1.0, f"{CLIENTS} clients, one replaced twice", sees=sees)


def others_and_own(
    model: nn.Module, federation: Federation, local: Sgd, trainer: str, seed: int, clip: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The others' part of the cohort's secure sum, and the first client's own, in units of the clip."""
    algorithm = dp_fedavg(clip=clip, noise_multiplier=1.0)
    simulation, _ = prepare(
        model,
        federation,
        algorithm,
        local=local,
        rounds=1,
        seed=seed,
        execution=Execution(trainer=trainer),
        secure=True,
    )
    # A secure run draws its shuffles anew; two runs can be compared only with the same ones.
    simulation = replace(simulation, streams=Streams(seed))
    state = simulation.begin()

    def total(cohort: Tensor) -> Tensor:
        return simulation.cohort_part(state, simulation.mechanism, cohort, 1)[0].vector.cpu() / clip

    own = total(torch.arange(1))
    return total(torch.arange(len(federation))) - own, own
