"""What two aggregators cost: accuracy on MNIST, and seconds and bytes of a round beside plain aggregation.

    python -m reproduction.benchmarks.two_party accuracy [--seeds 5] [--out FOLDER] [--data FOLDER] [--device cuda]
    python -m reproduction.benchmarks.two_party overhead [--dimension 1000000] [--nodes 20] [--out FILE]

accuracy  the paper's MNIST runs: local (Gaussian), central (free rule), and the same central run by two aggregators, with the
          noise of both and with the helper's alone, at the same ε against each aggregator. Runs are recorded in
          OUT/two-party/runs.jsonl as `paper` records its own; one that is there, or in another section, is not repeated.
overhead  one round after training: what a client, the server and the helper compute and send, each part by itself, in seconds of
          processor time (the best of three), which do not depend on what else the machine does
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPEATS = 3
KINDS = ("local", "central", "two-party", "two-party-one-sided")


def accuracy(seeds: int, out: Path, device: str | None, data: str | None, jobs: int | None) -> dict[str, Any]:
    from reproduction.paper.experiments import experiment, vary
    from reproduction.paper.results.collected import Results, all_records
    from reproduction.paper.results.planned import Place, trainings
    from reproduction.paper.results.record import fingerprint
    from reproduction.paper.results.size import Size
    from reproduction.paper.results.spread import final, spread

    size, free = Size(seeds), {"algorithm.numerator": "free"}
    settings = {
        "local": experiment("mnist-ldp-gaussian-fedexp"),
        "central": vary(experiment("mnist-cdp-fedexp"), free),
        **{kind: vary(experiment("mnist-cdp-fedexp"), free | {"algorithm.aggregation": kind}) for kind in KINDS[2:]},
    }
    runs = {kind: size.runs(one) for kind, one in settings.items()}
    planned = [run for kind in KINDS for run in trainings(runs[kind], f"two-party: {kind}")]
    images = fingerprint(data)
    results = Results(all_records({"two-party": planned}, out, images, Place(device, data, jobs))["two-party"], images)
    means, rows = {}, {}
    for kind in KINDS:
        finished = results.training(runs[kind])
        reached = spread([100 * final(one, "test_accuracy") for one in finished])
        means[kind] = reached.mean
        rows[kind] = {
            "accuracy": reached.mean,
            "sd": reached.sd,
            "seeds": reached.n,
            "epsilon": finished[0]["epsilon_total"],
        }
    for row in rows.values():
        row["of the difference"] = (row["accuracy"] - means["local"]) / (means["central"] - means["local"])
    return rows


def overhead(dimension: int, nodes: int) -> dict[str, Any]:
    import numpy as np
    import torch

    from dpfedexp.core.clipping import clip
    from dpfedexp.core.noise import ChaChaNoise, from_words, to_words
    from dpfedexp.core.sums import Sums
    from dpfedexp.mechanisms import Report
    from dpfedexp.mechanisms.aggregation import (
        Helper,
        PrivateKey,
        RoundBinding,
        mask_row,
        new_key,
        set_digest,
        unmask_sum,
    )
    from dpfedexp.mechanisms.central_gaussian import SecureCentralGaussian
    from dpfedexp.mechanisms.serialization import encode
    from dpfedexp.mechanisms.two_party import TwoPartyGaussian

    plain = SecureCentralGaussian(0.3, 5.0, numerator="free")
    mechanism = TwoPartyGaussian(0.3, 5.0, numerator="free")
    updates = clip(torch.randn(nodes, dimension, generator=torch.Generator().manual_seed(0)), 0.3)
    everyone = torch.arange(nodes)
    reports = mechanism.randomize(updates, everyone, ChaChaNoise()).vector
    times: dict[str, float] = {}

    def timed(name: str, work: Any) -> Any:
        made, spent = None, []
        for _ in range(REPEATS):
            began = time.process_time()
            made = work()
            spent.append(time.process_time() - began)
        times[name] = min(spent)
        return made

    def added() -> Sums:
        sums = [plain.collect(Report(row[None])) for row in reports]
        return sum(sums[1:], sums[0])

    sums = timed("plain: server adds", added)
    timed("plain: server's noise", lambda: plain.release(sums, nodes, ChaChaNoise(), ChaChaNoise()))

    with tempfile.TemporaryDirectory() as folder:
        public = new_key(Path(folder) / "key")
        helper = Helper(PrivateKey.load(Path(folder) / "key"), 2, lambda *_: None, ChaChaNoise)
        columns = mechanism.columns(dimension)
        round_ = RoundBinding("benchmark", 1, secrets.token_hex(16), columns, mechanism.clip, encode(mechanism))
        rows = timed("two-party: grid, all clients", lambda: to_words(mechanism.units(Report(reports))))
        sent = timed(
            "two-party: mask and seal, all clients",
            lambda: {node: mask_row(row, round_, node, public) for node, row in enumerate(rows)},
        )
        seeds = [(node, one.sealed) for node, one in sent.items()]
        answer = timed("two-party: helper", lambda: helper.answer(round_, seeds))
        require_same(answer.digest, set_digest(round_, seeds))

        def finished() -> Any:
            own = to_words(mechanism.noise_units(columns, "server", ChaChaNoise(), ChaChaNoise()))
            total = unmask_sum([one.words for one in sent.values()], answer.words, own)
            return mechanism.decode(from_words(total), nodes, nodes)

        release = timed("two-party: server", finished)
    off = float((release.c_bar - sums.vector[:-1] / nodes).abs().max())
    assert off < 20 * 5.0 * 0.3 / nodes, "the release is the plain sum and noise"
    return {
        "dimension": dimension,
        "nodes": nodes,
        "processor_seconds": {name: round(value, 4) for name, value in times.items()},
        "bytes_client_to_server": {"plain": 4 * (dimension + 1), "two-party": 8 * columns + len(seeds[0][1])},
        "bytes_server_to_helper": sum(8 + len(sealed) for _, sealed in seeds),
        "bytes_helper_to_server": int(np.asarray(answer.words).nbytes),
    }


def require_same(one: str, other: str) -> None:
    if one != other:
        raise RuntimeError("the helper answered for another set")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "overhead"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", default=os.environ.get("DPFEDEXP_DATA"))
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--device", help="of the accuracy's runs")
    parser.add_argument("--dimension", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=20)
    given = parser.parse_args()
    if given.what == "accuracy":
        results = given.out or HERE.parent / "experiments" / "results"
        made = accuracy(given.seeds, results, given.device, given.data, given.jobs)
        print(json.dumps(made, indent=1))
        return
    made = {**overhead(given.dimension, given.nodes), "machine": f"{os.cpu_count()} cores, {platform.machine()}"}
    text = json.dumps(made, indent=1) + "\n"
    (given.out or HERE / "results" / "two-party.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
