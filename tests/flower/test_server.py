"""The strategy against clients that fail, lie or repeat themselves: what counts, what is charged, what is said."""

import json
import logging
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from dpfedexp import Candidate
from dpfedexp.accounting import Sampling
from dpfedexp.algorithms import cdp_fedexp, dp_fedavg, dp_scaffold, fedavg, ldp_fedexp
from dpfedexp.algorithms.algorithm import with_aggregation
from dpfedexp.algorithms.round import FixedSize, Poisson
from dpfedexp.engine.checkpoint import read_progress
from dpfedexp.errors import InputError, RoundFailed
from dpfedexp.flower import DpFedExp
from dpfedexp.flower.cohort import choose, exchange
from dpfedexp.flower.messages import REPORT, REQUEST
from dpfedexp.flower.monitor import read_status
from tests.engine.small import entries

from .loopback import LoopbackGrid, Silence, counts, deploy, flat, grid_of, plain_app, problem

CDP = cdp_fedexp(clip=0.5, noise_multiplier=1.0)
LDP = ldp_fedexp(clip=0.5, noise_multiplier=1.0)
SCAFFOLD = dp_scaffold(clip=1.0, noise_multiplier=1.0)
pytestmark = pytest.mark.usefixtures("sleepless")


def changed(reply: Message, vector=None, **fields) -> Message:
    """The honest reply with another vector or other fields in it."""
    said = ConfigRecord({**reply.content.config_records[REQUEST], **fields})
    made = vector if isinstance(vector, Array) else Array(vector_of(reply) if vector is None else vector)
    return answering(reply, RecordDict({REPORT: ArrayRecord({"vector": made}), REQUEST: said}))


def answering(reply: Message, content: RecordDict | Error) -> Message:
    """Other content with the metadata of the honest reply."""
    asked = Message(RecordDict(), reply.metadata.src_node_id, "train")
    asked.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return Message(content, reply_to=asked)


def vector_of(reply: Message) -> np.ndarray:
    return reply.content.array_records[REPORT]["vector"].numpy()


def lying_array(reply: Message) -> Array:
    """An array whose description of itself differs from its bytes."""
    honest, other = Array(vector_of(reply)), Array(np.zeros(3, dtype=np.float32))
    return Array(dtype=honest.dtype, shape=honest.shape, stype=honest.stype, data=other.data)


def huge(reply: Message) -> Message:
    return changed(reply, np.full_like(vector_of(reply), 1e12))


HOSTILE = {
    "NaN": lambda r: changed(r, np.full_like(vector_of(r), np.nan)),
    "infinity": lambda r: changed(r, np.full_like(vector_of(r), np.inf)),
    "wrong length": lambda r: changed(r, vector_of(r)[:-1].copy()),
    "wrong shape": lambda r: changed(r, vector_of(r)[None].copy()),
    "int64": lambda r: changed(r, vector_of(r).astype(np.int64)),
    "float64": lambda r: changed(r, vector_of(r).astype(np.float64)),
    "empty": lambda r: answering(r, RecordDict()),
    "bytes that lie": lambda r: changed(r, lying_array(r)),
    "more than a report": lambda r: answering(r, RecordDict({**r.content, "more": ConfigRecord({"loss": 0.2})})),
    "wrong nonce": lambda r: changed(r, nonce="0" * 32),
    "error": lambda r: answering(r, Error(2, "SECRET 4711")),
    "nothing": lambda r: None,
}


start = partial(deploy, timeout=0.05, node_timeout=0.05)


def grid_where(node: int, change) -> LoopbackGrid:
    return grid_of(reply_of=lambda message, reply: change(reply) if message.metadata.dst_node_id == node else reply)


def charges(folder) -> int:
    return len(entries(folder))


@cache
def model_after(local: bool, absent: bool) -> torch.Tensor:
    """The model after a round without noise, with or without an answer of node 2; noise must be off."""
    grid = grid_where(2, lambda r: None) if absent else None
    with tempfile.TemporaryDirectory() as folder:
        return start(Path(folder) / "run", LDP if local else CDP, grid, noise=Silence)[0].state.w


