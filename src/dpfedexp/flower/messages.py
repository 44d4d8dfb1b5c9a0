"""What a message carries: the server's request, a client's report, and the checks that stand between a reply and the sums.

A request holds a nonce that is new for every message. A reply must echo it, so an old reply sent again, or one of another node, is
refused. Nothing of a reply is used before all of it has been checked.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from dpfedexp.accounting.events import Sampling
from dpfedexp.core.clipping import row_norms
from dpfedexp.core.sums import Sums
from dpfedexp.core.votes import HALF
from dpfedexp.errors import InputError, require
from dpfedexp.flower.arrays import as_array, strict_array
from dpfedexp.flower.noise import deployed
from dpfedexp.mechanisms import Mechanism, Report
from dpfedexp.mechanisms.text import decode, encode

REQUEST = "dpfedexp"
REPORT = "dpfedexp.report"
HOSTED = "updates"
BALLOTS = "dpfedexp.votes"
TAU_ETA_L = "tau_eta_l"
"""Record names: the request, the report, and what an app returns to its node: rows of hosted clients, and a metric for each vote by
its name (for hosted clients a list of numbers). And the key of τη_l in a request."""
REFUSAL = "dpfedexp: "
"""How the texts begin that this library puts into an error reply; the server shows no others."""
FAILED_PRECONDITION = 6
"""Flower's error code MOD_FAILED_PRECONDITION."""


@dataclass(frozen=True)
class Request:
    """What the server asks of one node in one round.

    Args:
        clients: which of the clients that the node hosts take part; empty on an ordinary node, which is one client.
        tau_eta_l: τη_l for SCAFFOLD's control variates, None without SCAFFOLD.
        rounds: how many rounds the run has.
        hosted: how many clients a node hosts.
    """

    round: int
    nonce: str
    mechanism: Mechanism
    sampling: Sampling
    clients: tuple[int, ...] = ()
    tau_eta_l: float | None = None
    rounds: int = 1
    hosted: int = 1

    @property
    def size(self) -> int:
        """How many clients the node answers for."""
        return max(1, len(self.clients))

    def to_record(self) -> ConfigRecord:
        return ConfigRecord(
            {
                "round": self.round,
                "nonce": self.nonce,
                "mechanism": encode(self.mechanism),
                "sampling": self.sampling.kind,
                "rate": float(self.sampling.rate),
                "clients": list(self.clients),
                TAU_ETA_L: 0.0 if self.tau_eta_l is None else float(self.tau_eta_l),
                "rounds": self.rounds,
                "hosted": self.hosted,
            }
        )

    @staticmethod
    def from_message(message: Message) -> Request:
        """The request of a message; a sentence if there is none or it makes no sense."""
        record = message.content.config_records.get(REQUEST)
        if record is None:
            raise InputError("the message carries no dpfedexp request; the server must use the DpFedExp strategy.")
        values = dict(record)
        kinds = {"nonce": str, "mechanism": str, "sampling": str, "rate": float, TAU_ETA_L: float}
        for name, kind in kinds.items():
            require(isinstance(values.get(name), kind), f"the request's {name} is {values.get(name)!r}.")
        for name in ("round", "rounds", "hosted"):
            number = values.get(name)
            whole = isinstance(number, int) and not isinstance(number, bool) and number >= 1
            require(whole, f"the request's {name} is {number!r}; it must be a positive whole number.")
        tau_eta_l = values[TAU_ETA_L]
        require(
            isinstance(tau_eta_l, float) and 0 <= tau_eta_l < math.inf,
            f"the request's {TAU_ETA_L} is {tau_eta_l!r}; it must be finite and zero or more.",
        )
        clients = values.get("clients")
        if not isinstance(clients, list) or not all(isinstance(c, int) and c >= 0 for c in clients):
            raise InputError(f"the request's clients is {clients!r}; it must be a list of whole numbers.")
        require(len(set(clients)) == len(clients), "the request asks for a hosted client twice.")
        require(
            not (clients and tau_eta_l),
            "the request asks hosted clients for SCAFFOLD, which keeps a control variate per node; use one client per node.",
        )
        return Request(
            values["round"],  # type: ignore[arg-type]
            values["nonce"],  # type: ignore[arg-type]
            deployed(decode(values["mechanism"])),  # type: ignore[arg-type]
            Sampling(values["sampling"], values["rate"]),  # type: ignore[arg-type]
            tuple(int(c) for c in clients),
            tau_eta_l or None,  # type: ignore[arg-type]
            values["rounds"],  # type: ignore[arg-type]
            values["hosted"],  # type: ignore[arg-type]
        )


