"""Hostile input for every parser: a result or one sentence, never another exception. `make test-long` tries fifty times as many.

Each target is a function of a folder that returns the seeds and what is done with an input. Hypothesis chooses how a seed is
changed and shrinks what it finds.
"""

import contextlib
import gzip
import hashlib
import json
import random
import shutil
import struct
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from safetensors.torch import load
from typer.testing import CliRunner

from dpfedexp import Execution, Sgd, config, dp_scaffold
from dpfedexp.accounting import Ledger, Sampling
from dpfedexp.accounting import ledger as chain
from dpfedexp.accounting.events import to_json
from dpfedexp.cli import app
from dpfedexp.cli.train import TEMPLATE
from dpfedexp.core.clipping import clip
from dpfedexp.core.noise import Streams
from dpfedexp.core.sums import within_clip_vote
from dpfedexp.data import synthetic_regression
from dpfedexp.data.data_sets import read_idx
from dpfedexp.engine import checkpoint as checkpoints
from dpfedexp.engine import verify as verification
from dpfedexp.engine.checkpoint import digest
from dpfedexp.engine.open_run import described
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import BudgetExceeded, InputError, LedgerError, RoundFailed
from dpfedexp.flower import messages as wire
from dpfedexp.flower.guard import Guard
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit
from dpfedexp.mechanisms import serialization as spec
from dpfedexp.models import linear_regression
from tests.sizes import sized

WIDTH = 3
LONGEST = 8192
TOKENS = (b"1e400", b"-1", b"nan", b"null", b"[[[[", b"{}", b"99999999999999999999", b"\xff\xfe")
Target = tuple[Sequence[bytes], Callable[[bytes], None]]


def mutation(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A seed with up to 16 pieces replaced by bytes, by something that parsers stumble on, or by pieces of other seeds."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        other, at = chance.choice(seeds), chance.randrange(len(data) + 1)
        start = chance.randrange(len(other) + 1)
        piece = chance.choice((b"", bytes([chance.randrange(256)]), chance.choice(TOKENS), other[start : start + 200]))
        data[at : at + chance.choice((0, len(piece), 30))] = piece
    return bytes(data[:LONGEST])


def toml(folder: Path) -> Target:
    """A configuration file, and after a zero byte the values of --set."""
    seeds = [
        TEMPLATE.read_bytes(),
        b'[algorithm]\nname = "ldp_fedexp"\nclip = 0.3\nmechanism = "privunit"\nepsilon0 = 1.0\n[run]\nrounds = 3\n',
        b'[algorithm]\nname = "dp_scaffold"\nclip = 1\nnoise_multiplier = 5\n[participation]\nkind = "poisson"\nrate = 0.1\n',
        b'[data]\nkind = "npz"\npath = "x"\n[model]\nname = "mlp"\noptions = { inputs = 3 }\n\0algorithm.clip=0.5\0run.seed=1',
        b'algorithm = { name = "cdp_fedexp", clip = "adaptive", target_epsilon = 8 }\n\0algorithm.adaptive.rate=0.1',
    ]

    def one(data: bytes) -> None:
        text, *overrides = data.split(b"\0")
        (folder / "run.toml").write_bytes(text)
        decoded = [override.decode("utf-8", "surrogateescape") for override in overrides]
        with contextlib.suppress(InputError):
            found = config.load(folder / "run.toml", decoded)
            found.check()
            assert found.build_local()
            cohort = found.build_participation().expected(100)
            assert found.build_algorithm().bind(7, cohort, Sampling(), 3).event(Sampling())
            config.parse(tomllib.loads(found.to_toml()))

    return seeds, one


def idx(folder: Path) -> Target:
    """An array no larger than its file, plain or gzipped."""
    images = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 3, 4) + bytes(24)
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, 5) + bytes(5)
    huge = struct.pack(">BBBBIII", 0, 0, 0x0E, 3, 2**20, 2**10, 2**10) + bytes(64)

    def one(data: bytes) -> None:
        (folder / "file").write_bytes(data)
        for dimensions in (None, 1, 3):
            with contextlib.suppress(InputError):
                array = read_idx(folder / "file", dimensions)
                assert dimensions in (None, array.ndim)
                assert array.nbytes <= 2000 * len(data)

    return [images, labels, huge, gzip.compress(images), gzip.compress(bytes(8000)), b""], one