@pytest.mark.parametrize(("name", "local"), [*((name, False) for name in HOSTILE), ("NaN", True)])
def test_a_bad_reply_counts_as_missing_and_nothing_else_changes(name, local, tmp_path, silent, caplog):
    """With node 2's reply spoilt, the round is exactly the round in which node 2 never answered."""
    with caplog.at_level(logging.DEBUG, logger="flwr"):
        spoilt, result = start(tmp_path, LDP if local else CDP, grid_where(2, HOSTILE[name]), noise=Silence)
    assert torch.equal(spoilt.state.w, model_after(local, absent=True))
    assert not torch.equal(spoilt.state.w, model_after(local, absent=False)), "node 2 must matter for the comparison"
    missing = 1 if name == "nothing" else 0
    assert counts(result.train_metrics_clientapp[1]) == (3, 2, 1 - missing, missing)
    assert charges(tmp_path) == 1
    assert "SECRET" not in caplog.text, "a client's own error text may hold its data"


def test_the_noise_on_the_sum_does_not_shrink_when_replies_are_missing(tmp_path):
    """c̄ = (Σ + zC·n)/clients with the public number of clients, however many answered."""

    class Ones:
        def normal(self, clients, width, device, dtype):
            return torch.ones(len(clients), width, device=device, dtype=dtype)

    algorithm = dp_fedavg(clip=0.5, noise_multiplier=2.0)
    quiet, _ = start(tmp_path / "quiet", algorithm, grid_where(2, lambda r: None), noise=Silence)
    noisy, _ = start(tmp_path / "noisy", algorithm, grid_where(2, lambda r: None), noise=Ones)
    shift = noisy.state.w - quiet.state.w
    torch.testing.assert_close(shift, torch.full_like(shift, 2.0 * 0.5 / 3))


def test_central_privacy_clips_a_huge_reply_again_and_counts_it(tmp_path):
    strategy, result = start(tmp_path, dp_fedavg(clip=0.5, noise_multiplier=1.0), grid_where(2, huge), noise=Silence)
    assert result.train_metrics_clientapp[1]["valid"] == 3
    assert float((strategy.state.w - flat(problem(3)[1])).norm()) <= 0.5 * (1 + 1e-12), "three of norm C"


@pytest.mark.parametrize("algorithm", [LDP, ldp_fedexp(clip=0.5, mechanism="privunit")], ids=["gaussian", "privunit"])
def test_local_privacy_refuses_a_reply_longer_than_any_honest_one(algorithm, tmp_path):
    _, result = start(tmp_path, algorithm, grid_where(2, huge))
    assert counts(result.train_metrics_clientapp[1]) == (3, 2, 1, 0)


def test_a_reply_replayed_from_an_earlier_round_is_refused(tmp_path):
    kept: list[Message] = []

    def replay(reply: Message) -> Message:
        kept.append(reply)
        return answering(reply, kept[0].content)

    _, result = start(tmp_path, CDP, grid_where(2, replay), rounds=2)
    assert [result.train_metrics_clientapp[r]["valid"] for r in (1, 2)] == [3, 2]


@pytest.mark.parametrize(
    "errors", [[httpx.ConnectError("")], [ValueError(), ConnectionError()], [ValueError(), ValueError()]]
)
def test_of_replies_that_can_not_be_read_together_one_is_left_out_and_a_lost_connection_ends_the_round(errors):
    def pull(keys):
        if "unreadable" in keys and errors:
            raise errors.pop(0)
        return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=key)) for key in keys]

    grid = SimpleNamespace(push_messages=list, pull_messages=pull)
    lost, replies = not isinstance(errors[-1], ValueError), []
    with pytest.raises(type(errors[-1])) if lost else nullcontext():
        replies = exchange(grid, ["unreadable", None, "readable"], 5.0)
    assert [reply.metadata.reply_to_message_id for reply in replies] == ([] if lost else ["readable"])


