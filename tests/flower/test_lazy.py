"""Flower is an extra: everything else works without it, and asking for it then is one sentence."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = "import sys; sys.modules['flwr'] = None\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=120)


def test_the_library_and_the_template_need_no_flower(tmp_path):
    app = tmp_path / "app"
    done = run(
        "import dpfedexp, dpfedexp.flower\n"
        "from dpfedexp.cli import app\n"
        f"app(['flower', 'new', {str(app)!r}], standalone_mode=False)\n"
    )
    assert done.returncode == 0, done.stderr
    assert (app / "federation" / "client_app.py").exists()


def test_without_flower_its_names_say_how_to_install_it():
    done = run("from dpfedexp.flower import DpFedExp")
    assert "Flower is not installed; install it with: pip install 'dpfedexp[flower]'" in done.stderr
