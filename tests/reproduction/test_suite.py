"""The suite of real federations: problems, contenders, runs that are recorded as they end, and tables."""

import math
from dataclasses import replace

import numpy as np
import pytest
from reproduction.paper.results.planned import Result
from reproduction.suite import command, stored, suite_plan, suite_runs, synthetic_problems, table, tables, tuned
from reproduction.suite.contenders import CONTENDERS, DELTA
from reproduction.suite.problems import HALVES, PROBLEMS, coin
from reproduction.suite.stored import Rows, split
from reproduction.suite.suite_plan import LEADING, Size, SuiteRun
from reproduction.suite.suite_runs import Place, run_suite

from dpfedexp.core import local_rate
from dpfedexp.errors import InputError

ADVANTAGE = {"fit": 0.04, "safe": 0.03, "fedavg": 0.0, "plain": -0.1, "auto": 0.03}
ADVANTAGE |= {"fedavg-tuned": 0.02, "fedadam-tuned": 0.0}


def made_up_result(run: SuiteRun, advantage: dict[str, float] = ADVANTAGE) -> Result:
    """Better near the middle of the grid, at larger ε and at server rate 2; every seed shifts all contenders alike."""
    quality = advantage[run.contender_name] + 0.02 * math.log2(run.epsilon / 8.0) + 0.01 * (run.seed - 2)
    if run.lr is not None:
        quality -= 0.1 * abs(math.log10(run.lr / run.problem.center))
    if run.server_rate is not None:
        quality -= 0.01 * abs(math.log2(run.server_rate / 2.0))
    return {"finals": {"test_accuracy": 0.8 + quality, "test_loss": 0.3 * math.exp(-3.0 * quality)}}


def rows_of(owners, blocks=None):
    owner = np.asarray(owners)
    numbers = np.arange(len(owner), dtype=np.float32)
    return Rows(numbers[:, None], numbers, owner, owner if blocks is None else np.asarray(blocks))