MECHANISMS = [
    CentralGaussian(0.3, 5.0, votes=(within_clip_vote(9.0),)),
    LocalGaussian(0.3, 0.7),
    PrivUnit(0.3, WIDTH),
    CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=3.0),
]


def ledger(folder: Path) -> Target:
    """First byte S: lines of JSON that get their hashes here. Otherwise: a ledger, a zero byte, and its head."""
    place, plain = folder / "run", MECHANISMS[1].event(Sampling())
    path = place / "ledger.jsonl"

    def lines(count: int, sampling: Sampling) -> bytes:
        kinds = [*MECHANISMS, NoPrivacy()]
        header = {"format": "dpfedexp-ledger", "version": 1, "config": ""}
        events = [to_json(kinds[n % len(kinds)].event(sampling)) for n in range(count)]
        charges = [{"seq": n, "round": n, "event": event} for n, event in enumerate(events, 1)]
        return b"\n".join(json.dumps(line).encode() for line in [header, *charges])

    def file(count: int) -> bytes:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        with Ledger.create(path) as book:
            for number in range(count):
                book.charge(number + 1, plain)
        return path.read_bytes() + b"\0" + chain.head_path(path).read_bytes()

    def sealed(body: bytes) -> tuple[bytes, bytes]:
        previous, found, count = chain._GENESIS, [], -1
        for line in body.split(b"\n"):
            if line[-1:] == b"}":
                text = line[:-1] + (b',"previous":"' + previous.encode() + b'"}' if found else b"}")
                previous, count = hashlib.sha256(previous.encode() + text).hexdigest(), count + 1
                found.append(text[:-1] + b',"hash":"' + previous.encode() + b'"}\n')
        return b"".join(found), json.dumps({"count": max(0, count), "hash": previous}).encode() + b"\n"

    def read() -> None:
        with Ledger.open(path, read_only=True) as book:
            book.guarantee(1e-5)

    def repair() -> None:
        with Ledger.open(path) as book:
            before = len(book)
            book.charge(10**6, plain)
        with Ledger.open(path, read_only=True) as again:
            assert len(again) == before + 1

    def verify() -> None:
        assert verification.recompute(place).text
        assert verification.verify_run(place)

    def one(data: bytes) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        body, _, head = data[1:].partition(b"\0")
        if data[:1] == b"S":
            body, head = sealed(body)
        path.write_bytes(body)
        chain.head_path(path).write_bytes(head)
        for work in (read, repair, verify):
            with contextlib.suppress(InputError, LedgerError):
                work()

    known = [b"S" + lines(count, sampling) for count in (1, 6) for sampling in (Sampling(), Sampling("poisson", 0.1))]
    return [*known, *(b"R" + file(count) for count in (0, 1, 3))], one


