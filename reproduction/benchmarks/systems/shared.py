"""The workloads without the rest of dpfedexp, so that another system's environment needs only torch and itself."""

from __future__ import annotations

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def _bare_package() -> None:
    """`dpfedexp` as a package of modules, without its own `__init__`, which imports everything."""
    if "dpfedexp" not in sys.modules:
        package = types.ModuleType("dpfedexp")
        package.__path__ = [str(ROOT / "src" / "dpfedexp")]
        sys.modules["dpfedexp"] = package
        sys.path.append(str(ROOT))


def load(name: str):
    """The workload `name`."""
    _bare_package()
    from reproduction.benchmarks.workloads import workload

    return workload(name)


def peak_memory() -> int:
    """Of this process and of the largest of its children, in bytes."""
    import resource

    return 1024 * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    import os

    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def networks():
    """The benchmarks' networks, without the rest of dpfedexp."""
    _bare_package()
    from reproduction.benchmarks import networks as found

    return found