@pytest.mark.parametrize("algorithm", [CDP, LDP], ids=["central", "local"])
def test_a_straggler_is_missing_in_its_round_and_answers_the_next_one(algorithm, tmp_path, silent):
    """Its late reply arrives with the next one. The rounds are those of a node that never answered the first."""

    def late(kept: list[Message], deliver: bool):
        def reply_of(reply: Message) -> list[Message]:
            kept.append(reply)
            return [] if len(kept) == 1 else [*(kept[:1] if deliver and len(kept) == 2 else []), reply]

        return grid_where(2, reply_of)

    (straggler, result), (absent, _) = (
        start(tmp_path / str(deliver), algorithm, late([], deliver), rounds=3, noise=Silence)
        for deliver in (True, False)
    )
    shown = [counts(result.train_metrics_clientapp[r]) for r in (1, 2, 3)]
    assert shown == [(3, 2, 0, 1), (3, 3, 0, 0), (3, 3, 0, 0)]
    assert torch.equal(straggler.state.w, absent.state.w)
    assert "3 rounds, 3 clients" in straggler.statement.text, "who was missing is promised what all are"
    assert charges(tmp_path / "True") == 3


def test_a_second_reply_of_the_same_node_is_ignored(tmp_path, silent):
    once, _ = start(tmp_path / "once", CDP, noise=Silence)
    twice, result = start(tmp_path / "twice", CDP, grid_where(2, lambda r: [r, r, r]), noise=Silence)
    assert torch.equal(once.state.w, twice.state.w)
    assert result.train_metrics_clientapp[1]["valid"] == 3


@pytest.mark.parametrize(("algorithm", "paid"), [(CDP, 0), (LDP, 1)], ids=["central", "local"])
def test_with_too_few_replies_the_round_fails_and_releases_nothing(algorithm, paid, tmp_path):
    """A failed central round was never released; in a local one the reports had left the clients, and that is charged."""
    cost = "charged before it was sent" if paid else "Nothing was released or charged"
    with pytest.raises(RoundFailed, match=rf"round 1 failed: 2 of 3 clients .* at least 3 must .*{cost}"):
        start(tmp_path, algorithm, grid_where(2, lambda r: None), min_reply_fraction=1.0)
    assert charges(tmp_path) == paid
    assert read_progress(tmp_path).round == 0


def test_a_local_round_is_charged_and_in_the_status_before_its_messages_leave(tmp_path):
    """Clients randomize and send in a round that the server may not live to finish."""
    seen, told = [], []

    class Watching(LoopbackGrid):
        def push_messages(self, messages):
            seen.append(charges(tmp_path))
            told.append(read_status(tmp_path)["epsilon"])
            return super().push_messages(messages)

    start(tmp_path, LDP, Watching(plain_app(*problem(3)), 3), rounds=2)
    assert seen == [1, 2]
    assert 0 < told[0] < told[1]


def test_a_central_round_is_charged_before_noise_is_drawn(tmp_path):
    seen = []

    class Watching(Silence):
        def normal(self, *args):
            seen.append(charges(tmp_path))
            return super().normal(*args)

    start(tmp_path, CDP, rounds=2, noise=Watching)
    assert seen == [1, 2]


def test_poisson_sampling_is_drawn_from_system_entropy_at_its_rate():
    drawn = [len(choose(range(1000), 1, Sampling("poisson", 0.3))[0]) for _ in range(40)]
    # 40 000 draws: mean 300 with standard error 2.3, and five of them fail by chance once in a million.
    assert abs(np.mean(drawn) - 300) < 5 * 2.3
    assert len(set(drawn)) > 5


def test_an_empty_poisson_round_releases_noise(tmp_path, monkeypatch):
    monkeypatch.setattr("dpfedexp.flower.cohort.choose", lambda *_, equal: [{}])
    strategy, result = start(tmp_path, CDP, participation=Poisson(0.5))
    assert strategy.state.round == 1
    assert result.train_metrics_clientapp[1]["epsilon_total"] > 0


