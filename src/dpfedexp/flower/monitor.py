"""Monitoring of runs and sites: `status.json`, `dpfedexp guard show`, and metrics for Prometheus.

    {"status": "running", "round": 3, "rounds": 10, "epsilon": 2.1, "delta": 1e-05, "reason": ""}

Everything in a run's status is public. It has no times, because the duration of a round depends on the clients' data. A server app
holds a lock on its ledger while it runs, so the status "running" with an unlocked ledger means "killed". A separate process reads
the metrics from existing files. A run's metrics are released or public; a guard's are private to the site. Both are served on
loopback by default.
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfedexp.accounting.ledger import read_chain
from dpfedexp.engine.outlets import LEDGER, STATUS
from dpfedexp.engine.run import read_history
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.files import try_lock

if TYPE_CHECKING:
    from dpfedexp.flower.guard import Limits

EXIT_CODES = {"completed": 0, "running": 4, "stopped": 3, "failed": 3, "killed": 4}
"""Exit codes by status; only "completed" has 0."""


def read_status(folder: Path | str) -> dict[str, Any]:
    """The content of `status.json`, with "killed" for a run that ended without writing its end."""
    path = Path(folder) / STATUS
    try:
        status: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"round": int, "rounds": int, "epsilon": int | float | None, "reason": str}
        known = status["status"] in EXIT_CODES and all(isinstance(status[name], kinds[name]) for name in kinds)
    except FileNotFoundError:
        raise InputError(f"{str(path)!r} does not exist; a server app writes it when it begins.") from None
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise InputError(f"{str(path)!r} can't be read; it is written anew after the next round.")
    if status["status"] == "running" and not _is_held(Path(folder) / LEDGER):
        status |= {"status": "killed", "reason": "the server app ended unexpectedly; repeat the command to resume."}
    return status


def describe(status: Mapping[str, Any]) -> str:
    """A run's status, rounds, epsilon and reason, for a reader."""
    epsilon = math.inf if status["epsilon"] is None else status["epsilon"]
    where = f"{status['round']} of {status['rounds']} rounds, epsilon {epsilon:.4g}"
    return f"{status['status']}: {where}. {status['reason']}".rstrip()


def _is_held(ledger: Path) -> bool:
    """Whether a process holds the ledger's lock; True where that is unknown."""
    try:
        with open(ledger, "rb") as file:
            return not try_lock(file.fileno())
    except OSError:  # it is held, or can't be opened
        return True


def load_limits(path: Path) -> Limits:
    """The limits in a guard file, or in a helper's file, which is recognized by its `private_key`."""
    from dpfedexp.flower.guard import Guard, HelperFile

    try:
        helps = "private_key" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        helps = False
    return HelperFile.load(path) if helps else Guard.load(path)


def guard_summary(guard: Limits, last: int = 10) -> dict[str, Any]:
    """The limits of a site or a helper, its total charges and its newest charges; reads only.

    "problem" is the reason for which the node would refuse requests, or "". "id" is None before the first use.
    """
    from dpfedexp.flower.guard import GuardFiles, read_ledger, total

    limits = {name: getattr(guard, name) for name in ("max_epsilon_total", "max_epsilon_per_round", "delta")}
    summary: dict[str, Any] = {"guard": str(guard.path), "id": None, **limits, "charges": 0, "epsilon": 0.0}
    summary |= {"apps": list(getattr(guard, "apps", ())), "last": [], "problem": ""}
    try:
        files = GuardFiles.of(guard.path)
        summary["id"] = files.id
        ledger = read_ledger(files)
        if ledger is not None and len(ledger):
            summary["charges"], summary["epsilon"] = len(ledger), total(ledger.charges(), guard.delta)
            lines = read_chain(files.ledger).records[-last:] if last else []
            summary["last"] = [{key: line.get(key, "") for key in ("time", "run", "round", "app")} for line in lines]
    except LedgerError as error:
        summary["problem"] = str(error)
    return summary


_COUNTS = ("asked", "valid", "refused", "missing")
Lines = list[tuple[str, str, float]]
"""Metrics as (name, label, value); those of one name follow each other."""


def run_metrics(folder: Path) -> tuple[Lines, bool]:
    """A run's metrics, and whether it is running or completed."""
    status = read_status(folder)
    lines: Lines = [
        ("dpfedexp_run_round", "", status["round"]),
        ("dpfedexp_run_rounds", "", status["rounds"]),
        ("dpfedexp_run_epsilon", "", math.inf if status["epsilon"] is None else status["epsilon"]),
        *(("dpfedexp_run_status", f'status="{name}"', float(name == status["status"])) for name in EXIT_CODES),
    ]
    try:
        newest = (read_history(folder) or [{}])[-1]
    except InputError:
        newest = {}
    lines += [("dpfedexp_run_clients", f'what="{name}"', newest[name]) for name in _COUNTS if name in newest]
    return lines, status["status"] in ("running", "completed")


def guard_metrics(path: Path) -> tuple[Lines, bool]:
    """A site's metrics, and whether its node can answer requests."""
    summary = guard_summary(load_limits(path), last=0)
    names = {"epsilon": "epsilon", "max_epsilon_total": "epsilon_limit", "charges": "charges"}
    return [(f"dpfedexp_guard_{name}", "", summary[key]) for key, name in names.items()], not summary["problem"]


def to_text(lines: Lines) -> str:
    """Format metrics in Prometheus's text format.

    >>> print(to_text([("dpfedexp_run_round", "", 3)]), end="")
    # TYPE dpfedexp_run_round gauge
    dpfedexp_run_round 3
    """
    text = []
    for name, values in itertools.groupby(lines, key=lambda line: line[0]):
        text.append(f"# TYPE {name} gauge")
        for _, label, value in values:
            shown = "+Inf" if math.isinf(value) else f"{value:.10g}"
            text.append(f"{name}{{{label}}} {shown}" if label else f"{name} {shown}")
    return "\n".join(text) + "\n"


def metrics_server(source: Callable[[], tuple[Lines, bool]], host: str, port: int) -> ThreadingHTTPServer:
    """Return an HTTP server of /metrics and /healthz, which the caller runs.

    `source` returns the metrics, and whether the run or site is in order: /healthz then has status 200, otherwise 503.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            try:
                lines, well = source()
                text = to_text(lines)
            except (InputError, ValueError, KeyError, TypeError, AttributeError, IndexError):
                # A malformed file must not stop the server.
                well, text = False, ""
            if self.path == "/metrics":
                self._answer(200, text)
            elif self.path == "/healthz":
                self._answer(200 if well else 503, "ok\n" if well else "not well\n")
            else:
                self._answer(404, "")

        def _answer(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Requests are not logged."""

    return ThreadingHTTPServer((host, port), Handler)
