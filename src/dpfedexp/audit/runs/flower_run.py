"""The black-box audit of the Flower strategy: the real `DpFedExp` and the real client mod, in this process, without a network."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from dpfedexp.algorithms import Algorithm, dp_fedavg
from dpfedexp.algorithms.participation import Poisson
from dpfedexp.audit.result import Result, skip
from dpfedexp.audit.runs.blackbox import LITTLE_NOISE, NOISE, RATE, SAMPLED_NOISE, balanced_signs
from dpfedexp.audit.runs.observed import KIND, Observed, bounds, clip_and_noise, participation, repetition
from dpfedexp.models import linear_regression

MISSING = "Flower is not installed; install it with: pip install 'dpfedexp[flower]'"

_ONLY_MESSAGES = "the audit's federation knows its nodes and exchanges messages, and nothing else"


def audit_flower(seed: int, confidence: float, *, rounds: int = 32, nodes: int = 48) -> list[Result]:
    """The same as `audit_train`, with nodes for clients."""
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        return [skip(KIND, "Flower", MISSING)]
    signs = balanced_signs(nodes, seed)
    full = [observe(dp_fedavg(clip=0.5, noise_multiplier=NOISE / 2), signs, rounds) for _ in range(2)]
    sampled = observe(dp_fedavg(clip=0.5, noise_multiplier=SAMPLED_NOISE), signs, rounds, Poisson(RATE))
    who = observe(dp_fedavg(clip=0.5, noise_multiplier=LITTLE_NOISE), signs, rounds, Poisson(RATE))
    return [
        *bounds(full[0], confidence),
        *bounds(sampled, confidence),
        repetition(full, full[0].name, confidence),
        *participation(who, confidence),
    ]


def observe(algorithm: Algorithm, signs: Tensor, rounds: int, sampling: Poisson | None = None) -> Observed:
    """One federation in which node i is a canary in coordinate i with this sign."""
    from flwr.app import ArrayRecord

    from dpfedexp.flower import DpFedExp

    clip, noise = clip_and_noise(algorithm)
    start = linear_regression(len(signs)).state_dict()
    models = [_flat(start)]
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            strategy = DpFedExp(
                algorithm,
                clients=len(signs),
                rounds=rounds,
                folder=Path(folder) / "run",
                participation=sampling,
                floor=1e-6,
            )
            strategy.start(
                _grid(signs),
                ArrayRecord(start),
                evaluate_fn=lambda _, arrays: models.append(_flat(arrays.to_torch_state_dict())),
            )
            event = strategy.mechanism.event(strategy.sampling)
    finally:
        log.setLevel(level)
    sums = np.diff(np.stack(models), axis=0) * len(signs) * (sampling.rate if sampling else 1.0) / clip
    name = "Flower" + (", Poisson" if sampling else "")
    return Observed(name, sums, signs.double().numpy(), event, noise)


def _flat(state: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([value.flatten() for value in state.values()]).double().numpy()


def _grid(signs: Tensor) -> Any:
    """A grid whose nodes 1 … n answer at once: each runs the client mod over a train function that moves its own coordinate."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    from dpfedexp.flower import private_training

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    app = ClientApp()

    @app.train(mods=[private_training])
    def train(message: Message, context: Context) -> Message:
        state = {
            name: value.clone() for name, value in message.content.array_records["arrays"].to_torch_state_dict().items()
        }
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

        @property
        def run(self) -> Any:
            raise TypeError(_ONLY_MESSAGES)

        def create_message(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError(_ONLY_MESSAGES)

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            raise TypeError(_ONLY_MESSAGES)

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
