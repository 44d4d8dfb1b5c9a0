"""A command as another user of this machine, also where the interpreter lies in root's own folder."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

APP_USER, STRANGER = 65534, 65533
"""Two users without rights: the apps' and another one of the same machine."""
_VIEW = """
set -e
mount --bind "$1" /mnt
mount -t tmpfs -o mode=755 none "$2"
mkdir -p "$1"
mount --bind /mnt "$1"
shift 2
exec "$@"
"""


def as_user(command: list[str], user: int) -> list[str]:
    """The command as another user, who sees the interpreter even where root keeps it."""
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
    base = Path(sys.base_prefix).resolve()
    closed = [folder for folder in base.parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return [*drop, *command]
    return ["unshare", "--mount", "sh", "-c", _VIEW, "sh", str(base), str(closed[-1]), *drop, *command]


def as_app_user(command: list[str]) -> list[str]:
    return as_user(command, APP_USER)


@functools.cache
def can_switch_user() -> bool:
    """Whether this machine lets the tests start Python as another user."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    asked = as_app_user([sys.executable, "-c", "import os; print(os.getuid())"])
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() == str(APP_USER)
