"""What a Flower node, or somebody in its place, may send: replies, requests, mechanisms and guard files."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.fuzz.harness import fuzz, instrumented

with instrumented():
    from dpfedexp.accounting import Sampling
    from dpfedexp.core.clipping import clip
    from dpfedexp.core.noise.streams import Streams
    from dpfedexp.core.votes import within_clip
    from dpfedexp.errors import InputError
    from dpfedexp.flower import messages as wire
    from dpfedexp.flower.guard import Guard
    from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, PrivUnit
    from dpfedexp.mechanisms import text as spec

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

WIDTH = 3
GUARD = Path(tempfile.mkdtemp()) / "guard.toml"
MECHANISMS = [
    CentralGaussian(0.3, 5.0, votes=(within_clip(9.0),)),
    LocalGaussian(0.3, 0.7),
    PrivUnit(0.3, WIDTH),
    CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=3.0),
]
REQUESTS = [wire.Request(1, "00ff", mechanism, Sampling()) for mechanism in MECHANISMS]
REQUESTS += [wire.Request(1, "00ff", MECHANISMS[n], Sampling(), clients=(0, 1)) for n in (0, 1, 3)]


def _seed(number: int) -> bytes:
    request = REQUESTS[number]
    clients = max(1, len(request.clients))
    rows = clip(torch.ones(clients, WIDTH), 0.3)
    report = request.mechanism.randomize(rows, torch.arange(clients), Streams(0).at("noise", 1))
    content = (
        wire.sums_content(request.mechanism.collect(report), request)
        if request.clients
        else wire.report_content(report, request)
    )
    array = content.array_records[wire.REPORT]["vector"]
    said = dict(content.config_records[wire.REQUEST])
    kind = {"dtype": array.dtype, "shape": list(array.shape), "stype": array.stype}
    return bytes([number]) + json.dumps([said, kind]).encode() + b"\0" + array.data


SEEDS = [_seed(number) for number in range(len(REQUESTS))]
SEEDS += [bytes([100]) + spec.encode(mechanism).encode() for mechanism in MECHANISMS]
SEEDS += [bytes([150]) + json.dumps(dict(request.to_record())).encode() for request in REQUESTS]
SEEDS.append(
    bytes([200])
    + b"max_epsilon_per_round = 4.0\nmax_epsilon_total = 20.0\ndelta = 1e-5\nmax_clip = 1.0\nmechanisms = ['privunit']\n"
)


def one(data: bytes) -> None:
    """First byte: below 100 which request is answered, then a mechanism, a request, or a guard file."""
    which, rest = data[:1], data[1:]
    number = which[0] if which else 0
    with contextlib.suppress(InputError):
        if number < 100:
            _reply(REQUESTS[number % len(REQUESTS)], rest)
        elif number < 150:
            assert spec.encode(spec.decode(rest.decode("utf-8", "replace")))
        elif number < 200:
            _request(rest)
        else:
            GUARD.write_bytes(rest)
            assert Guard.load(GUARD).max_clip > 0


def _reply(request: wire.Request, rest: bytes) -> None:
    """A sum that is returned is finite and no longer than so many honest reports."""
    text, _, body = rest.partition(b"\0")
    message = _message(_records(text, body))
    if message is None:
        return
    sums = wire.read_sums(message, request, WIDTH)
    assert sums.vector.shape == (WIDTH,)
    assert bool(sums.vector.isfinite().all())
    clients = max(1, len(request.clients))
    assert sums.count == clients
    assert float(sums.vector.norm()) <= clients * request.mechanism.norm_bound(WIDTH) * (1 + 1e-5)
    assert np.isfinite(float(sums.squares))
    assert bool((sums.votes.abs() <= clients / 2).all())


def _records(text: bytes, body: bytes) -> RecordDict | None:
    """What Flower itself would hand over; input that it refuses is not ours to judge."""
    try:
        said, kind = json.loads(text)
        array = Array(kind["dtype"], tuple(kind["shape"]), kind["stype"], body)
        return RecordDict({wire.REPORT: ArrayRecord({"vector": array}), wire.REQUEST: ConfigRecord(said)})
    except Exception:
        return None


def _request(rest: bytes) -> None:
    try:
        content = RecordDict({wire.REQUEST: ConfigRecord(json.loads(rest))})
    except Exception:
        return
    message = _message(content)
    if message is not None:
        assert wire.Request.from_message(message).round is not None


def _message(content: RecordDict | None) -> SimpleNamespace | None:
    """Only a message's content is read; a real one needs a running federation."""
    return None if content is None else SimpleNamespace(content=content)


if __name__ == "__main__":
    fuzz(one, SEEDS)
