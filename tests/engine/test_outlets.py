"""What leaves a run is in the list, and with `secure` nothing of it depends on a client but through what was released."""

import csv
import json
import re
import shutil
import time
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import dpfedexp
from dpfedexp import Federation, Sgd, cdp_fedexp, dp_scaffold, ldp_fedexp, train
from dpfedexp.config import parse
from dpfedexp.engine import outlets
from dpfedexp.engine.outlets import CHECKPOINT, OUTLETS, recorded, right
from dpfedexp.engine.run import RunFolder
from dpfedexp.mechanisms import Release
from dpfedexp.mechanisms.central_gaussian import SecureCentralGaussian
from dpfedexp.mechanisms.local_gaussian import SecureLocalGaussian
from dpfedexp.models import linear_regression
from dpfedexp.report.page import report

D, M, ROUNDS = 3, 8, 4
CASES = {
    "adaptive": cdp_fedexp(clip="adaptive", noise_multiplier=1.0),
    "local": ldp_fedexp(clip=0.3, noise_multiplier=0.7),
    "scaffold": dp_scaffold(clip=0.3, noise_multiplier=1.0),
}
CLOCKS = {
    "audit.*": "audits measure mechanisms on synthetic clients",
    "cli.train": "the default name of a folder has the time at which the run was started",
    "engine.open_run": "the one date that all files of the folder get",
    "engine.ranks": "watches the other ranks",
    "engine.engine": "`seconds` of a record, which `recorded` leaves out of a secure run",
    "engine.run": "the one date that all files of the folder get",
    "flower.guard": "the note of a charge in the node's own ledger, which stays with the node",
    "flower.local_deployment": "waits for processes of a federation on this machine, and dates its certificates",
    "flower.cohort": "waits for nodes, replies and the helper; what the server's own log says of it has Flower's time of day",
    "flower.site": "waits for the app and for requests",
    "machine": "the time left of a bar, which a sweep of secure runs does not show",
    "trainers.*": "measures trainers on synthetic clients",
}
"""Every module that reads a clock (its name in the package), and why none of its times leaves a secure run."""


def federation(replaced=0):
    """So many other rows in the place of one client's."""
    own = [torch.Generator().manual_seed(number) for number in range(M)]
    clients = [(torch.randn(5, D, generator=g), torch.randn(5, generator=g)) for g in own]
    if replaced:
        clients[3] = (torch.full((replaced, D), 9.0), torch.full((replaced,), -7.0))
    return Federation.from_clients(clients)


def whole_run(folder, algorithm, data, **options):
    """Every file that lies in the folder after each round and at the end, by name."""
    moments = []
    run_folder = RunFolder(folder)
    run_folder.write_config(parse({"algorithm": {"name": "fedavg"}, "local": {"lr": 1.0}}))

    def record(line):
        moments.append({path.name: path.read_bytes() for path in folder.iterdir()})

    given = {"local": Sgd(lr=0.02, steps=2), "rounds": ROUNDS, "out": run_folder, "on_round": record}
    given |= {"execution": "cpu", "evaluate": lambda model: {"test_size": float(model.weight.detach().norm())}}
    train(linear_regression(D), data, algorithm, **given | options)
    moments.append({path.name: path.read_bytes() for path in folder.iterdir()})
    return moments


@pytest.fixture
def constant(monkeypatch, tmp_path_factory):
    """Releases that are the same whatever the clients hold, and names that are the same in every run."""

    def release(self, sums, denominator, noise, scalar_noise):
        votes = {vote.name: 0.4 for vote in self.votes}
        return Release(torch.full((D,), 0.01, dtype=torch.float64), 0.5, votes, self.clip)

    for mechanism in (SecureCentralGaussian, SecureLocalGaussian):
        monkeypatch.setattr(mechanism, "release", release)
    count = iter(range(10**6))
    monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(count):0{2 * size}x}")

    def restart():
        nonlocal count
        count = iter(range(10**6))
        monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path_factory.mktemp("private")))

    return restart


def canonical(name, content):
    """All the bytes; the two texts in a checkpoint's header are written in an order that is random for every file."""
    if name != CHECKPOINT:
        return content
    length = int.from_bytes(content[:8], "little")
    return length, json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.parametrize(
    ("name", "rows", "stop"),
    [("adaptive", 400, False), ("local", 5, False), ("scaffold", 400, False), ("scaffold", 5, True)],
)
def test_a_secure_run_writes_the_same_bytes_whatever_one_client_holds(name, rows, stop, constant, tmp_path):
    """With the release held fixed nothing else may differ: no hash, no duration, no size."""
    folder, found = tmp_path / "run", []
    options = {"secure": True} | ({"budget": 16.0} if stop else {})
    for replaced in (0, rows):
        constant()
        found.append(whole_run(folder, CASES[name], federation(replaced), **options))
        shutil.rmtree(folder)
    for ours, theirs in zip(*found, strict=True):
        assert ours.keys() == theirs.keys()
        assert [file for file in ours if canonical(file, ours[file]) != canonical(file, theirs[file])] == []
    rounds = len(found[0]) - 1
    assert rounds == ROUNDS if not stop else 0 < rounds < ROUNDS


