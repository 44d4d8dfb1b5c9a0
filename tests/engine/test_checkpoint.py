import json
import resource
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dpfedexp as dp
from dpfedexp.accounting import Ledger
from dpfedexp.core import step_size
from dpfedexp.data import synthetic_regression
from dpfedexp.engine import checkpoint
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.simulated import Simulation
from dpfedexp.errors import LedgerError
from dpfedexp.models import linear_regression
from tests.engine.small import ROUNDS, Crash, crash_after, crash_in, entries, forge, path_content, regression_run
from tests.optimizers import Adagrad

M, D = 16, 5
PROBLEM = synthetic_regression(M, D, seed=2)
PLAIN = dp.cdp_fedexp(clip=0.3, noise_multiplier=1.0)
CASES = {
    "cdp_fedexp": (PLAIN, {}),
    "adaptive": (dp.cdp_fedexp(clip="adaptive", target_epsilon=8.0), {}),
    "privunit": (dp.ldp_fedexp(clip=0.3, mechanism="privunit"), {"evaluate_every": 4}),
    "adam": (dp.dp_fedadam(clip=0.3, noise_multiplier=1.0), {}),
    "a server optimizer of one's own": (replace(dp.cdp_fedexp(clip=0.3, noise_multiplier=0.5), server=Adagrad()), {}),
    "sampled scaffold": (
        dp.dp_scaffold(clip=0.3, noise_multiplier=1.0, adjacency="add-remove"),
        {"participation": dp.Poisson(0.4), "population": M},
    ),
    "budget": (PLAIN, {"budget": 12.0}),
    "batches": (dp.fedexp(), {"local": dp.Sgd(lr=0.02, epochs=1, batch_size=1), "participation": dp.FixedSize(7)}),
}
MOMENTS = ["before charge", "after charge", "before checkpoint", "after checkpoint"]


def run(algorithm, folder=None, **options):
    return regression_run(PROBLEM, algorithm, out=folder, **options)


def result(done, folder):
    history = [{k: v for k, v in record.items() if k != "seconds"} for record in done.history]
    weights = [p.detach().numpy().tobytes() for p in done.model.parameters()]
    charges = [(entry.round, entry.event, entry.noise) for entry in entries(folder)]
    return weights, history, charges, done.privacy.to_json(), done.stopped


@pytest.mark.parametrize(("name", "moment"), [(name, MOMENTS[at % 4]) for at, name in enumerate(CASES)])
def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(name, moment, tmp_path, monkeypatch):
    algorithm, options = CASES[name]
    whole = result(run(algorithm, tmp_path / "whole", **options), tmp_path / "whole")
    broken = tmp_path / "broken"
    order, _, what = moment.partition(" ")
    owner, function = (Ledger, "charge") if what == "charge" else (checkpoint, "save")
    for when in (1, 3):
        with monkeypatch.context() as patch:
            crash_in(patch, owner, function, when, order == "before")
            if name != "budget" or when == 1:
                with pytest.raises(Crash):
                    run(algorithm, broken, **options)
    assert result(run(algorithm, broken, **options), broken) == whole
    assert result(run(algorithm, broken, **options), broken) == whole, "a finished run is left as it is"
    assert len({entry.run for entry in entries(broken)}) == 1


def test_a_crash_in_the_middle_of_the_clients_leaves_control_variates_as_they_were(monkeypatch):
    algorithm = dp.dp_scaffold(clip=0.3, noise_multiplier=1.0)
    options = {"local": dp.Sgd(lr=0.02, steps=3), "rounds": 2, "execution": dp.Execution(chunk_size=4)}
    engine, _ = prepare(linear_regression(D), PROBLEM.federation, algorithm, **options)
    state, _ = engine.step(engine.begin(), Ledger.in_memory())
    remembered = state.client_controls.clone()
    assert float(remembered.abs().max()) > 0
    crash_in(monkeypatch, Simulation, "updates", 3, before=True)
    with pytest.raises(Crash):
        engine.step(state, Ledger.in_memory())
    assert torch.equal(state.client_controls, remembered)


