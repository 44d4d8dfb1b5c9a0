"""The black-box audit: whole runs, seen only through the models and the history that they publish; every client is a canary.

A client's update is +C or −C along its own coordinate in every round, because its target is too far to reach. So each coordinate
of each round is one sample of "this client's data or their replacement" through all the code of a run.

The training audit is one whole run with many canaries. A fair coin decides for every canary whether it takes part, and the attacker
guesses the coins from the trained model alone; it may abstain where it is unsure. The number of correct guesses proves a lower
bound on the ε of the run, by two tests. The first (Steinke, Nasr and Jagielski 2023, Theorem 5.2) holds for every (ε, δ)-DP run.
The second (Mahloujifar, Melis and Chaudhuri 2025, their numerical procedure for c' guesses) uses the whole trade-off curve, here
that of μ-GDP, and proves more.
"""

import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import binom, chi2
from torch import Tensor, nn

from dpfedexp.accounting import Event, Guarantee, compose, gdp
from dpfedexp.algorithms import Algorithm, cdp_fedexp, dp_fedavg
from dpfedexp.algorithms.round import Full, Poisson
from dpfedexp.audit import bounds as stats
from dpfedexp.audit.bounds import Floats, Power, Result, chance_failure, mu_score
from dpfedexp.audit.mechanisms import discriminant
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local_optimizer import Sgd
from dpfedexp.data import Federation
from dpfedexp.engine import checkpoint
from dpfedexp.engine.advice import silence
from dpfedexp.engine.run import Run
from dpfedexp.engine.stopping import OnAdvice, Stop
from dpfedexp.engine.train import train
from dpfedexp.errors import InputError, checked
from dpfedexp.models import linear_regression
from dpfedexp.trainers.execution import Execution

KIND = "black box"
DELTA = 0.01
BLOCK = 4
"""The number of rounds that an attack on several rounds uses; its claim is that of their composition."""


@dataclass(frozen=True)
class ObservedRun:
    """What a run published, and what it claims of every round.

    Attributes:
        sums: how far each round moved the sum of updates in each client's coordinate, in units of the clip: [rounds, clients].
        signs: the sign of each client's update: [clients].
        event: the event that a round was charged as.
        noise: the standard deviation of the noise on `sums`.
    """

    name: str
    sums: Floats
    signs: Floats
    event: Event
    noise: float

    @property
    def rate(self) -> float:
        """The claimed probability with which a client takes part in a round."""
        return 1.0 if self.event.sampling is None else self.event.sampling.rate


def clip_and_noise(algorithm: Algorithm) -> tuple[float, float]:
    if isinstance(algorithm.clip, AdaptiveClip) or algorithm.noise_multiplier is None:
        raise InputError(f"{algorithm.name} has no fixed clip and noise_multiplier; this audit needs both.")
    return algorithm.clip, algorithm.noise_multiplier


def mu_of(guarantee: Guarantee, name: str) -> float:
    if guarantee.mu is None:
        raise InputError(
            f"the guarantee of {name} has no μ; this audit needs Gaussian noise and every client in every round."
        )
    return guarantee.mu


