"""Flower is an extra: everything else works without it, and asking for it then is one sentence."""

import subprocess
import sys


def test_the_library_and_the_template_need_no_flower_and_its_names_say_how_to_install_it(tmp_path):
    app = tmp_path / "app"
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import dpfedexp, dpfedexp.flower\n"
        "from dpfedexp.cli import app\n"
        f"app(['flower', 'new', {str(app)!r}], standalone_mode=False)\n"
        "dpfedexp.flower.DpFedExp\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (app / "federation" / "client_app.py").exists(), done.stderr
    assert "Flower is not installed; install it with: pip install 'dpfedexp[flower]'" in done.stderr
