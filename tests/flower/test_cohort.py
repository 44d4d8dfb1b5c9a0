"""A node that hosts clients trains each with the app's own loss, in the order asked, and refuses what it does not host."""

import copy

import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import nn

from dpfedexp import Federation
from dpfedexp.accounting import Sampling
from dpfedexp.core.local import Sgd
from dpfedexp.errors import InputError
from dpfedexp.flower import train_hosted
from dpfedexp.flower.messages import REQUEST, Request
from dpfedexp.mechanisms import CentralGaussian
from tests.flower.loopback import LoopbackGrid  # noqa: F401  # gives this process the identity that messages ask for

LR, STEPS = 0.1, 3
GENERATOR = torch.Generator().manual_seed(0)
CLIENTS = Federation.from_clients(
    [(torch.randn(n, 3, generator=GENERATOR), torch.randn(n, generator=GENERATOR)) for n in (4, 2, 5)]
)
MODEL = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def absolute_error(outputs, targets):
    return (outputs - targets).abs()


def message(*asked):
    request = Request(1, "nonce", CentralGaussian(1.0, 1.0), Sampling(), asked)
    content = RecordDict({"arrays": ArrayRecord(MODEL.state_dict()), REQUEST: request.to_record()})
    return Message(content, dst_node_id=1, message_type="train")


def rows(*asked, **options):
    content = train_hosted(message(*asked), MODEL, CLIENTS, local=Sgd(lr=LR, steps=STEPS), **options)
    return torch.from_numpy(content.array_records["updates"]["rows"].numpy())


def by_hand(client, loss):
    net = copy.deepcopy(MODEL)
    inputs, targets = CLIENTS.client(client)
    optimiser = torch.optim.SGD(net.parameters(), lr=LR)
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss(net(inputs), targets).mean().backward()
        optimiser.step()
    pairs = zip(net.parameters(), MODEL.parameters(), strict=True)
    return torch.cat([(after - before).detach().flatten() for after, before in pairs])


@pytest.mark.parametrize("loss", [absolute_error, None])
def test_hosted_clients_train_with_the_loss_that_the_app_names(loss):
    expected = loss or (lambda outputs, targets: 0.5 * (outputs - targets).square())
    for client, row in zip((2, 0), rows(2, 0, loss=loss), strict=True):
        torch.testing.assert_close(row, by_hand(client, expected), rtol=1e-5, atol=1e-6)  # float32 in another order
    assert not torch.allclose(by_hand(0, absolute_error), by_hand(0, lambda o, t: 0.5 * (o - t).square()), atol=1e-3)


def test_a_hosted_client_that_does_not_exist_is_refused_and_the_last_one_is_not():
    assert rows(2).shape == (1, 4)
    with pytest.raises(InputError, match="hosted client 3"):
        rows(0, 3)


def test_an_empty_hosted_client_sends_zero_and_the_others_their_own_update():
    clients = Federation.from_clients([CLIENTS.client(0), (torch.zeros(0, 3), torch.zeros(0)), CLIENTS.client(2)])
    content = train_hosted(message(2, 1, 0), MODEL, clients, local=Sgd(lr=LR, steps=STEPS), loss=absolute_error)
    found = torch.from_numpy(content.array_records["updates"]["rows"].numpy())
    assert found[1].tolist() == [0.0] * 4
    for client, row in ((2, found[0]), (0, found[2])):
        torch.testing.assert_close(row, by_hand(client, absolute_error), rtol=1e-5, atol=1e-6)
