"""Deployments whose apps are another user's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dpfedexp.flower.local import Deployment

from .other_user import NOBODY, as_nobody


class Apart(Deployment):
    """Nodes with `--isolation process`, and a SuperExec for each that runs the apps as another user."""

    def superexec(self, name: str) -> list[str]:
        """The program that starts the apps of a node."""
        return [sys.executable, "-m", "dpfedexp", "superexec"]

    def runtime(self, index: int) -> str:
        """Where the node's Runtime API listens."""
        return (self.folder.parent / f"supernode{index}.address").read_text()

    def _spawn(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        if not name.startswith("supernode"):
            return super()._spawn(command, name)
        place = self.folder.parent
        home, secret, authority = place / f"home-{name}", place / f"{name}.secret", place / f"{name}.ca"
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        secret.write_bytes(os.urandom(32))
        os.chown(secret, 0, NOBODY)
        secret.chmod(0o640)
        node = super()._spawn([*command, "--isolation", "process", "--superexec-auth-secret-file", str(secret)], name)
        shutil.copyfile(self.certificates.authority, authority)
        authority.chmod(0o644)
        runtime = f"127.0.0.1:{command[command.index('--port') + 1]}"
        Path(place / f"{name}.address").write_text(runtime)
        options = ["--runtime-api-address", runtime, "--root-certificates", str(authority)]
        with open(self.folder / f"{name}-app.log", "ab") as log:
            subprocess.Popen(
                as_nobody([*self.superexec(name), *options, "--superexec-auth-secret-file", str(secret)]),
                env={**self.environment, "FLWR_HOME": str(home), "HOME": str(home)},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return node
