"""The problems: what they promise about clients, test data and grids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reproduction.suite.problems import PROBLEMS
from reproduction.suite.stored import Rows, split

from dpfedexp.core.losses import resolve
from dpfedexp.errors import InputError
from reproduction.suite import made_up, roles, stored, tables

MADE_UP = [name for name in PROBLEMS if name.startswith(("regression", "classes"))]


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


def test_the_same_source_gives_the_same_file():
    rows = rows_of(np.arange(300) % 40)
    first, second = split(rows, 5), split(rows, 5)
    assert all(np.array_equal(first[name], second[name]) for name in first)


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


def test_speeches_belong_to_names_that_recur_and_stage_directions_to_nobody():
    said = "To be, or not to be: that is the question! " * 2
    play = "ACT I.\n\n" + "".join(f"Ham.\n{said}[Exit.]\n\n" for _ in range(3)) + f"Once.\n{said * 5}\n\n"
    spoken = roles.speeches(play)
    assert set(spoken) == {"HAM"}
    assert "exit" not in spoken["HAM"]
    assert set(spoken["HAM"]) <= set(roles.SYMBOLS)


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_with_spread_0_one_model_fits_every_client_and_with_more_none_does(spread):
    loaded = made_up.regression(spread, seed=1, clients=100)
    x, y = loaded.clients.inputs.double(), loaded.clients.targets.double()
    residual = y - x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    # Targets are stored in single precision; at spread 2 the residual is of the size of the spread.
    assert residual.abs().max() < 1e-4 if spread == 0.0 else residual.square().mean() > 1.0


@pytest.mark.parametrize("name", MADE_UP)
def test_made_up_problems_follow_from_their_seed_and_fit_their_model(name):
    first, second, other = (PROBLEMS[name].load(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.clients.inputs, second.clients.inputs)
    assert not torch.equal(first.clients.inputs, other.clients.inputs)
    inputs, targets = first.clients.prepare(*first.test)
    assert resolve(first.loss, targets)(first.model(inputs), targets).shape == (len(targets),)


def test_every_problem_has_nine_rates_over_four_decades():
    for problem in PROBLEMS.values():
        assert len(problem.rates) == 9
        assert problem.rates[4] == problem.centre
        assert problem.rates[-1] / problem.rates[0] == pytest.approx(1e4, rel=0.01)
        ratios = np.diff(np.log10(problem.rates))
        assert ratios == pytest.approx(np.full(8, 0.5), abs=0.01)
