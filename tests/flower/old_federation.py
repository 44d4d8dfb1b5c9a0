"""Writes server folders and a guard's ledger, as the version of dpfedexp that is on the path leaves them.

    cd OLD && PYTHONPATH=src:. DPFEDEXP_PRIVATE=OUT/private python NEW/tests/flower/old_federation.py OUT

The folders in tests/flower/old were made in this way by 0.1.0 at git e363675, with that version's own tests on the path:

central, local  stopped while the server waits for the third of four rounds; there is no noise, so a run can be repeated
finished        all four rounds of `central`
guard           a node's limits and ledger after two answers
"""

from __future__ import annotations

import sys
from inspect import signature
from pathlib import Path

from dpfedexp.algorithms import cdp_fedexp, ldp_fedexp
from dpfedexp.clipping import AdaptiveClip
from dpfedexp.mechanisms import LocalGaussian
from tests.flower import test_resume
from tests.flower.test_resume import Crash, CrashingGrid, run

PAPER = {"step": "paper"} if "step" in signature(ldp_fedexp).parameters else {}
"""The step size of all runs of before, whose versions do not have the argument."""
ALGORITHMS = {
    "central": cdp_fedexp(clip=AdaptiveClip(), noise_multiplier=1.0, **PAPER),
    "local": ldp_fedexp(clip=0.5, noise_multiplier=1.0, **PAPER),
}
MECHANISM, ANSWERS = LocalGaussian(0.3, 2.2), 2


def main(out: Path) -> None:
    from tests.flower.test_client import ask, guard_file

    test_resume.client.deployment_noise = test_resume.Silence
    for name, algorithm in ALGORITHMS.items():
        try:
            run(out / name, algorithm, grid=CrashingGrid(3))
        except Crash:
            print(name)
    run(out / "finished", ALGORITHMS["central"])
    (out / "guard").mkdir()
    node = {"dpfedexp-guard": str(guard_file(out / "guard"))}
    for number in range(1, ANSWERS + 1):
        ask(MECHANISM, node, round=number)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
