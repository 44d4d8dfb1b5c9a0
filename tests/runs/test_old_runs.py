"""Run folders of versions before verify and go on, or are refused with a sentence that says why."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpfedexp import InputError, Run
from dpfedexp.accounting import Ledger
from dpfedexp.cli.train import execute
from dpfedexp.clipping import AdaptiveClip
from dpfedexp.config import load
from dpfedexp.errors import LedgerError
from dpfedexp.runs.checkpoints import earlier_names
from dpfedexp.runs.checkpoints.checkpoint import read_progress
from dpfedexp.runs.file_names import CHECKPOINT, CONFIG, LEDGER, METRICS, MODEL
from dpfedexp.runs.folder import RunFolder
from dpfedexp.runs.verify import recompute, verify_run
from tests.runs.old_runs import ROUNDS, STOP, cases, run

OLD = Path(__file__).parent / "old"
BEFORE, MUCH_EARLIER = OLD / "0.1.0-e363675", OLD / "0.1.0-2287ef6"
CASES = cases()
SEEDED = [name for name in CASES if not name.startswith("secure")]
SECURE = [name for name in CASES if name.startswith("secure")]
_WHOLE: dict[str, Whole] = {}


def put(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a folder of runs, with its private folder in force and readable by its owner alone, as git does not keep it."""
    shutil.copytree(source, place)
    for path in (place / "private").rglob("*"):
        os.chmod(path, 0o700 if path.is_dir() else 0o600)
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(place / "private"))
    return place


@pytest.fixture
def api(tmp_path, monkeypatch) -> Path:
    return put(BEFORE / "api", tmp_path / "api", monkeypatch)


@pytest.fixture
def cli(tmp_path, monkeypatch) -> Path:
    return put(BEFORE / "cli", tmp_path / "cli", monkeypatch)


@dataclass(frozen=True)
class Whole:
    """A run of today without an interruption, and its state after as many rounds as the old one had."""

    run: Run
    tensors: dict[str, torch.Tensor]


def whole(name: str) -> Whole:
    if name not in _WHOLE:
        with tempfile.TemporaryDirectory() as place:
            folder, tensors = Path(place) / "run", {}

            def remember(record):
                if record["round"] == STOP:
                    tensors.update(load_file(folder / CHECKPOINT))

            _WHOLE[name] = Whole(run(CASES[name], checkpoint=folder, on_round=remember), tensors)
    return _WHOLE[name]


def without_seconds(history: list[dict]) -> list[dict]:
    """What runs of before and of today both record: votes, which are released, are recorded only today."""
    return [{key: v for key, v in record.items() if key != "seconds" and "vote_" not in key} for record in history]


def weights(done: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in done.model.parameters()])


def check_same_model(resumed: Run, name: str) -> None:
    """Bit for bit where this machine computes the first rounds as the one did that wrote the folder, and to rounding elsewhere."""
    here, there = whole(name).tensors, load_file(BEFORE / "api" / name / CHECKPOINT)
    assert here.keys() == there.keys()
    if all(torch.equal(here[key], there[key]) for key in here):
        assert torch.equal(weights(resumed), weights(whole(name).run))
    # Local training is float32, whose relative error of 6e-8 may grow over a few rounds on another machine.
    assert torch.allclose(weights(resumed), weights(whole(name).run), rtol=1e-4, atol=1e-6)


def failed(folder: Path, planned=None) -> list[str]:
    return [check.name for check in verify_run(folder, planned) if not check.passed]


def charges(folder: Path) -> list[int]:
    return [entry.round for entry in Ledger.open(folder / LEDGER, read_only=True).entries]


def test_there_is_an_old_folder_of_every_case():
    assert sorted(path.name for path in (BEFORE / "api").iterdir()) == sorted([*CASES, "private"])


