"""`dpfedexp audit`: measure what is claimed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.audit import QUICK_SAMPLES, USUAL_SAMPLES
from dpfedexp.errors import require

app = typer.Typer(help="Measure lower bounds on ε from outside, beside what is claimed.", invoke_without_command=True)


@app.callback()
def audit(
    context: typer.Context,
    samples: Annotated[
        int | None, typer.Option(min=1000, help=f"Releases of each input [default: {USUAL_SAMPLES}].")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_SAMPLES} samples: ends within a minute.")] = False,
    confidence: Annotated[float, typer.Option(help="With which every single bound holds.")] = 1 - 1e-6,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the table as JSON and the picture.")] = Path("audit"),
) -> None:
    """Try to break the guarantee: mechanisms, noise, whole runs, isolation of clients.

    Exit code 1 if a lower bound exceeds its claim, or if an attack that should have power has none.
    """
    if context.invoked_subcommand is not None:
        return
    require(0 < confidence < 1, f"--confidence is {confidence}; it must be between 0 and 1.")
    from dpfedexp.audit.jobs import all_jobs, audit_section, do
    from dpfedexp.machine import run_all
    from dpfedexp.report.document import wide

    count = samples or (QUICK_SAMPLES if quick else USUAL_SAMPLES)
    jobs = all_jobs(count, seed, confidence)
    found = run_all(do, jobs, "auditing", cost=lambda job: job.seconds)
    results = [result for part in found for result in part]
    section = audit_section(results, f"dpfedexp audit --samples {count} --seed {seed}")
    console = wide()
    section.show(console)
    written = section.save(out)
    console.print("Written: " + ", ".join(f"[bold]{path}[/]" for path in written), highlight=False)
    if any(result.fails for result in results):
        raise typer.Exit(1)


@app.command("noise-cost")
def cost(
    dimensions: Annotated[
        list[int] | None, typer.Option("--dimension", "-d", min=2, help="Repeat for several.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the table as JSON.")] = None,
) -> None:
    """How much longer a release takes with secure and with strict noise."""
    import torch

    from dpfedexp.audit.jobs import cost_section
    from dpfedexp.audit.noise import noise_cost
    from dpfedexp.report.document import wide

    torch.set_num_threads(1)
    given = dimensions or [237, 5046, 100_000]
    command = "dpfedexp audit noise-cost " + " ".join(f"-d {d}" for d in given)
    section = cost_section([noise_cost(d) for d in given], command)
    console = wide()
    section.show(console)
    if out is not None:
        section.save(out)
