"""Many nodes on one machine: does every reply arrive, how long is a round, how much memory does the SuperLink take?

    python -m reproduction.benchmarks.nodes --nodes 50 --rounds 10 [--processes] [--parameters 100000] [--out FILE]

A real SuperLink (`dpfedexp superlink`) with TLS and node authentication, a real server app, and for every node a connection with
a key of its own through Flower's own functions and the site's (`MessageGate`). With `--processes` every node is a SuperNode with an
app process for each message, which needs about 0.2 GB a node and 0.4 GB more while its app runs. Without it, the nodes are threads
of one process and training is replaced by a fixed update, so that the exchange itself is what is measured.

min_reply_fraction is 1: a single reply that is lost or refused fails the round, and the command.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from dpfedexp.engine.run import read_history
from dpfedexp.flower.app import app_hash, new_app, run_app
from dpfedexp.flower.local_deployment import Deployment

HERE = Path(__file__).resolve().parent
POLL = 3.0
"""Seconds between two questions of a node that has nothing to do, as Flower's own SuperNode waits."""


class LinkOnly(Deployment):
    """A SuperLink that knows all keys, without SuperNodes."""

    def start_supernode(self, index: int, key: Path | None = None) -> Any:
        return None


def make_app(folder: Path, nodes: int, rounds: int, out: Path, parameters: int) -> Path:
    new_app(folder)
    path = folder / "pyproject.toml"
    content = tomllib.loads(path.read_text())
    config = content["tool"]["flwr"]["app"]["config"]
    config["federation"] |= {
        "clients": nodes,
        "rounds": rounds,
        "min_reply_fraction": 1.0,
        "folder": str(out),
        "round_timeout": 300.0,
    }
    # Nodes whose training is replaced answer no votes.
    del config["federation"]["epsilon"]
    config |= {"algorithm": {"name": "cdp_fedexp", "clip": 0.3, "noise_multiplier": 5.0}, "local": {"lr": 0.1}}
    path.write_text(tomli_w.dumps(content))
    task = folder / "federation" / "task.py"
    text = task.read_text()
    task.write_text(text.replace("nn.Linear(4, 1)", f"nn.Linear({parameters}, 1, bias=False)"))
    return folder


def answer(deployment: Deployment, index: int, guard: Any, stop: threading.Event) -> None:
    """One node: Flower's connection, the site's gate, and in the place of an app a reply that is the model and a little more."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.fleet_http_connection import http_request_response
    from flwr.supernode.nodestate import NodeStateFactory

    from dpfedexp.flower.site import MessageGate, Site

    private = load_ssh_private_key(deployment.keys[index][0].read_bytes(), None)
    store = ObjectStoreFactory()
    state = NodeStateFactory(store).state()
    gate = MessageGate(Site(guard))
    authority = deployment.certificates.authority.read_bytes()  # type: ignore[union-attr]
    address = f"{deployment.host}:{deployment.port}"
    with http_request_response(address, False, authority, (private, private.public_key())) as connection:  # type: ignore[arg-type, union-attr]
        node_id, receive, send, get_run, get_fab, pull_object, push_object, confirm = connection
        state.set_node_id(node_id)
        while not stop.is_set():
            run = gate._pull_one(
                state=state,
                object_store=store.store(),
                node_config={},
                receive=receive,
                get_run=get_run,
                get_fab=get_fab,
                pull_object=pull_object,
                confirm_message_received=confirm,
                trusted_entities=None,
            )
            if run is None:
                stop.wait(POLL)
                continue
            if gate._admitted is not None:
                asked = gate._admitted
                model = asked.message.content.array_records["arrays"]
                trained = ArrayRecord({name: Array(array.numpy() + 1e-3) for name, array in model.items()})
                reply = Message(RecordDict({"arrays": trained}), reply_to=asked.message)
                reply.metadata.__dict__["_message_id"] = reply.object_id
                session = state.start_session(run)
                state.store_message_and_object_tree(reply, get_object_tree(reply), session)
                for key, value in get_all_nested_objects(reply).items():
                    state.store_object(run, session, key, value.deflate())
            gate.push(state, store.store(), send, push_object)


def memory(pid: int) -> int:
    """Peak resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def measure(place: Path, nodes: int, rounds: int, processes: bool, parameters: int) -> dict[str, Any]:
    from dpfedexp.flower.guard import Guard

    out = place / "out"
    app = make_app(place / "app", nodes, rounds, out, parameters)
    limits = "max_epsilon_per_round = 1e9\nmax_epsilon_total = 1e9\ndelta = 1e-5\nmax_clip = 1\nmechanisms = ['central-gaussian']\n"
    (place / "guard.toml").write_text(limits + f'apps = ["{app_hash(app)}"]\n')
    environment = {"DPFEDEXP_DATA": "", "OMP_NUM_THREADS": "1", "DPFEDEXP_PRIVATE": str(place / "private")}
    os.environ.update(environment)
    kind = Deployment if processes else LinkOnly
    given = {n: {"dpfedexp-guard": str(place / "guard.toml")} for n in range(nodes)} if processes else {}
    begun = time.monotonic()
    with kind(place / "up", nodes, node_config=given, environment=environment) as deployment:
        stop = threading.Event()
        threads = []
        for index in range(0 if processes else nodes):
            own = place / f"guard.node{index}.toml"
            shutil.copyfile(place / "guard.toml", own)
            threads.append(
                threading.Thread(target=answer, args=(deployment, index, Guard.load(own), stop), daemon=True)
            )
            threads[-1].start()
        started = time.monotonic()
        os.environ.update(deployment.environment)
        code = run_app(app, "up")
        ended = time.monotonic()
        peak = memory(deployment.superlink.pid) if deployment.superlink else 0
        stop.set()
        for thread in threads:
            thread.join(60)
    history = read_history(out)
    books = list(place.glob("guard.node*.ledger.jsonl"))
    charges = sum(len(path.read_text().splitlines()) - 1 for path in books)
    valid = [line["valid"] for line in history]
    if code or valid != [nodes] * rounds:
        raise SystemExit(f"replies were lost: {valid}, exit status {code}")
    return {
        "nodes": nodes,
        "rounds": rounds,
        "nodes are": "processes" if processes else "threads, without training",
        "parameters": parameters,
        "valid replies": sum(valid),
        "charges of all sites": charges,
        "ledgers": len(books),
        "seconds of the run": round(ended - started, 1),
        "seconds to start": round(started - begun, 1),
        "peak megabytes of the SuperLink": round(peak / 2**20),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}",
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--parameters", type=int, default=20)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "nodes.json")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="dpfedexp-nodes-"))
    try:
        result = measure(place, asked.nodes, asked.rounds, asked.processes, asked.parameters)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    before = json.loads(asked.out.read_text()) if asked.out.exists() else []
    asked.out.write_text(json.dumps([*before, result], indent=1) + "\n")
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
