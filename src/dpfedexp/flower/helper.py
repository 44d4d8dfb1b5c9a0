"""Two-party aggregation on nodes: clients that mask their rows, and the helper that adds the masks.

Both know the run and the client's node id from their own SuperNode, and the helper's key from the site's own files; a message has
no say in any of them. The helper's operator has a file like a guard's, with its key and its limits, and a ledger beside it:

    private_key = "helper.key"           # beside the file, or a whole path; `dpfedexp flower helper-key` writes it
    min_clients = 10
    max_epsilon_per_round = 4.0
    max_epsilon_total = 20.0
    delta = 1e-5
    mechanisms = ["two-party"]
    max_clip = 1.0
    max_columns = 100_000_000            # the longest row, in numbers of 8 bytes; this is what holds where it is not said

Its path comes from the node's own environment (DPFEDEXP_HELPER) or configuration (`--node-config 'dpfedexp-helper="…"'`), never
from a message. The ledger is kept like a guard's (`guard.py`): a copy that was put back from a backup is refused, and so is the
file without its ledger. `dpfedexp guard show` shows what was spent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from dpfedexp.algorithms.probe import CLIP, RATE, SCALE
from dpfedexp.core.client_metrics import EVALUATION
from dpfedexp.core.noise import Noise, to_words
from dpfedexp.errors import InputError, is_count, require
from dpfedexp.flower.guard import Guard, Limits, Refused, now, read_limits
from dpfedexp.flower.messages import REPORT, NodeRequest, as_array, deployment_noise, refusal, reply_of
from dpfedexp.mechanisms import Report
from dpfedexp.mechanisms.aggregation import FEWEST, BadSeeds, Helper, PrivateKey, RoundBinding, check_public, mask_row
from dpfedexp.mechanisms.serialization import encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

_log = logging.getLogger("flwr")

HELPER = "dpfedexp.helper"
"""The record of every message to and from a helper."""
KEY_VARIABLE, KEY_NODE = "DPFEDEXP_HELPER_KEY", "dpfedexp-helper-key"
NODE_KEY, VARIABLE = "dpfedexp-helper", "DPFEDEXP_HELPER"


@dataclass(frozen=True)
class Sender:
    """Whose row is masked: the run and the node as the SuperNode knows them, and the key of the helper that the site trusts."""

    run: str
    node: int
    helper_key: str


def pinned_key(request: NodeRequest, guard: Guard | None, node_config: Mapping[str, Any]) -> str:
    """The public key of the helper that this site trusts; "" where the request needs none."""
    if not request.mechanism.needs_helper:
        return ""
    if request.clients:
        raise InputError("two-party aggregation needs one client per node; set clients_per_node to 1.")
    key = guard.helper_key if guard is not None else None
    key = key or os.environ.get(KEY_VARIABLE) or node_config.get(KEY_NODE)
    if not key:
        raise InputError(
            "helper_key is missing in the node's guard file; two-party aggregation needs the public key of a trusted helper."
        )
    return check_public(key)


def round_of(request: NodeRequest, columns: int, run: str) -> RoundBinding:
    """What a round's seeds are bound to."""
    mechanism = request.mechanism
    return RoundBinding(run, request.round, request.nonce, columns, mechanism.clip, encode(mechanism))


def masked_content(report: Report, request: NodeRequest, sender: Sender) -> RecordDict:
    """One client's row under a mask, and the seed of the mask under the helper's key, as the whole content of its reply."""
    mechanism = request.mechanism
    if not isinstance(mechanism, TwoPartyGaussian):
        raise InputError(f"mechanism {mechanism.kind!r} has no helper.")
    row = to_words(mechanism.units(report)[0])
    sent = mask_row(row, round_of(request, len(row), sender.run), sender.node, sender.helper_key)
    return reply_of(np.ascontiguousarray(sent.words, dtype="<u8"), request, seed=sent.sealed)


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
            return refusal(message, "this node is no helper.")
        helper = file.helper()
        if record.get("asks") == "who":
            return Message(RecordDict({HELPER: ConfigRecord({"key": helper.key.public})}), reply_to=message)
        answer = helper.answer(*_asked(record, run))
        words = ArrayRecord({"vector": as_array(np.ascontiguousarray(answer.words, dtype="<u8"))})
        fields = ConfigRecord({"nonce": str(record["nonce"]), "digest": answer.digest})
        return Message(RecordDict({REPORT: words, HELPER: fields}), reply_to=message)
    except BadSeeds as reason:
        _log.warning("this helper refused a request: %s", reason)
        return Message(RecordDict({HELPER: ConfigRecord({"closed": reason.nodes})}), reply_to=message)
    except InputError as reason:
        _log.warning("this helper refused a request: %s", reason)
        return refusal(message, getattr(reason, "shown", str(reason)))
    except Exception as error:
        _log.error("this helper failed", exc_info=error)
        return refusal(message, "the helper failed; see its log.")


