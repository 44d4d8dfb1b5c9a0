"""A deployment draws secure noise or none at all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flwr.app import RecordDict

from dpfedexp.accounting import Sampling
from dpfedexp.algorithms import fedavg
from dpfedexp.algorithms.participation import Full
from dpfedexp.engine.rounds import LONG, Ahead
from dpfedexp.errors import InputError
from dpfedexp.flower.messages import REQUEST, Request, begun, bind, deployed, deployment_noise
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy


def test_a_mechanism_whose_secure_variant_draws_plain_noise_is_refused_on_a_node(monkeypatch):
    """Low bits of a release would tell what the noise was added to. The server refuses it too: `test_registry`."""
    mechanism = CentralGaussian(0.5, 1.0)
    message = SimpleNamespace(content=RecordDict({REQUEST: Request(1, "n", mechanism, Sampling()).to_record()}))
    assert deployed(mechanism) == Request.from_message(message).mechanism != mechanism
    monkeypatch.setattr(CentralGaussian, "secure", lambda self, strict=False: self)
    plain = "'central-gaussian' draws plain noise where a deployment asked for secure noise"
    with pytest.raises(InputError, match=plain):
        deployed(mechanism)
    with pytest.raises(InputError, match=plain):
        Request.from_message(message)


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