def bounds(seen: ObservedRun, confidence: float) -> list[Result]:
    """Compare lower bounds with the claims: from single rounds, and from blocks of `BLOCK` rounds together."""
    # μ needs fewer samples, but a sampled mechanism has no μ.
    unit, score = ("μ", mu_score) if seen.rate == 1.0 else (f"ε at δ = {DELTA:g}", stats.epsilon_score(DELTA))
    found = []
    for rounds, name in ((1, "one round"), (BLOCK, f"{BLOCK} rounds together")):
        blocks = seen.sums[: len(seen.sums) // rounds * rounds].reshape(-1, rounds, len(seen.signs)).mean(1)
        here, there = blocks[:, seen.signs > 0].ravel(), blocks[:, seen.signs < 0].ravel()
        guarantee = compose([(seen.event, rounds)], DELTA)
        claim = mu_of(guarantee, seen.name) if unit == "μ" else guarantee.epsilon
        lower = stats.lower_bound(here, there, score, confidence)
        detail = f"{len(here) + len(there)} samples from {len(seen.sums)} rounds"
        counts, shift = (len(here), len(there)), 2.0 / seen.noise
        power = stats.power_of_shift(shift, counts, score, confidence, seen.rate, rounds)
        found.append(Result(KIND, f"{seen.name}, {name}", unit, lower, claim, confidence, detail, power=power))
    return found


def repetition(runs: list[ObservedRun], name: str, confidence: float) -> Result:
    """Test whether the noise of runs with full participation repeats in another coordinate, round or run."""
    rows = np.concatenate([run.sums - run.signs for run in runs])
    limit = stats.correlation_limit(len(rows), rows.shape[1], chance_failure(confidence))
    detail = f"{len(rows)} rounds of {len(runs)} runs, {rows.shape[1]} coordinates"
    unit, detects = "largest correlation of noise", f"≥ {min(1.0, 2 * limit):.2f}"
    value, sure = stats.largest_correlation(rows), 1 - chance_failure(confidence)
    return Result(KIND, f"{name}, noise again", unit, value, limit, sure, detail, detects=detects)


def participation(seen: ObservedRun, confidence: float) -> list[Result]:
    """Test whether clients take part at the charged rate and independently; the run has too little noise to hide it."""
    failure = chance_failure(confidence)
    bits = seen.sums * seen.signs > 0.5
    # Noise flips a few bits, with a known probability.
    slip = float(ndtr(-0.5 / seen.noise))
    rate = seen.rate * (1 - slip) + (1 - seen.rate) * slip
    low, high = stats.interval(float(bits.sum()), bits.size, failure)
    detail = f"{bits.shape[0]} rounds of {bits.shape[1]} clients"

    def result(what: str, unit: str, off: float, limit: float, detects: str) -> Result:
        return Result(KIND, f"{seen.name}, {what}", unit, off, limit, 1 - failure, detail, detects=detects)

    off = max(0.0, low - rate, rate - high)
    found = [result("who takes part", "rate off the one charged", off, 0.0, f"≥ {high - low:.3f}")]
    for axis, who in ((1, "clients"), (0, "rounds")):
        groups = bits.sum(axis)
        spread = float(np.square(groups - rate * bits.shape[axis]).sum() / (bits.shape[axis] * rate * (1 - rate)))
        # Sums of many coins have slightly lighter tails than χ², never heavier ones.
        ends = chi2.ppf([failure / 2, 1 - failure / 2], len(groups)) / len(groups)
        limit = float(max(-np.log(ends[0]), np.log(ends[1])))
        off = float(abs(np.log(max(spread / len(groups), 1e-300))))
        unit = "|log| of the counts' dispersion"
        found.append(result(f"{who} drawn on their own", unit, off, limit, f"≥ {2 * limit:.2f}"))
    return found


CLIENTS = 256
NOISE, SAMPLED_NOISE, LITTLE_NOISE = 2.0, 0.5, 0.2
RATE = 0.7
_FAR = 1e6
"""A target so far away that a client's clipped update is the same in every round."""


def audit_train(seed: int, confidence: float, *, rounds: int = 32, clients: int = CLIENTS) -> list[Result]:
    """Audit runs with full participation, seeded and secure, with Poisson sampling and with candidates."""
    signs = balanced_signs(clients, seed)
    plain = dp_fedavg(clip=0.5, noise_multiplier=NOISE)
    secure = [observe(plain, signs, rounds, seed, secure=True) for _ in range(2)]
    seeded = [observe(plain, signs, rounds, seed + n) for n in range(2)]
    sampled, who = (
        observe(dp_fedavg(clip=0.5, noise_multiplier=z), signs, rounds, seed, secure=True, participation=Poisson(RATE))
        for z in (SAMPLED_NOISE, LITTLE_NOISE)
    )
    compared = bounds(observe_candidates(plain, signs, rounds, seed), confidence)
    return _findings([secure, seeded], sampled, who, confidence) + compared


def _findings(full: list[list[ObservedRun]], sampled: ObservedRun, who: ObservedRun, confidence: float) -> list[Result]:
    found = [result for seen in (*(runs[0] for runs in full), sampled) for result in bounds(seen, confidence)]
    found += [repetition(runs, runs[0].name, confidence) for runs in full]
    return found + participation(who, confidence)


def observe(
    algorithm: Algorithm,
    signs: Tensor,
    rounds: int,
    seed: int,
    *,
    secure: bool = False,
    participation: Poisson | None = None,
) -> ObservedRun:
    """Run `train` with client i as a canary in coordinate i with sign `signs[i]`, and return what the run published."""
    clip, noise = clip_and_noise(algorithm)
    run, models = run_canaries(algorithm, _canaries(signs), rounds, seed, secure=secure, participation=participation)
    expected = len(signs) * (participation.sampling(len(signs)).rate if participation else 1.0)
    sums = np.diff(models, axis=0) * expected / clip
    how = "train" + (", secure" if secure else ", seeded") + (", Poisson" if participation else "")
    return ObservedRun(how, sums, signs.double().numpy(), run.ledger.charges()[0][0], noise)


def observe_candidates(algorithm: Algorithm, signs: Tensor, rounds: int, seed: int) -> ObservedRun:
    """Like `observe` for a run that compares two candidates in every round.

    A client is in the group of one candidate. The attacker adds up the moves of both models. That doubles the variance of the
    noise, and shows a client that is in both groups.
    """
    clip, noise = clip_and_noise(algorithm)
    models: list[Floats] = []

    def look(record: dict[str, Any]) -> Stop | None:
        saved = checkpoint.load(folder)
        if saved is None or saved.progress.round != record["round"]:
            raise InputError(f"round {record['round']} has no checkpoint; this audit reads one after every round.")
        state = checkpoint.state_from(saved.tensors, record["round"], clip)
        models.append(np.sum([player.w.numpy() for player in state.players.values()], axis=0))
        return Stop() if record["round"] == rounds else None

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        # Two candidates are compared in the first tenth of the rounds.
        given: dict[str, Any] = {"candidates": [Sgd(lr=lr, steps=1, batch_size=1) for lr in (0.1, 0.2)], "out": folder}
        run, _ = run_canaries(algorithm, _canaries(signs), 10 * rounds, seed, on_round=[look], **given)
    sums = np.diff(np.stack([np.zeros(len(signs)), *models]), axis=0) * len(signs) / 2 / clip
    event = run.ledger.charges()[0][0]
    return ObservedRun("train, two candidates", sums, signs.double().numpy(), event, noise * math.sqrt(2.0))


def balanced_signs(clients: int, seed: int) -> Tensor:
    signs = torch.ones(clients)
    signs[torch.randperm(clients, generator=torch.Generator().manual_seed(seed))[: clients // 2]] = -1.0
    return signs


def _canaries(values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """One client per value, with a coordinate of its own: ±1 for a target too far to reach, 0 for no update."""
    rows = torch.eye(len(values)) * values.abs()[:, None]
    return [(rows[i : i + 1], _FAR * values[i : i + 1]) for i in range(len(values))]


def run_canaries(
    algorithm: Algorithm,
    clients: Sequence[tuple[Tensor, Tensor]],
    rounds: int,
    seed: int,
    *,
    secure: bool = False,
    participation: Poisson | None = None,
    local: Sgd = Sgd(lr=0.1, steps=1, batch_size=1),
    on_round: Sequence[Any] = (),
    **more: Any,
) -> tuple[Run, Floats]:
    """Train on the clients; returns the run and its published models, including the initial one: [rounds + 1, d].

    `more` are further arguments of `train`.
    """
    start = linear_regression(clients[0][0].shape[1])
    models = [_flat(start.parameters())]

    def look(model: nn.Module) -> dict[str, float]:
        models.append(_flat(model.parameters()))
        return {}

    declared = len(clients) if algorithm.adjacency == "add-remove" else None
    how: dict[str, Any] = {"local": local, "rounds": rounds, "secure": secure}
    how |= {"participation": replace(participation or Full(), population=declared)}
    how |= {"execution": Execution("cpu", seed, progress=False), "on_round": [OnAdvice(silence), *on_round]}
    run = train(start, Federation.from_clients(clients), algorithm, evaluate=look, **how, **more)
    return run, np.stack(models)


def _flat(values: Iterable[Tensor]) -> Floats:
    return torch.cat([value.detach().flatten() for value in values]).double().numpy()


def step_size_cases() -> dict[str, tuple[Algorithm, float]]:
    """Algorithms whose history shows more than the model: η_g by both rules, and the adaptive clip.

    The audited client is at the clip, or has no update. The number is how far that moves the release, in units of its noise.
    """
    z, count = 0.7, 1.0
    adaptive = AdaptiveClip(initial=0.5, quantile=0.5, rate=0.01, count_noise=count)
    update = (z**-2 - (2 * count) ** -2) ** 0.5
    free = cdp_fedexp(clip=0.5, noise_multiplier=z, step="paper", average_last=1)
    paper = cdp_fedexp(clip=0.5, numerator="paper", noise_multiplier=z, step="paper", average_last=1)
    return {
        "η_g of the free rule": (free, math.sqrt(2.0) / z),
        "η_g of the paper's rule": (paper, math.hypot(1.0 / z, 1.0 / z**2)),
        "adaptive clip": (dp_fedavg(clip=adaptive, noise_multiplier=z), math.hypot(update, 1.0 / count)),
    }


def audit_history(name: str, seed: int, confidence: float, *, rounds: int = 600, clients: int = 12) -> list[Result]:
    """Audit everything that a round publishes (model, η_g, clip), from runs in which one client sends a clipped update or none."""
    algorithm, shift = step_size_cases()[name]
    values = torch.ones(clients)
    # Half of the clients exceed the clip in any case, so that an adaptive clip hardly moves.
    values[clients // 2 + 1 :] = 0.0 if name == "adaptive clip" else 1.0
    views = []
    for world, own in enumerate((1.0, 0.0)):
        values[0] = own
        run, models = run_canaries(algorithm, _canaries(values), rounds, seed + world, secure=True)
        views.append(_published(algorithm, run, models))
        claim = run.ledger.charges()[0][0].strength
    here, there = views
    direction = discriminant(here[::2], there[::2])
    lower = stats.lower_bound(here @ direction, there @ direction, mu_score, confidence)
    power = stats.power_of_shift(shift, (len(here), len(there)), mu_score, confidence)
    detail = f"{len(here)} rounds with the client, {len(there)} without"
    return [Result(KIND, f"train, secure, {name}", "μ", lower, claim, confidence, detail, power=power)]


def _published(algorithm: Algorithm, run: Run, models: Floats) -> Floats:
    """Per round: the canary's coordinate of c̄ in units of C/M, η_g‖c̄‖² in units of C²/M, and the log change of the clip."""
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


def audit_flower(seed: int, confidence: float, *, rounds: int = 32, nodes: int = 48) -> list[Result]:
    """Audit Flower runs like `audit_train`, with nodes as clients."""
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        return [stats.skip(KIND, "Flower", "Flower is not installed; install it with: pip install 'dpfedexp[flower]'")]
    signs = balanced_signs(nodes, seed)
    full = [observe_flower(dp_fedavg(clip=0.5, noise_multiplier=NOISE / 2), signs, rounds) for _ in range(2)]
    sampled = observe_flower(dp_fedavg(clip=0.5, noise_multiplier=SAMPLED_NOISE), signs, rounds, Poisson(RATE))
    who = observe_flower(dp_fedavg(clip=0.5, noise_multiplier=LITTLE_NOISE), signs, rounds, Poisson(RATE))
    return _findings([full], sampled, who, confidence)


def observe_flower(algorithm: Algorithm, signs: Tensor, rounds: int, sampling: Poisson | None = None) -> ObservedRun:
    """Like `observe` for Flower, with nodes as clients: the real `DpFedExp` and client mod in this process, without a network."""
    from flwr.app import ArrayRecord

    from dpfedexp.flower import DpFedExp

    clip, noise = clip_and_noise(algorithm)
    start = linear_regression(len(signs)).state_dict()
    models = [_flat(start.values())]

    def look(_: int, arrays: ArrayRecord) -> None:
        models.append(_flat(arrays.to_torch_state_dict().values()))

    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            place: dict[str, Any] = {"folder": Path(folder) / "run", "participation": sampling}
            strategy = DpFedExp(algorithm, clients=len(signs), rounds=rounds, min_reply_fraction=1e-6, **place)
            strategy.start(_grid(signs), ArrayRecord(start), evaluate_fn=look)
            event = strategy.opened.description.engine.event
    finally:
        log.setLevel(level)
    sums = np.diff(np.stack(models), axis=0) * len(signs) * (sampling.rate if sampling else 1.0) / clip
    return ObservedRun("Flower" + (", Poisson" if sampling else ""), sums, signs.double().numpy(), event, noise)


def _grid(signs: Tensor) -> Any:
    """A Flower grid whose nodes 1 … n answer at once: each runs the client mod on a function that moves its own coordinate."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    from dpfedexp.flower import private_training

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    app = ClientApp()

    @app.train(mods=[private_training])
    def train(message: Message, context: Context) -> Message:
        given = message.content.array_records["arrays"].to_torch_state_dict()
        state = {name: value.clone() for name, value in given.items()}
        own = int(context.node_config["partition-id"])
        for value in state.values():
            value.view(-1)[own] += 10.0 * float(signs[own])
        return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)

    class LocalGrid(Grid):
        def __init__(self) -> None:
            numbers = range(1, len(signs) + 1)
            self.contexts = {n: Context(1, n, {"partition-id": n - 1}, RecordDict(), {}) for n in numbers}
            self.inbox: list[Message] = []

        def set_run(self, run: Any) -> None: ...

        def refuse(self, *_: Any, **__: Any) -> Any:
            raise TypeError("the audit's federation knows its nodes and exchanges messages, and nothing else")

        run = property(refuse)
        create_message = send_and_receive = refuse

        def get_node_ids(self) -> Iterable[int]:
            return list(self.contexts)

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            keys = []
            for message in messages:
                message.metadata.__dict__["_message_id"] = key = str(uuid4())
                keys.append(key)
                self.inbox.append(app(message, self.contexts[message.metadata.dst_node_id]))
            return keys

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ready, self.inbox = self.inbox, []
            return ready

    return LocalGrid()


CANARY_DELTA = 1e-9
"""The δ of the run's claim. With 1,000 canaries the (ε, δ) test has a failure probability of about 5δ: a usual δ proves nothing."""

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the canaries that the attacker guesses; each fraction uses a part of the failure probability."""

Test = Callable[[int, int, int, float], float]
"""(canaries, guesses, correct guesses, failure) → the largest ε that they refute."""


@checked
def audit_training(
    seed: int,
    confidence: float,
    *,
    algorithm: Algorithm | None = None,
    canaries: int = 1000,
    others: int = 100,
    rounds: int = 8,
) -> list[Result]:
    """Train the synthetic linear model with canaries whose updates have directions of their own, and bound ε from guesses.

    Both tests are one-sided: by their nature they reach only a small part of the spent ε; their power says how much.
    """
    algorithm = algorithm or dp_fedavg(clip=0.3, noise_multiplier=1.0, adjacency="add-remove", delta=CANARY_DELTA)
    coins = np.random.default_rng(seed).random(canaries) < 0.5
    directions, empty = torch.eye(canaries), (torch.zeros(0, canaries), torch.zeros(0))
    # A target too far to reach keeps a canary's residual, and so its clipped update, the same in every round.
    clients = [(directions[i : i + 1], torch.tensor([1e4])) if coin else empty for i, coin in enumerate(coins)]
    x = np.random.default_rng([seed, 1]).normal(size=(others, canaries)) / math.sqrt(canaries)
    clients += [(row, row.sum(1)) for row in torch.from_numpy(x).float().split(1)]
    run, _ = run_canaries(algorithm, clients, rounds, seed, local=Sgd(lr=0.1, steps=2))
    scores = next(run.model.parameters()).detach().double().numpy().ravel()
    delta, failure = run.privacy.delta, 1.0 - confidence
    mu = mu_of(run.ledger.guarantee(delta), algorithm.name)
    # The scores of the same attacker against a mechanism that spends exactly the claimed μ.
    reference = np.random.default_rng(seed + 1).normal(mu * coins, 1.0)

    tests: dict[str, Test] = {
        "(ε, δ) test": lambda m, guesses, right, failing: epsilon_of_guesses(m, guesses, right, failing, delta),
        "f-DP test": lambda *guessed: gdp.epsilon(mu_of_guesses(*guessed), delta),
    }
    found = []
    for name, test in tests.items():
        lower, guessed, right = best_guess(scores, coins, test, failure)
        likely = best_guess(scores, coins, test, 0.05)[0]
        power = Power(best_guess(reference, coins, test, failure)[0], 0.0)
        what = f"{algorithm.name}, {rounds} rounds, {canaries} canaries, {name}"
        detail = f"{right} of {guessed} guesses right; {likely:.2f} at 95%"
        unit, claim = f"ε at δ = {delta:g}", run.privacy.epsilon_total
        found.append(Result("training", what, unit, lower, claim, confidence, detail, power=power, one_sided=True))
    return found


def best_guess(scores: Floats, coins: np.ndarray, test: Test, failure: float) -> tuple[float, int, int]:
    """Guess 'took part' for the highest scores and 'did not' for the lowest: (lower bound, guesses, correct guesses)."""
    order = np.argsort(scores)
    best = (0.0, 0, 0)
    for share in SHARES:
        half = int(len(scores) * share / 2)
        right = int(coins[order[len(scores) - half :]].sum() + (~coins[order[:half]]).sum())
        best = max(best, (test(len(scores), 2 * half, right, failure / len(SHARES)), 2 * half, right))
    return best


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """P(at least `right` correct guesses) under (ε, δ)-DP: Theorem 5.2 of Steinke, Nasr and Jagielski."""
    q = 1.0 / (1.0 + math.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, q))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
    alpha = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, beta + 2.0 * canaries * delta * alpha)


def epsilon_of_guesses(canaries: int, guesses: int, right: int, failure: float, delta: float) -> float:
    """The largest ε that this many correct guesses refute."""
    if guesses == 0 or p_value(canaries, guesses, right, 0.0, delta) > failure:
        return 0.0
    # Slightly below the root: a bound must not be rounded up.
    root = brentq(lambda e: p_value(canaries, guesses, right, e, delta) - failure, 0.0, 60.0, xtol=1e-9)
    return max(0.0, float(root) - 1e-8)


def refutes_gdp(canaries: int, guesses: int, right: int, mu: float, failure: float) -> bool:
    """Whether this many correct guesses have a probability below `failure` under μ-GDP.

    Suppose that probability is τ. Among outcomes with at least i correct guesses let r_i be the mass of correct guesses of a canary
    and h_i that of wrong ones, averaged over canaries. At i = c they are at least τc/m and τ(c' − c)/m. Flipping a canary's own
    coin turns correct into wrong, so h_i ≥ f̄⁻¹(r_{i+1}) with the curve's blow-up f̄(x) = Φ(Φ⁻¹(x) + μ); and outcomes with exactly
    i correct have i/(c' − i) correct guesses per wrong one. Iterated down to i = 0 the sum must not exceed the whole mass c'/m.
    """
    if not 0 < right <= guesses:
        return False
    r, h = failure * right / canaries, failure * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        wrong = max(h, float(ndtr(ndtri(r) - mu)))
        r, h = r + i / (guesses - i) * (wrong - h), wrong
        if r + h > guesses / canaries:
            return True
    return False


def mu_of_guesses(canaries: int, guesses: int, right: int, failure: float) -> float:
    """The largest μ that this many correct guesses refute, rounded down."""
    if not refutes_gdp(canaries, guesses, right, 0.0, failure):
        return 0.0
    low, high = 0.0, 50.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refutes_gdp(canaries, guesses, right, middle, failure) else (low, middle)
    return low
