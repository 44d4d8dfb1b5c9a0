"""Processes that are killed, that share a run or that hold copies of it: everything released is charged, and one run goes on."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import dpfedexp as dp
from dpfedexp.accounting import Ledger
from dpfedexp.cli import main
from dpfedexp.cli.train import execute
from dpfedexp.config import load, parse
from dpfedexp.core.local_rate import scale_rounds
from dpfedexp.engine import checkpoint
from dpfedexp.engine import ranks as distributed
from dpfedexp.engine.engine import Engine
from dpfedexp.engine.run import RunFolder
from dpfedexp.engine.simulated import Simulation
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.models import linear_regression
from tests.engine.small import entries, random_rows, weights
from tests.engine.small import federation as small_federation
from tests.sizes import sized

KILLS, ROUNDS = sized((3, 6), (20, 20))


def settings(name="cdp_fedexp", **run):
    """The text of a configuration."""
    tables = {
        "data": {"kind": "synthetic", "clients": 12, "dimension": 6},
        "algorithm": {"name": name, "clip": 0.3, "noise_multiplier": 4.0},
        "local": {"lr": 0.01, "steps": 2, "max_examples": 8},
        "run": {"device": "cpu", **run},
    }
    return parse(tables).to_toml()


@pytest.fixture
def spawn():
    """Starts a child of a server that has imported this file, so that each begins at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def start(target, *given):
        process = context.Process(daemon=True, target=target, args=given)
        process.start()
        return process

    return start


def command(arguments, environment, said, sabotage=None):
    """`dpfedexp` with these arguments, as this process; its words go to the file `said`."""
    os.environ |= environment | {"COLUMNS": "500"}
    torch.set_num_threads(1)
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if sabotage is not None:
        sabotage()
    sys.argv = ["dpfedexp", *map(str, arguments)]
    main()


def killed_when(owner, name, is_time):
    """Kills this process before `owner.name` is called with arguments for which it is time."""
    original = getattr(owner, name)

    def call(*given):
        if is_time(*given):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given)

    setattr(owner, name, call)


def live(folder: Path, began=None) -> None:
    """A script that makes a new random model whenever it is run, and goes on in the folder. The rate is voted on.

    A byte goes to `began` when a round begins, and the last waits to be killed.
    """
    torch.set_num_threads(1)
    step = Engine.step

    def announced(self, state, *given):
        if began is not None:
            os.write(began.fileno(), b".")
            if state.round == ROUNDS - 1:
                time.sleep(600)
        return step(self, state, *given)

    Engine.step = announced
    torch.manual_seed(0 if not (folder / checkpoint.CHECKPOINT).exists() else random.SystemRandom().getrandbits(32))
    model, execution = nn.Linear(3, 1, bias=False), dp.Execution(device="cpu", trainer="loop")
    algorithm = dp.cdp_fedexp(clip="adaptive", target_epsilon=8.0)
    given = {"local": dp.Sgd(lr="auto", steps=2), "rounds": ROUNDS, "out": folder, "execution": execution}
    dp.train(model, small_federation(), algorithm, **given)


def check_that_everything_released_was_charged(folder: Path) -> int:
    """From the files alone: how many rounds are complete."""
    metrics = folder / "metrics.jsonl"
    if not (folder / "ledger.jsonl").exists():
        assert not (folder / checkpoint.CHECKPOINT).exists()
        assert not metrics.exists()
        return 0
    votes = sum(entry.round == 0 for entry in entries(folder))
    charged = [entry.round for entry in entries(folder) if not entry.event.question]
    scales = [entry.round for entry in entries(folder) if entry.event.question == "rate scale"]
    assert scales == [number for number in scale_rounds(ROUNDS, 0.0) if number in scales], "in their order, each once"
    assert not scales or scales[-1] <= len(charged)
    assert charged == list(range(1, len(charged) + 1))
    progress = checkpoint.read_progress(folder)
    done = progress.round if progress else 0
    assert votes in ((0, 1, 2) if not charged else (0, 2)), "each is charged once, and before the first round"
    assert len(charged) in (done, done + 1)
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    assert all(json.loads(line)["round"] in charged for line in lines if line.endswith("\n"))
    return done


