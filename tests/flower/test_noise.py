"""A deployment draws secure noise or none at all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flwr.app import RecordDict

from dpfedexp.accounting import Sampling
from dpfedexp.errors import InputError
from dpfedexp.flower.messages import REQUEST, NodeRequest
from dpfedexp.mechanisms import CentralGaussian, NoPrivacy
from dpfedexp.mechanisms.base import with_secure_noise


def test_a_mechanism_whose_secure_variant_draws_plain_noise_is_refused_on_a_node(monkeypatch):
    """Low bits of a release would tell what the noise was added to. The server refuses it too: `test_registry`."""
    mechanism = CentralGaussian(0.5, 1.0)
    message = SimpleNamespace(content=RecordDict({REQUEST: NodeRequest(1, "n", mechanism, Sampling()).to_record()}))
    assert with_secure_noise(mechanism) == NodeRequest.from_message(message).mechanism != mechanism
    monkeypatch.setattr(CentralGaussian, "secure", lambda self, strict=False: self)
    plain = "'central-gaussian' draws plain noise where a deployment asked for secure noise"
    with pytest.raises(InputError, match=plain):
        with_secure_noise(mechanism)
    with pytest.raises(InputError, match=plain):
        NodeRequest.from_message(message)


def test_what_promises_nothing_has_no_noise_to_check():
    assert with_secure_noise(NoPrivacy()) == NoPrivacy()
