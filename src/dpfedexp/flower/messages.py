"""Messages: the server's request, a client's report, and the checks of a reply.

A request has a nonce that is new for every message. A reply must echo the nonce, so a replayed reply, or a reply of another node,
is refused. Nothing of a reply is used before all of it is checked. Flower's named arrays become one flat vector, in the
simulator's layout. Noise comes from the operating system, never from a seed, and is on a grid.
"""

from __future__ import annotations

import hmac
import math
from ast import literal_eval
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0
from torch import Tensor

from dpfedexp.accounting.events import Sampling
from dpfedexp.algorithms.probe import BINS, CLIP, LATER, MOST_CANDIDATES, RATE, UPDATE
from dpfedexp.core.clipping import row_norms
from dpfedexp.core.modules import Layout
from dpfedexp.core.sums import MAX_SHARE, Sums
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms import Mechanism, Report
from dpfedexp.mechanisms.aggregation import RoundBinding
from dpfedexp.mechanisms.base import with_secure_noise
from dpfedexp.mechanisms.serialization import decode, encode

MODEL, CONTROL, ANCHOR_MODEL = "arrays", "dpfedexp.control", "dpfedexp.anchor"
REQUEST = "dpfedexp"
REPORT = "dpfedexp.report"
ROWS = "updates"
BALLOTS = "dpfedexp.votes"
HELPER = "dpfedexp.helper"
CORRECTION = "correction"
TAU_ETA_L = "tau_eta_l"
"""Names of records: the model, SCAFFOLD's control variate, the anchor, the request, the report, and the app's reply to its node:
one row per client, and one metric per vote, by name (a list for several clients). `TAU_ETA_L` is the key of τη_l in a request.
Models of further candidates, and the helper's records for further groups of clients, have a number: `arrays.2`."""
REFUSAL = "dpfedexp: "
"""Prefix of this library's texts in error replies; the server shows no other texts."""
FAILED_PRECONDITION = 6
"""Flower's error code MOD_FAILED_PRECONDITION."""
_WHOLE, _NUMBERS = ("round", "rounds", "clients_per_node", "candidate"), (TAU_ETA_L, "local_rate", "shake")
"""Fields of a request that are whole numbers, and fields that are real numbers, with 0 for None."""


def layout_of(arrays: ArrayRecord) -> Layout:
    """The layout of a model's arrays. All arrays are trained, averaged and covered by the noise, so all must be floating point."""
    require(len(arrays) > 0, "the model's arrays are empty; a model has at least one parameter.")
    for name, array in arrays.items():
        if array.dtype not in ("float16", "float32", "float64"):
            raise InputError(
                f"the model's array {name!r} has type {array.dtype}; only floating-point parameters can be trained. Leave buffers "
                "such as BatchNorm's counters out, and use GroupNorm: running statistics would leave the client without noise."
            )
    return Layout(tuple(arrays), tuple(torch.Size(array.shape) for array in arrays.values()))


def to_flat(arrays: ArrayRecord, layout: Layout, dtype: torch.dtype = torch.float64) -> Tensor:
    """Copy the arrays into one vector; raises `InputError` if names or shapes differ from the layout."""
    require(
        tuple(arrays) == layout.names,
        f"the arrays are named {list(arrays)}; they must be {list(layout.names)}, in this order.",
    )
    found = [array.numpy() for array in arrays.values()]
    for name, values, shape in zip(layout.names, found, layout.shapes, strict=True):
        require(
            tuple(values.shape) == tuple(shape),
            f"the array {name!r} has shape {tuple(values.shape)}; it must have {tuple(shape)}.",
        )
        require(np.can_cast(values.dtype, np.float64, "same_kind"), f"the array {name!r} does not hold real numbers.")
    flat = torch.empty(layout.dimension, dtype=dtype)
    # Overflow gives infinity, which the later checks for finite numbers find.
    with np.errstate(over="ignore", invalid="ignore"):
        for values, part in zip(found, flat.split(layout.sizes), strict=True):
            np.copyto(part.numpy(), values.reshape(-1))
    return flat


