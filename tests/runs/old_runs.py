"""Writes run folders, each stopped after three of five rounds, with the version of dpfedexp that is on the path.

    PYTHONPATH=OLD/src:. DPFEDEXP_PRIVATE=OUT/api/private python -m tests.runs.old_runs api OUT/api
    PYTHONPATH=OLD/src:. DPFEDEXP_PRIVATE=OUT/cli/private python -m tests.runs.old_runs cli OUT/cli

The folders in tests/runs/old were made in this way by the versions that their names say: 0.1.0 at git e363675, and at 2287ef6,
which had no private folders. Only names that all those versions have are used here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpfedexp import (
    AdaptiveClip,
    Federation,
    FixedSize,
    Poisson,
    Sgd,
    cdp_fedexp,
    dp_fedadam,
    dp_fedavg,
    dp_scaffold,
    fedexp,
    ldp_fedexp,
    naive_ldp_fedexp,
    train,
)

ROUNDS, STOP = 5, 3
LOCAL = Sgd(lr=0.1, steps=2)
OVERRIDES = ("data.clients=20", "data.dimension=5", "local.steps=2", f"run.rounds={ROUNDS}", "run.device='cpu'")
"""What makes the file that `dpfedexp init` writes a small run."""


class Stop(BaseException):
    """Stands for whatever ended the run."""


def numbers(*shape: int, step: int) -> torch.Tensor:
    """The same numbers on every machine, without a generator."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * step) % 101).float().sub(50).div(64).reshape(shape)


def clients() -> Federation:
    return Federation.from_clients([(numbers(4, 3, step=7 + k), numbers(4, step=11 + k)) for k in range(12)])


def model() -> torch.nn.Module:
    network = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(numbers(*parameter.shape, step=13))
    return network


def of_before(algorithm: Callable[..., Any], **given: Any) -> Any:
    """The algorithm with the paper's step size, which versions without the argument `step` had no other than."""
    step = {"step": "paper"} if "step" in inspect.signature(algorithm).parameters else {}
    return algorithm(**given, **step)


def cases() -> dict[str, dict[str, Any]]:
    """What `train` is given in each folder, beside what all of them share."""
    noise: dict[str, Any] = {"clip": 0.5, "noise_multiplier": 1.0}
    sampled = {"participation": Poisson(0.5), "population": 12}
    report = dp_scaffold(mechanism="local-gaussian", control="report", **noise)
    return {
        "fedexp": {"algorithm": fedexp()},
        "central-free": {"algorithm": of_before(cdp_fedexp, **noise)},
        "central-paper": {"algorithm": of_before(cdp_fedexp, clip=0.5, target_epsilon=4.0, numerator="paper")},
        "central-adaptive": {"algorithm": of_before(cdp_fedexp, clip=AdaptiveClip(initial=0.5), noise_multiplier=1.0)},
        "central-rate": {"algorithm": dp_fedavg(server_rate=1.5, **noise), "participation": FixedSize(8)},
        "add-remove": {"algorithm": of_before(cdp_fedexp, adjacency="add-remove", **noise), **sampled},
        "momentum": {"algorithm": dp_fedavg(server_rate=0.7, server_momentum=0.9, **noise)},
        "adam": {"algorithm": dp_fedadam(**noise)},
        "scaffold": {"algorithm": dp_scaffold(**noise)},
        "scaffold-report": {"algorithm": report},
        "local-free": {"algorithm": of_before(ldp_fedexp, **noise)},
        "local-paper": {"algorithm": of_before(ldp_fedexp, numerator="paper", **noise)},
        "naive": {"algorithm": naive_ldp_fedexp(**noise)},
        "privunit": {"algorithm": of_before(ldp_fedexp, clip=0.5, mechanism="privunit")},
        "secure": {"algorithm": of_before(cdp_fedexp, **noise), "secure": True},
        "secure-local": {"algorithm": of_before(ldp_fedexp, **noise), "secure": True},
        "secure-privunit": {"algorithm": of_before(ldp_fedexp, clip=0.5, mechanism="privunit"), "secure": True},
    }


def run(settings: dict[str, Any], **more: Any) -> Any:
    given = {"local": LOCAL, "rounds": ROUNDS, "device": "cpu", "progress": False, **settings, **more}
    return train(model(), clients(), given.pop("algorithm"), **given)


def until(last: int) -> Callable[[dict[str, Any]], None]:
    def on_round(record: dict[str, Any]) -> None:
        if record["round"] == last:
            raise Stop

    return on_round


def write_api(out: Path) -> None:
    """One folder of `train` for every case."""
    for name, settings in cases().items():
        try:
            run(settings, checkpoint=out / name, on_round=until(STOP))
        except Stop:
            print(name)


def write_cli(out: Path) -> None:
    """`finished` and `interrupted`, by `dpfedexp train`."""
    from dpfedexp.cli import main

    try:
        from dpfedexp.runs.folder import RunFolder
    except ImportError:
        from dpfedexp.simulation.output import RunFolder  # where it was

    def call(*words: object) -> None:
        sys.argv = ["dpfedexp", *map(str, words)]
        try:
            main()
        except (SystemExit, Stop):
            return

    def stopped(self: RunFolder, line: dict[str, Any]) -> None:
        record(self, line)
        if line["round"] == STOP:
            raise Stop

    record = RunFolder.record
    settings = [word for override in OVERRIDES for word in ("--set", override)]
    call("init", out / "dpfedexp.toml")
    call("train", out / "dpfedexp.toml", "--quiet", "--out", out / "finished", *settings)
    RunFolder.record = stopped  # type: ignore[method-assign]
    call("train", out / "dpfedexp.toml", "--quiet", "--out", out / "interrupted", *settings)


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    {"api": write_api, "cli": write_cli}[kind](folder)
