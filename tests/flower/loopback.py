"""Flower without a network: a grid that runs the real ClientApp in this process, through the real serialization of messages."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator
from uuid import uuid4

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from dpfedexp.core.local_optimizer import Sgd
from dpfedexp.data import synthetic_regression
from dpfedexp.engine.stopping import Stop
from dpfedexp.flower import DpFedExp, private_training
from dpfedexp.models import linear_regression
from tests.engine.small import Crash

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
LOCAL = Sgd(lr=0.05, steps=5)


class Silence:
    """Noise without noise: what a mechanism computes is then exact."""

    def normal(self, clients, width, device, dtype):
        return torch.zeros(len(clients), width, device=device, dtype=dtype)

    def uniform(self, clients, width):
        return torch.full((len(clients), width), 0.25, dtype=torch.float64)


def parts_of(content: Message | RecordDict) -> dict[str, bytes]:
    """All objects of a message or of its content, serialized, by their names."""
    return {key: value.deflate() for key, value in get_all_nested_objects(content).items()}


def with_id(message: Message) -> Message:
    """The message with the id that Flower gives it when it is sent."""
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def through_the_wire(message: Message) -> Message:
    """The message as its receiver gets it: every object serialized and read back."""
    received = inflate_object_from_contents(message.object_id, parts_of(message))
    received.metadata.__dict__["_message_id"] = message.metadata.message_id
    return received


class LoopbackGrid(Grid):
    """Nodes 1 … n, each with its own context. `reply_of` may replace what a node answers (None: nothing arrives)."""

    def __init__(
        self,
        app: ClientApp,
        nodes: int,
        *,
        node_config: dict | None = None,
        run_config: dict | None = None,
        reply_of: Callable[[Message, Message], Message | list[Message] | None] | None = None,
        serialize: bool = True,
    ) -> None:
        self.app, self.reply_of = app, reply_of
        self.carry = through_the_wire if serialize else (lambda message: message)
        given = {"num-partitions": nodes, **(node_config or {})}
        configs = {n: {"partition-id": n - 1, **given} for n in range(1, nodes + 1)}
        self.contexts = {n: Context(1, n, own, RecordDict(), run_config or {}) for n, own in configs.items()}
        self.inbox: list[Message] = []
        self.sent: list[Message] = []

    def set_run(self, run) -> None: ...

    def refuse(self, *args, **kwargs):
        raise NotImplementedError

    run = property(refuse)
    create_message = send_and_receive = refuse

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        keys = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = key = str(uuid4())
            keys.append(key)
            self.sent.append(message)
            node = message.metadata.dst_node_id
            reply = self.carry(self.app(self.carry(message), self.contexts[node]))
            answer = reply if self.reply_of is None else self.reply_of(message, reply)
            self.inbox += [] if answer is None else answer if isinstance(answer, list) else [answer]
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        ready = [m for m in self.inbox if m.metadata.reply_to_message_id in wanted]
        self.inbox = [m for m in self.inbox if m not in ready]
        return ready


def plain_app(clients, model: nn.Module, local: Sgd = LOCAL, mods=(private_training,)) -> ClientApp:
    """A client as a user writes it: a loop of gradient steps on its own rows, parameters out."""
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        net = copy.deepcopy(model)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, targets = clients.client(context.node_config["partition-id"])
        correction = message.content.array_records.get("correction")
        pull = {} if correction is None else correction.to_torch_state_dict()
        for _ in range(local.steps):
            net.zero_grad()
            (0.5 * (net(inputs) - targets).square().mean()).backward()
            with torch.no_grad():
                for name, p in net.named_parameters():
                    p -= local.lr * (p.grad + pull.get(name, 0.0))
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict())}), reply_to=message)

    return app


def problem(clients: int = 6, dimension: int = 20):
    """The paper's regression with a start that is not zero, so that updates differ in length."""
    posed = synthetic_regression(clients, dimension, seed=3)
    model = linear_regression(dimension)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.5, 0.5, dimension).view_as(p))
    return posed.federation, model


def grid_of(clients: int = 3, **options) -> LoopbackGrid:
    """As many nodes as the problem has clients, each with the plain app."""
    federation, model = problem(clients)
    return LoopbackGrid(plain_app(federation, model), clients, **options)


def deploy(folder, algorithm, grid=None, clients=3, rounds=1, timeout=1.0, model=None, **options):
    """A strategy, and the result of all its rounds over the problem."""
    given = {"node_timeout": 0.1, "local": LOCAL, **options}
    strategy = DpFedExp(algorithm, clients=clients, rounds=rounds, folder=folder, **given)
    start = ArrayRecord((model or problem(clients)[1]).state_dict())
    return strategy, strategy.start(grid or grid_of(clients), start, timeout=timeout)


def counts(line) -> tuple[int, int, int, int]:
    """How many clients of a round were asked, valid, refused and missing."""
    return line["asked"], line["valid"], line["refused"], line["missing"]


def stop_after(round: int) -> Callable[[dict], Stop | None]:
    """A callback that ends the run after a round; the same call without it goes on."""
    return lambda record: Stop("for a test") if record["round"] == round else None


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@contextlib.contextmanager
def dying_at(write: int, monkeypatch) -> Iterator[list[int]]:
    """Whatever is done here ends with its nth write to disk; how many writes were left over is in the list."""
    replace, left = os.replace, [write]

    def crash(source, target):
        left[0] -= 1
        if left[0] == 0:
            raise Crash
        replace(source, target)

    with monkeypatch.context() as patched, contextlib.suppress(Crash):
        patched.setattr("os.replace", crash)
        patched.setattr("os.fsync", lambda fd: None)
        yield left
