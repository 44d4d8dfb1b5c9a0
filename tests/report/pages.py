"""Folders of results as a user has them, small."""

import json
from pathlib import Path

from reproduction.paper import sections
from reproduction.paper.results.size import Size

from dpfedexp.accounting import PrivacyStatement
from dpfedexp.accounting.events import central_gaussian
from dpfedexp.engine.run import RunFacts
from tests.reproduction.fabricated import Fabricated

EVIL = "<script>alert('x')</script>"


def write_run(folder: Path, rounds: int = 6) -> Path:
    folder.mkdir(parents=True)
    same = {"clip": 0.3, "seconds": 0.1}
    lines = [
        {"round": i, "test_accuracy": 0.5 + 0.05 * i, "eta_g": 4.0 / i, "epsilon_total": 1.0 * i, **same}
        for i in range(1, rounds + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "config.toml").write_text(f'[algorithm]\nname = "cdp_fedexp"  # {EVIL}\n', encoding="utf-8")
    (folder / "privacy.txt").write_text(f"ε = 6.00 in total & δ = 1e-05. {EVIL}\n", encoding="utf-8")
    charges = [(central_gaussian(5.0), rounds)]
    statement = PrivacyStatement.from_charges(charges, 1e-5, algorithm="CDP-FedEXP", clients=1000)
    (folder / "privacy.json").write_text(statement.to_json(), encoding="utf-8")
    named = ("0123456789abcdef", "cdp_fedexp", "synthetic", "Linear")
    RunFacts(*named, 1000, 500, rounds, 1e-5, secure=False, command="dpfedexp train config.toml").write(folder)
    return folder


def write_paper(folder: Path, *names: str) -> Path:
    """Sections of the paper, without their figures as files, because drawing is slow."""
    folder.mkdir(parents=True)
    for name in names:
        section = sections.MAKERS[name].section(Size(seeds=2), Fabricated())
        (folder / f"{name}.json").write_text(section.to_json(), encoding="utf-8")
    return folder
