"""The black-box audit of `train`: whole runs, seen only through the models and the history that they publish."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dpfedexp.algorithms import Algorithm, cdp_fedexp, dp_fedavg
from dpfedexp.algorithms.participation import Participation, Poisson
from dpfedexp.audit.bounds import Distinguisher, Floats, mu_score
from dpfedexp.audit.mechanisms.release import discriminant
from dpfedexp.audit.power import power_of_shift
from dpfedexp.audit.result import Result
from dpfedexp.audit.runs.observed import KIND, Observed, bounds, clip_and_noise, participation, repetition
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local import Sgd
from dpfedexp.data import Federation
from dpfedexp.engine.advice import silence
from dpfedexp.engine.run import Run
from dpfedexp.engine.train import train
from dpfedexp.models import linear_regression

CLIENTS = 256
NOISE, SAMPLED_NOISE, LITTLE_NOISE = 2.0, 0.5, 0.2
RATE = 0.7
_FAR = 1e6
"""A target so far away that a client's clipped update is the same in every round."""

_LOCAL = Sgd(lr=0.1, steps=1, batch_size=1)


def audit_train(seed: int, confidence: float, *, rounds: int = 32, clients: int = CLIENTS) -> list[Result]:
    """Full participation seeded and secure, and Poisson sampling: bounds, repeated noise, and who took part."""
    signs = balanced_signs(clients, seed)
    plain = dp_fedavg(clip=0.5, noise_multiplier=NOISE)
    secure = [observe(plain, signs, rounds, seed, secure=True) for _ in range(2)]
    seeded = [observe(plain, signs, rounds, seed + n) for n in range(2)]
    sampled = observe(
        dp_fedavg(clip=0.5, noise_multiplier=SAMPLED_NOISE),
        signs,
        rounds,
        seed,
        secure=True,
        participation=Poisson(RATE),
    )
    who = observe(
        dp_fedavg(clip=0.5, noise_multiplier=LITTLE_NOISE),
        signs,
        rounds,
        seed,
        secure=True,
        participation=Poisson(RATE),
    )
    return [
        *bounds(secure[0], confidence),
        *bounds(seeded[0], confidence),
        *bounds(sampled, confidence),
        repetition(secure, secure[0].name, confidence),
        repetition(seeded, seeded[0].name, confidence),
        *participation(who, confidence),
    ]


def observe(
    algorithm: Algorithm,
    signs: Tensor,
    rounds: int,
    seed: int,
    *,
    secure: bool = False,
    participation: Participation | None = None,
) -> Observed:
    """One run of `train` in which client i is a canary in coordinate i with this sign."""
    clip, noise = clip_and_noise(algorithm)
    run, models = _run(algorithm, _canaries(signs), rounds, seed, secure=secure, participation=participation)
    event = run.ledger.charges()[0][0]
    expected = len(signs) * (participation.sampling(len(signs)).rate if participation else 1.0)
    sums = np.diff(models, axis=0) * expected / clip
    how = "train" + (", secure" if secure else ", seeded") + (", Poisson" if participation else "")
    return Observed(how, sums, signs.double().numpy(), event, noise)


