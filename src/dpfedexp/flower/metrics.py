"""Prometheus metrics and health of a run, or of a site's guard, from files that are there anyway.

A process of its own reads them, so a question costs the run nothing and can't reach into it. A run's numbers are those that are
released or public: round, ε, status, and counts of replies where the guarantee does not hide them. A guard's numbers are the
site's own business; both are served on loopback unless the operator says otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dpfedexp.engine.outlets import SERVER_CHECKPOINT
from dpfedexp.errors import InputError
from dpfedexp.flower.node.show import guard_summary, load_limits
from dpfedexp.flower.server.status import EXIT_CODES, read_status

_COUNTS = ("asked", "valid", "refused", "missing")
Lines = list[tuple[str, str, float]]
"""Name, label, value."""


def run_metrics(folder: Path) -> tuple[Lines, bool]:
    """A run's metrics, and whether it is well: running or completed."""
    status = read_status(folder)
    lines: Lines = [
        ("dpfedexp_run_round", "", status["round"]),
        ("dpfedexp_run_rounds", "", status["rounds"]),
        ("dpfedexp_run_epsilon", "", math.inf if status["epsilon"] is None else status["epsilon"]),
        *(("dpfedexp_run_status", f'status="{name}"', float(name == status["status"])) for name in EXIT_CODES),
    ]
    try:
        history = json.loads((folder / SERVER_CHECKPOINT).read_text(encoding="utf-8"))["history"]
    except (OSError, ValueError, KeyError):
        history = []
    newest: dict[str, Any] = history[-1] if history else {}
    lines += [("dpfedexp_run_clients", f'what="{name}"', newest[name]) for name in _COUNTS if name in newest]
    return lines, status["status"] in ("running", "completed")


def guard_metrics(path: Path) -> tuple[Lines, bool]:
    """A site's metrics, and whether its node would answer at all."""
    summary = guard_summary(load_limits(path), last=0)
    names = {"epsilon": "epsilon", "max_epsilon_total": "epsilon_limit", "charges": "charges"}
    return [(f"dpfedexp_guard_{name}", "", summary[key]) for key, name in names.items()], not summary["problem"]


def to_text(lines: Iterable[tuple[str, str, float]]) -> str:
    """In Prometheus's text format.

    >>> print(to_text([("dpfedexp_run_round", "", 3)]), end="")
    # TYPE dpfedexp_run_round gauge
    dpfedexp_run_round 3
    """
    text, typed = [], set()
    for name, label, value in lines:
        if name not in typed:
            text.append(f"# TYPE {name} gauge")
            typed.add(name)
        shown = "+Inf" if math.isinf(value) else f"{value:.10g}"
        text.append(f"{name}{{{label}}} {shown}" if label else f"{name} {shown}")
    return "\n".join(text) + "\n"


def metrics_server(sources: list[Callable[[], tuple[Lines, bool]]], host: str, port: int) -> ThreadingHTTPServer:
    """Serves /metrics and /healthz (200 if all is well, 503 if not) until it is shut down."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            try:
                found = [source() for source in sources]
                well, text = all(good for _, good in found), to_text(line for lines, _ in found for line in lines)
            except (InputError, ValueError, KeyError, TypeError, AttributeError, IndexError):
                # What is not as the library writes it is no reason to stop answering.
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
            """Who asked when is nobody's business."""

    return ThreadingHTTPServer((host, port), Handler)
