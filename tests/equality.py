"""Whether two checkouts promise, compute and refuse the same: ε of 500 settings, bits of seeded runs, sentences of wrong uses.

    python -m tests.equality write before.json     # in one checkout, then in the other
    python -m tests.equality compare before.json after.json

Both files must come from the same machine: the order in which a processor adds up is its own. Only public names are used, so that
the module can be copied into any checkout. `--uses FILE` takes the wrong uses from another checkout's tests/test_wrong_uses.py.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import dpfedexp as dp
from dpfedexp.accounting import compose
from dpfedexp.algorithms.algorithm import with_aggregation
from tests.arguments import arguments

Found = dict[str, Any]


def command(line: str) -> Any:
    """What `dpfedexp <line>` prints if it succeeds, else its exit code and its sentence."""
    out, err = io.StringIO(), io.StringIO()
    argv, show = patch("sys.argv", ["dpfedexp", *line.split()]), patch("warnings.showwarning")
    with argv, show, patch.dict("os.environ", COLUMNS="200"), redirect_stdout(out), redirect_stderr(err):
        try:
            runpy.run_module("dpfedexp", run_name="__main__")
        except SystemExit as end:
            if end.code:
                return [end.code, err.getvalue()]
    return json.loads(out.getvalue())


def commands(count: int, draw: random.Random) -> Found:
    """`dpfedexp privacy epsilon | noise` for random mechanisms, noise, rounds, sampling, adjacency and δ."""
    found: Found = {}
    mechanisms = {"central-gaussian": 9, "local-gaussian": 4, "privunit": 4, "two-party": 2, "two-party-one-sided": 1}
    while len(found) < count:
        what = draw.choices(["epsilon", "noise"], [6, 3])[0]
        mechanism = draw.choices(list(mechanisms), list(mechanisms.values()))[0]
        line = f"privacy {what} --json --mechanism {mechanism} --delta {draw.choice([1e-3, 1e-5, 1e-6, 1e-9])}"
        line += (
            f" --clients {draw.choice([10, 1000, 100000])}" if what == "epsilon" else f" -e {draw.uniform(0.2, 20):.4g}"
        )
        line += f" --rounds {draw.randint(1, 300)}"
        if mechanism == "privunit":
            line += "".join(f" --epsilon{i} {draw.uniform(0.2, 4):.4g}" for i in range(3))
            line += f" --gamma {draw.choice(['exact', 'paper'])} --dimension {draw.choice([2, 50, 7850])}"
        elif what == "epsilon":
            line += f" --noise-multiplier {10 ** draw.uniform(-0.3, 1.7):.4g}"
        if mechanism == "central-gaussian":
            line += f" --adjacency {draw.choice(['replace-one', 'add-remove'])}"
        # Calibration under sampling takes seconds.
        if draw.random() < (0.35 if what == "epsilon" else 0.12):
            line += f" --sampling {draw.choice(['poisson', 'fixed'])} -q {10 ** draw.uniform(-2.5, -0.2):.3g}"
        found[line] = command(line)
    return found


def events(count: int, draw: random.Random) -> Found:
    """What algorithms charge: a fixed or an adaptive clip with its votes, each numerator, plain and secure noise."""
    found: Found = {}
    while len(found) < count:
        name = draw.choice(["cdp_fedexp", "dp_fedavg", "ldp_fedexp", "dp_scaffold"])
        given: Found = {draw.choice(["noise_multiplier", "target_epsilon"]): round(draw.uniform(0.5, 12), 3)}
        given |= {"clip": 1.0, "delta": draw.choice([1e-4, 1e-5, 1e-7])}
        if name != "ldp_fedexp":
            given["clip"] = draw.choice([1.0, "adaptive", dp.AdaptiveClip(count_noise=draw.randint(1, 50))])
            given["adjacency"] = draw.choice(["replace-one", "add-remove"])
        if name.endswith("fedexp"):
            given["numerator"] = draw.choice(["free", "paper"])
        who: Any = draw.choices([dp.Full(), dp.Poisson(0.05), dp.FixedSize(100)], [8, 1, 1])[0]
        secure, rounds, d = draw.choice([False, True, "strict"]), draw.randint(1, 100), draw.choice([10, 7850])
        key = f"{name}({given}), {who}, secure={secure}, rounds={rounds}, d={d}"
        try:
            event = (
                getattr(dp, name)(**given)
                .bind(d, who.expected(2000), who.sampling(2000), rounds, secure)
                .event(who.sampling(2000))
            )
            found[key] = asdict(compose([(event, rounds)], given["delta"]))
        except dp.InputError as error:
            found[key] = str(error)
    return found


TRAINERS = ("vectorized", "loop", "fast")
# So little noise that step sizes are above 1.
FIXED: Found = {"clip": 0.3, "noise_multiplier": 0.01}
LOCALLY: Found = {**FIXED, "mechanism": "local-gaussian"}
STEPS: Found = {"steps": 3, "max_examples": 7}
ALGORITHMS: dict[str, dp.Algorithm] = {
    "fedavg": dp.fedavg(),
    "fedexp": dp.fedexp(),
    "dp_fedavg": dp.dp_fedavg(**FIXED),
    "dp_fedavg momentum": dp.dp_fedavg(**FIXED, server_momentum=0.9),
    "dp_fedavg local": dp.dp_fedavg(**LOCALLY),
    "dp_fedadam": dp.dp_fedadam(**FIXED),
    "cdp_fedexp": dp.cdp_fedexp(**FIXED),
    "cdp_fedexp paper": dp.cdp_fedexp(**FIXED, numerator="paper", step="paper"),
    "cdp_fedexp adaptive": dp.cdp_fedexp(clip="adaptive", target_epsilon=8.0),
    "cdp_fedexp add-remove": dp.cdp_fedexp(**FIXED, adjacency="add-remove"),
    "ldp_fedexp": dp.ldp_fedexp(**FIXED),
    "ldp_fedexp paper": dp.ldp_fedexp(**FIXED, numerator="paper", step="paper"),
    "ldp_fedexp privunit": dp.ldp_fedexp(clip=0.3, mechanism="privunit", epsilons=(60.0, 60.0, 60.0), step="paper"),
    "naive_ldp_fedexp": dp.ldp_fedexp(**FIXED, numerator="naive", step="paper"),
    "dp_scaffold": dp.dp_scaffold(**FIXED),
    "dp_scaffold report": dp.dp_scaffold(**LOCALLY, control="report"),
}
OPTIONS: dict[str, Found] = {
    "Poisson": {"participation": dp.Poisson(0.5)},
    "FixedSize": {"participation": dp.FixedSize(6)},
    "larger cohort": {"participation": dp.FixedSize(6), "noise_cohort": 60},
    "two-party": {"algorithm": with_aggregation(ALGORITHMS["cdp_fedexp"], "two-party")},
    "one-sided": {"algorithm": with_aggregation(ALGORITHMS["cdp_fedexp"], "two-party-one-sided")},
    "AdamW": {"local": dp.AdamW(lr=0.01, **STEPS)},
    "momentum": {"local": dp.Sgd(lr=0.1, **STEPS, momentum=0.9, nesterov=True, weight_decay=0.01)},
    "FedProx": {"local": dp.Sgd(lr=0.1, proximal=0.1, **STEPS)},
    "batches": {"local": dp.Sgd(lr=0.1, epochs=2, batch_size=3, max_examples=7)},
    "cosine": {"local": dp.Sgd(lr=0.1, **STEPS, schedule=dp.CosineRate(rounds=3))},
    "auto": {"local": dp.Sgd(lr="auto", **STEPS)},
}


def bits(run: dp.Run) -> Found:
    """Hashes of the parameters and of the released numbers, and what the statement says was spent."""
    held = b"".join(value.detach().cpu().contiguous().numpy().tobytes() for value in run.model.state_dict().values())
    history = [{name: repr(value) for name, value in one.items() if name != "seconds"} for one in run.history]
    spent = [repr(run.privacy.epsilon_round), repr(run.privacy.epsilon_total)]
    model, numbers = (hashlib.sha256(one).hexdigest() for one in (held, json.dumps(history, sort_keys=True).encode()))
    steps = [one.get("eta_g") for one in history]
    return {"model": model, "history": numbers, "eta_g": steps, "epsilon": spent, "trainer": run.trainer}


@contextmanager
def known_entropy() -> Iterator[None]:
    """Secure noise from a constant key, in place of the operating system's and OpenDP's. Names, which are shorter, stay random."""
    fresh = os.urandom

    def urandom(size: int) -> bytes:
        return bytes(range(32)) if size == 32 else fresh(size)

    def gaussian(_domain: Any, _metric: Any, scale: float) -> Any:
        return lambda zeros: [round(scale * math.sin(place)) for place in range(len(zeros))]

    strict, bits = patch("opendp.measurements.make_gaussian", gaussian), patch("secrets.randbits", lambda k: 7)
    with patch("os.urandom", urandom), patch("random._urandom", urandom), strict, bits:
        yield


def runs() -> Found:
    """Three rounds on twelve clients by every algorithm, and cdp_fedexp with every option: each trainer, plain and secure noise."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 7, 1, 6, 6, generator=draw), torch.randint(0, 3, (12, 7), generator=draw)
    clients = dp.Federation.from_clients([(x[i, : 4 + i % 4], y[i, : 4 + i % 4]) for i in range(12)])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    common: Found = {"test": (x[0], y[0]), "seed": 5, "rounds": 3}
    plain: Found = {"algorithm": ALGORITHMS["cdp_fedexp"], "local": dp.Sgd(lr=0.1, **STEPS)}
    choices = {name: {**plain, "algorithm": one} for name, one in ALGORITHMS.items()}
    choices["cdp_fedexp add-remove"]["population"] = 15
    choices |= {name: {**plain, **one} for name, one in OPTIONS.items()}
    found: Found = {}
    for (name, given), trainer, secure in itertools.product(choices.items(), TRAINERS, (False, True, "strict")):
        execution = dp.Execution(device="cpu", trainer=trainer, chunk_size=5)
        try:
            with known_entropy():
                run = dp.train(
                    model, clients, **arguments({**given, "execution": execution, "secure": secure, **common})
                )
            found[f"{name}, {trainer}, secure={secure}"] = bits(run)
        except dp.InputError as error:
            found[f"{name}, {trainer}, secure={secure}"] = str(error)
    who: dict[str, Found] = {"everybody": {}, "Poisson": {"participation": dp.Poisson(0.5)}}
    for name, epsilon in itertools.product(who, (1.0, 8.0, 30.0)):
        execution = dp.Execution(device="cpu", trainer="fast", chunk_size=5)
        run = dp.fit(model, clients, epsilon=epsilon, **arguments({"execution": execution, **common, **who[name]}))
        found[f"fit, {name}, epsilon={epsilon}"] = {**bits(run), "choices": run.privacy.choices}
    return found