@pytest.mark.parametrize("name", SEEDED)
def test_a_run_of_the_version_before_ends_as_if_it_had_begun_today(name, api):
    assert failed(api / name) == ["claim"], "an unfinished run has a whole ledger and claims nothing yet"
    before = read_progress(api / name).history
    resumed = run(CASES[name], checkpoint=api / name, resume=True)
    assert resumed.history[:STOP] == before
    check_same_model(resumed, name)
    for ours, theirs in zip(*(without_seconds(done.history) for done in (resumed, whole(name).run)), strict=True):
        # Records of before do not have what was added since.
        since = set(theirs) - set(ours)
        assert since <= ({"update_norm"} if ours["round"] <= STOP else set())
        assert ours == pytest.approx({key: value for key, value in theirs.items() if key not in since}, rel=1e-4)
    assert charges(api / name) == [1, 2, 3, 4, 5]
    assert resumed.privacy == whole(name).run.privacy
    assert recompute(api / name).epsilon_total == resumed.privacy.epsilon_total


@pytest.mark.parametrize("name", SECURE)
@pytest.mark.filterwarnings("ignore:the run is secure")
def test_a_secure_run_of_the_version_before_ends_with_what_it_promised(name, api):
    assert failed(api / name) == ["claim"]
    resumed = run(CASES[name], checkpoint=api / name, resume=True)
    assert [record["round"] for record in resumed.history] == [1, 2, 3, 4, 5]
    assert charges(api / name) == [1, 2, 3, 4, 5]
    assert resumed.privacy == whole(name).run.privacy
    assert not any((api / "private").glob(f"{read_progress(api / name).run}*"))


@pytest.mark.parametrize("name", ["central-free", "local-paper", "momentum", "privunit"])
def test_an_old_ledger_without_its_checkpoint_is_known_by_the_names_of_its_time(name, api):
    (api / name / CHECKPOINT).unlink()
    resumed = run(CASES[name], checkpoint=api / name, resume=True)
    assert charges(api / name) == [1, 2, 3, 4, 5], "the same noise is not paid for twice"
    check_same_model(resumed, name)


def test_an_old_ledger_of_other_settings_is_refused_without_its_checkpoint(api):
    (api / "central-free" / CHECKPOINT).unlink()
    with pytest.raises(LedgerError, match=r"a run with other settings.*resume it with those, or begin a new run"):
        run(CASES["central-free"], checkpoint=api / "central-free", resume=True, seed=3)


def test_an_old_checkpoint_of_another_run_is_refused_by_what_differs_and_not_by_what_was_renamed(api):
    with pytest.raises(InputError, match=r"is of another run: seed is 3 here and 0 there\. Resume with"):
        run(CASES["central-free"], checkpoint=api / "central-free", resume=True, seed=3)


def test_names_of_before_and_of_today_lead_to_each_other_and_no_further():
    rules = earlier_names.RENAMED["algorithm.rule"]
    assert len(set(rules.values())) == len(rules)
    old = {"algorithm.rule": "_free", "algorithm.numerator": "free", "seed": 0}
    new = {"algorithm.rule": "free", "algorithm.numerator": "free", "seed": 0}
    assert earlier_names.present_names(old) == new == earlier_names.present_names(new)
    assert earlier_names.earlier_names(new) == old == earlier_names.earlier_names(old)


def test_a_setting_that_is_new_has_the_value_that_every_run_had_before_it(monkeypatch):
    monkeypatch.setitem(earlier_names.ADDED, "local.clip", 1.5)
    assert earlier_names.present_names({"seed": 0}) == {"local.clip": 1.5, "seed": 0}
    assert earlier_names.earlier_names({"local.clip": 1.5, "seed": 0}) == {"seed": 0}
    assert earlier_names.earlier_names({"local.clip": 2.0, "seed": 0}) == {"local.clip": 2.0, "seed": 0}


def free(release):
    """A user's own rule, with the name of one of the library's."""
    return 99.0


def test_a_rule_of_ones_own_is_not_taken_for_the_librarys_of_that_name(api):
    other = CASES["central-free"] | {"algorithm": replace(CASES["central-free"]["algorithm"], rule=free)}
    with pytest.raises(InputError, match=r"algorithm.rule is 'tests\.runs\.test_old_runs\.free' here and 'free' there"):
        run(other, checkpoint=api / "central-free", resume=True)


