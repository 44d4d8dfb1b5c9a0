"""The grid of a sweep: all combinations, values as a file has them, and wrong ones in a sentence."""

import pytest

from dpfedexp.cli.trials import Trial, trials
from dpfedexp.errors import InputError


def test_a_grid_is_all_combinations_with_every_seed():
    found = trials(["algorithm.clip=0.1,1", "local.lr=0.3"], 2)
    assert [(trial.label, trial.seed) for trial in found] == [
        ("clip=0.1, lr=0.3", 0),
        ("clip=0.1, lr=0.3", 1),
        ("clip=1, lr=0.3", 0),
        ("clip=1, lr=0.3", 1),
    ]
    assert len({trial.folder("") for trial in found}) == 4
    assert trials([], 1) == [Trial((), 0)]
    assert trials([], 1)[0].label == "as in the file"


def test_commas_in_brackets_and_quotes_are_part_of_a_value():
    (first, second) = trials(["model.options={ inputs = 2, hidden = 3 },{ inputs = 2, hidden = 4 }"], 1)
    assert first.changes == ("model.options={ inputs = 2, hidden = 3 }",)
    assert second.changes == ("model.options={ inputs = 2, hidden = 4 }",)
    assert [trial.changes[0] for trial in trials(['data.path="a,b",c'], 1)] == ['data.path="a,b"', "data.path=c"]


def test_a_value_that_is_there_twice_is_run_once():
    assert len(trials(["algorithm.clip=1, 1,2"], 1)) == 2


def test_a_folder_name_has_no_characters_that_a_path_minds():
    name = Trial(("data.path=../a b/c:d",), 3).folder("")
    assert name.startswith("data.path=..-a-b-c-d_seed=3_")
    assert len(Trial(("data.path=" + "x" * 400,), 3).folder("")) < 200


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("algorithm.clip=1e+3",), ("algorithm.clip=1e-3",)),
        (("algorithm.clip=1e3",), ("algorithm.clip=1E3",)),
        (("data.path=a/b",), ("data.path=a b",)),
        (("a.b=1_c.d=2",), ("a.b=1", "c.d=2")),
        (("data.path=" + "x" * 400 + "a",), ("data.path=" + "x" * 400 + "b",)),
        (("data.path=é",), ("data.path=è",)),
    ],
)
def test_two_trials_never_share_a_folder(one, other):
    """Not where letters of one case are the other's, as on some file systems."""
    assert Trial(one, 0).folder("").lower() != Trial(other, 0).folder("").lower()


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        (["clip"], "it must look like algorithm.clip=0.1,0.3,1"),
        (["algorithm.clip="], "it must look like"),
        (["algorithm.clip=1,,2"], "it must look like"),
        (["run.seed=1,2"], "--seeds says how many"),
        (["a.b=1", "a.b=2"], "--grid has a.b twice"),
    ],
)
def test_a_wrong_grid_is_refused(grid, sentence):
    with pytest.raises(InputError, match=sentence):
        trials(grid, 1)