def test_under_poisson_sampling_neither_metrics_nor_logs_say_who_or_how_many(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "flwr")
    given = {"algorithm": CDP, "participation": Poisson(1.0 - 1e-9)}
    with pytest.raises(RoundFailed, match="fewer than 100% of the clients"):
        start(tmp_path, grid=grid_where(2, lambda r: None), min_reply_fraction=1.0, **given)
    assert "2 of 3" not in caplog.text
    strategy, result = start(tmp_path / "b", grid=grid_where(2, HOSTILE["NaN"]), min_reply_fraction=0.1, **given)
    assert not {"asked", "valid", "refused", "missing"} & set(result.train_metrics_clientapp[1])
    assert "node 2" not in caplog.text
    assert "whether a round failed because" in strategy.statement.text


def test_a_complete_run_is_returned_and_another_run_is_refused_with_the_difference(tmp_path, caplog):
    first, _ = start(tmp_path / "run", CDP)
    grid = grid_of()
    with caplog.at_level(logging.WARNING, logger="flwr"):
        again, result = start(tmp_path / "run", CDP, grid)
    assert not grid.sent, "a complete run asks nothing"
    assert "which is complete: no round is made" in caplog.text
    assert torch.equal(again.state.w, first.state.w)
    assert again.statement == first.statement
    assert len(again.opened.ledger) == len(first.history) == len(result.train_metrics_clientapp)
    with pytest.raises(InputError, match=r"is of another run: algorithm.clip is 0.25 here and 0.5 there"):
        start(tmp_path / "run", replace(CDP, clip=0.25))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(InputError, match=r"holds files but no run; name a new one in federation\.folder"):
        start(tmp_path / "notes", CDP)


MASKED = Candidate(algorithm=with_aggregation(CDP, "two-party"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": SCAFFOLD}, "dp_scaffold needs the clients' local steps"),
        ({"algorithm": replace(SCAFFOLD, scaffold="report")}, "control is 'report', which is for"),
        ({"clients": 0}, "clients is 0; it must be a positive whole number"),
        ({"resume": True}, "DpFedExp has no argument 'resume'. Write the same folder"),
        ({"min_reply_fraction": 1.5}, "min_reply_fraction is 1.5; it must be above 0 and at most 1"),
        ({"clients_per_node": 2}, "the first must be a multiple of the second"),
        (
            {"clients": 4, "clients_per_node": 2, "candidates": [Candidate(rate=0.1), MASKED]},
            "two-party aggregation needs one client per node",
        ),
        ({"participation": FixedSize(2)}, r"participation must be Full\(\) or Poisson"),
    ],
)
def test_wrong_settings_are_sentences(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        DpFedExp(**{"algorithm": CDP, "clients": 3, "rounds": 1, "folder": tmp_path, **options})


def test_integer_arrays_in_the_model_are_refused(tmp_path):
    strategy = DpFedExp(fedavg(), clients=3, rounds=1, folder=tmp_path)
    with pytest.raises(InputError, match="'steps' has type int64"):
        strategy.start(grid_of(), ArrayRecord({"steps": Array(np.zeros(1, dtype=np.int64))}))


def test_the_server_logs_the_preflight_and_the_verdict_and_writes_both(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="flwr"):
        strategy, _ = deploy(tmp_path, dp_fedavg(clip=0.5, noise_multiplier=200.0), clients=4, rounds=6)
    warned = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert warned[0].startswith("4 clients: client-level privacy does not work here")
    assert all(line["update_norm"] > 0 for line in strategy.history)
    told = [json.loads(line) for line in (tmp_path / "advice.jsonl").read_text().splitlines()]
    assert [one["sentence"] for one in told] == [one.sentence for one in strategy.run.advice]
    # Noise alone passes for a signal twice in a hundred runs: the verdict itself is tested on seeded noise.
    assert [one["code"] for one in told] in (["few-clients", "dead"], ["few-clients"])
    assert set(warned) >= {one["sentence"] for one in told}
