"""A deployment draws secure noise or none at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from flwr.app import RecordDict

from dpfedexp.accounting import Sampling
from dpfedexp.algorithms import dp_fedavg, fedavg
from dpfedexp.algorithms.participation import Full
from dpfedexp.engine.rounds import LONG, Ahead
from dpfedexp.errors import InputError
from dpfedexp.flower.messages import REQUEST, Request, begun, bind, deployed, deployment_noise
from dpfedexp.mechanisms import MECHANISMS, CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit
from dpfedexp.mechanisms.registry import Entry


@dataclass(frozen=True)
class StillPlain(CentralGaussian):
    """Its `secure` changes nothing: low bits of a release would tell what the noise was added to."""

    kind = "still-plain"

    @classmethod
    def bound(cls, terms):
        return terms.drawn(cls(terms.radius, terms.noise_multiplier or 1.0))

    def secure(self, strict=False):
        return self


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(MECHANISMS, "still-plain", Entry("tests.flower.test_noise:StillPlain", "plain noise"))


def test_a_mechanism_whose_secure_variant_draws_plain_noise_is_refused_on_a_node(registered):
    with pytest.raises(InputError, match="'still-plain' draws plain noise where a deployment asked for secure noise"):
        deployed(StillPlain(0.5, 1.0))
    request = Request(1, "n" * 32, StillPlain(0.5, 1.0), Sampling(), rounds=1)
    message = SimpleNamespace(content=RecordDict({REQUEST: request.to_record()}))
    with pytest.raises(InputError, match="plain noise"):
        Request.from_message(message)


def test_the_server_refuses_it_too_before_the_first_round(registered):
    algorithm = replace(dp_fedavg(clip=0.5, noise_multiplier=1.0), mechanism="still-plain")
    with pytest.raises(InputError, match="draws other noise"):
        bind(algorithm, Full(), 3, 10, 2)


@pytest.mark.parametrize("mechanism", [CentralGaussian(0.5, 1.0), LocalGaussian(0.5, 1.0), PrivUnit(0.5, 8)])
def test_the_mechanisms_of_the_library_are_deployed_with_secure_noise(mechanism):
    assert deployed(mechanism).noise_kind is True


def test_what_promises_nothing_has_no_noise_to_check():
    assert deployed(NoPrivacy()) == NoPrivacy()
    assert bind(fedavg(), Full(), 3, 10, 2) == NoPrivacy()


def test_the_servers_noise_is_begun_where_it_draws_one_and_handed_out_once():
    central = CentralGaussian(1.0, 1.0).secure()
    begun_ = begun(deployment_noise, central, LONG)
    assert isinstance(begun_, Ahead)
    server = torch.zeros(1, dtype=torch.int64)
    first, second = (begun_.normal(server, LONG, torch.device("cpu"), torch.float64) for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(float(first.std()) - 1.0) < 0.05
    for other in (replace(central, strict=True), LocalGaussian(1.0, 1.0), NoPrivacy()):
        assert not isinstance(begun(deployment_noise, other, LONG), Ahead)
    assert not isinstance(begun(deployment_noise, central, LONG - 1), Ahead)
