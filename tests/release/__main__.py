"""`make release`: everything of a release, in dist/; nothing is uploaded and no tag is set.

The source distribution and the wheel are built from the commit, twice, and must be the same bytes. Both are installed and used in
a clean environment with the versions that the tests run with, and the wheel with the lowest and with the newest versions of
everything that pyproject.toml admits. A tree with uncommitted changes, or a version without a dated section in CHANGELOG.md, is
refused; a rehearsal takes both, from the last commit.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

from tests.release.installed import FIXED, PROJECT, SOURCE, Environment, Failure, check, require, step, version_of

DIFFERENT = ({"TZ": "UTC", "PYTHONHASHSEED": "1"}, {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2"})
"""Variables of two builds whose files must be the same."""
UNCHECKED = "another Python, and another torch, which brings gigabytes along (`make release LARGE=1`: the lowest and the newest)."
VALIDATE = (
    "import sys; from cyclonedx.schema import SchemaVersion; from cyclonedx.validation.json import JsonStrictValidator; "
    "error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()); sys.exit(error and str(error))"
)


class Refused(Exception):
    """There is nothing to release yet; the message says what is missing."""


def sections(changelog: str) -> dict[str, tuple[str | None, str]]:
    """What each version changed, the newest first: its day as YYYY-MM-DD where the title has one, and the text below."""
    parts = re.split(r"^## (\S+)(?: \((\d{4}-\d{2}-\d{2})\))?$", changelog, flags=re.MULTILINE)
    return {name: (date, text.strip()) for name, date, text in zip(*(parts[n::3] for n in (1, 2, 3)), strict=True)}


def notes(version: str, changelog: str, commit: str, rehearsal: bool) -> str:
    """The page that goes with a release: the version's section of the changelog; in a rehearsal, "Unreleased" will do.

    Raises:
        Refused: the version has no section with a date and text.
    """
    found = sections(changelog)
    date, text = found.get(version, (None, ""))
    if not (date and text) and not rehearsal:
        raise Refused(
            f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)' with text; give 'Unreleased' that title and begin a new "
            f"one, or rehearse with `make release DRY=1`."
        )
    state = f"Released {date}" if date else "A rehearsal, not a release"
    return (
        f"# dpfedexp {version}\n\n{state}, from commit {commit}.\n\n{text or found['Unreleased'][1]}\n\n### The files\n\n"
        "`SHA256SUMS` holds the checksums (`sha256sum --check SHA256SUMS`), the `.cdx.json` file the software bill of materials "
        "(CycloneDX), and `CHECKED.md` in which environments the wheel and the source distribution were installed and run, and "
        f"in which they were not. `git checkout {commit[:12]} && make release` builds the same bytes.\n"
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def refuse_changes(root: Path, rehearsal: bool) -> None:
    """Refuses a tree with uncommitted changes; a rehearsal says that they are left out."""
    changed = git(root, "status", "--porcelain").splitlines()
    if changed and not rehearsal:
        raise Refused(
            f"{len(changed)} files are changed or new and not committed, such as {changed[0].split(maxsplit=1)[1]}; commit or "
            "remove them, or rehearse with `make release DRY=1`."
        )
    if changed:
        print(f"A rehearsal: {len(changed)} files that are changed or new and not committed are not in it.", flush=True)


def pack_again(sdist: Path, epoch: int) -> None:
    """Replaces a source distribution by one with the same files in a fixed order, with one date and no user name.

    setuptools packs the times, owners and permissions that files happen to have; a wheel it dates by SOURCE_DATE_EPOCH.
    """
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, epoch
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), compresslevel=9, mtime=epoch))


def build(root: Path, commit: str, folder: Path, variables: dict[str, str]) -> tuple[Path, Path]:
    """The source distribution of a commit's files alone, and the wheel that is built from it, both dated with the commit."""
    epoch = git(root, "show", "--no-patch", "--format=%ct", commit)
    everything = os.environ | variables | {"SOURCE_DATE_EPOCH": epoch, "PYTHONPATH": ""}

    def make(kind: str, source: Path, pattern: str) -> Path:
        with tarfile.open(source) as archive:
            archive.extractall(folder / kind, filter="data")
        tree = min((folder / kind).rglob("pyproject.toml"), key=lambda path: len(path.parts)).parent
        words = [sys.executable, "-m", "build", "--quiet", "--no-isolation", f"--{kind}", "--outdir", str(folder)]
        subprocess.run([*words, str(tree)], check=True, env=everything, umask=0o022, capture_output=True, text=True)
        (made,) = folder.glob(pattern)
        return made

    folder.mkdir()
    git(root, "archive", "--output", str(folder / "files.tar"), commit)
    sdist = make("sdist", folder / "files.tar", "*.tar.gz")
    pack_again(sdist, int(epoch))
    return sdist, make("wheel", sdist, "*.whl")


def build_twice(root: Path, commit: str, folder: Path) -> tuple[Path, Path]:
    """The two files of a commit.

    Raises:
        Failure: a second build, in another folder, time zone and order of hashes, has other bytes.
    """
    made = [build(root, commit, folder / str(number), variables) for number, variables in enumerate(DIFFERENT)]
    for one, other in zip(*made, strict=True):
        require(
            digest(one) == digest(other), f"two builds of {one.name} from commit {commit} differ: {one} and {other}."
        )
    return made[0]