def test_a_checkpoint_of_another_run_is_refused_and_the_difference_named(tmp_path):
    """A rule of one's own is not taken for the library's of that name."""

    def free(release):
        return 99.0

    free.__qualname__ = "free"
    run(PLAIN, tmp_path, rounds=2)
    for given, words in [
        ({"seed": 3}, "seed is 3 here and 0 there"),
        ({"rounds": 3}, "rounds is 3 here and 2 there"),
        ({"local": dp.Sgd(lr=0.03, steps=3)}, "local.lr is 0.03 here and 0.02 there"),
        ({"participation": dp.Poisson(0.5)}, "participation is 'Poisson' here and 'Full' there"),
        ({"evaluate": dp.Evaluation(lambda model: {}, every=2)}, "evaluate_every is 2"),
        ({"algorithm": dp.cdp_fedexp(clip=0.4, noise_multiplier=1.0)}, r"algorithm\.clip is 0\.4 here and 0\.3 there"),
        ({"algorithm": replace(PLAIN, server=Adagrad())}, "server is 'Adagrad' here and 'Extrapolate' there"),
        ({"algorithm": replace(PLAIN, rule=step_size.free)}, "rule is 'dpfedexp.free' here and 'Safe' there"),
        ({"algorithm": replace(PLAIN, rule=free)}, "rule is 'free' here and 'Safe' there"),
    ]:
        with pytest.raises(dp.InputError, match=words):
            run(**({"algorithm": PLAIN, "folder": tmp_path, "rounds": 2} | given))
    with pytest.warns(UserWarning, match="holds this run, which is complete: no round is made"):
        run(PLAIN, tmp_path, rounds=2)


def interrupted(folder, **options):
    with pytest.raises(Crash):
        run(PLAIN, folder, on_round=crash_after(3), **options)


def test_a_resumed_run_says_so_at_the_callers_line(tmp_path):
    interrupted(tmp_path, rounds=5)
    with pytest.warns(UserWarning, match="resuming at round 4 of 5 from ") as caught:
        run(PLAIN, tmp_path, rounds=5)
    (said,) = (one for one in caught if "resuming" in str(one.message))
    assert said.filename == regression_run.__code__.co_filename


def test_the_chunk_size_of_the_interrupted_run_is_kept(tmp_path):
    whole = result(run(PLAIN, tmp_path / "whole", execution=dp.Execution(chunk_size=5)), tmp_path / "whole")
    broken = tmp_path / "broken"
    interrupted(broken, execution=dp.Execution(chunk_size=5))
    assert checkpoint.read_progress(broken).chunk_size == 5
    assert result(run(PLAIN, broken), broken) == whole


