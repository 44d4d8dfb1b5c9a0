"""`dpfedexp fit`: private training with automatic settings."""

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dpfedexp.cli.options import DataOption, OutOption, QuietOption
from dpfedexp.cli.train import execute, on_interrupt, public_sizes, run_folder, show_run
from dpfedexp.errors import require

MOST_FEATURES = 1000
"""The most features for which a linear model is the default; for more, pass --model."""
HIDDEN = 32
"""The default width of a hidden layer; `--set model.options.hidden=64` changes it."""
OPEN_SECTIONS = ("data", "model", "participation", "run")


def fit(
    arrays: Annotated[
        Path | None,
        typer.Argument(
            help="An .npz file: inputs, targets, client (who holds each row)[, test_inputs, test_targets].",
            show_default=False,
        ),
    ] = None,
    data_set: Annotated[str | None, typer.Option("--data-set", help="mnist or cifar10, dealt out to clients.")] = None,
    data: DataOption = None,
    model: Annotated[
        str | None, typer.Option(help="A network by name, or module:factory of your own; by default fits the data.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=2, help="Number of classes; required in a secure run, which must not count them.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="ε of the whole run, for each client.")] = 8.0,
    delta: Annotated[float | None, typer.Option(help="δ; by default the smaller of 1e-5 and 0.1/M.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds; 50 by default.")] = None,
    adjacency: Annotated[
        str, typer.Option(help="replace-one, or add-remove, which needs --population.")
    ] = "replace-one",
    population: Annotated[int | None, typer.Option(min=1, help="The public number of clients.")] = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="Protect real data: noise on a grid, from the operating system.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of data, model, participation, run."),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0, help="Clients measure the model on this share of their rows, with noise within the same ε."
        ),
    ] = None,
    out: OutOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws of a simulation.")] = 0,
    device: Annotated[str | None, typer.Option(help="A torch device such as cuda.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Train privately with automatic δ, clip, step size and local rate; the statement says what was chosen."""
    from dpfedexp.config import problem
    from dpfedexp.config.settings import apply_override, parse
    from dpfedexp.engine.fit import describe_choices, fit_settings
    from dpfedexp.engine.plan import default_delta

    require((arrays is None) != (data_set is None), "pass either ARRAYS.npz or --data-set for the clients' data.")
    tree: dict[str, Any] = {
        "data": {"kind": data_set} if arrays is None else {"kind": "npz", "path": str(arrays)},
        "model": {},
        **(chosen := fit_settings(float(epsilon), 1)),
        "algorithm": chosen["algorithm"] | {"delta": delta, "adjacency": adjacency, "step": "safe"},
        "participation": {"population": population},
        "run": {"seed": seed, "device": device, "secure": secure} | ({} if rounds is None else {"rounds": rounds}),
    }
    if held_out is not None:
        tree["run"] |= {"evaluate": "clients", "held_out": held_out or None}
    for text in set_ or ():
        section = text.partition(".")[0]
        require(
            section in OPEN_SECTIONS,
            f"--set is {text!r}; fit chooses algorithm and local steps and accepts only {', '.join(OPEN_SECTIONS)}. `dpfedexp "
            "train` accepts all settings.",
        )
        apply_override(tree, text)
    tree["model"] |= _model(model, tree, classes)
    settings = parse(tree)
    settings.check()
    built = problem.build(settings, data)
    if delta is None:
        tree["algorithm"]["delta"] = default_delta(public_sizes(settings, built)[0])
        settings = parse(tree)
    folder = run_folder(settings, out, str(data_set) if arrays is None else arrays.stem)
    choices = partial(describe_choices, algorithm=settings.build_algorithm(), delta_given=delta is not None)
    with on_interrupt(f"Resume with: the same command and --out {folder.path}."):
        run = execute(settings, folder, progress=not quiet, built=built, choices_of=choices)
    show_run(Console(), run, folder)


def _model(name: str | None, tree: dict[str, Any], classes: int | None) -> dict[str, Any]:
    """Return the section [model]: the named network, by default a linear model, with inputs and outputs that fit the data file."""
    if name is not None and ":" in name:
        return {"factory": name}
    if tree["data"]["kind"] != "npz" or "factory" in tree["model"]:
        return {} if name is None else {"name": name}
    from dpfedexp.config.problem import read_arrays
    from dpfedexp.models import MODELS

    path = tree["data"]["path"]
    arrays = read_arrays(path)
    require(
        "client" in arrays,
        f"{path!r} has no array 'client'; it must say who holds each row, because a client is what is protected.",
    )
    shape, whole = arrays["inputs"].shape, arrays["targets"].dtype.kind in "iub"
    features = math.prod(map(int, shape[1:]))
    if name is None:
        require(
            len(shape) == 2 and features <= MOST_FEATURES and arrays["inputs"].dtype.kind == "f",
            f"a row of the inputs has shape {shape[1:]} and type {arrays['inputs'].dtype}; name a network with --model: "
            f"{', '.join(MODELS)}, or module:factory of your own.",
        )
        name = "linear"
    takes = inspect.signature(MODELS[name]).parameters if name in MODELS else {}
    outputs = 1
    if whole and not {"classes", "outputs"}.isdisjoint(takes):
        require(
            classes is not None or not tree["run"]["secure"],
            "--classes is missing: in a secure run the number of classes is declared, not counted from the targets.",
        )
        outputs = max(2, int(arrays["targets"].max()) + 1) if classes is None else classes
    sizes = {"inputs": features, "dimension": features, "hidden": HIDDEN, "classes": outputs, "outputs": outputs}
    options = {option: size for option, size in sizes.items() if option in takes}
    return {"name": name, "options": options | tree["model"].get("options", {})}
