"""The source distribution and the wheel of a commit, the same bytes whenever and wherever they are built.

They are built from the files of the commit and nothing else in the folder, and dated with the commit. setuptools dates a wheel by
SOURCE_DATE_EPOCH, but packs into a source distribution the times, owners and permissions that files happen to have, so that one is
packed again. The bytes also depend on the version of setuptools, which constraints.txt fixes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

DIFFERENT = ({"TZ": "UTC", "PYTHONHASHSEED": "1"}, {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2"})
"""Variables of two builds whose files must be the same."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def committed_files(root: Path, commit: str, folder: Path) -> None:
    """The files of a commit, in a folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=root, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def pack_again(sdist: Path, epoch: int) -> None:
    """Replaces a source distribution by one with the same files in a fixed order, with one date and nobody's name."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, epoch
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), compresslevel=9, mtime=epoch))


def build(tree: Path, epoch: int, folder: Path, variables: dict[str, str]) -> tuple[Path, Path]:
    """The source distribution of a folder of sources, and the wheel that is built from it.

    Args:
        tree: the sources; nothing of an earlier build may be in it.
        epoch: the date of every file, in seconds since 1970.
        folder: where the files go; it is made.
        variables: of the environment, besides those of this process.
    """
    folder.mkdir(parents=True)
    everything = os.environ | variables | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONPATH": ""}

    def make(kind: str, source: Path, pattern: str) -> Path:
        words = [sys.executable, "-m", "build", "--quiet", "--no-isolation", f"--{kind}", "--outdir", str(folder)]
        subprocess.run([*words, str(source)], check=True, env=everything, umask=0o022, capture_output=True, text=True)
        (made,) = folder.glob(pattern)
        return made

    sdist = make("sdist", tree, "*.tar.gz")
    pack_again(sdist, epoch)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, make("wheel", unpacked, "*.whl")


def build_twice(root: Path, commit: str, folder: Path) -> tuple[Path, Path]:
    """The two files of a commit.

    Raises:
        RuntimeError: a second build, in another folder, time zone and order of hashes, has other bytes.
    """
    epoch = int(git(root, "show", "--no-patch", "--format=%ct", commit))
    made = []
    for number, variables in enumerate(DIFFERENT):
        tree = folder / f"tree-{number}"
        committed_files(root, commit, tree)
        made.append(build(tree, epoch, folder / f"built-{number}", variables))
    for one, other in zip(*made, strict=True):
        if digest(one) != digest(other):
            raise RuntimeError(f"two builds of {one.name} from commit {commit} differ: {one} and {other}.")
    return made[0]
