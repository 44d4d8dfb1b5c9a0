"""`make release`: everything of a release, in dist/; nothing is uploaded and no tag is set.

The source distribution and the wheel are built from the commit, twice, and must be the same bytes. Both are installed and used in
a clean environment with the versions that the tests run with, and the wheel in the oldest and the newest that this machine has.
What it does not have is said to be unchecked, on the screen and in CHECKED.md. A tree with uncommitted changes, or a version
without a dated section in CHANGELOG.md, is refused; a rehearsal takes both, from the last commit.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.installed.check import Environment, Failure, check, tested_torch
from tests.release.bill import write_bill
from tests.release.build import build_twice, digest, git
from tests.release.changelog import Refused, notes, section_of
from tests.release.environments import PROJECT, floor, interpreters, is_small, lowest_versions, offered, plan

ROOT = Path(__file__).resolve().parents[2]
VERSION = "src/dpfedexp/__init__.py"
MORE = (
    "A torch is checked where pip finds a build of it that ends with +cpu (PIP_EXTRA_INDEX_URL), or with `make release LARGE=1`, "
    "which installs gigabytes; a Python, where it is on the path or in pyenv."
)


def refuse_changes(root: Path, rehearsal: bool) -> None:
    """Refuses a tree with uncommitted changes; a rehearsal says that they are left out."""
    changed = git(root, "status", "--porcelain").splitlines()
    if not changed:
        return
    if not rehearsal:
        example = changed[0].split(maxsplit=1)[1]
        raise Refused(
            f"{len(changed)} files are changed or new and not committed, such as {example}; commit or remove them, or rehearse "
            "with `make release DRY=1`."
        )
    print(f"A rehearsal: {len(changed)} files that are changed or new and not committed are not in it.", flush=True)


def checked_page(version: str, passed: list[str], unchecked: list[str]) -> str:
    """What was checked and what was not, as a page."""
    lines = [f"# Where dpfedexp {version} was installed and run", "", *(f"- {one}" for one in passed), ""]
    if unchecked:
        lines += ["## Not checked here", "", *(f"- {one}" for one in unchecked), "", MORE]
    return "\n".join(lines).rstrip() + "\n"


def release(root: Path, out: Path, rehearsal: bool, large: bool) -> None:
    """Everything, into the folder `out`, which is emptied first and stays empty unless all checks pass."""
    start = time.monotonic()
    commit = git(root, "rev-parse", "HEAD")
    refuse_changes(root, rehearsal)
    version = re.search(r'^__version__ = "(.+)"$', git(root, "show", f"{commit}:{VERSION}"), re.MULTILINE)[1]
    section = section_of(version, git(root, "show", f"{commit}:CHANGELOG.md"), rehearsal)
    shutil.rmtree(out, ignore_errors=True)

    def say(sentence: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {sentence}", flush=True)

    with tempfile.TemporaryDirectory(prefix="dpfedexp-release-") as name:
        folder = Path(name).resolve()
        say(f"building commit {commit[:12]} twice")
        ready = folder / "ready"
        ready.mkdir()
        sdist, wheel = (Path(shutil.copy(path, ready)) for path in build_twice(root, commit, folder))
        say(f"both builds have the same bytes: {sdist.name}, {wheel.name}")
        lowest = folder / "lowest.txt"
        lowest.write_text("\n".join(lowest_versions(PROJECT, ["secure"])) + "\n")
        pythons = interpreters(floor(PROJECT["requires-python"]))
        small = (lambda version: True) if large else is_small
        others, unchecked = plan(pythons, offered, lowest, small)
        as_tested = Environment("the versions of constraints.txt", torch=tested_torch())
        passed, epoch = [], int(git(root, "show", "--no-patch", "--format=%ct", commit))

        def bill(programs: Path) -> None:
            place = folder / "bill"
            place.mkdir()
            count = write_bill(programs, wheel, root, place, epoch, ready / f"dpfedexp-{version}.cdx.json")
            say(f"bill of materials: {count} components, valid")

        for artefact, where in [(wheel, as_tested), (sdist, as_tested), *((wheel, other) for other in others)]:
            python = next(number for number, program in pythons.items() if program == where.python)
            title = f"{artefact.name} on Python {python}, {where.torch or 'no torch'}: {where.title}"
            say(title)
            begin = time.monotonic()
            if artefact is wheel and where is as_tested:
                check(artefact, where, after=bill)
            else:
                check(artefact, where)
            passed.append(f"{title} ({time.monotonic() - begin:.0f} s)")
        (ready / "CHECKED.md").write_text(checked_page(version, passed, unchecked))
        (ready / "RELEASE_NOTES.md").write_text(notes(section, version, commit))
        sums = [f"{digest(path)}  {path.name}\n" for path in sorted(ready.iterdir())]
        (ready / "SHA256SUMS").write_text("".join(sums))
        shutil.copytree(ready, out)
    say(f"{'rehearsed' if rehearsal else 'ready'}: {len(passed)} checks passed, {len(unchecked)} not checked here")
    for sentence in unchecked:
        print(f"not checked here: {sentence}")
    if unchecked:
        print(MORE)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:9,}  {path}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dry", action="store_true", help="a rehearsal: needs neither a clean tree nor a dated section"
    )
    parser.add_argument("--large", action="store_true", help="check torches that bring accelerator packages along, too")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder, which is emptied (default: dist)")
    given = parser.parse_args()
    try:
        release(ROOT, given.out, given.dry, given.large)
    except Refused as refusal:
        print(f"Nothing was released: {refusal}", file=sys.stderr)
        return 2
    except (Failure, RuntimeError) as failure:
        print(f"The release failed: {failure}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"The release failed: {' '.join(error.cmd)}\n{error.stderr or ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
