"""Runs of pytest in forked copies of this process, which has imported the slow packages once.

Every worker has its own copy of the package in a temporary folder, first on the path of the run and of the processes that its tests
start: the work tree is never touched.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation.operators import Mutant

_PYTEST = "pytest hypothesis anyio.pytest_plugin pytest_cov.plugin coverage "
_PRELOADED = (
    "torch torch.func numpy scipy.optimize scipy.special "
    "scipy.signal scipy.stats scipy.integrate safetensors.torch pydantic typer rich mpmath dp_accounting "
    "dp_accounting.pld.privacy_loss_distribution dp_accounting.rdp cryptography.hazmat.primitives.ciphers.algorithms "
    "opendp.prelude flwr.app flwr.serverapp flwr.clientapp"
)
_MEMORY = 12 * 2**30


@dataclass(frozen=True)
class Job:
    """One run of pytest on test files.

    With a mutant: in its presence, only the tests in `seconds`, in that order, to the first failure. Without: all tests, with their
    outcomes, their times and the lines that each of them runs.
    """

    files: tuple[Path, ...]
    mutant: Mutant | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code, negative for a signal, its time, what it wrote (JSON, or a test's name), and its log."""

    job: Job
    code: int
    seconds: float
    wrote: str
    log: str


def run(jobs: Iterable[Job], root: Path, package: Path, workers: int) -> Iterator[Ended]:
    """All the jobs, `workers` at a time, in the order in which they end. Closing the generator ends what runs."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # a forked copy has no other threads
    for name in (_PYTEST + _PRELOADED * (package.name == "dpfedexp")).split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    waiting, running = iter(jobs), {}
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        free = [Path(folder).resolve() / str(number) for number in range(workers)]
        for slot in free:
            shutil.copytree(package, slot / "src" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            while True:
                while free and (job := next(waiting, None)):
                    slot = free.pop()
                    process = multiprocessing.get_context("fork").Process(target=_copy, args=(job, slot, root, package))
                    process.start()
                    running[process] = (slot, job, time.monotonic())
                if not running:
                    return
                time.sleep(0.02)
                for process, (slot, job, began) in list(running.items()):
                    seconds = time.monotonic() - began
                    if process.exitcode is not None:
                        _end_group(process.pid)
                        del running[process]
                        if job.mutant is not None:
                            shutil.copy(package / job.mutant.file, slot / "src" / package.name / job.mutant.file)
                        yield Ended(
                            job, process.exitcode, seconds, *((slot / name).read_text() for name in ("out", "log"))
                        )
                        free.append(slot)
                    elif seconds > (60 + 10 * sum(job.seconds.values()) if job.mutant else 1200):
                        os.kill(process.pid, signal.SIGALRM)
        finally:
            for process in running:
                _end_group(process.pid)
                process.join()  # it may write to its slot until it is gone


def _end_group(pid: int) -> None:
    """Whatever a run's tests have started and left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _copy(job: Job, slot: Path, root: Path, package: Path) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = _pytest(job, slot, root, package)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _pytest(job: Job, slot: Path, root: Path, package: Path) -> int:
    import pytest

    out, source, scratch = slot / "out", slot / "src", slot / "scratch"
    out.write_text("")
    log = os.open(slot / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    os.chdir(root)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        "COVERAGE_FILE": str(scratch / "coverage"),
        "DPFEDEXP_PRIVATE": str(scratch / "private"),
        "TMPDIR": str(scratch),
    }
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(source), str(root)]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "-W", "ignore"]
    options += [f"--rootdir={root}", f"--basetemp={scratch / 'pytest'}", *map(str, job.files)]
    if job.mutant is not None:
        path = source / package.name / job.mutant.file
        path.write_text(job.mutant.apply(path.read_text()))
        code = int(pytest.main(["-x", *options], plugins=[_Chosen(job.seconds, out)]))
    else:
        reach = _Reach(package.name)
        code = int(pytest.main([f"--cov={source}", "--cov-context=test", "--cov-report=", *options], plugins=[reach]))
        out.write_text(json.dumps(reach.records(source / package.name)))
    loaded = sys.modules.get(package.name)
    return code if loaded is None or str(loaded.__file__).startswith(str(source)) else 71


class _Chosen:
    """Keeps the chosen tests, in their order, and ends the process when one takes far too long.

    The name of the test that runs, and of the one that failed, is in `out` whatever happens to the process.
    """

    def __init__(self, seconds: dict[str, float], out: Path) -> None:
        self._seconds, self._out = seconds, out

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        order = list(self._seconds)
        items[:] = sorted((i for i in items if i.nodeid in self._seconds), key=lambda i: order.index(i.nodeid))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._out.write_text(nodeid)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(15 + int(10 * self._seconds[nodeid]))

    def pytest_runtest_logfinish(self) -> None:
        signal.alarm(0)


class _Reach:
    """The outcome and the time of every test; caches of the package are emptied before each, so that its lines are counted."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tests[nodeid] = {"outcome": "passed", "seconds": 0.0}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == self._package:
                for value in list(vars(module).values()):
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        record = self._tests[report.nodeid]
        record["seconds"] += report.duration
        if not report.passed:
            record["outcome"] = report.outcome
            crash = getattr(report.longrepr, "reprcrash", None)
            record["reason"] = crash.message.partition("\n")[0] if crash else ""

    def records(self, package: Path) -> dict[str, dict[str, Any]]:
        """The tests with the lines that each ran. What a fixture runs counts for all: a later test may use it as it is."""
        import coverage

        data = coverage.CoverageData(os.environ["COVERAGE_FILE"])
        data.read()
        for record in self._tests.values():
            record["lines"] = {}
        for path in data.measured_files():
            file = str(Path(path).relative_to(package))
            for line, contexts in data.contexts_by_lineno(path).items():
                made = any(context.endswith("|setup") for context in contexts)
                for test in self._tests if made else {context.rpartition("|")[0] for context in contexts} - {""}:
                    self._tests[test]["lines"].setdefault(file, []).append(line)
        return self._tests