def lowest_versions(project: dict, extras: tuple[str, ...]) -> dict[str, str]:
    """The lowest version of every dependency that the project admits."""
    lines = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    wanted = [Requirement(line) for line in lines]
    return {one.name: next(s.version for s in one.specifier if s.operator in (">=", "==")) for one in wanted}


def write_bill(programs: Path, wheel: Path, folder: Path, epoch: str, out: Path) -> None:
    """The CycloneDX bill of materials of an environment in which the wheel was installed, validated strictly."""
    step([sys.executable, "-m", "venv", str(folder)], folder, "an environment for the bill of materials")
    request = f"cyclonedx-bom=={FIXED['cyclonedx-bom']}"
    step([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", request], folder, f"pip install {request}")
    tool = (
        f"{folder}/bin/cyclonedx-py environment --mc-type library --sv 1.6 --no-validate --output-reproducible".split()
    )
    options = ["--pyproject", str(SOURCE / "pyproject.toml"), "-o", str(out), str(programs / "python")]
    step([*tool, *options], folder, "cyclonedx-py environment", SOURCE_DATE_EPOCH=epoch)
    out.write_text(json.dumps(completed(json.loads(out.read_text()), wheel), indent=2, ensure_ascii=False) + "\n")
    step([f"{folder}/bin/python", "-c", VALIDATE, str(out)], folder, "the bill of materials against CycloneDX 1.6")


def completed(bill: dict, wheel: Path) -> dict:
    """The bill with the version of the package, which pyproject.toml leaves open, and the wheel's hash."""
    stated = {component["name"].lower(): component["version"].partition("+")[0] for component in bill["components"]}
    for name in ("torch", "numpy", "scipy", "dp-accounting", "flwr"):
        require(
            stated.get(name) == FIXED[name], f"the bill of materials says {name} {stated.get(name)}, not {FIXED[name]}"
        )
    version = version_of(wheel)
    about = {"version": version, "purl": f"pkg:pypi/{PROJECT['name']}@{version}"}
    about["hashes"] = [{"alg": "SHA-256", "content": digest(wheel)}]
    return bill | {"metadata": bill["metadata"] | {"component": bill["metadata"]["component"] | about}}


def release(root: Path, out: Path, rehearsal: bool, large: bool) -> None:
    """Everything, into the folder `out`, which is emptied first and stays empty unless all checks pass."""
    commit = git(root, "rev-parse", "HEAD")
    refuse_changes(root, rehearsal)
    stated = git(root, "show", f"{commit}:src/dpfedexp/__init__.py")
    version = re.search(r'^__version__ = "(.+)"$', stated, re.MULTILINE)[1]
    page = notes(version, git(root, "show", f"{commit}:CHANGELOG.md"), commit, rehearsal)
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="dpfedexp-release-") as name:
        folder = Path(name).resolve()
        ready, bill = folder / "ready", folder / "bill"
        for place in (ready, bill):
            place.mkdir()
        sdist, wheel = (Path(shutil.copy(path, ready)) for path in build_twice(root, commit, folder))
        print(f"both builds of {commit[:12]} have the same bytes: {sdist.name}, {wheel.name}", flush=True)
        # Without Flower, which asks for newer packages than the lowest.
        lowest = lowest_versions(PROJECT, ("secure",))
        held = folder / "lowest.txt"
        held.write_text("".join(f"{name}=={number}\n" for name, number in lowest.items() if name != "torch"))
        pip = [sys.executable, "-m", "pip", "index", "versions", "torch"]
        newest = re.search(r"\((.+?)\)", step(pip, folder))[1] if large else FIXED["torch"]
        tested = Environment("the versions of constraints.txt")
        oldest = Environment("the lowest", lowest["torch"] if large else FIXED["torch"], held, ("secure",), short=True)
        newer = Environment("the newest", newest, None, short=True)
        checks = [(wheel, tested), (sdist, tested), (wheel, oldest), (wheel, newer)]
        epoch = git(root, "show", "--no-patch", "--format=%ct", commit)
        lines = [f"# Where dpfedexp {version} was installed and run", ""]
        bill_of = partial(write_bill, wheel=wheel, folder=bill, epoch=epoch, out=ready / f"dpfedexp-{version}.cdx.json")
        for artifact, where in checks:
            begin = time.monotonic()
            check(artifact, where, bill_of if (artifact, where) == (wheel, tested) else lambda programs: None)
            took = time.monotonic() - begin
            lines.append(f"- {artifact.name} with torch {where.torch} and {where.title} ({took:.0f} s)")
        lines += [] if large else ["", f"Not checked here: {UNCHECKED}"]
        (ready / "CHECKED.md").write_text("\n".join(lines) + "\n")
        (ready / "RELEASE_NOTES.md").write_text(page)
        (ready / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in sorted(ready.iterdir())))
        shutil.copytree(ready, out)
    print("\n".join([*lines, *(f"{path.stat().st_size:9,}  {path}" for path in sorted(out.iterdir()))]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="a rehearsal: no need of a clean tree or a dated section")
    parser.add_argument("--large", action="store_true", help="check torches that bring accelerator packages along, too")
    given = parser.parse_args()
    try:
        release(SOURCE, SOURCE / "dist", given.dry, given.large)
    except Refused as refusal:
        print(f"Nothing was released: {refusal}", file=sys.stderr)
        return 2
    except (Failure, subprocess.CalledProcessError) as failure:
        print(f"The release failed: {failure}\n{getattr(failure, 'stderr', '') or ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
