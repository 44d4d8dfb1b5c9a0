"""Messages: the server's request, a client's report, and the checks of a reply.

A request holds a nonce that is new for every message. A reply must echo it, so an old reply sent again, or one of another node, is
refused. Nothing of a reply is used before all of it has been checked. Flower's named arrays are one flat vector here, in the layout
that the simulator uses. Noise comes from the operating system, never from a seed, and lies on a grid.
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
from dpfedexp.algorithms.probe import CLIP, RATE, SCALE, UPDATE, bin_count
from dpfedexp.core.client_metrics import EVALUATION
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
"""Record names: the model, SCAFFOLD's control variate, the request, the report, and what an app returns to its node: a row for
each client, and a metric for each vote by its name (for several clients a list of numbers). And the key of τη_l in a request."""
REFUSAL = "dpfedexp: "
"""How the texts begin that this library puts into an error reply; the server shows no others."""
FAILED_PRECONDITION = 6
"""Flower's error code MOD_FAILED_PRECONDITION."""
_WHOLE, _NUMBERS = ("round", "rounds", "clients_per_node"), (TAU_ETA_L, "local_rate", "shake")
"""Fields of a request that are whole numbers, and those that are numbers, 0 for None."""


def layout_of(arrays: ArrayRecord) -> Layout:
    """The layout of a model's arrays. All of them are trained, averaged and covered by the noise, so all must be floating point."""
    require(len(arrays) > 0, "the model's arrays are empty; a model has at least one parameter.")
    for name, array in arrays.items():
        if array.dtype not in ("float16", "float32", "float64"):
            raise InputError(
                f"the model's array {name!r} has type {array.dtype}; only floating-point parameters can be trained. Leave buffers "
                "such as BatchNorm's counters out, and use GroupNorm: running statistics would leave the client without noise."
            )
    return Layout(tuple(arrays), tuple(torch.Size(array.shape) for array in arrays.values()))


def to_flat(arrays: ArrayRecord, layout: Layout, dtype: torch.dtype = torch.float64) -> Tensor:
    """A copy of the arrays as one vector; a sentence if names or shapes are not the layout's."""
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
    # Too large for the type is infinite, and found where finite numbers are asked for.
    with np.errstate(over="ignore", invalid="ignore"):
        for values, part in zip(found, flat.split(layout.sizes), strict=True):
            np.copyto(part.numpy(), values.reshape(-1))
    return flat


def as_array(values: np.ndarray) -> Array:
    """Flower's array of these values, in the bytes that Flower writes, without its second copy of them."""
    values, header = np.require(values, requirements="C"), BytesIO()
    write_array_header_1_0(header, header_data_from_array_1_0(values))
    data = b"".join((header.getvalue(), values.reshape(-1).view(np.uint8).data))
    return Array(dtype=str(values.dtype), shape=tuple(values.shape), stype="numpy.ndarray", data=data)


def to_arrays(w: Tensor, layout: Layout) -> ArrayRecord:
    """The vector as named float32 arrays, which is what clients compute with."""
    named = layout.unflatten(w.float())
    return ArrayRecord({name: as_array(value.numpy()) for name, value in named.items()})


