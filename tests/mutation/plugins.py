"""What the mutation run asks of pytest: who reaches which line, and the chosen tests in the chosen order."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


class Reach:
    """Records for every test how long it takes and which lines of the package it runs, in this process.

    Caches of the package are emptied before every test, so that a line is counted for each test that needs it. What a fixture runs
    counts for every test of the file, because a later test may use the same fixture without running it again.
    """

    def __init__(self, package: Path, out: Path) -> None:
        self._name, self._prefix, self._out = package.name, str(package) + "/", out
        self._tests: dict[str, dict[str, Any]] = {}
        self._shared: set[tuple[str, int]] = set()
        self._lines: set[tuple[str, int]] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        _clear_caches(self._name)
        self._lines = set()
        began = time.perf_counter()
        yield
        record = self._tests.setdefault(item.nodeid, {"outcome": "passed"})
        record |= {"seconds": time.perf_counter() - began, "lines": self._lines}

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self):
        with self._traced(self._shared):
            yield

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self):
        with self._traced(self._lines):
            yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            record = self._tests.setdefault(report.nodeid, {})
            record["outcome"] = report.outcome
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:
                record["reason"] = crash.message.partition("\n")[0]

    def pytest_sessionfinish(self) -> None:
        for record in self._tests.values():
            reached: dict[str, list[int]] = {}
            for name, line in sorted(record.get("lines", set()) | self._shared):
                reached.setdefault(name.removeprefix(self._prefix), []).append(line)
            record["lines"] = reached
        self._out.write_text(json.dumps(self._tests))

    def _traced(self, lines: set[tuple[str, int]]):
        prefix = self._prefix

        def on_line(frame: FrameType, event: str, _: object):
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return on_line

        def on_call(frame: FrameType, event: str, _: object):
            return on_line if frame.f_code.co_filename.startswith(prefix) else None

        return _Tracing(on_call)


class _Tracing:
    def __init__(self, function: Any) -> None:
        self._function = function

    def __enter__(self) -> None:
        sys.settrace(self._function)
        threading.settrace(self._function)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def _clear_caches(package: str) -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class Chosen:
    """Keeps the tests with the given names, in their order, and ends the process when one takes far too long.

    The name of the test that runs, and of the one that failed, is in `out` whatever happens to the process.
    """

    def __init__(self, seconds: dict[str, float], out: Path) -> None:
        self._limits = {name: 15 + int(10 * value) for name, value in seconds.items()}
        self._order = {name: place for place, name in enumerate(seconds)}
        self._out = out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda i: self._order[i.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._out.write_text(nodeid)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(self._limits[nodeid])

    def pytest_runtest_logfinish(self) -> None:
        signal.alarm(0)