def checkpoint(folder: Path) -> Target:
    """First byte S: JSON text, header and tensors that get their hashes here. Otherwise: the file."""
    simulation, _ = prepare(
        linear_regression(WIDTH),
        synthetic_regression(4, WIDTH, seed=0).federation,
        dp_scaffold(clip=0.3, noise_multiplier=1.0),
        local=Sgd(lr=0.1, steps=1),
        rounds=3,
        execution=Execution(device="cpu", trainer="loop"),
    )
    told, book, path = described(simulation, simulation.cohort, 3).settings, Ledger.in_memory(), folder / CHECKPOINT
    state, _ = simulation.step(simulation.begin(), book)
    progress = checkpoints.Progress(1, state.radius, told, simulation.run, book.mark(), [{"round": 1}], True, 4, "loop")
    checkpoints.save(folder, state, progress)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    content = json.loads(whole[8:start])["__metadata__"]["content"].encode()

    def packed(tree: dict, tensors: bytes) -> bytes:
        header = json.dumps(tree).encode()
        return len(header).to_bytes(8, "little") + header + tensors

    def sealed(data: bytes) -> bytes:
        text, _, rest = data.partition(b"\0")
        header, _, tensors = rest.partition(b"\0")
        try:
            tree, content = json.loads(header), json.loads(text)
            tree["__metadata__"]["content"] = ""
        except (ValueError, TypeError, KeyError, RecursionError):
            return data
        if isinstance(content, dict):
            try:
                content["tensors"] = digest(load(packed(tree, tensors)))
            except Exception:
                content["tensors"] = ""
        said = json.dumps(content)
        tree["__metadata__"] = {"content": said, "sha256": hashlib.sha256(said.encode()).hexdigest()}
        return packed(tree, tensors)

    def one(data: bytes) -> None:
        path.write_bytes(sealed(data[1:]) if data[:1] == b"S" else data[1:])
        with contextlib.suppress(InputError):
            checkpoints.read_progress(folder)
        with contextlib.suppress(InputError, LedgerError):
            found = checkpoints.load(folder)
            assert found is not None
            checkpoints.check_same(found, told, folder)
            checkpoints.check_charged(found, book, folder)
            again = checkpoints.resume(found, simulation.begin(), folder)
            assert again.w.shape == again.reported.shape == (WIDTH,)

    return [b"R" + whole, b"S" + content + b"\0" + whole[8:start] + b"\0" + whole[start:]], one


def replies(folder: Path) -> Target:
    """What a Flower node may send. First byte: below 100 which request is answered, then a mechanism, a request, a guard file."""
    requests = [wire.NodeRequest(1, "00ff", mechanism, Sampling()) for mechanism in MECHANISMS]
    requests += [wire.NodeRequest(1, "00ff", MECHANISMS[n], Sampling(), clients=(0, 1)) for n in (0, 1, 3)]

    def answer(number: int, request: wire.NodeRequest) -> bytes:
        clients = max(1, len(request.clients))
        rows = clip(torch.ones(clients, WIDTH), 0.3)
        report = request.mechanism.randomize(rows, torch.arange(clients), Streams(0).at("noise", 1))
        sums = request.mechanism.collect(report) if request.clients else None
        content = wire.sums_content(sums, request) if sums else wire.report_content(report, request)
        array = content.array_records[wire.REPORT]["vector"]
        kind = {"dtype": array.dtype, "shape": list(array.shape), "stype": array.stype}
        said = json.dumps([dict(content.config_records[wire.REQUEST]), kind]).encode()
        return bytes([number]) + said + b"\0" + array.data

    def message(make: Callable[[], RecordDict]) -> SimpleNamespace:
        """What Flower itself would hand over; input that it refuses is not ours to judge. Only the content is read."""
        try:
            return SimpleNamespace(content=make())
        except Exception:
            raise InputError("refused by Flower") from None

    def reply(request: wire.NodeRequest, rest: bytes) -> None:
        """A sum that is returned is finite and no longer than so many honest reports."""
        text, _, body = rest.partition(b"\0")

        def records() -> RecordDict:
            said, kind = json.loads(text)
            array = Array(kind["dtype"], tuple(kind["shape"]), kind["stype"], body)
            return RecordDict({wire.REPORT: ArrayRecord({"vector": array}), wire.REQUEST: ConfigRecord(said)})

        sums, clients = wire.read_sums(message(records), request, WIDTH), max(1, len(request.clients))
        assert sums.vector.shape == (WIDTH,)
        assert bool(sums.vector.isfinite().all())
        assert sums.count == clients
        assert float(sums.vector.norm()) <= clients * request.mechanism.norm_bound(WIDTH) * (1 + 1e-5)
        assert np.isfinite(float(sums.squares))
        assert bool((sums.votes.abs() <= clients / 2).all())

    def one(data: bytes) -> None:
        number, rest = (data or b"\0")[0], data[1:]
        with contextlib.suppress(InputError):
            if number < 100:
                reply(requests[number % len(requests)], rest)
            elif number < 150:
                assert spec.encode(spec.decode(rest.decode("utf-8", "replace")))
            elif number < 200:
                asked = message(lambda: RecordDict({wire.REQUEST: ConfigRecord(json.loads(rest))}))
                assert wire.NodeRequest.from_message(asked).round is not None
            else:
                (folder / "guard.toml").write_bytes(rest)
                assert Guard.load(folder / "guard.toml").max_clip > 0

    guard = b"max_epsilon_per_round = 4.0\nmax_epsilon_total = 20.0\ndelta = 1e-5\nmax_clip = 1.0\nmechanisms = ['privunit']\n"
    return [
        *(answer(number, request) for number, request in enumerate(requests)),
        *(bytes([100]) + spec.encode(mechanism).encode() for mechanism in MECHANISMS),
        *(bytes([150]) + json.dumps(dict(request.to_record())).encode() for request in requests),
        bytes([200]) + guard,
    ], one


