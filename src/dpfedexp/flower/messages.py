"""What a message carries: the server's request, a client's report, and the checks that stand between a reply and the sums.

A request holds a nonce that is new for every message. A reply must echo it, so an old reply sent again, or one of another node, is
refused. Nothing of a reply is used before all of it has been checked.
"""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from scipy.special import chdtri

from dpfedexp.accounting.events import Sampling
from dpfedexp.clipping import row_norms
from dpfedexp.errors import InputError, require
from dpfedexp.flower.arrays import strict_array
from dpfedexp.flower.mechanism_text import decode, encode
from dpfedexp.flower.noise import deployed
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, Mechanism, PrivUnit, Report
from dpfedexp.mechanisms.secure_gaussian import SecureCentralGaussian
from dpfedexp.noise.lattice import step_for, truncate
from dpfedexp.sums import Sums

REQUEST = "dpfedexp"
REPORT = "dpfedexp.report"
HOSTED = "updates"
"""Record names: the request, the report, and the rows that an app returns for the clients that its node hosts."""

_NEVER = 1e-15
"""How often an honest report may fall outside the bound that robustness puts on it."""


@dataclass(frozen=True)
class Request:
    """What the server asks of one node in one round.

    clients  which of the clients that the node hosts take part; empty on an ordinary node, which is one client
    travel   τη_l for SCAFFOLD's control variates, None without SCAFFOLD
    rounds   how many rounds the run has
    hosted   how many clients a node hosts
    """

    round: int
    nonce: str
    mechanism: Mechanism
    sampling: Sampling
    clients: tuple[int, ...] = ()
    travel: float | None = None
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
                "travel": 0.0 if self.travel is None else float(self.travel),
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
        kinds = {"nonce": str, "mechanism": str, "sampling": str, "rate": float, "travel": float}
        for name, kind in kinds.items():
            require(isinstance(values.get(name), kind), f"the request's {name} is {values.get(name)!r}.")
        for name in ("round", "rounds", "hosted"):
            number = values.get(name)
            whole = isinstance(number, int) and not isinstance(number, bool) and number >= 1
            require(whole, f"the request's {name} is {number!r}; it must be a positive whole number.")
        travel = values["travel"]
        require(
            isinstance(travel, float) and 0 <= travel < math.inf,
            f"the request's travel is {travel!r}; it must be finite and zero or more.",
        )
        clients = values.get("clients")
        if not isinstance(clients, list) or not all(isinstance(c, int) and c >= 0 for c in clients):
            raise InputError(f"the request's clients is {clients!r}; it must be a list of whole numbers.")
        require(len(set(clients)) == len(clients), "the request asks for a hosted client twice.")
        require(
            not (clients and travel),
            "the request asks hosted clients for SCAFFOLD, which keeps a control variate per node; use one client per node.",
        )
        return Request(
            values["round"],  # type: ignore[arg-type]
            values["nonce"],  # type: ignore[arg-type]
            deployed(decode(values["mechanism"])),  # type: ignore[arg-type]
            Sampling(values["sampling"], values["rate"]),  # type: ignore[arg-type]
            tuple(int(c) for c in clients),
            travel or None,  # type: ignore[arg-type]
            values["rounds"],  # type: ignore[arg-type]
            values["hosted"],  # type: ignore[arg-type]
        )


def report_content(report: Report, request: Request) -> RecordDict:
    """One client's report as the whole content of its reply."""
    said: dict[str, int | str] = {"round": request.round, "nonce": request.nonce}
    if report.level is not None:
        said["level"] = int(report.level[0])
    if report.within is not None:
        said["within"] = int(report.within[0])
    vector = np.ascontiguousarray(report.vector[0].numpy(), dtype="<f4")
    return _content(vector, said)


def sums_content(sums: Sums, request: Request) -> RecordDict:
    """The reports of a node's hosted clients, already added."""
    said = {
        "round": request.round,
        "nonce": request.nonce,
        "count": sums.count,
        "squares": float(sums.squares),
        "within": float(sums.within),
    }
    return _content(np.ascontiguousarray(sums.vector.numpy(), dtype="<f8"), said)


def _content(vector: np.ndarray, said: dict) -> RecordDict:
    return RecordDict({REPORT: ArrayRecord({"vector": Array(vector)}), REQUEST: ConfigRecord(said)})