def _asked(record: ConfigRecord, run: str) -> tuple[RoundBinding, list[tuple[int, bytes]]]:
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
    round_ = RoundBinding(run, values["round"], values["nonce"], values["columns"], values["clip"], values["mechanism"])
    return round_, list(zip(nodes, seeds, strict=True))


@dataclass(frozen=True)
class HelperFile(Limits):
    """The limits of a helper.

    Formal guarantee: all answers under this file together are within `max_epsilon_total` for every client, whichever runs asked and
    whichever of them the client was in.
    """

    private_key: Path
    min_clients: int
    max_columns: int = 100_000_000

    whose: ClassVar[str] = "helper"

    @staticmethod
    def of_node(node_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> HelperFile | None:
        """The file of a node that is a helper, None on any other node."""
        path = environment.get(VARIABLE, node_config.get(NODE_KEY))
        return None if path is None else HelperFile.load(Path(str(path)).expanduser())

    @staticmethod
    def load(path: Path | str) -> HelperFile:
        """The limits in a helper's file; a sentence if it can't be read or does not state all of them."""
        path = Path(path)
        values = read_limits(path, "helper", ("private_key", "min_clients"), ("max_columns",))
        fewest = values["min_clients"]
        require(
            is_count(fewest) and fewest >= FEWEST,
            f"helper: min_clients is {fewest!r}; it must be a whole number of at least {FEWEST}.",
        )
        longest = values.get("max_columns", 1)
        require(is_count(longest), f"helper: max_columns is {longest!r}; it must be a positive whole number.")
        require(isinstance(values["private_key"], str), "helper: private_key must be the name of a file.")
        values["private_key"] = path.parent / Path(values["private_key"]).expanduser()
        return HelperFile(path, **values)

    def helper(self, noise: Callable[[], Noise] = deployment_noise) -> Helper:
        """The helper with this file's key, limits and ledger."""
        return Helper(PrivateKey.load(self.private_key), self.min_clients, self.admit, noise)

    def admit(self, round_: RoundBinding, mechanism: TwoPartyGaussian) -> None:
        """Returns when the answer is the first to its round and nonce, within every limit, and charged on disk."""
        self.check_mechanism(mechanism)
        question = mechanism.question
        if question not in ((RATE, CLIP) if round_.number == 0 else ("", EVALUATION, SCALE)):
            raise Refused("only a vote on the local rate or on the first clip comes before the first round.")
        if round_.columns > self.max_columns:
            raise Refused(f"a row has {round_.columns} numbers, above this helper's max_columns of {self.max_columns}.")
        # For a client that is in every set: the helper sees who takes part, so sampling does not amplify.
        event = mechanism.client_event()
        self.check_round([(event, 1)])
        with self.open_ledger() as ledger:
            # Votes before the first round share its number, and an evaluation has that of the round before it; each is asked once.
            own = [(e.round, e.event.question) for e in ledger.entries if e.run == round_.run]
            later = [n for n, asked in own if n > round_.number or (n == round_.number and question in ("", asked))]
            if later:
                raise Refused(
                    f"round {round_.number} comes after an answer to round {max(later)} of the same run: every round "
                    "is answered once, for one set of clients, and rounds go up."
                )
            if any(entry.noise == round_.nonce for entry in ledger.entries):
                raise Refused("the nonce was answered before; nonces must not repeat.")
            self.check_total([*ledger.charges(), (event, 1)])
            ledger.charge(round_.number, event, run=round_.run, noise=round_.nonce, note={"time": now()})