LINES = (
    "privacy epsilon -z 5 --rounds 5 --delta 1e-5",
    "privacy noise --epsilon 5 --rounds 5 --mechanism local-gaussian",
    "privacy noise --epsilon 5 --rounds 5 --adjacency add-remove",
    "privacy verify out",
    "train run.toml --out out --quiet",
    "train run.toml --set algorithm.clip=0 --set run.rounds=1",
    "init out --force",
    "report out",
)
MORE = (
    "explain plan flower new --help --per --json --epsilon0 --epsilon1 --epsilon2 --data audit 0 1 -1 0.1 nan inf 1e308 1e-308",
    "99999999999999999999 = replace-one privunit central-gaussian algorithm.name=fedavg run.secure=true run.seed=-1 data.kind=npz",
    "data.path=x .. /dev/null é",
)
WORDS = ["", *sorted({word for line in (*LINES, *MORE) for word in line.split()})]


def command_line(folder: Path) -> Target:
    """A byte names a word; 255 begins one of their own."""
    (folder / "run.toml").write_text(
        "data = { clients = 4, dimension = 2 }\nalgorithm = { clip = 0.3, noise_multiplier = 5.0 }\n"
        'run = { rounds = 2, device = "cpu" }\n'
    )

    def one(data: bytes) -> None:
        spelt, *literal = data.split(b"\xff")
        words = [WORDS[byte % len(WORDS)] for byte in spelt[:12]]
        words += [word[:200].decode("utf-8", "replace") for word in literal[:4] if b"\0" not in word]
        if {"demo", "audit", "up"} & set(words):
            words.append("--no-such-option")  # they would work for minutes, so they are only parsed
        with contextlib.chdir(folder):
            done = CliRunner().invoke(app, words)
        expected = SystemExit | InputError | LedgerError | BudgetExceeded | RoundFailed | None
        if not isinstance(done.exception, expected):
            raise done.exception
        assert "Traceback" not in done.output
        assert not (folder.parent / "out").exists()

    return [bytes(map(WORDS.index, line.split())) for line in LINES], one


TARGETS = {target.__name__: target for target in (toml, idx, ledger, checkpoint, replies, command_line)}


def fuzz(seeds: Sequence[bytes], one: Callable[[bytes], None], count: int) -> None:
    @settings(max_examples=count, deadline=60_000, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def run(chance: random.Random) -> None:
        data = mutation(chance, seeds)
        note(repr(data))
        one(data)

    for seed in seeds:
        one(seed)
    # What survives a power failure is not the question here, and many more inputs fit into the time.
    with mock.patch("os.fsync"):
        run()


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_gets_a_sentence(name, tmp_path):
    torch.set_num_threads(1)
    (tmp_path / "own").mkdir()
    seeds, one = TARGETS[name](tmp_path / "own")
    fuzz(seeds, one, sized(8 if name == "command_line" else 60, 300))