def test_a_damaged_checkpoint_is_one_sentence_and_without_it_a_seeded_run_pays_nothing_twice(tmp_path):
    interrupted(tmp_path)
    path = tmp_path / CHECKPOINT
    good = path.read_bytes()
    tensor_bit = bytearray(good)
    tensor_bit[-3] ^= 1
    text_bit = good.replace(b"noise_multiplier", b"noise_multipliar", 1)
    for bad in (b"", good[: len(good) // 2], good[:-1], bytes(tensor_bit), text_bit, b"\xff" * 64):
        path.write_bytes(bad)
        with pytest.raises(dp.InputError, match=r"damaged .* Restore it"):
            run(PLAIN, tmp_path)
    path.unlink()
    again, whole = run(PLAIN, tmp_path), run(PLAIN, tmp_path / "whole")
    assert again.privacy.epsilon_total == whole.privacy.epsilon_total
    assert torch.equal(next(again.model.parameters()), next(whole.model.parameters()))


def said_without_room(folder, room):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = (folder / "ledger.jsonl").stat().st_size + room
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    with pytest.raises((dp.InputError, LedgerError)) as error:
        run(PLAIN, folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (600, ("checkpoint of round 4 can't be written", "The one before it is kept")),
        (100, ("round 4 can't be charged", "Nothing of it was released")),
    ],
    ids=["the checkpoint", "the charge"],
)
def test_a_full_disk_is_one_sentence_and_the_last_good_state_is_kept(room, words, tmp_path):
    """In a process of its own, whose limit is this much more than the ledger."""
    interrupted(tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        said = pool.submit(said_without_room, tmp_path, room).result(timeout=100)
    assert all(part in said for part in words)
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
    assert len(run(PLAIN, tmp_path).history) == ROUNDS


def test_a_checkpoint_is_its_owners_only_and_a_forged_one_whose_hashes_fit_is_refused_by_its_shapes(tmp_path):
    interrupted(tmp_path)
    path = tmp_path / CHECKPOINT
    assert path.stat().st_mode & 0o077 == 0
    good = load_file(path)
    memory = {f"memory.step.{name}" for name in ("c_bar.1", "c_bar.2", "c_bar.3", "numbers")}
    assert set(good) == {"w", "recent.0", *memory}
    for bad, words in [
        ({**good, "w": torch.zeros(D + 1, dtype=torch.float64)}, "does not fit"),
        ({**good, "w": torch.zeros(D)}, "does not fit"),
        ({**good, "recent.0": torch.zeros(1, dtype=torch.float64)}, "does not fit"),
        ({**good, "other": torch.zeros(1)}, "other tensors"),
        ({"recent.0": good["recent.0"]}, "other tensors"),
    ]:
        forge(tmp_path, bad)
        with pytest.raises(dp.InputError, match=words):
            run(PLAIN, tmp_path)
        forge(tmp_path, good)


WRONG = {
    "round": (1, 2.0),
    "chunk_size": (0, 1.0),
    "radius": (0.0, 1),
    "ledger": ({"count": 2}, *({"count": count, "hash": name} for count, name in ((-1, ""), (True, ""), (2, 1)))),
    **dict.fromkeys(("settings", "cohort"), ([],)),
    **dict.fromkeys(("run", "controls", "trainer", "stop_source", "version", "format"), (1,)),
    "history": ({}, [1]),
}


def test_a_text_with_a_wrong_value_is_not_that_of_a_checkpoint_though_its_hashes_fit(tmp_path):
    run(PLAIN, tmp_path, rounds=2)
    forge(tmp_path, round=0, history=[], chunk_size=1)
    assert checkpoint.read_progress(tmp_path).chunk_size == 1
    good = (tmp_path / CHECKPOINT).read_bytes()
    wrong = [{name: value} for name, values in WRONG.items() for value in values]
    for changes in (*wrong, {"round": 1, "history": [1]}):
        (tmp_path / CHECKPOINT).write_bytes(good)
        forge(tmp_path, **changes)
        with pytest.raises(dp.InputError, match=r"its text is not that of|has version 1|written by another program"):
            checkpoint.read_progress(tmp_path)


def test_a_tensor_that_is_not_in_the_list_of_outlets_is_not_written(tmp_path, monkeypatch):
    run(PLAIN, tmp_path, rounds=1)
    progress, kept = checkpoint.read_progress(tmp_path), (tmp_path / CHECKPOINT).read_bytes()
    monkeypatch.setattr(checkpoint, "state_tensors", lambda state: {"client_rows": torch.ones(3)})
    with pytest.raises(LookupError, match="no field 'client_rows'"):
        checkpoint.save(tmp_path, None, progress)
    assert (tmp_path / CHECKPOINT).read_bytes() == kept


def test_a_checkpoint_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    """A text of more than 64 MiB was written, and was damaged when it was read."""
    interrupted(tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    monkeypatch.setattr(checkpoint, "_LARGEST_TEXT", len(json.dumps(path_content(tmp_path))))
    with pytest.raises(dp.InputError, match=r"round 4 can't be written: its history takes .* one before it is kept"):
        run(PLAIN, tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_the_largest_text_fits_into_a_header_however_it_is_escaped(tmp_path, monkeypatch):
    """Safetensors refuses headers of more than 100 MB, and writes each quote as two characters."""
    text = '"' * checkpoint._LARGEST_TEXT
    save_file({"w": torch.zeros(1)}, tmp_path / "large.safetensors", {"content": text})
    with safe_open(tmp_path / "large.safetensors", "pt") as file:
        assert file.metadata()["content"] == text