def report_content(report: Report, request: Request) -> RecordDict:
    """One client's report as the whole content of its reply."""
    fields: dict[str, int | str | list[float]] = {"round": request.round, "nonce": request.nonce}
    if report.level is not None:
        fields["level"] = int(report.level[0])
    if report.votes is not None:
        fields["votes"] = report.votes[0].tolist()
    vector = np.ascontiguousarray(report.vector[0].numpy(), dtype="<f4")
    return _content(vector, fields)


def sums_content(sums: Sums, request: Request) -> RecordDict:
    """The reports of a node's hosted clients, already added."""
    fields: dict[str, float | str | list[float]] = {
        "round": request.round,
        "nonce": request.nonce,
        "count": sums.count,
        "squares": float(sums.squares),
        "votes": sums.votes.tolist(),
    }
    return _content(np.ascontiguousarray(sums.vector.numpy(), dtype="<f8"), fields)


def _content(vector: np.ndarray, fields: Mapping[str, float | str | list[float]]) -> RecordDict:
    return RecordDict({REPORT: ArrayRecord({"vector": as_array(vector)}), REQUEST: ConfigRecord(dict(fields))})


def read_parts(reply: Message, request: Request) -> tuple[Array, ConfigRecord]:
    """The two parts of a reply to this very request, its vector and its fields; anything more or less raises `InputError`."""
    content = reply.content
    require(set(content) == {REPORT, REQUEST}, "it holds other records than a report")
    arrays, fields = content.array_records.get(REPORT), content.config_records.get(REQUEST)
    if arrays is None or fields is None or set(arrays) != {"vector"}:
        raise InputError("it holds other records than a report")
    nonce = fields.get("nonce")
    require(
        isinstance(nonce, str) and hmac.compare_digest(nonce.encode(), request.nonce.encode()),
        "it answers another message than the one that was sent (an old reply, or another node's)",
    )
    return arrays["vector"], fields


def read_sums(reply: Message, request: Request, width: int) -> Sums:
    """The reply's contribution to the sums. Raises `InputError` with the reason if any part of it is not as it must be."""
    sent, fields = read_parts(reply, request)
    if request.clients:
        return _read_hosted(sent, fields, request, width)
    vector = torch.from_numpy(strict_array(sent, "float32", (width,)))[None]
    mechanism = request.mechanism
    level = _level(fields) if "level" in mechanism.parts else None
    votes = _votes(fields, mechanism, 1)[None] if "votes" in mechanism.parts else None
    report = Report(vector, level=level, votes=votes)
    mechanism.check_report(report)
    return mechanism.collect(report)


def _level(fields: ConfigRecord) -> torch.Tensor:
    """One whole number beside the vector; the mechanism says whether it is in range."""
    value = fields.get("level")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise InputError("its level is out of range")
    return torch.tensor([value])


def _votes(fields: ConfigRecord, mechanism: Mechanism, clients: int) -> torch.Tensor:
    """The shares of every vote, summed over so many clients: within half of their number."""
    values = fields.get("votes")
    if not isinstance(values, list) or len(values) != len(mechanism.votes):
        raise InputError("it does not answer the votes that were asked")
    right = all(isinstance(value, float) and abs(value) <= HALF * clients for value in values)
    require(right, "one of its votes is out of range")
    return torch.tensor(values, dtype=torch.float64)


def _read_hosted(array: Array, fields: ConfigRecord, request: Request, width: int) -> Sums:
    vector = torch.from_numpy(strict_array(array, "float64", (width,)))
    mechanism, n, slack = request.mechanism, len(request.clients), 1 + 1e-6
    count, squares = fields.get("count"), fields.get("squares")
    require(count == n, "it does not count the clients that were asked")
    longest = n * mechanism.norm_bound(width) * slack
    require(float(row_norms(vector[None])[0]) <= longest, "its sum is longer than so many reports can be")
    low, high = mechanism.square_bounds(width)
    least, most = n * low * slack, n * high * slack
    require(isinstance(squares, float) and least <= squares <= most, "one of its statistics is out of range")
    votes = _votes(fields, mechanism, n)
    return mechanism.settled(Sums(vector, torch.tensor(squares, dtype=torch.float64), votes, n))
