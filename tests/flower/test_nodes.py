"""Who takes part: participants that no later node displaces, and everybody where adding one node must change only its own."""

import logging
import re

import pytest
import torch
from flwr.app import Context, RecordDict

from dpfedexp.algorithms import dp_fedavg, ldp_fedexp
from dpfedexp.engine.checkpoint import read_progress
from dpfedexp.engine.verify import outcome, recompute, verify_run
from dpfedexp.errors import RoundFailed
from dpfedexp.flower import DpFedExp

from .loopback import LoopbackGrid, Silence, deploy, flat, plain_app, problem, stop_after

pytestmark = pytest.mark.usefixtures("silent", "sleepless")
CLIP = 0.5
REPLACE = dp_fedavg(clip=CLIP, noise_multiplier=1.0)
LOCAL = ldp_fedexp(clip=CLIP, noise_multiplier=1.0)
ADD = dp_fedavg(clip=CLIP, noise_multiplier=1.0, adjacency="add-remove")


class Nodes(LoopbackGrid):
    """Nodes with chosen ids: id → which client's data it has. `arrivals[round]` replaces who is connected before that round."""

    def __init__(self, connected: dict[int, int], arrivals: dict[int, dict[int, int]] | None = None) -> None:
        super().__init__(plain_app(*problem(6)), 0)
        self.arrivals, self.asked = arrivals or {}, []
        self.connect(connected)

    def connect(self, connected: dict[int, int]) -> None:
        known = dict(self.contexts)
        fresh = {n: Context(1, n, {"partition-id": c}, RecordDict(), {}) for n, c in connected.items()}
        self.contexts = {n: known.get(n, context) for n, context in fresh.items()}

    def push_messages(self, messages):
        messages = list(messages)
        self.asked.append(sorted(m.metadata.dst_node_id for m in messages))
        keys = super().push_messages(messages)
        if len(self.asked) + 1 in self.arrivals:
            self.connect(self.arrivals[len(self.asked) + 1])
        return keys


def start(folder, grid, algorithm=REPLACE, clients=3, rounds=1, **options) -> DpFedExp:
    given = {"min_reply_fraction": 0.3, "node_timeout": 0.01, "noise": Silence, **options}
    return deploy(folder, algorithm, grid, clients, rounds, timeout=0.05, **given)[0]


def moved_sum(strategy: DpFedExp) -> torch.Tensor:
    """Σ of the clipped updates of the first round: with server rate 1, c̄·clients."""
    return (strategy.state.w - flat(problem(6)[1])) * strategy.clients


def bound(folder) -> list[int]:
    return read_progress(folder).cohort["nodes"]


@pytest.mark.parametrize("id_of_new", [1, 99], ids=["lowest id", "highest id"])
def test_adding_a_node_under_add_remove_moves_the_sum_by_at_most_the_clip(id_of_new, tmp_path):
    """More nodes than `clients` too. Where a place was taken from another, the sum moved by their difference, up to 2C."""
    for count in (2, 3, 5):
        some = {10 + n: n for n in range(count)}
        before = start(tmp_path / f"{count} before", Nodes(some), ADD)
        after = start(tmp_path / f"{count} after", Nodes({**some, id_of_new: 5}), ADD)
        shift = float((moved_sum(after) - moved_sum(before)).norm())
        assert 0.1 * CLIP < shift <= CLIP * (1 + 1e-6)
        alone = moved_sum(start(tmp_path / f"{count} alone", Nodes({7: 5}), ADD))
        # Float32 updates and a grid of noise of 2⁻²¹: what it adds is what it sends alone.
        torch.testing.assert_close(moved_sum(after) - moved_sum(before), alone, rtol=0, atol=1e-5)


def test_under_add_remove_every_connected_node_is_asked_and_neither_file_nor_log_says_who_or_how_many(tmp_path, caplog):
    grid = Nodes({n: n for n in range(1, 6)})
    with caplog.at_level(logging.DEBUG, logger="flwr"):
        strategy = start(tmp_path / "all", grid, ADD, clients=3)
        with pytest.raises(RoundFailed, match="too few nodes were connected") as failure:
            start(tmp_path / "few", Nodes({1: 0, 2: 1}), ADD, clients=6, min_reply_fraction=0.9)
    assert grid.asked == [[1, 2, 3, 4, 5]]
    assert bound(tmp_path / "all") == []
    assert "valid" not in strategy.history[0]
    assert "2 of 6" not in str(failure.value) + caplog.text
    assert "Waiting up to 0.01 s for nodes: too few are connected" in caplog.text


FIRST = {10: 0, 11: 1, 12: 2}
LATER = {10: 0, 11: 1, 5: 3, 6: 4}


