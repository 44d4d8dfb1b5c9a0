"""`dpfedexp guard show` and `dpfedexp flower metrics`: what a site has spent, and what monitoring may see."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.errors import InputError

app = typer.Typer(help="A site's own limits and what was spent under them.", no_args_is_help=True)


@app.callback()
def _guard() -> None: ...


@app.command()
def show(
    file: Annotated[
        Path, typer.Argument(help="The guard file, or a helper's file of two-party aggregation.", show_default=False)
    ],
    last: Annotated[int, typer.Option(help="How many of the newest charges to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False,
) -> None:
    """Show the limits, what was spent, and the newest charges; exit status 2 if the node would refuse its own ledger."""
    from dpfedexp.flower.monitor import guard_summary, load_limits

    summary = guard_summary(load_limits(file), last)
    if as_json:
        print(json.dumps(summary))
    else:
        print(
            f"{summary['charges']} charges, epsilon {summary['epsilon']:.4f} of {summary['max_epsilon_total']:g} at delta "
            f"{summary['delta']:g} (at most {summary['max_epsilon_per_round']:g} a round)"
        )
        for line in summary["last"]:
            print(
                f"  {line['time'] or 'no time':25}  run {line['run']}  round {line['round']}  app {line['app'][:12] or '-'}"
            )
    if summary["problem"]:
        raise InputError(summary["problem"])


def metrics(
    run: Annotated[list[Path] | None, typer.Option(help="The folder of a run.", show_default=False)] = None,
    guard: Annotated[
        list[Path] | None, typer.Option(help="A guard file, or a helper's file.", show_default=False)
    ] = None,
    listen: Annotated[str, typer.Option(help="Where Prometheus asks: an IP address and a port.")] = "127.0.0.1:9464",
) -> None:
    """Serve /metrics for Prometheus and /healthz, from the files of a run or of a site."""
    from dpfedexp.flower.access import parse_address
    from dpfedexp.flower.monitor import guard_metrics, metrics_server, run_metrics

    sources = [partial(run_metrics, folder) for folder in run or []] + [partial(guard_metrics, f) for f in guard or []]
    if len(sources) != 1:
        raise InputError("name one --run or one --guard; several need a process each.")
    host, port = parse_address(listen, "listen")
    with metrics_server(list(sources), host, port) as server:
        print(f"http://{listen}/metrics and http://{listen}/healthz", flush=True)
        server.serve_forever()