def as_array(values: np.ndarray) -> Array:
    """Convert values to Flower's array, with the bytes that Flower writes but without its second copy."""
    values, header = np.require(values, requirements="C"), BytesIO()
    write_array_header_1_0(header, header_data_from_array_1_0(values))
    data = b"".join((header.getvalue(), values.reshape(-1).view(np.uint8).data))
    return Array(dtype=str(values.dtype), shape=tuple(values.shape), stype="numpy.ndarray", data=data)


def to_arrays(w: Tensor, layout: Layout) -> ArrayRecord:
    """Convert the vector to named float32 arrays, the precision of clients."""
    named = layout.unflatten(w.float())
    return ArrayRecord({name: as_array(value.numpy()) for name, value in named.items()})


def strict_array(array: Array, dtype: str, shape: tuple[int, ...], *, of_app: bool = False) -> np.ndarray:
    """The array's values, if type and shape match exactly and all are finite; nothing that the array claims is trusted.

    Sizes are compared before any byte is parsed, so an array that claims to be huge costs nothing. `of_app` is for what an app
    gives its own site: NaN and infinity, which the site replaces by zeros, and column-major arrays, as Flower writes a transposed
    parameter.
    """
    expected = np.dtype(dtype).newbyteorder("<")
    size = math.prod(shape) * expected.itemsize
    require(array.stype == "numpy.ndarray", "it is not a NumPy array")
    require(array.dtype == dtype, f"its type is not {dtype}")
    require(tuple(array.shape) == shape, f"its shape is not {shape}")
    offset = len(array.data) - size
    require(0 < offset <= 256, "its size is wrong")
    require(array.data[:8] == b"\x93NUMPY\x01\x00", "its header is wrong")
    header = _header(array.data[8:offset])
    right = {"descr": expected.str, "fortran_order": False, "shape": shape}
    transposed = of_app and header == {**right, "fortran_order": True}
    require(transposed or header == right, "its header is wrong")
    values = np.frombuffer(array.data, dtype=expected, offset=offset)
    require(of_app or bool(np.isfinite(values).all()), "it is not finite")
    return values.reshape(shape, order="F" if transposed else "C").copy()


