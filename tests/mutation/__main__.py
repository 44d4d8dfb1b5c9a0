"""`python -m tests.mutation`: how many wrong changes of the privacy-relevant files the tests notice.

torch and SciPy are imported once, every mutant runs in a forked copy of that process, meets only the tests that reach its line,
quickest first, and the first failure ends it. mutmut and cosmic-ray, which do the same for any project, were not tried.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.mutation import forks
from tests.mutation.result import Display, print_result, write_json
from tests.mutation.run import Project, judge, measure, plan
from tests.mutation.table import TableError

ENOUGH = 0.95


def main(arguments: list[str] | None = None) -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "files", nargs="*", help="files or folders of the package; all that guards.toml lists by default"
    )
    parser.add_argument("--count", type=int, help="mutants in all (300; 40 for every named file)")
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", type=Path, default=here.parent.parent, help="the folder that holds src and tests")
    parser.add_argument("--package", default="dpfedexp")
    parser.add_argument(
        "--tables", type=Path, default=here, help="the folder that holds guards.toml and equivalents.toml"
    )
    parser.add_argument("--json", type=Path, help="where the result goes (build/mutants/result.json)")
    given = parser.parse_args(arguments)
    root = given.root.resolve()
    project = Project(root, root / "src" / given.package, given.tables.resolve(), root / "build" / "mutants")
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _leave)
    # A shell in the background starts its programs deaf to ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        made = plan(project, given.files, given.count, given.seed)
        forks.preload(forks.PRELOADED if given.package == "dpfedexp" else "")
        with forks.slots(project.package, given.workers) as places, Display(len(made.chosen)) as display:
            measure(project, made, places, display.tick)
            outcomes = judge(project, made, places, display.tick, display.tell)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; what was judged so far is remembered, and the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    score = print_result(outcomes, made.unused, made.failing, time.monotonic() - began)
    write_json(given.json or project.state / "result.json", outcomes, made.failing, score)
    return 0 if score >= ENOUGH else 1


def _leave(number: int, _: object) -> None:
    """Ends by an exception, so that the running copies are ended and the temporary folder is removed on the way."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