def result_of(folder: Path):
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (
        load_file(folder / "model.safetensors")["weight"].numpy().tobytes(),
        [{name: value for name, value in record.items() if name != "seconds"} for record in history],
        [(entry.round, entry.event, entry.noise) for entry in entries(folder)],
        (folder / "privacy.json").read_bytes(),
    )


def test_kills_at_random_moments_change_nothing(tmp_path, spawn):
    def undisturbed(folder):
        process = spawn(live, folder)
        process.join()
        assert process.exitcode == 0

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed(whole)
    moments, window = random.Random(0), 0.01
    for kill in range(KILLS):
        done = check_that_everything_released_was_charged(broken)
        assert done < ROUNDS
        # The window follows the machine's pace, so that the kills spread over all the rounds.
        window = min(1.0, max(1e-4, window * (0.6 if done > kill * ROUNDS // KILLS else 1.2)))
        read, write = multiprocessing.Pipe(duplex=False)
        process = spawn(live, broken, write)
        if done < ROUNDS - 2 and moments.random() < 0.9:
            while process.is_alive() and not read.poll(0.0005):
                pass
            time.sleep(moments.uniform(0.0, window))
        process.kill()
        process.join()
        assert process.exitcode == -9
        read.close()
        write.close()
    undisturbed(broken)
    assert check_that_everything_released_was_charged(broken) == ROUNDS
    assert outcome(verify_run(broken)) == "holds"
    assert result_of(broken) == result_of(whole)


def killed_between_charge_and_anchor():
    killed_when(Ledger, "_move_witnesses", lambda ledger: len(ledger) == 2)


def test_a_run_that_was_killed_leaves_no_lock_and_of_two_processes_on_two_copies_one_goes_on(tmp_path, private, spawn):
    """Killed between the charge of round 2 and the move of the anchor."""
    file, folders = tmp_path / "my.toml", [tmp_path / "a", tmp_path / "b"]
    file.write_text(settings(rounds=4, secure=True))

    def start(folder, *sabotage):
        arguments = ["train", file, "--out", folder, "--quiet"]
        return spawn(command, arguments, {"DPFEDEXP_PRIVATE": str(private)}, f"{folder}.txt", *sabotage)

    first = start(folders[0], killed_between_charge_and_anchor)
    first.join()
    assert first.exitcode == -9
    assert len(entries(folders[0])) == 2, "charged, and not yet in the anchor"
    shutil.copytree(*folders)
    runs = [start(folder) for folder in folders]
    for run in runs:
        run.join()
    codes = [run.exitcode for run in runs]
    said = [Path(f"{folder}.txt").read_text() for folder in folders]
    assert sorted(codes) == [0, 2], said
    winner, loser = sorted(folders, key=lambda folder: codes[folders.index(folder)])
    # Which sentence depends on how far the winner has come; it may just be removing what both look for.
    assert said[folders.index(loser)].startswith("Error: the "), said
    assert [entry.round for entry in entries(winner)] == [1, 2, 2, 3, 4]
    assert outcome(verify_run(winner)) == "holds"
    assert outcome(verify_run(loser)) != "holds"
    charged = {(entry.run, entry.round, entry.noise) for folder in folders for entry in entries(folder)}
    assert len(charged) == 4 + 1
    assert list(private.rglob("*.lock")) == []


D, M = 12, 30
LOCAL = {"local": dp.Sgd(lr=0.02, steps=3)}
LOOP = {"local": dp.Sgd(lr=1e-6, steps=1), "rounds": 2, "execution": dp.Execution(device="cpu", trainer="loop")}
SHARED = {
    "scaffold poisson": (
        dp.dp_scaffold(clip=0.3, noise_multiplier=1.0, adjacency="add-remove"),
        {"participation": dp.Poisson(0.4, population=M - 1), "execution": dp.Execution(chunk_size=3)},
    ),
    # So few clients at a small epsilon measure nothing but noise. The votes of every round are in the history.
    "fit": (None, {"epsilon": 400.0, "evaluate": "clients", "candidates": [dp.Candidate(), dp.Candidate(rate=0.3)]}),
    **sized(
        {},
        {
            "paper": (dp.cdp_fedexp(clip=0.3, noise_multiplier=1.0, numerator="paper"), {"diagnostics": True}),
            "privunit": (dp.ldp_fedexp(clip=0.3, mechanism="privunit"), {}),
            "mini-batches": (dp.fedavg(), {"local": dp.Sgd(lr=0.1, epochs=2, batch_size=2)}),
            "budget": (dp.cdp_fedexp(clip=0.3, noise_multiplier=5.0), {"budget": 3.0, "rounds": 20}),
        },
    ),
}


def uneven():
    return dp.Federation.from_clients(random_rows([1 + 2 * n % 7 for n in range(M)], D))


def shared_run(name):
    algorithm, more = SHARED[name]
    model, given = linear_regression(D), {"rounds": 3, "execution": "cpu"} | more
    run = dp.train(model, uneven(), algorithm, **(LOCAL | given)) if algorithm else dp.fit(model, uneven(), **given)
    history = [{key: value for key, value in record.items() if key != "seconds"} for record in run.history]
    return {"weights": weights(run), "history": history, "stopped": run.stopped, "epsilon": run.privacy.epsilon_total}


class Remembers(nn.Module):
    """Keeps what one client alone has."""

    def __init__(self, value):
        super().__init__()
        self.linear, self.value, self.kept = nn.Linear(3, 1), value, 0.0

    def forward(self, x):
        largest = float(x.abs().amax())
        if abs(largest - self.value) < 10:
            self.kept = largest
        return self.linear(x)


class InterruptedHere(nn.Linear):
    """Ctrl-C on rank 0 in the middle of a round."""

    def forward(self, x):
        if distributed.rank() == 0 and len(x) == 4:
            raise KeyboardInterrupt
        return super().forward(x)


def environment(rank, at):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(at)}


def port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def work(rank, at, folder):
    os.environ |= environment(rank, at)
    torch.set_num_threads(1)
    assert distributed.join()
    found = {name: shared_run(name) for name in SHARED}
    # One of two clients, and so one of two ranks, is remembered; the larger client is rank 0's.
    rows = dp.Federation.from_clients(
        [(torch.full((4 - i, 3), 100.0 + 100 * i), torch.zeros(4 - i, 1)) for i in (0, 1)]
    )
    failing = {
        "failure": lambda: dp.train(
            linear_regression(D), uneven(), dp.fedavg(), evaluate=lambda m: 1 / 0, rounds=3, **LOCAL
        ),
        "remembers 0": lambda: dp.train(Remembers(100.0), rows, dp.fedavg(), **LOOP),
        "remembers 1": lambda: dp.train(Remembers(200.0), rows, dp.fedavg(), **LOOP),
        "interrupt": lambda: dp.train(InterruptedHere(3, 1), rows, dp.fedavg(), **LOOP),
    }
    for name, run in failing.items():
        # A rank that a heartbeat tells of the interrupt ends at once, and has nothing more to say.
        torch.save(found, f"{folder}/{rank}.pt")
        try:
            run()
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
    distributed.leave()
    torch.save(found, f"{folder}/{rank}.pt")


def test_two_ranks_give_the_run_of_one_process_and_end_together(tmp_path, spawn):
    at = port()
    pair = [spawn(work, rank, at, str(tmp_path)) for rank in range(2)]
    for process in pair:
        process.join()
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for name in SHARED:
        alone = shared_run(name)
        for found in (found[name] for found in ranks):
            assert torch.allclose(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5), name
            assert (found["stopped"], len(found["history"])) == (alone["stopped"], len(alone["history"])), name
            assert found["epsilon"] == pytest.approx(alone["epsilon"]), name
            for record, expected in zip(found["history"], alone["history"], strict=True):
                assert record == pytest.approx(expected, rel=1e-4), name
    votes = {"noisy_mean_improved", "noisy_mean_within_clip"}
    assert all(votes <= record.keys() for found in ranks for record in found["fit"]["history"])
    assert [found["failure"].partition(":")[0] for found in ranks] == ["ZeroDivisionError", "RoundFailed"]
    for client in range(2):
        ended = [found[f"remembers {client}"] for found in ranks]
        assert "keeps 'kept' from batch to batch" in ended[client]
        assert ended[1 - client].startswith(f"RoundFailed: rank {client} failed in round 1")
    assert ranks[0]["interrupt"].startswith("Interrupted")
    assert ranks[1].get("interrupt", "RoundFailed").startswith("RoundFailed")


def killed_in_round_4():
    killed_when(Simulation, "collect", lambda self, request, clients: request.round == 4)


def test_a_killed_rank_is_reported_and_the_run_resumes_on_another_number_of_ranks(tmp_path, private, spawn):
    config, out, at = tmp_path / "run.toml", tmp_path / "out", port()
    config.write_text(settings("dp_scaffold", rounds=6, chunk_size=4))
    pair = []
    for rank, sabotage in ((0, None), (1, killed_in_round_4)):
        arguments = ["train", config, "--out", out, "--quiet"]
        variables = environment(rank, at) | {"DPFEDEXP_PRIVATE": str(private)}
        pair.append(spawn(command, arguments, variables, tmp_path / f"{rank}.txt", sabotage))
    for process in pair:
        process.join(120)
    assert [process.exitcode for process in pair] == [3, -9]
    said = (tmp_path / "0.txt").read_text()
    assert "rank" in said
    assert "Repeat the command to resume" in said.replace("\n", " ")
    assert "Traceback" not in said
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    execute(load(config), RunFolder(out, resume=True), progress=False)
    execute(load(config), RunFolder(tmp_path / "whole"), progress=False)
    ends = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("out", "whole")]
    assert ends[0]["round"] == ends[1]["round"] == 6
    assert ends[0]["distance"] == pytest.approx(ends[1]["distance"], rel=1e-4)
    assert ends[0]["epsilon_total"] == ends[1]["epsilon_total"]


@pytest.mark.parametrize("world", [1, 3])
def test_shares_are_a_partition_of_even_work(world):
    sizes = torch.randint(0, 50, (100,), generator=torch.Generator().manual_seed(0))
    shares = [distributed.share(sizes, rank, world) for rank in range(world)]
    assert sorted(torch.cat(shares).tolist()) == list(range(100))
    work = [int(sizes[part].sum()) for part in shares]
    assert max(work) - min(work) <= 50


@pytest.mark.parametrize(("world", "words"), [("2", "RANK"), ("two", "WORLD_SIZE is 'two'")])
def test_ranks_that_do_not_know_each_other_are_told_what_is_missing(world, words, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(dp.InputError, match=words):
        distributed.join()


def test_a_rank_that_stops_beating_is_given_up(monkeypatch):
    """As when a machine loses its network: no connection is closed."""
    monkeypatch.setattr(distributed, "EVERY", 0.05)
    monkeypatch.setattr(distributed, "GONE_AFTER", 0.5)
    given_up = threading.Event()
    monkeypatch.setattr(distributed.Heartbeat, "_give_up", lambda self, other: given_up.set())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.set("beat/1", "0")
    watch = distributed.Heartbeat(store, 0, 2)
    threading.Thread(target=watch._run, daemon=True).start()
    for beat in range(20):
        store.set("beat/1", str(beat))
        time.sleep(0.05)
    assert not given_up.is_set()
    assert given_up.wait(10)
    watch.stopped.set()