def _header(raw: bytes) -> object:
    require(int.from_bytes(raw[:2], "little") == len(raw) - 2, "its header is wrong")
    try:
        return literal_eval(raw[2:].decode("latin1").strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise InputError("its header is wrong") from None


@dataclass(frozen=True)
class NodeRequest:
    """The server's request to one node.

    Args:
        clients: the node's clients that take part; empty for a node with one client.
        tau_eta_l: τη_l for SCAFFOLD's control variates, None without SCAFFOLD.
        rounds: the number of rounds of the run.
        clients_per_node: the number of clients of each node.
        purpose: `UPDATE`, the name of a vote, or `EVALUATION`.
        local_rate: the automatic rate to train with; None for a given rate.
        shake: the public noise of a vote on the rate's scale; that message also holds the anchor.
        candidate: the number of the candidate whose model is in the message; a vote on the best candidate has further models.
    """

    round: int
    nonce: str
    mechanism: Mechanism
    sampling: Sampling
    clients: tuple[int, ...] = ()
    tau_eta_l: float | None = None
    rounds: int = 1
    clients_per_node: int = 1
    purpose: str = UPDATE
    local_rate: float | None = None
    shake: float = 0.0
    candidate: int = 0

    @property
    def size(self) -> int:
        """The number of clients that the node answers for."""
        return max(1, len(self.clients))

    def shape(self, dimension: int) -> tuple[int, int]:
        """The shape of the rows that the node's clients answer with, before clipping: updates, votes in bins, or metrics."""
        return self.size, BINS.get(self.purpose) or dimension

    def to_record(self) -> ConfigRecord:
        same = {name: getattr(self, name) for name in (*_WHOLE, "nonce", "purpose")}
        numbers = {name: float(getattr(self, name) or 0.0) for name in _NUMBERS}
        sampling = {"sampling": self.sampling.kind, "rate": float(self.sampling.rate)}
        return ConfigRecord(
            {**same, **numbers, **sampling, "mechanism": encode(self.mechanism), "clients": list(self.clients)}
        )

    @staticmethod
    def from_message(message: Message) -> NodeRequest:
        """Parse the request of a message; raises `InputError` if it is missing or invalid."""
        record = message.content.config_records.get(REQUEST)
        if record is None:
            raise InputError("the message carries no dpfedexp request; the server must use the DpFedExp strategy.")
        values: dict[str, Any] = dict(record)
        for name in ("nonce", "mechanism", "sampling", "purpose"):
            require(isinstance(values.get(name), str), f"the request's {name} is {values.get(name)!r}.")
        for name in ("rate", *_NUMBERS):
            number = values.get(name)
            good = isinstance(number, float) and 0 <= number < math.inf
            require(good, f"the request's {name} is {number!r}; it must be finite and zero or more.")
        purpose, tau_eta_l, clients = values["purpose"], values[TAU_ETA_L], values.get("clients")
        known = (UPDATE, RATE, CLIP, *LATER)
        require(purpose in known, f"the request's purpose is {purpose!r}, which does not exist.")
        limits = {"round": (int(purpose not in (RATE, CLIP)), 2**31), "candidate": (0, MOST_CANDIDATES - 1)}
        for name in _WHOLE:
            number, (least, most) = values.get(name), limits.get(name, (1, 2**31))
            whole = isinstance(number, int) and not isinstance(number, bool) and least <= number <= most
            require(whole, f"the request's {name} is {number!r}; it must be a whole number from {least} to {most}.")
        if not isinstance(clients, list) or not all(isinstance(c, int) and c >= 0 for c in clients):
            raise InputError(f"the request's clients is {clients!r}; it must be a list of whole numbers.")
        require(len(set(clients)) == len(clients), "the request asks for a client twice.")
        require(
            not (clients and tau_eta_l),
            "the request asks several clients of a node for SCAFFOLD, which keeps one control variate; use one client per node.",
        )
        mechanism = with_secure_noise(decode(values["mechanism"]))
        question = getattr(mechanism, "question", "")
        require(
            not mechanism.is_private or question == ("" if purpose == UPDATE else purpose),
            f"the request is for {purpose!r}, and its mechanism is not one for that.",
        )
        require(purpose == UPDATE or not tau_eta_l, "SCAFFOLD's control variates are for updates alone.")
        require(purpose not in (RATE, CLIP) or values["round"] == 0, "a vote comes before the first round.")
        return NodeRequest(
            **{name: values[name] for name in (*_WHOLE, "nonce", "purpose", "shake")},
            mechanism=mechanism,
            sampling=Sampling(values["sampling"], values["rate"]),
            clients=tuple(clients),
            tau_eta_l=tau_eta_l or None,
            local_rate=values["local_rate"] or None,
        )


def round_of(request: NodeRequest, columns: int, run: str) -> RoundBinding:
    """The facts that the seeds of a round are bound to."""
    mechanism = request.mechanism
    known = (run, request.round, request.nonce, columns, float(mechanism.clip), encode(mechanism))
    return RoundBinding(*known, request.candidate)


def refusal(message: Message, reason: str) -> Message:
    """An error reply with a reason that may be shown to the server."""
    return Message(Error(FAILED_PRECONDITION, REFUSAL + reason), reply_to=message)


def report_content(report: Report, request: NodeRequest) -> RecordDict:
    """The content of the reply with one client's report."""
    fields: dict[str, Any] = {}
    if report.level is not None:
        fields["level"] = int(report.level[0])
    if report.votes is not None:
        fields["votes"] = report.votes[0].tolist()
    return reply_of(np.ascontiguousarray(report.vector[0].numpy(), dtype="<f4"), request, **fields)


def sums_content(sums: Sums, request: NodeRequest) -> RecordDict:
    """The content of the reply with the sum of the reports of a node's clients."""
    vector = np.ascontiguousarray(sums.vector.numpy(), dtype="<f8")
    return reply_of(vector, request, count=sums.count, squares=float(sums.squares), votes=sums.votes.tolist())


def reply_of(vector: np.ndarray, request: NodeRequest, **fields: Any) -> RecordDict:
    """The content of a reply with a vector and fields, and the request's round and nonce."""
    named = ConfigRecord({"round": request.round, "nonce": request.nonce, **fields})
    return RecordDict({REPORT: ArrayRecord({"vector": as_array(vector)}), REQUEST: named})


def read_parts(reply: Message, request: NodeRequest) -> tuple[Array, ConfigRecord]:
    """The vector and the fields of the reply to this request; raises `InputError` for another nonce or other records."""
    content = reply.content
    arrays, fields = content.array_records.get(REPORT), content.config_records.get(REQUEST)
    if set(content) != {REPORT, REQUEST} or arrays is None or fields is None or set(arrays) != {"vector"}:
        raise InputError("it holds other records than a report")
    nonce = fields.get("nonce")
    require(
        isinstance(nonce, str) and hmac.compare_digest(nonce.encode(), request.nonce.encode()),
        "it answers another message than the one that was sent (an old reply, or another node's)",
    )
    return arrays["vector"], fields


def read_sums(reply: Message, request: NodeRequest, width: int) -> Sums:
    """The sum of the reports in a reply. Raises `InputError` with the reason if any part of the reply is malformed."""
    sent, fields = read_parts(reply, request)
    if request.clients:
        return _read_added(sent, fields, request, width)
    vector = torch.from_numpy(strict_array(sent, "float32", (width,)))[None]
    mechanism = request.mechanism
    level = None
    if "level" in mechanism.parts:  # `check_report` checks the mechanism's own range
        value = fields.get("level")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise InputError("its level is out of range")
        level = torch.tensor([value])
    votes = _votes(fields, mechanism, 1)[None] if "votes" in mechanism.parts else None
    report = Report(vector, level=level, votes=votes)
    mechanism.check_report(report)
    return mechanism.collect(report)


def _votes(fields: ConfigRecord, mechanism: Mechanism, clients: int) -> torch.Tensor:
    """The summed shares of every vote, each within ±½ per client; raises `InputError` otherwise."""
    values = fields.get("votes")
    if not isinstance(values, list) or len(values) != len(mechanism.votes):
        raise InputError("it does not answer the votes that were asked")
    right = all(isinstance(value, float) and abs(value) <= MAX_SHARE * clients for value in values)
    require(right, "one of its votes is out of range")
    return torch.tensor(values, dtype=torch.float64)


def _read_added(array: Array, fields: ConfigRecord, request: NodeRequest, width: int) -> Sums:
    vector = torch.from_numpy(strict_array(array, "float64", (width,)))
    mechanism, n, slack = request.mechanism, len(request.clients), 1 + 1e-6
    count, squares = fields.get("count"), fields.get("squares")
    require(count == n, "it does not count the clients that were asked")
    longest = n * mechanism.norm_bound(width) * slack
    require(float(row_norms(vector[None])[0]) <= longest, "its sum is longer than its reports can be")
    low, high = mechanism.square_bounds(width)
    least, most = n * low * slack, n * high * slack
    require(isinstance(squares, float) and least <= squares <= most, "one of its statistics is out of range")
    votes = _votes(fields, mechanism, n)
    return mechanism.prepare_sums(Sums(vector, torch.tensor(squares, dtype=torch.float64), votes, n))
