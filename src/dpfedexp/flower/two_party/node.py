"""A node's side of two-party aggregation: a client that masks what it sends, and the helper that answers for the masks.

Both know the run and the client's node id from their own SuperNode, and the helper's key from the site's own files; a message has
no say in any of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from dpfedexp.core.noise.lattice import to_words
from dpfedexp.errors import InputError
from dpfedexp.flower.arrays import as_array
from dpfedexp.flower.messages import FAILED_PRECONDITION, REFUSAL, REPORT, REQUEST, Request
from dpfedexp.flower.node.guard import Guard
from dpfedexp.flower.node.price import Refused
from dpfedexp.flower.two_party.helper_file import HelperFile
from dpfedexp.mechanisms import Report
from dpfedexp.mechanisms.aggregation import BadSeeds, Round, check_public, masked
from dpfedexp.mechanisms.text import encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

_log = logging.getLogger("flwr")

HELPER = "dpfedexp.helper"
"""The record of every message to and from a helper."""
KEY_VARIABLE, KEY_NODE = "DPFEDEXP_HELPER_KEY", "dpfedexp-helper-key"


@dataclass(frozen=True)
class Sender:
    """Whose row is masked: the run and the node as the SuperNode knows them, and the key of the helper that the site trusts."""

    run: str
    node: int
    helper_key: str


def pinned_key(request: Request, guard: Guard | None, node_config: Mapping[str, Any]) -> str:
    """The public key of the helper that this site trusts; "" where the request needs none."""
    if not request.mechanism.needs_helper:
        return ""
    if request.clients:
        raise InputError("two-party aggregation needs one client per node; set clients_per_node to 1.")
    key = guard.helper_key if guard is not None else None
    key = key or os.environ.get(KEY_VARIABLE) or node_config.get(KEY_NODE)
    if not key:
        raise InputError(
            "this site names no helper that it trusts: two-party aggregation needs helper_key in the node's guard file."
        )
    return check_public(key)


def round_of(request: Request, columns: int, run: str) -> Round:
    """What a round's seeds are bound to."""
    mechanism = request.mechanism
    return Round(run, request.round, request.nonce, columns, mechanism.clip, encode(mechanism))


def masked_content(report: Report, request: Request, sender: Sender) -> RecordDict:
    """One client's row under a mask, and the seed of the mask under the helper's key, as the whole content of its reply."""
    mechanism = request.mechanism
    if not isinstance(mechanism, TwoPartyGaussian):
        raise InputError(f"mechanism {mechanism.kind!r} has no helper.")
    row = to_words(mechanism.units(report)[0])
    sent = masked(row, round_of(request, len(row), sender.run), sender.node, sender.helper_key)
    fields: dict[str, Any] = {"round": request.round, "nonce": request.nonce, "seed": sent.sealed}
    return RecordDict({REPORT: words_record(sent.words), REQUEST: ConfigRecord(fields)})


def words_record(words: np.ndarray) -> ArrayRecord:
    return ArrayRecord({"vector": as_array(np.ascontiguousarray(words, dtype="<u8"))})


def helper_reply(message: Message, run: str, node_config: Mapping[str, Any]) -> Message | None:
    """The reply to a message for a helper, None for any other message.

    Args:
        message: as it came.
        run: the run's name, which the node's own SuperNode says.
        node_config: the node's settings.
    """
    record = message.content.config_records.get(HELPER)
    if record is None:
        return None
    try:
        file = HelperFile.of_node(node_config)
        if file is None:
            return _refused(message, "this node is no helper.")
        helper = file.helper()
        if record.get("asks") == "who":
            return Message(RecordDict({HELPER: ConfigRecord({"key": helper.key.public})}), reply_to=message)
        answer = helper.answer(*_asked(record, run))
        fields = ConfigRecord({"nonce": str(record["nonce"]), "digest": answer.digest})
        return Message(RecordDict({REPORT: words_record(answer.words), HELPER: fields}), reply_to=message)
    except BadSeeds as reason:
        _log.warning("this helper refused a request: %s", reason)
        return Message(RecordDict({HELPER: ConfigRecord({"closed": reason.nodes})}), reply_to=message)
    except (InputError, Refused) as reason:
        _log.warning("this helper refused a request: %s", reason)
        return _refused(message, getattr(reason, "shown", str(reason)))
    except Exception as error:
        _log.error("this helper failed", exc_info=error)
        return _refused(message, "the helper failed; its own log says why.")


def _refused(message: Message, reason: str) -> Message:
    return Message(Error(FAILED_PRECONDITION, REFUSAL + reason), reply_to=message)


def _asked(record: ConfigRecord, run: str) -> tuple[Round, list[tuple[int, bytes]]]:
    """The round and its clients' seeds, of a message that may hold anything."""
    values: dict[str, Any] = dict(record)
    kinds = {"round": int, "nonce": str, "columns": int, "clip": float, "mechanism": str, "nodes": list, "seeds": list}
    for name, kind in kinds.items():
        if not isinstance(values.get(name), kind):
            raise InputError(f"the request to the helper has no {name}, or one of another kind.")
    nodes, seeds = values["nodes"], values["seeds"]
    right = len(nodes) == len(seeds) and all(isinstance(seed, bytes) for seed in seeds)
    if not right or not all(isinstance(node, int) and 0 <= node < 2**64 for node in nodes):
        raise InputError("the request to the helper must name a client for every seed.")
    round_ = Round(run, values["round"], values["nonce"], values["columns"], values["clip"], values["mechanism"])
    return round_, list(zip(nodes, seeds, strict=True))