def strict_array(array: Array, dtype: str, shape: tuple[int, ...], *, finite: bool = True) -> np.ndarray:
    """The array's values if it is exactly of this type and shape and finite, read without believing anything it says of itself.

    Sizes are compared before a byte is parsed, so an array that claims to be enormous costs nothing. `finite=False` lets NaN and
    infinity through, for a reader that makes zeros of them.
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
    require(header == {"descr": expected.str, "fortran_order": False, "shape": shape}, "its header is wrong")
    values = np.frombuffer(array.data, dtype=expected, offset=offset)
    require(not finite or bool(np.isfinite(values).all()), "it is not finite")
    return values.reshape(shape).copy()


def _header(raw: bytes) -> object:
    require(len(raw) >= 2 and int.from_bytes(raw[:2], "little") == len(raw) - 2, "its header is wrong")
    try:
        return literal_eval(raw[2:].decode("latin1").strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise InputError("its header is wrong") from None


@dataclass(frozen=True)
class NodeRequest:
    """The server's request to one node.

    Args:
        clients: which of the clients of the node take part; empty on an ordinary node, which is one client.
        tau_eta_l: τη_l for SCAFFOLD's control variates, None without SCAFFOLD.
        rounds: how many rounds the run has.
        clients_per_node: how many clients a node answers for.
        purpose: an update, or the name of a vote.
        local_rate: the automatic rate to train with; None for a given rate.
        shake: the public noise of a vote on the rate's scale, whose message has the anchor beside the model.
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

    @property
    def size(self) -> int:
        """How many clients the node answers for."""
        return max(1, len(self.clients))

    def shape(self, dimension: int) -> tuple[int, int]:
        """Of the rows that the node's clients answer with, before clipping: updates, or votes in bins."""
        return self.size, bin_count(self.purpose) or dimension

    def to_record(self) -> ConfigRecord:
        same = {name: getattr(self, name) for name in (*_WHOLE, "nonce", "purpose")}
        numbers = {name: float(getattr(self, name) or 0.0) for name in _NUMBERS}
        sampling = {"sampling": self.sampling.kind, "rate": float(self.sampling.rate)}
        return ConfigRecord(
            {**same, **numbers, **sampling, "mechanism": encode(self.mechanism), "clients": list(self.clients)}
        )

    @staticmethod
    def from_message(message: Message) -> NodeRequest:
        """The request of a message; a sentence if there is none or it makes no sense."""
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
        known = (UPDATE, RATE, CLIP, SCALE, EVALUATION)
        require(purpose in known, f"the request's purpose is {purpose!r}, which does not exist.")
        for name in _WHOLE:
            number, least = values.get(name), int(name != "round" or purpose not in (RATE, CLIP))
            whole = isinstance(number, int) and not isinstance(number, bool) and number >= least
            require(whole, f"the request's {name} is {number!r}; it must be a positive whole number.")
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
    """What a round's seeds are bound to."""
    mechanism = request.mechanism
    return RoundBinding(run, request.round, request.nonce, columns, mechanism.clip, encode(mechanism))


def refusal(message: Message, reason: str) -> Message:
    """An error reply with a reason that may be shown to the server."""
    return Message(Error(FAILED_PRECONDITION, REFUSAL + reason), reply_to=message)


def report_content(report: Report, request: NodeRequest) -> RecordDict:
    """One client's report as the whole content of its reply."""
    fields: dict[str, Any] = {}
    if report.level is not None:
        fields["level"] = int(report.level[0])
    if report.votes is not None:
        fields["votes"] = report.votes[0].tolist()
    return reply_of(np.ascontiguousarray(report.vector[0].numpy(), dtype="<f4"), request, **fields)


def sums_content(sums: Sums, request: NodeRequest) -> RecordDict:
    """The reports of a node's clients, already added."""
    vector = np.ascontiguousarray(sums.vector.numpy(), dtype="<f8")
    return reply_of(vector, request, count=sums.count, squares=float(sums.squares), votes=sums.votes.tolist())


def reply_of(vector: np.ndarray, request: NodeRequest, **fields: Any) -> RecordDict:
    """A vector and fields as the reply to a request, whose nonce it echoes."""
    named = ConfigRecord({"round": request.round, "nonce": request.nonce, **fields})
    return RecordDict({REPORT: ArrayRecord({"vector": as_array(vector)}), REQUEST: named})


def read_parts(reply: Message, request: NodeRequest) -> tuple[Array, ConfigRecord]:
    """The two parts of a reply to this very request, its vector and its fields; anything more or less raises `InputError`."""
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
    """The reply's contribution to the sums. Raises `InputError` with the reason if any part of it is not as it must be."""
    sent, fields = read_parts(reply, request)
    if request.clients:
        return _read_added(sent, fields, request, width)
    vector = torch.from_numpy(strict_array(sent, "float32", (width,)))[None]
    mechanism = request.mechanism
    level = None
    if "level" in mechanism.parts:  # the mechanism says whether it is in range
        value = fields.get("level")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise InputError("its level is out of range")
        level = torch.tensor([value])
    votes = _votes(fields, mechanism, 1)[None] if "votes" in mechanism.parts else None
    report = Report(vector, level=level, votes=votes)
    mechanism.check_report(report)
    return mechanism.collect(report)


def _votes(fields: ConfigRecord, mechanism: Mechanism, clients: int) -> torch.Tensor:
    """The summed shares of every vote, within ±½ per client."""
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
