"""Two aggregators on Flower: real messages, real serialization, a helper's file with its ledger, and parties that misbehave."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from dpfedexp.accounting import Ledger, compose
from dpfedexp.accounting.events import Sampling
from dpfedexp.algorithms import cdp_fedexp, dp_fedavg, dp_scaffold
from dpfedexp.algorithms.algorithm import with_aggregation
from dpfedexp.algorithms.round import Poisson
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.engine import engine
from dpfedexp.engine.checkpoint import read_progress
from dpfedexp.errors import InputError, RoundFailed
from dpfedexp.flower import strategy_from
from dpfedexp.flower.guard import HelperFile
from dpfedexp.flower.messages import HELPER, REPORT, REQUEST
from dpfedexp.mechanisms.two_party import TwoPartyGaussian
from tests.engine.small import Crash, crash_in, entries

from ..mechanisms.parties import charges, helper_file, public_key
from .loopback import LoopbackGrid, Silence, counts, deploy, grid_of, plain_app, problem
from .test_mod import guard_file

CLIENTS = 6
ALGORITHMS = {
    "free": cdp_fedexp(clip=0.5, noise_multiplier=1.0, step="paper"),
    "paper": cdp_fedexp(clip=0.5, noise_multiplier=1.0, numerator="paper", step="paper"),
    "adaptive": cdp_fedexp(clip=AdaptiveClip(initial=1.0), noise_multiplier=1.0, step="paper"),
    "scaffold": dp_scaffold(clip=0.5, noise_multiplier=1.0),
}
FREE = ALGORITHMS["free"]


class Federation:
    """Six clients that pin the key of one helper, which is node 7."""

    def __init__(self, folder, *, reply_of=None, clients=CLIENTS, **limits):
        self.folder, self.clients = folder, clients
        (folder / "helper").mkdir()
        self.file = helper_file(folder / "helper", **{"total": 1e3, "per_round": 1e2, "max_clip": 1e6, **limits})
        self.grid = LoopbackGrid(plain_app(*problem(clients)), clients + 1, reply_of=reply_of)
        self.nodes = {node: context.node_config for node, context in self.grid.contexts.items()}
        self.nodes[clients + 1]["dpfedexp-helper"] = str(self.file.path)
        for node in range(1, clients + 1):
            self.nodes[node]["dpfedexp-helper-key"] = public_key(self.file)

    def run(self, algorithm=FREE, name="run", rounds=1, **options):
        given = {"clients": self.clients, "rounds": rounds, "timeout": 5, **options}
        return deploy(self.folder / name, with_aggregation(algorithm, "two-party"), self.grid, **given)


@pytest.fixture
def silent(monkeypatch):
    helper = HelperFile.helper
    monkeypatch.setattr(HelperFile, "helper", lambda self: helper(self, Silence))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_models_are_those_of_plain_aggregation_bit_for_bit_without_noise(name, tmp_path, silent):
    two, results = Federation(tmp_path).run(ALGORITHMS[name], rounds=2, noise=Silence)
    given = {"clients": CLIENTS, "rounds": 2, "noise": Silence}
    one, expected = deploy(tmp_path / "plain", ALGORITHMS[name], grid_of(CLIENTS), **given)
    assert torch.equal(two.state.reported, one.state.reported)
    for number in (1, 2):
        assert dict(results.train_metrics_clientapp[number]) == dict(expected.train_metrics_clientapp[number])


def test_a_run_charges_both_ledgers_and_states_what_holds_against_whom(tmp_path):
    federation = Federation(tmp_path)
    strategy, result = federation.run(ALGORITHMS["adaptive"], rounds=2)
    assert charges(federation.file) == len(entries(tmp_path / "run")) == 2
    text = str(strategy.statement)
    assert "against either aggregator" in text
    assert "If server and helper work together" in text
    assert result.train_metrics_clientapp[2]["valid"] == CLIENTS


def test_no_message_but_the_masked_row_and_the_sealed_seed_leaves_a_client(tmp_path):
    seen = []
    federation = Federation(tmp_path, reply_of=lambda message, reply: seen.append((message, reply)) or reply)
    federation.run()
    replies = [reply for _, reply in seen if not reply.has_error() and {REPORT, REQUEST} <= set(reply.content)]
    assert len(replies) == CLIENTS
    for reply in replies:
        assert set(reply.content[REQUEST]) == {"round", "nonce", "seed"}
        assert len(reply.content[REQUEST]["seed"]) == 80
        words = reply.content[REPORT]["vector"].numpy()
        assert words.dtype == np.uint64
        # A row in the clear is small; words under a mask are uniform, so some of 21 are above 2⁶², and some below 3·2⁶².
        assert (words.view(np.int64) > 2**60).any()
        assert (words.view(np.int64) < -(2**60)).any()
    asked = [message for message, _ in seen if HELPER in message.content and "seeds" in message.content[HELPER]]
    assert len(asked) == 1
    assert set(asked[0].content) == {HELPER}, "the helper gets no model, no masked row and no report"


@pytest.mark.parametrize("key", ["", "9c" * 32], ids=["no key", "another's key"])
def test_a_client_whose_site_pins_no_helper_or_another_is_left_out_and_the_others_are_counted(key, tmp_path):
    federation = Federation(tmp_path)
    federation.nodes[3]["dpfedexp-helper-key"] = key
    strategy, result = federation.run(min_reply_fraction=0.5)
    assert strategy.state.round == charges(federation.file) == 1
    assert counts(result.train_metrics_clientapp[1]) == (6, 5, 1, 0)


def test_sites_that_all_trust_another_helper_fail_the_round(tmp_path):
    federation = Federation(tmp_path)
    for node in range(1, CLIENTS + 1):
        federation.nodes[node]["dpfedexp-helper-key"] = "9c" * 32
    with pytest.raises(RoundFailed, match="their sites must pin this helper's key"):
        federation.run(min_reply_fraction=0.5)
    assert charges(federation.file) == 0


def test_the_guard_file_pins_the_key_and_charges_the_client(tmp_path):
    federation = Federation(tmp_path)
    limits = {"max_epsilon_per_round": 50.0, "max_epsilon_total": 500.0, "mechanisms": ["two-party"]}
    guard = guard_file(tmp_path, **limits, helper_key=federation.nodes[2].pop("dpfedexp-helper-key"))
    federation.nodes[2]["dpfedexp-guard"] = str(guard)
    _, result = federation.run()
    assert result.train_metrics_clientapp[1]["valid"] == CLIENTS
    (entry,) = Ledger.open(tmp_path / "guard.ledger.jsonl").entries
    assert entry.event.setting == "two-party"


def test_a_client_of_the_list_that_calls_itself_a_helper_is_not_believed(tmp_path):
    """The attack: node 1 answers "who" before the helper does, so that the rounds would fail or be its own."""
    federation = Federation(tmp_path)
    federation.nodes[1]["dpfedexp-helper"] = str(federation.file.path)
    listed = tmp_path / "nodes"
    listed.write_text("".join(f"{node}\n" for node in range(1, CLIENTS + 1)))
    strategy, result = federation.run(nodes=listed)
    assert strategy.opened.description.engine.cohort.helper == CLIENTS + 1
    assert result.train_metrics_clientapp[1]["valid"] == CLIENTS


def test_a_helper_that_starts_late_is_waited_for_until_the_deadline(tmp_path, monkeypatch, sleepless):
    federation, early = Federation(tmp_path), iter([range(1, CLIENTS + 1)] * 2)
    monkeypatch.setattr(federation.grid, "get_node_ids", lambda: next(early, range(1, CLIENTS + 2)))
    strategy, _ = federation.run(node_timeout=1)
    assert strategy.opened.description.engine.cohort.helper == CLIENTS + 1
    monkeypatch.setattr(federation.grid, "get_node_ids", lambda: range(1, CLIENTS + 1))
    with pytest.raises(RoundFailed, match=r"no connected node was a helper within 0\.01 seconds"):
        federation.run(name="without", node_timeout=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields, vector: ({**fields, "digests": ["00" * 32]}, vector), "another round or another set"),
        (lambda fields, vector: (fields, vector[:-1]), "shape"),
        (lambda fields, vector: (fields, vector.astype(np.float64)), "type is not uint64"),
        (lambda fields, vector: (fields, vector ^ np.uint64(0x9E3779B97F4A7C15)), "a mask was not removed"),
        (None, "the helper did not answer"),
    ],
    ids=["another set", "another length", "floats", "dropped seeds", "silence"],
)
def test_a_server_refuses_a_helper_that_misbehaves_and_releases_nothing(change, words, tmp_path):
    def changed(message, reply):
        if "seeds" not in message.content.config_records.get(HELPER, ()):
            return reply
        if change is None:
            return None
        fields, vector = change(dict(reply.content[HELPER]), reply.content[REPORT]["vector"].numpy())
        reply.content = RecordDict({REPORT: ArrayRecord({"vector": Array(vector)}), HELPER: ConfigRecord(fields)})
        return reply

    with pytest.raises(RoundFailed, match=words):
        Federation(tmp_path, reply_of=changed).run(timeout=1)
    assert read_progress(tmp_path / "run").round == 0
    assert len(entries(tmp_path / "run")) == 1, "it is charged before the helper is asked"


@pytest.fixture
def other_run():
    """What Flower does when a run is resumed: another id, for the server app and for every node."""
    before = TaskIdentity.run_id

    def change(grid):
        TaskIdentity.run_id = 2
        for context in grid.contexts.values():
            context.run_id = 2

    yield change
    TaskIdentity.run_id = before


def test_a_server_that_dies_between_answer_and_release_is_resumed_and_pays_again(tmp_path, monkeypatch, other_run):
    federation = Federation(tmp_path)
    with monkeypatch.context() as patched:
        crash_in(patched, engine, "advance", 2, before=True)
        with pytest.raises(Crash):
            federation.run(rounds=2)
    assert charges(federation.file) == 2
    other_run(federation.grid)
    assert federation.run(rounds=2)[0].state.round == 2
    assert charges(federation.file) == len(entries(tmp_path / "run")) == 3


def test_a_helper_that_dies_between_charge_and_answer_is_asked_again_and_both_pay(tmp_path, monkeypatch, other_run):
    """One client dies in the same round, before it answers."""
    federation = Federation(tmp_path, reply_of=lambda asked, reply: None if asked.metadata.dst_node_id == 2 else reply)
    with monkeypatch.context() as patched:
        crash_in(patched, TwoPartyGaussian, "noise_units", 1, before=True, error=RuntimeError("killed"))
        with pytest.raises(RoundFailed, match="the helper failed; see its log"):
            federation.run(rounds=2, timeout=0.2)
    assert charges(federation.file) == len(entries(tmp_path / "run")) == 1
    other_run(federation.grid)
    federation.grid.reply_of = None
    assert federation.run(rounds=2)[0].state.round == 2
    assert charges(federation.file) == len(entries(tmp_path / "run")) == 3


def test_sampling_counts_for_readers_of_the_models_only(tmp_path):
    federation = Federation(tmp_path, clients=12, min_clients=2)
    given = {"participation": Poisson(0.7), "min_reply_fraction": 0.1}
    strategy, _ = federation.run(dp_fedavg(clip=0.5, noise_multiplier=1.0), **given)
    statement, one = strategy.statement, strategy.opened.description.engine.mechanism.event(Sampling())
    assert statement.epsilon_total == compose([(one, 1)], 1e-5).epsilon
    assert statement.models_only.epsilon_total < compose([(one.to_readers(), 1)], 1e-5).epsilon


def test_nodes_that_share_one_environment_as_in_a_simulation_have_one_helper_among_them(tmp_path, monkeypatch):
    federation = Federation(tmp_path)
    monkeypatch.setenv("DPFEDEXP_HELPER", str(federation.file.path))
    monkeypatch.setenv("DPFEDEXP_HELPER_KEY", public_key(federation.file))
    for node in federation.nodes.values():
        node.pop("dpfedexp-helper", node.pop("dpfedexp-helper-key", None))
    federation.grid.app = plain_app(*problem(CLIENTS + 1))
    strategy, result = federation.run()
    assert strategy.opened.description.engine.cohort.helper == 1
    assert result.train_metrics_clientapp[1]["valid"] == CLIENTS


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm.adjacency": "add-remove"}, "both aggregators see who takes part"),
        ({"federation.clients_per_node": 2}, "one client per node"),
        ({"algorithm.name": "ldp_fedexp"}, "needs 'central-gaussian'"),
    ],
)
def test_what_can_not_be_done_is_one_sentence_before_anything_is_spent(settings, words, tmp_path):
    federation = Federation(tmp_path)
    config = {"federation.clients": CLIENTS, "federation.rounds": 2, "federation.folder": str(tmp_path / "run")}
    config |= {"algorithm.clip": 0.5, "algorithm.noise_multiplier": 1.0, "algorithm.aggregation": "two-party"}
    with pytest.raises(InputError, match=words):
        strategy_from({**config, **settings}).start(federation.grid, ArrayRecord(problem(CLIENTS)[1].state_dict()))
    assert not (tmp_path / "run").exists()
    assert charges(federation.file) == 0