def balanced_signs(clients: int, seed: int) -> Tensor:
    signs = torch.ones(clients)
    signs[torch.randperm(clients, generator=torch.Generator().manual_seed(seed))[: clients // 2]] = -1.0
    return signs


def _canaries(values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """One client per value, in its own coordinate: ±1 is an update out of reach, 0 none at all."""
    rows = torch.eye(len(values)) * values.abs()[:, None]
    return [(rows[i : i + 1], _FAR * values[i : i + 1]) for i in range(len(values))]


def _run(
    algorithm: Algorithm,
    clients: Sequence[tuple[Tensor, Tensor]],
    rounds: int,
    seed: int,
    *,
    secure: bool,
    participation: Participation | None = None,
) -> tuple[Run, Floats]:
    """The run, and the models that it showed, the first one included: [rounds + 1, d]."""
    start = linear_regression(clients[0][0].shape[1])
    models = [_parameters(start)]

    def look(model: nn.Module) -> dict[str, float]:
        models.append(_parameters(model))
        return {}

    run = train(
        start,
        Federation.from_clients(clients),
        algorithm,
        local=_LOCAL,
        rounds=rounds,
        seed=seed,
        device="cpu",
        participation=participation,
        evaluate=look,
        secure=secure,
        progress=False,
        on_advice=silence,
        population=len(clients) if algorithm.adjacency == "add-remove" else None,
    )
    return run, np.stack(models)


def _parameters(model: nn.Module) -> Floats:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()


def step_size_cases() -> dict[str, tuple[Algorithm, float]]:
    """Runs whose history shows more than the model: η_g by both rules, and the adaptive clip.

    The client is at the clip, or has no update at all. Beside each is how far that moves the release, in units of its noise.
    """
    z, count = 0.7, 1.0
    adaptive = AdaptiveClip(initial=0.5, quantile=0.5, rate=0.01, count_noise=count)
    update = (z**-2 - (2 * count) ** -2) ** 0.5
    return {
        "η_g of the free rule": (
            cdp_fedexp(clip=0.5, noise_multiplier=z, step="paper", average_last=1),
            math.sqrt(2.0) / z,
        ),
        "η_g of the paper's rule": (
            cdp_fedexp(clip=0.5, numerator="paper", noise_multiplier=z, step="paper", average_last=1),
            math.hypot(1.0 / z, 1.0 / z**2),
        ),
        "adaptive clip": (dp_fedavg(clip=adaptive, noise_multiplier=z), math.hypot(update, 1.0 / count)),
    }


def audit_history(name: str, seed: int, confidence: float, *, rounds: int = 600, clients: int = 12) -> list[Result]:
    """Everything that a round publishes (model, η_g, clip), with a client at the clip and with one that has no update."""
    algorithm, shift = step_size_cases()[name]
    values = torch.ones(clients)
    # Half of the clients are outside of the clip in any case, so that an adaptive one stays about where it is.
    values[clients // 2 + 1 :] = 0.0 if name == "adaptive clip" else 1.0
    views, claims = [], []
    for world, own in enumerate((1.0, 0.0)):
        values[0] = own
        run, models = _run(algorithm, _canaries(values), rounds, seed + world, secure=True)
        views.append(_published(algorithm, run, models))
        claims.append(run.ledger.charges()[0][0].strength)
    here, there = views
    direction = discriminant(here[::2], there[::2])
    attack = Distinguisher(here @ direction, there @ direction, confidence)
    counts = (len(here), len(there))
    return [
        Result(
            KIND,
            f"train, secure, {name}",
            "μ",
            attack.bound(mu_score).value,
            claims[-1],
            confidence,
            f"{counts[0]} rounds with the client, {counts[1]} without",
            power=power_of_shift(shift, counts, mu_score, confidence),
        )
    ]


def _published(algorithm: Algorithm, run: Run, models: Floats) -> Floats:
    """Per round: the canary's coordinate of c̄ in units of C/M, η_g‖c̄‖² in units of C²/M, and how far the clip moved."""
    clients = models.shape[1]
    eta = np.array([line["eta_g"] for line in run.history])
    radius = np.array([line["clip"] for line in run.history])
    c_bar = np.diff(models, axis=0) / eta[:, None]
    numerator = eta * np.square(c_bar).sum(1) / radius**2 * clients
    moved = np.log(radius[1:] / radius[:-1])
    seen = [c_bar[:-1, 0] / radius[:-1] * clients]
    seen += [numerator[:-1]] if algorithm.numerator is not None else []
    seen += [moved] if isinstance(algorithm.clip, AdaptiveClip) else []
    return np.stack(seen, axis=1)
