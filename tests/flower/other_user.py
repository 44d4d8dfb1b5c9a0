"""A command as another user of this machine, also where the interpreter lies in root's own folder."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
_DROP = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
_VIEW = """
set -e
mount --bind "$1" /mnt
mount -t tmpfs -o mode=755 none "$2"
mkdir -p "$1"
mount --bind /mnt "$1"
shift 2
exec "$@"
"""


def as_nobody(command: list[str]) -> list[str]:
    """The command as the user nobody, who sees the interpreter even where root keeps it."""
    base = Path(sys.base_prefix).resolve()
    closed = [folder for folder in base.parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return [*_DROP, *command]
    return ["unshare", "--mount", "sh", "-c", _VIEW, "sh", str(base), str(closed[-1]), *_DROP, *command]


@functools.cache
def can_be_nobody() -> bool:
    """Whether this machine lets the tests start Python as another user."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    asked = as_nobody([sys.executable, "-c", "import os; print(os.getuid())"])
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() == str(NOBODY)