def test_momentum_that_once_ignored_the_step_size_does_not_go_on_with_it():
    before = {"algorithm.rule": "_free", "algorithm.server": "Momentum"}
    assert earlier_names.present_names(before)["server_step"] == "1"
    assert earlier_names.present_names(before | {"algorithm.rule": "_one"})["server_step"] == "eta_g"
    assert earlier_names.earlier_names({"server_step": "eta_g", "seed": 0}) == {"seed": 0}


def resume_cli(folder: Path):
    run_folder = RunFolder(folder, resume=True)
    return execute(load(folder / CONFIG), run_folder, resume=True, progress=False)


def test_a_finished_run_of_the_version_before_verifies_and_is_left_as_it_is(cli):
    folder = cli / "finished"
    assert failed(folder, load(folder / CONFIG).planned_event()) == []
    model = (folder / MODEL).read_bytes()
    done = resume_cli(folder)
    assert len(done.history) == ROUNDS
    assert (folder / MODEL).read_bytes() == model
    assert charges(folder) == [1, 2, 3, 4, 5]
    assert failed(folder, load(folder / CONFIG).planned_event()) == []


def test_an_interrupted_run_of_the_version_before_ends_like_its_finished_one(cli):
    resume_cli(cli / "interrupted")
    histories = [
        without_seconds([json.loads(line) for line in (cli / name / METRICS).read_text().splitlines()])
        for name in ("interrupted", "finished")
    ]
    for ours, theirs in zip(*histories, strict=True):
        # Both began on the same machine; to rounding, because this one may be another.
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=1e-4)
        assert set(ours) - set(theirs) <= {"update_norm"}, "what was added since"
    ours, theirs = (load_file(cli / name / MODEL) for name in ("interrupted", "finished"))
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-4, atol=1e-6) for key in theirs)
    assert failed(cli / "interrupted", load(cli / "interrupted" / CONFIG).planned_event()) == []


def test_a_folder_of_before_has_the_papers_step_and_one_of_today_names_its_own(cli, tmp_path, monkeypatch):
    folder = cli / "interrupted"
    assert "\nstep =" not in (folder / CONFIG).read_text()
    before = load(folder / CONFIG).build_algorithm()
    assert (before.step, before.clip) == ("paper", AdaptiveClip())
    own = folder / CONFIG
    without = own.read_text().partition("[resolved]")[0]
    (tmp_path / "mine.toml").write_text(without)
    changed = (
        r"algorithm\.adaptive\.quantile is 'auto' here and 0\.5 there; algorithm\.step is 'safe' here and 'paper' there"
    )
    with pytest.raises(InputError, match=f"holds another run: {changed}"):
        execute(load(tmp_path / "mine.toml"), RunFolder(folder, resume=True), resume=True, progress=False)
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "private"))
    execute(load(tmp_path / "mine.toml"), RunFolder(tmp_path / "new"), progress=False)
    today = load(tmp_path / "new" / CONFIG).build_algorithm()
    assert (today.step, today.clip.quantile) == ("safe", "auto")


def test_a_run_from_before_private_folders_verifies_but_is_not_resumed(tmp_path):
    shutil.copytree(MUCH_EARLIER / "cli", tmp_path / "cli")
    finished, interrupted = tmp_path / "cli" / "finished", tmp_path / "cli" / "interrupted"
    assert failed(finished, load(finished / CONFIG).planned_event()) == []
    assert failed(interrupted) == ["claim"]
    reason = r"version 1, which carries a hash of the clients' data.*finish the run with the version of dpfedexp that wrote it"
    with pytest.raises(InputError, match=reason):
        resume_cli(interrupted)
    (interrupted / CHECKPOINT).unlink()
    # Neither the settings nor the name of the run can be recognised in a ledger of that time.
    with pytest.raises(LedgerError, match=r"can't be resumed: .*(other settings|does not name its run)"):
        resume_cli(interrupted)
    assert charges(interrupted) == [1, 2, 3]