class Refusals:
    """A plugin of pytest that keeps what `pytest.raises` caught, warnings that a test kept, and what a command said."""

    def __init__(self) -> None:
        self.found: Found = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        said = self.found.setdefault(item.nodeid.split("::", 1)[1], [])
        raises, capsys = pytest.raises, item.funcargs.get("capsys")

        @contextmanager
        def recorded(*kinds: Any, **more: Any) -> Any:
            with raises(*kinds, **more) as caught:
                yield caught
            said.append([caught.type.__name__, str(caught.value), *getattr(caught.value, "__notes__", ())])

        class Caught(warnings.catch_warnings):
            def __enter__(self) -> Any:
                self.kept = super().__enter__()
                return self.kept

            def __exit__(self, *error: Any) -> None:
                super().__exit__(*error)
                said.extend(["UserWarning", str(w.message)] for w in self.kept or () if w.category is UserWarning)

        def read(original: Any = capsys and capsys.readouterr) -> Any:
            texts = original()
            said.append(["stderr", texts.err])
            return texts

        if capsys is not None:
            capsys.readouterr = read
        torch.manual_seed(0)
        with patch("pytest.raises", recorded), patch("warnings.catch_warnings", Caught):
            outcome = yield
        said.append("failed" if outcome.excinfo else "passed")