def test_no_block_is_on_both_sides_and_no_client_holds_more_than_its_share():
    owners = np.random.default_rng(0).integers(0, 50, size=2000)
    arrays = split(rows_of(owners, owners // 3), most_rows=10)
    train = owners[arrays["targets"].astype(int)]
    test = owners[arrays["test_targets"].astype(int)]
    assert not set(train // 3) & set(test // 3)
    assert np.bincount(arrays["client"]).max() == 10
    assert len(np.unique(arrays["client"])) == arrays["client"].max() + 1
    # The same owner has the same number, and no two share one.
    assert len(set(zip(train, arrays["client"], strict=True))) == len(set(train))


def test_a_stored_problem_survives_the_disk_and_a_missing_one_says_how_to_get_it(tmp_path):
    arrays = split(rows_of(np.arange(300) % 40), 5)
    stored.write(tmp_path / "chem97.npz", arrays)
    assert all(np.array_equal(stored.read("chem97", tmp_path)[name], arrays[name]) for name in arrays)
    with pytest.raises(InputError, match="python -m reproduction suite --prepare"):
        stored.read("insteval", tmp_path)
    (tmp_path / "insteval.npz").write_bytes(b"no archive")
    with pytest.raises(InputError, match="not a readable"):
        stored.read("insteval", tmp_path)


def test_a_users_history_holds_strictly_earlier_ratings_only():
    rating = np.array([5.0, 1.0, 3.0, 4.0])
    when = np.array([10, 20, 20, 30])
    genres = np.eye(2)[[0, 0, 1, 0]]
    history = tables._history(rating, when, genres)
    assert np.allclose(history[0], 0.0)  # nothing is earlier
    changed = rating.copy()
    changed[2:] = 0.5
    assert np.array_equal(tables._history(changed, when, genres)[:3], history[:3])


TODAY = [name for name, one in CONTENDERS.items() if one.algorithm is not None and not one.why_missing]


@pytest.mark.parametrize("name", TODAY)
def test_every_contender_promises_the_same_epsilon_and_delta_with_an_adaptive_clip(name):
    contender = CONTENDERS[name]
    algorithm = contender.algorithm(2.0, contender.server_rates[0] if contender.server_rates else None)
    assert (algorithm.target_epsilon, algorithm.delta) == (2.0, DELTA)
    assert type(algorithm.clip).__name__ == "AdaptiveClip"


TINY = Size(seeds=1, headline_seeds=1, grid_seeds=1, epsilons=(8.0,), headline_epsilons=())


@pytest.fixture
def tiny(monkeypatch):
    """The made-up regression with 30 clients, two rounds and two local steps."""
    small = {
        "make": lambda folders, seed: synthetic_problems.regression(2.0, seed, clients=30),
        "rounds": 2,
        "steps": 2,
    }
    monkeypatch.setitem(PROBLEMS, "regression-2", replace(PROBLEMS["regression-2"], **small))
    suite_plan._loaded.cache_clear()
    yield
    suite_plan._loaded.cache_clear()


def test_a_suite_that_was_stopped_goes_on_where_it_was_and_ends_with_the_same_numbers(tiny, tmp_path, monkeypatch):
    whole, outcome = run_suite(["regression-2"], TINY, tmp_path / "whole", Place())
    assert (outcome.failed, outcome.stopped) == ([], False)
    # The grid has 9 runs; FedAvg at the best rate and at server rate 1 is one of them.
    assert len({record.key for record in whole.records}) == len(whole.records) >= 9 + 1 + 4 + 5
    stopped, outcome = run_suite(["regression-2"], TINY, tmp_path / "cut", Place(limit_seconds=0.0))
    assert outcome.stopped
    assert not stopped.records
    path = tmp_path / "cut" / "suite" / "runs.jsonl"
    path.parent.mkdir(parents=True)
    *first, torn, _, _ = whole.records
    kept = [record.to_line() for record in first]
    # Killed while it wrote the third line from the end.
    path.write_text("\n".join([*kept, torn.to_line()[:40]]), encoding="utf-8")
    rest, outcome = run_suite(["regression-2"], TINY, tmp_path / "cut", Place())
    assert [record.to_line() for record in rest.records[: len(kept)]] == kept
    assert not outcome.stopped
    assert {one.key: one.finals for one in rest.records} == {one.key: one.finals for one in whole.records}
    monkeypatch.setattr(suite_runs, "_one", lambda *rest: pytest.fail("a recorded run was made again"))
    again, _ = run_suite(["regression-2"], TINY, tmp_path / "cut", Place())
    assert [record.to_line() for record in again.records] == [record.to_line() for record in rest.records]


def test_a_problem_without_its_data_is_left_out_with_a_sentence(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_SUITE", str(tmp_path / "empty"))
    for name in set(PROBLEMS) - {"chem97", "regression-2"}:
        monkeypatch.delitem(PROBLEMS, name)
    out = tmp_path / "out"
    heard: list[str] = []
    command.suite([], Size(), Place(limit_seconds=0.0), out, False, heard.append)
    assert any(text.startswith("chem97 is left out") and "--prepare" in text for text in heard)
    assert (out / "suite.md").exists()


ACCURACY, LOSS = PROBLEMS["classes-0"], PROBLEMS["regression-2"]


def test_the_difference_is_paired_so_that_what_a_seed_does_to_both_cancels():
    size = Size()
    cells = [table.cell(ACCURACY, name, LEADING, ACCURACY.center, size, made_up_result) for name in ("safe", "fedavg")]
    gain = table.difference(ACCURACY, *cells)
    assert cells[0].error > 0.5  # over seeds alone, in points
    assert gain.gain == pytest.approx(3.0)
    assert gain.error == pytest.approx(0.0, abs=1e-9)
    assert gain.seeds == 5
    assert not gain.worse


@pytest.mark.parametrize(
    ("diverged", "worse"), [(["safe"], True), (["fedavg"], False), (["safe", "fedavg"], False)], ids=str
)
def test_a_run_that_diverged_is_worse_than_one_that_did_not(diverged, worse):
    def lookup(run):
        result = made_up_result(run)
        return {"finals": dict.fromkeys(result["finals"])} if run.contender_name in diverged else result

    made, gains = table.at_epsilon({LOSS: LOSS.center}, 8.0, ("safe", "fedavg"), Size(), lookup)
    assert [cell == "diverged" for cell in made.rows[0][2:4]] == ["safe" in diverged, "fedavg" in diverged]
    assert gains[LOSS.name].worse == worse


def test_every_problem_is_in_the_half_that_its_coin_says():
    assert {name: coin(name) for name in PROBLEMS} == HALVES
    assert set(HALVES.values()) == {"tuning", "held-out"}


def test_fit_is_compared_with_the_best_of_all_tuned_rivals_on_their_seeds(tmp_path):
    """Safe FedEXP at the middle of the grid is the best rival, a point below `fit`; a `fit` that is worse comes first, marked."""
    good = tuned.pair(PROBLEMS["classes-0"], 8.0, 2, made_up_result)
    assert (good.best, good.seeds, len(good.grid)) == ("safe FedEXP, 0.1, 1", 2, 20)
    assert good.lost == pytest.approx(-1.0)
    worse = tuned.pair(PROBLEMS["regression-0"], 2.0, 2, lambda run: made_up_result(run, ADVANTAGE | {"fit": -0.01}))
    # Losses are 0.3·exp(−3·quality): 0.04 less of it is 12.7% more, over the 2% that count as a point.
    assert worse.lost == pytest.approx((math.exp(0.12) - 1.0) / 0.02)
    made = tuned.section("held-out", [good, worse], "command")
    assert [row[0] for row in made.tables[0].rows] == ["regression-0", "classes-0"]
    assert [row[-1].endswith(table.MARK) for row in made.tables[0].rows] == [True, False]
    assert [claim.holds for claim in made.claims] == [False, False, True]
    tuned.draw("held-out", [good, worse], tmp_path / "one.svg")
    tuned.draw("held-out", [good, worse], tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_run_of_fit_is_recorded_with_the_constants_of_its_rate_rule(monkeypatch):
    (run,) = tuned.fits(PROBLEMS["classes-0"], 8.0, 1)
    before = run.full_settings
    monkeypatch.setattr(local_rate, "SHAKE", 0.3)
    assert run.full_settings != before
