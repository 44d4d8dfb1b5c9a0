"""What a site lets in and what it lets out, whatever the uploaded app does (`dpfedexp node`).

Formal guarantee: with an app that returns anything at all, what leaves the site for a request is one report of the request's
mechanism, clipped and randomised here and charged to the site's own ledger first, or one error text that is always the same.
Reasons that are shown to the server are given before the app is started, and follow from the request and the guard file alone.

What remains is when the site answers, and whether: an app can take its time, and can fail. `answer_failures = true` in the guard
file answers a failure with a charged report of zero, so that only the time is left.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, Error, Message
from torch import Tensor

from dpfedexp.core.layout import Layout
from dpfedexp.errors import InputError, require
from dpfedexp.flower.arrays import strict_array
from dpfedexp.flower.messages import FAILED_PRECONDITION, HOSTED, REFUSAL, Request
from dpfedexp.flower.node.guard import Guard
from dpfedexp.flower.node.mod import MODEL, read_ballots, read_request, reply_content
from dpfedexp.flower.node.price import Refused
from dpfedexp.flower.two_party.node import Sender, helper_reply, pinned_key

_log = logging.getLogger("flwr")

NO_REPORT = REFUSAL + "the app made no report on this site; the site's own log says why."
_FLOATS = ("float16", "float32", "float64")
_TRAIN = "train"


@dataclass(frozen=True)
class Admitted:
    """A request that is within the site's limits, and the model that it came with."""

    message: Message
    request: Request
    layout: Layout
    w: Tensor
    app: str
    helper_key: str

    @property
    def run(self) -> str:
        return str(self.message.metadata.run_id)


@dataclass(frozen=True)
class Site:
    """The decisions of one site.

    Args:
        guard: the operator's limits, with the hashes of the apps that may run.
    """

    guard: Guard

    def check_app(self, content: bytes, claimed: str) -> None:
        """Raises `Refused` unless the app is on the site's list, by what it is and not by what it is called."""
        found = hashlib.sha256(content).hexdigest()
        if found != claimed or found not in self.guard.apps:
            raise Refused(f"the app {found} is not on this site's list.", shown="this app is not on the site's list.")

    def helped(self, message: Message) -> Message | None:
        """The answer of a site that is a helper of two-party aggregation, which no app has a part in; None to other messages."""
        if not message.has_content():
            return None
        return helper_reply(message, str(message.metadata.run_id), {})

    def admit(self, message: Message, app: str) -> Admitted:
        """The request of a message. Raises `Refused` with a reason that the server may know; nothing is charged yet."""
        try:
            require(
                message.metadata.message_type == _TRAIN and message.has_content(), "the site answers training only."
            )
            request, layout, w = read_request(message)
            helper_key = pinned_key(request, self.guard, {})
        except InputError as reason:
            raise Refused(str(reason)) from None
        except Exception as error:
            _log.warning("a request could not be read", exc_info=error)
            raise Refused("the request can't be read.") from None
        self.guard.admit(request, run=str(message.metadata.run_id), app=app, charge=False)
        return Admitted(message, request, layout, w, app, helper_key)

    def answer(self, admitted: Admitted, trained: Message | None) -> Message:
        """The only message that leaves for a request: a report that is paid for, or the one error."""
        request = admitted.request
        try:
            try:
                update, ballots = self._read(admitted, trained)
            except Exception as error:
                _log.error("what the app returned is not an update: %s", error)
                if not self.guard.answer_failures:
                    return refusal(admitted.message, NO_REPORT)
                update, ballots = torch.zeros(request.size, len(admitted.w)), None
            # Before the report exists.
            self.guard.admit(request, run=admitted.run, app=admitted.app)
            sender = Sender(admitted.run, admitted.message.metadata.dst_node_id, admitted.helper_key)
            return Message(reply_content(update, request, ballots, sender), reply_to=admitted.message)
        except Refused as reason:
            _log.warning("this site sent no report: %s", reason)
        except Exception as error:
            _log.error("the report could not be made", exc_info=error)
        return refusal(admitted.message, NO_REPORT)

    def _read(self, admitted: Admitted, trained: Message | None) -> tuple[Tensor, Tensor | None]:
        """The update [1, d], or a row per hosted client, and the votes. Nothing else of what the app returned is looked at."""
        request, layout, w = admitted.request, admitted.layout, admitted.w
        if trained is None or not trained.has_content():
            raise InputError("it returned no content.")
        records = trained.content.array_records
        if request.clients:
            rows = torch.from_numpy(_values(records[HOSTED]["rows"], (request.size, len(w))))
        else:
            arrays = records[MODEL]
            require(tuple(arrays) == layout.names, "its arrays are not those of the model.")
            parts = [
                _values(array, tuple(shape)).reshape(-1)
                for array, shape in zip(arrays.values(), layout.shapes, strict=True)
            ]
            rows = (torch.from_numpy(np.concatenate(parts)) - w)[None]
        return rows, read_ballots(trained, request)


def refusal(message: Message, text: str) -> Message:
    return Message(Error(FAILED_PRECONDITION, text), reply_to=message)


def _values(array: Array, shape: tuple[int, ...]) -> np.ndarray:
    """As float32, with what is not finite left in: `privatize` makes zeros of such rows, as it does for any client."""
    require(array.dtype in _FLOATS, "one of its arrays is not of floating-point numbers.")
    return strict_array(array, array.dtype, shape, finite=False).astype(np.float32)