def fields(name, content):
    """The fields of a file of a run, with those of its history."""
    if name in ("metrics.jsonl", "advice.jsonl", "ledger.jsonl", "ledger.jsonl.head"):
        yield from ((name, field) for line in content.decode().splitlines() for field in json.loads(line))
    elif name == "metrics.csv":
        yield from ((name, field) for field in next(csv.reader(content.decode().splitlines())))
    elif name in ("privacy.json", "run.json", "status.json"):
        yield from ((name, field) for field in json.loads(content))
    elif name == "config.toml":
        yield from ((name, field) for field in tomllib.loads(content.decode()))
    else:
        yield name, "whole"


@pytest.mark.parametrize("secure", [False, True])
def test_every_file_and_field_of_a_run_is_in_the_list(secure, tmp_path):
    algorithm = CASES["adaptive"]
    whole_run(tmp_path, algorithm, federation(), secure=secure, diagnostics=not secure, rounds=2)
    if not secure:
        report(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    written = "ledger.jsonl metrics.csv config.toml privacy.json run.json advice.jsonl"
    assert {CHECKPOINT, *written.split()} <= files.keys()
    listed = [pair for name in files if name != CHECKPOINT for pair in fields(name, files[name])]
    with safe_open(tmp_path / CHECKPOINT, "pt") as file:
        content = json.loads(file.metadata()["content"])
        listed += [(CHECKPOINT, field) for field in [*file.keys(), *content]]
    listed += [("metrics.jsonl", field) for record in content["history"] for field in record]
    rights = {pair: right(*pair) for pair in listed}
    assert None not in rights.values(), [pair for pair, known in rights.items() if known is None]
    nonprivate = {field for (_, field), known in rights.items() if known == "nonprivate"}
    assert nonprivate == (set() if secure else {"seconds", "nonprivate_eta_target", "chunk_size", "trainer"})


def test_a_field_without_a_right_can_not_be_written():
    with pytest.raises(LookupError, match="fingerprint"):
        recorded("ledger.jsonl", {"format": "x", "fingerprint": "y"}, secure=False)
    record = {"round": 1, "accuracy": 0.5, "seconds": 0.1, "nonprivate_x": 3.0}
    assert recorded("metrics.jsonl", record, secure=False) == record
    assert recorded("metrics.jsonl", record, secure=True) == {"round": 1, "accuracy": 0.5}


@pytest.mark.parametrize("secure", [True, False])
def test_the_dates_of_a_secure_runs_files_do_not_tell_how_long_it_took(secure, tmp_path):
    options = {"local": Sgd(lr=0.02, steps=2), "rounds": 2, "on_round": lambda record: time.sleep(0.05)}
    algorithm = cdp_fedexp(clip=1.0, noise_multiplier=2.0)
    run = train(linear_regression(D), federation(), algorithm, secure=secure, out=tmp_path / "run", **options)
    for folder in (tmp_path / "run", run.save(tmp_path / "saved")):
        assert (len({path.stat().st_mtime for path in folder.iterdir()}) == 1) == secure


CLOCK = re.compile(
    r"\btime\.(time|monotonic|perf_counter|process_time|clock_gettime|localtime|gmtime|strftime|ctime|asctime)"
    r"|\bdate(time)?\.(now|utcnow|today)|^\s*from time import (?!sleep$)",
    re.MULTILINE,
)


def test_every_module_that_reads_a_clock_says_why_no_time_leaves_a_secure_run():
    root = Path(dpfedexp.__file__).parent
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")}
    readers = sorted(name for path, name in names.items() if CLOCK.search(path.read_text(encoding="utf-8")))
    assert readers
    assert [name for name in readers if not any(fnmatchcase(name, known) for known in CLOCKS)] == []
    assert [known for known in CLOCKS if "*" not in known and known not in readers] == []


def test_every_file_of_a_run_folder_is_in_the_list():
    named = {value for name, value in vars(outlets).items() if name.isupper() and isinstance(value, str)}
    assert named <= OUTLETS.keys()


def test_a_secure_runs_progress_shows_no_time_and_no_outlet_has_one():
    assert recorded("terminal", {"elapsed": None}, secure=True) == {}
    for outlet, fields in OUTLETS.items():
        for field in ("seconds", "elapsed"):
            if field in fields:
                assert right(outlet, field) == "nonprivate", (outlet, field)
    for outlet in ("status.json", "run.json"):
        known = OUTLETS[outlet]
        words = {word for field in known for word in field.split("_")}
        assert not words & {"time", "times", "seconds", "date", "began", "ended", "elapsed", "duration"}, outlet
