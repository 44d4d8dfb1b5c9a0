"""Runs of pytest in forked copies of this process, which has imported the slow packages once.

Every slot has its own copy of the package in a temporary folder, first on the path of the run and of the processes that its tests
start: the work tree is never touched.
"""

from __future__ import annotations

import compileall
import contextlib
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

PRELOADED = (
    "torch numpy scipy.optimize scipy.special scipy.signal scipy.stats scipy.integrate safetensors.torch pydantic typer rich "
    "mpmath "
    "dp_accounting dp_accounting.pld.privacy_loss_distribution dp_accounting.rdp cryptography.hazmat.primitives.ciphers.algorithms "
    "opendp.prelude flwr.app flwr.serverapp flwr.clientapp torch.func"
)
_PYTEST = "pytest hypothesis anyio.pytest_plugin xdist.plugin"
_MEMORY = 12 * 2**30
TIMED_OUT = -signal.SIGALRM


def preload(names: str = "") -> None:
    """Imports what pytest imports, and the modules with these names. One thread: a forked copy has no others."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    for name in f"{_PYTEST} {names}".split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@dataclass(frozen=True)
class Slot:
    """A place where one run at a time happens."""

    folder: Path
    package: str

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def out(self) -> Path:
        return self.folder / "out.txt"

    def write(self, file: str, text: str) -> None:
        path = self.source / self.package / file
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


@contextlib.contextmanager
def slots(package: Path, count: int) -> Iterator[list[Slot]]:
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        made = []
        for number in range(count):
            slot = Slot(Path(folder).resolve() / f"slot{number}", package.name)
            shutil.copytree(package, slot.source / package.name, ignore=shutil.ignore_patterns("__pycache__"))
            compileall.compile_dir(slot.source, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
            made.append(slot)
        yield made


@dataclass(frozen=True)
class Job:
    """One run of pytest, to its first failure with `stop`.

    `prepare` changes the slot before it, `plugin` is made in the forked copy, and `finish` is told how it ended. After `limit`
    seconds it is ended.
    """

    tests: list[Path]
    plugin: Callable[[Slot], Any]
    prepare: Callable[[Slot], None]
    finish: Callable[[Slot, int, float], None]
    limit: float
    stop: bool = True


def run(jobs: Iterable[Job], places: list[Slot], root: Path, tick: Callable[[], None] = lambda: None) -> None:
    """All the jobs, as many at a time as there are places. A job's `finish` gets its exit code, negative for a signal."""
    free, waiting = list(places), iter(jobs)
    running: dict[int, tuple[Slot, Job, float]] = {}
    more = True
    try:
        while more or running:
            while free and more:
                job = next(waiting, None)
                if job is None:
                    more = False
                    break
                slot = free.pop()
                job.prepare(slot)
                running[_fork(job, slot, root)] = (slot, job, time.monotonic())
            for pid in list(running):
                slot, job, began = running[pid]
                done, status = os.waitpid(pid, os.WNOHANG)
                seconds = time.monotonic() - began
                if done:
                    _end_group(pid)
                    del running[pid]
                    free.append(slot)
                    job.finish(slot, os.waitstatus_to_exitcode(status), seconds)
                elif seconds > job.limit:
                    os.kill(pid, signal.SIGALRM)
            tick()
            time.sleep(0.02)
    finally:
        for pid in running:
            _end_group(pid)
            os.waitpid(pid, 0)  # it may still write to its slot until it is gone


def _end_group(pid: int) -> None:
    """Whatever a run's tests have started and left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _fork(job: Job, slot: Slot, root: Path) -> int:
    slot.out.write_text("")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        return pid
    code = 70
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        code = _in_the_copy(job, slot, root)
    finally:
        os._exit(code)


def _in_the_copy(job: Job, slot: Slot, root: Path) -> int:
    import pytest

    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    log = os.open(slot.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    os.chdir(root)
    scratch = slot.folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    path = os.pathsep.join(filter(None, [str(slot.source), os.environ.get("PYTHONPATH", "")]))
    os.environ |= {
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        "DPFEDEXP_PRIVATE": str(scratch / "private"),
        "TMPDIR": str(scratch),
    }
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(slot.source), str(root)]
    options = [
        "-q",
        *(["-x"] if job.stop else []),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--hypothesis-seed=0",
        "--rootdir",
        str(root),
    ]
    options += ["--basetemp", str(scratch / "pytest"), "-W", "ignore"]
    code = int(pytest.main([*options, *map(str, job.tests)], plugins=[job.plugin(slot)]))
    loaded = sys.modules.get(slot.package)
    if loaded is not None and not str(loaded.__file__).startswith(str(slot.source)):
        return 71
    sys.stdout.flush()
    sys.stderr.flush()
    return code