def refusals(uses: Path) -> Found:
    plugin = Refusals()
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        pytest.main([str(uses), "-q", "-p", "no:cacheprovider", f"--basetemp={scratch}/t"], plugins=[plugin])
        text = json.dumps(plugin.found).replace(scratch, "<scratch>").replace(str(uses), "<uses>")
    return dict(json.loads(re.sub(r"0x[0-9a-f]{6,}", "<address>", text)))


def write(path: Path, uses: Path) -> None:
    """Everything above, as JSON, in which a float is written by its `repr`."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("package:", Path(dp.__file__).parent, "uses:", uses)
    found = {"epsilon": {**commands(400, random.Random(0)), **events(100, random.Random(1))}, "bits": runs()}
    path.write_text(json.dumps({**found, "refusals": refusals(uses)}, indent=1, ensure_ascii=False) + "\n")


def compare(before: Path, after: Path) -> bool:
    """Prints what differs; whether anything does."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    differing = 0
    for room in dict.fromkeys([*old, *new]):
        a, b = (
            {key: json.dumps(value, ensure_ascii=False) for key, value in one.get(room, {}).items()}
            for one in (old, new)
        )
        keys = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
        print(f"{room}: {len(a)} before, {len(b)} after, {len(keys)} differ")
        for key in keys:
            print(f"  {key}\n    before: {a.get(key, 'missing')}\n    after:  {b.get(key, 'missing')}")
        differing += len(keys)
    return differing > 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--uses", type=Path, default=Path(__file__).parent / "test_wrong_uses.py")
    asked = parser.parse_args()
    if len(asked.files) != (1 if asked.what == "write" else 2):
        parser.error("write takes one file, compare takes two")
    if asked.what == "write":
        write(asked.files[0], asked.uses.resolve())
    elif compare(*asked.files):
        sys.exit(1)