def read_sums(reply: Message, request: Request, width: int) -> Sums:
    """The reply's contribution to the sums. Raises `InputError` with the reason if any part of it is not as it must be."""
    content = reply.content
    require(set(content) == {REPORT, REQUEST}, "it holds other records than a report")
    arrays, said = content.array_records.get(REPORT), content.config_records.get(REQUEST)
    if arrays is None or said is None or set(arrays) != {"vector"}:
        raise InputError("it holds other records than a report")
    nonce = said.get("nonce")
    require(
        isinstance(nonce, str) and hmac.compare_digest(nonce.encode(), request.nonce.encode()),
        "it answers another message than the one that was sent (an old reply, or another node's)",
    )
    if request.clients:
        return _read_hosted(arrays["vector"], said, request, width)
    vector = torch.from_numpy(strict_array(arrays["vector"], "float32", (width,)))[None]
    report = Report(vector, _level(said, request.mechanism), _within(said, request.mechanism))
    _check_norm(request.mechanism, vector)
    return request.mechanism.collect(report)


def _read_hosted(array: Array, said: ConfigRecord, request: Request, width: int) -> Sums:
    vector = torch.from_numpy(strict_array(array, "float64", (width,)))
    count, squares, within = said.get("count"), said.get("squares"), said.get("within")
    require(count == len(request.clients), "it does not count the clients that were asked")
    n, bound = len(request.clients), norm_bound(request.mechanism, width)
    slack = 1 + 1e-6
    require(float(row_norms(vector[None])[0]) <= n * bound * slack, "its sum is longer than so many reports can be")
    # A squared norm and a bit are never negative, but PrivUnit's unbiased estimate of a square can be.
    least = -n * bound**2 * slack if isinstance(request.mechanism, PrivUnit) else 0.0
    for value, low, high in ((squares, least, n * bound**2 * slack), (within, 0.0, float(n))):
        require(isinstance(value, float) and low <= value <= high, "one of its statistics is out of range")
    scalar = torch.tensor([squares, within], dtype=torch.float64)
    return on_grid(Sums(vector, scalar[0], scalar[1], n), request.mechanism)


def on_grid(sums: Sums, mechanism: Mechanism) -> Sums:
    """A node's sums truncated to the grid of the server's noise, where they are already if the node is honest."""
    if not isinstance(mechanism, SecureCentralGaussian):
        return sums
    step = step_for(mechanism.noise_multiplier * mechanism.clip)
    squares = sums.squares
    if mechanism.scalar_multiplier is not None:
        square_step = step_for(mechanism.scalar_multiplier * mechanism.clip**2)
        squares = truncate(squares, square_step).double() * square_step
    within = sums.within.round()
    return Sums(truncate(sums.vector, step).double() * step, squares, within, sums.count)


def _level(said: ConfigRecord, mechanism: Mechanism) -> torch.Tensor | None:
    if not isinstance(mechanism, PrivUnit):
        return None
    level = said.get("level")
    if not isinstance(level, int) or not 0 <= level <= mechanism.scalar.k:
        raise InputError("its level is out of range")
    return torch.tensor([level])


def _within(said: ConfigRecord, mechanism: Mechanism) -> torch.Tensor | None:
    if not isinstance(mechanism, CentralGaussian) or mechanism.count_noise is None:
        return None
    require(said.get("within") in (0, 1), "its clipping bit is not 0 or 1")
    return torch.tensor([bool(said["within"])])


def _check_norm(mechanism: Mechanism, vector: torch.Tensor) -> None:
    """In local privacy the server can't clip without bias, but no honest client sends a vector of any size."""
    norm = float(row_norms(vector)[0])
    if isinstance(mechanism, PrivUnit):
        require(abs(norm - 1.0) < 1e-3, "its direction is not a unit vector")
    elif isinstance(mechanism, LocalGaussian):
        require(norm <= norm_bound(mechanism, vector.shape[1]), "it is longer than any honest report")


def norm_bound(mechanism: Mechanism, width: int) -> float:
    """The largest norm of one client's vector in the sums, that of honest noise included."""
    if isinstance(mechanism, LocalGaussian):
        return mechanism.clip + mechanism.sigma * float(chdtri(width, _NEVER)) ** 0.5
    if isinstance(mechanism, PrivUnit):
        levels = torch.arange(mechanism.scalar.k + 1)
        return float(mechanism.scalar.magnitude(levels).abs().max()) / mechanism.direction.m * (1 + 1e-3)
    return mechanism.clip
