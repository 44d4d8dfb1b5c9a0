"""`dpfedexp audit`: test the privacy guarantee by attacks."""

from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.audit import QUICK_SAMPLES, USUAL_SAMPLES
from dpfedexp.errors import require


def audit(
    samples: Annotated[
        int | None, typer.Option(min=1000, help=f"Releases of each input [default: {USUAL_SAMPLES}].")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_SAMPLES} samples: ends within a minute.")] = False,
    confidence: Annotated[float, typer.Option(help="Confidence of every bound.")] = 1 - 1e-6,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the table as JSON.")] = Path("audit"),
) -> None:
    """Attack the privacy guarantee: mechanisms, noise, whole runs and the isolation of clients.

    Exit code 1 if a lower bound exceeds its claim, or if an attack that should have power has none.
    """
    require(0 < confidence < 1, f"--confidence is {confidence}; it must be between 0 and 1.")
    from dpfedexp.audit.jobs import all_jobs, audit_section, run_job
    from dpfedexp.machine import run_jobs
    from dpfedexp.report.document import wide

    count = samples or (QUICK_SAMPLES if quick else USUAL_SAMPLES)
    jobs = all_jobs(count, seed, confidence)
    found = run_jobs(run_job, jobs, "auditing", cost=lambda job: job.seconds)
    results = [result for part in found for result in part]
    section = audit_section(results, f"dpfedexp audit --samples {count} --seed {seed}")
    console = wide()
    section.show(console)
    written = section.save(out)
    console.print("Written: " + ", ".join(f"[bold]{path}[/]" for path in written), highlight=False)
    if any(result.fails for result in results):
        raise typer.Exit(1)