@pytest.mark.parametrize(
    ("connected", "arrivals", "asked", "told"),
    [
        (FIRST, {2: {1: 3, **FIRST}, 3: {1: 3, 2: 4, **FIRST}}, [[10, 11, 12]] * 3, []),
        ({2: 1, 4: 3, 5: 4, 6: 5}, {2: {1: 0, 2: 1, 4: 3, 5: 4, 6: 5}}, [[2, 4, 5]] * 3, ["connected"]),
        (FIRST, {2: {10: 0, 11: 1, 5: 3}, 3: {10: 0, 12: 2, 5: 3}}, [[10, 11, 12], [10, 11], [10, 12]], []),
        ({10: 0, 11: 1}, {2: LATER, 3: {1: 2, **LATER}}, [[10, 11], [5, 10, 11], [5, 10, 11]], ["joined"]),
    ],
    ids=["lower ids later", "more than clients", "absent stays a participant", "a missing participant joins once"],
)
@pytest.mark.parametrize("algorithm", [REPLACE, LOCAL], ids=["central", "local"])
def test_the_first_round_binds_and_a_later_node_displaces_no_other(
    connected, arrivals, asked, told, algorithm, tmp_path, caplog
):
    grid = Nodes(connected, arrivals)
    start(tmp_path, grid, algorithm, rounds=3)
    assert grid.asked == asked
    assert re.findall(r"1 nodes .*?(connected|joined)", caplog.text) == told
    assert bound(tmp_path) == sorted(asked[0]) + ([5] if len(asked[0]) == 2 else [])


def test_a_resumed_run_asks_the_nodes_of_its_first_round_and_not_those_with_new_ids(tmp_path):
    """SuperNodes without keys have other ids after a restart."""
    start(tmp_path, Nodes({10: 0, 11: 1, 12: 2}), rounds=3, on_round=stop_after(1))
    grid = Nodes({1: 3, 2: 4, 10: 0, 12: 2})
    start(tmp_path, grid, rounds=3, on_round=stop_after(2))
    assert grid.asked == [[10, 12]]
    grid = Nodes({20: 0, 21: 1, 12: 2})
    few = r"1 of 3 nodes were connected after waiting 0\.01 seconds, and the round needs at least 2"
    with pytest.raises(RoundFailed, match=few + ".* also 2 nodes that do not take part in .*with nodes that have keys"):
        start(tmp_path, grid, rounds=3, min_reply_fraction=0.6)
    assert grid.asked == []
    assert sorted(bound(tmp_path)) == [10, 11, 12]


def test_a_statement_with_a_fixed_number_of_participants_has_no_add_remove_figure(tmp_path):
    """The node with the lowest id leaves and another takes its place: the sum moves by more than C, and the counts show it."""
    four = {1: 0, 2: 1, 3: 2, 4: 3}
    whole = start(tmp_path / "four", Nodes(four))
    without = start(tmp_path / "three", Nodes({2: 1, 3: 2, 4: 3}))
    alone = start(tmp_path / "two", Nodes({2: 1, 3: 2}))
    assert (moved_sum(without) - moved_sum(alone)).norm() > 0, "node 4 took the place"
    assert (moved_sum(whole) - moved_sum(without)).norm() > 0
    for strategy in (whole, without):
        assert strategy.statement.other_adjacency is None
        assert "There is no add-remove figure: the number of participants is fixed" in strategy.statement.text
    place = tmp_path / "four"
    assert all(check.passed for check in verify_run(place)), [c for c in verify_run(place) if not c.passed]
    (place / "privacy.json").unlink()
    assert recompute(place).other_adjacency is None
    everybody = start(tmp_path / "all", Nodes(four), ADD)
    assert everybody.statement.other_adjacency is not None
    assert all(check.passed for check in verify_run(tmp_path / "all"))


def test_a_resumed_run_does_not_claim_more_reports_than_its_earlier_rounds_had(tmp_path):
    """The attack: two of six report while min_reply_fraction is low, then the run is resumed with 1."""
    early = start(tmp_path, Nodes({1: 0, 2: 1}), LOCAL, clients=6, rounds=2, on_round=stop_after(1))
    assert early.statement.reporting == 2
    assert outcome(verify_run(tmp_path)) == "holds"
    late = start(tmp_path, Nodes({n: n - 1 for n in range(1, 7)}), LOCAL, 6, rounds=2, min_reply_fraction=1.0)
    assert late.statement.reporting == 2
    assert outcome(verify_run(tmp_path)) == "holds"
    assert late.statement.models_only is not None
    # The first statement, of a stopped run, counts the planned round too.
    assert late.statement.models_only.epsilon_total == early.statement.models_only.epsilon_total
