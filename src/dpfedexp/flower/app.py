"""`dpfedexp flower new` writes a small Flower app to start from; `run` is `flwr run --stream` with an exit status.

Flower's own command exits with 0 even if the server app failed, and resolves relative folders where the SuperLink was started.
Here relative folders are resolved in the user's working directory, and the exit status comes from `status.json` and from Flower.
"""

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfedexp.errors import InputError, first_line, nearest, require
from dpfedexp.files import writing
from dpfedexp.flower.local_deployment import CONNECTION, DOWN, FOLDER, QUIET, find_running, program
from dpfedexp.flower.monitor import EXIT_CODES, describe, read_status

_STARTED = re.compile(r"Successfully started run (\d+)")
_TRACEBACK, _FRAME = "Traceback (most recent call last)", re.compile(r'File "([^"]+)", line (\d+)')
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FOLDER, _NODES = "federation.folder", "federation.nodes"
STOPPED = (
    "The run was stopped with the nodes, and what was charged stays charged. After `dpfedexp flower up`, the same "
    "`dpfedexp flower run` in the same folder goes on from its last checkpoint."
)


def new_app(folder: Path | str) -> list[Path]:
    """Write the app into a new or empty folder; return its files."""
    folder = Path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"the folder {str(folder)!r} is not empty; name a new one.")
        name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
        template, written = Path(__file__).with_name("template"), []
        for source in (path for path in template.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            written.append(folder / source.relative_to(template))
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            written[-1].write_text(source.read_text(encoding="utf-8").replace("@name@", name), encoding="utf-8")
    return sorted(written)


def app_hash(app: Path | str) -> str:
    """The hash of an app as Flower bundles it, for the setting `apps` of a guard file."""
    from flwr.cli.build import build_fab_from_disk

    try:
        return hashlib.sha256(build_fab_from_disk(Path(app))).hexdigest()
    except (OSError, ValueError) as error:
        raise InputError(f"{str(app)!r} is not a Flower app: {error}") from None


def try_task(app: Path, files: Sequence[Path]) -> None:
    """Build the model of an app's `task.py` and try it on every node's file; raise `InputError` that says what is wrong.

    Apps without a `task.py` like the template's are not tried.
    """
    found = next(iter(sorted(app.glob("*/task.py"))), None)
    if found is None:
        return
    from dpfedexp.flower.client import try_training

    package, what = found.parent.name, "importing it"
    sys.path.insert(0, str(app.resolve()))
    try:
        task = importlib.import_module(f"{package}.task")
        what = "build_model()"
        task.build_model()
        for path in files if hasattr(task, "load_data") else ():
            what = f"load_data({str(path)!r})"
            rows = task.load_data(str(path))
            what = f"training on {str(path)!r}"
            try_training(task.build_model(), rows, getattr(task, "LOSS", None))
    except Exception as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = next((f", line {one.lineno}" for one in frames if Path(one.filename) == found.resolve()), "")
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"{str(found)!r}{line}: {what} failed: {kind}{first_line(error)}") from None
    finally:
        sys.path.remove(str(app.resolve()))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def run_app(app: Path, connection: str | None = None, settings: Sequence[str] = ()) -> int:
    """Run an app and show its log; return 0 if it completed, 3 if it stopped or failed, 4 if its server app was killed.

    Args:
        app: the app's folder.
        connection: the name of the SuperLink in Flower's config.toml; by default the SuperLink of `dpfedexp flower up`.
        settings: overrides as for `flwr run -c`; several may change the same section.
    """
    written, given, logs, environment = _app_config(app), read_overrides(settings), None, dict(os.environ)
    if connection is None:
        deployed, home, logs = _own_deployment(app, written, given)
        given = {**deployed, **given}
        connection, environment["FLWR_HOME"] = CONNECTION, str(home)
    _check_settings(written, given)
    paths = paths_from_here(app, given, Path.cwd())
    folder = Path(paths[_FOLDER])
    before = _status(folder)
    taken = {"completed": "a complete run", "running": "a run that is not over"}.get(before.get("status", ""))
    require(
        taken is None,
        f"the folder {str(folder)!r} holds {taken}; name a new one for another run (--folder runs/second).",
    )
    # TOML writes strings, numbers and booleans as JSON does.
    joined = " ".join(f"{name}={json.dumps(value)}" for name, value in {**given, **paths}.items())
    read = {} if logs is None else {path: path.stat().st_size for path in sorted(logs.glob("supernode*.log"))}
    log = (app / FOLDER / "run.log").resolve()
    try:
        log.parent.mkdir(mode=0o700, exist_ok=True)
        log.touch(mode=0o600)
    except OSError as error:
        raise InputError(f"the log {str(log)!r} can't be written: {error.strerror}.") from None
    down = None if logs is None else logs / DOWN
    try:
        run = _stream(
            [program("flwr"), "run", str(app), connection, "--stream", "-c", joined], environment, folder, log, down
        )
    except KeyboardInterrupt:
        print(
            f"\nThe run goes on without this log: see `dpfedexp flower status {folder}`. `flwr stop` with the run's id ends it.",
            file=sys.stderr,
        )
        raise
    if run is None:
        print("The run was not started.", file=sys.stderr)
        return 2
    status, told = _final_status(folder, connection, run, environment, before)
    if status != "completed" and down is not None and down.exists():
        status, told = "killed", told and {**told, "reason": ""}
        print(STOPPED, flush=True)
    elif status != "completed":
        _show_failures(app, {log: 0, **read})
    what = describe({**told, "status": status}) if told else f"{status}: no status here."
    print(f"Run {run} {what}", flush=True)
    if told:
        print(f"Its files are in {folder}.", flush=True)
    return EXIT_CODES.get(status, 3)


def _own_deployment(app: Path, written: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], Path, Path]:
    """The deployment of `dpfedexp flower up` for an app: its settings, its FLWR_HOME, and the folder of its logs."""
    folder = (app / FOLDER).resolve()
    found = find_running(folder)
    if not found:
        raise InputError(
            "no nodes are up for this app; start them on this machine with `dpfedexp flower up`, or name a SuperLink of Flower's "
            "config.toml: `dpfedexp flower run . NAME`."
        )
    each = {**written, **given}.get("federation.clients_per_node", 1)
    settings = {"federation.clients": found["nodes"] * each, _NODES: found["node_list"]}
    return {name: value for name, value in settings.items() if name in written}, folder / "flwr-home", folder


def _check_settings(written: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise `InputError` for settings that the server app would refuse later, and for overrides that Flower would ignore."""
    from dpfedexp.flower.app_settings import read_candidates, read_settings

    read_settings({**written, **given})
    read_candidates({**written, **given})
    for name in given:
        if name not in written:
            section, _, key = name.rpartition(".")
            require(bool(section), f"{name} is not a setting.{nearest(f'federation.{name}', written)}")
            raise InputError(
                f"{name} is not in the app's pyproject.toml, and Flower changes no other settings; write {key} = "
                f"{json.dumps(given[name])} under [tool.flwr.app.config.{section}] there."
            )


def _show_failures(app: Path, logs: Mapping[Path, int]) -> None:
    """Print the newest exception in each log since the run began, without repeats, and where the log is. All are the user's own."""
    own = {"/".join(path.parts[-2:]) for path in app.resolve().glob("*/*.py")}
    shown: dict[str, Path] = {}
    for path, before in logs.items():
        sentence = failure_in(path.read_bytes()[before:].decode("utf-8", "replace"), own)
        if sentence:
            shown.setdefault(sentence, path)
    for sentence, path in shown.items():
        print(f"Error: {sentence}\n  The whole log: {path}", flush=True)


def failure_in(log: str, own: Collection[str]) -> str:
    """The newest exception in a log in one line, with the place in the app's `own` files that raised it; "" without one."""
    _, found, rest = log.rpartition(_TRACEBACK)
    lines = rest.splitlines()[1:]
    end = next((n for n, line in enumerate(lines) if line and not line.startswith(" ")), None)
    if not found or end is None:
        return ""
    frames = [("/".join(Path(path).parts[-2:]), line) for path, line in _FRAME.findall("\n".join(lines[:end]))]
    place = next((f"{name}, line {line}: " for name, line in reversed(frames) if name in own), "")
    return place + lines[end].removeprefix("dpfedexp.errors.InputError: ")


def read_overrides(settings: Sequence[str]) -> dict[str, Any]:
    """Parse the settings of several `-c` options; the last value of a name wins."""
    from flwr.common.config import parse_config_args

    found: dict[str, Any] = {}
    for text in settings:
        try:
            given = parse_config_args([text])
        except Exception:
            given = {}
        if not given:  # Flower drops what it does not understand
            raise InputError(f"a setting is {text!r}; write settings as 'a.b=1 a.c=\"text\" a.d=true', each once.")
        found |= given
    return found


def paths_from_here(app: Path, given: Mapping[str, Any], here: Path) -> dict[str, str]:
    """The run's settings that are paths, resolved from the directory `here`: its folder and, if set, its list of nodes."""
    written = _app_config(app)
    asked = {name: given.get(name, written.get(name)) for name in (_FOLDER, _NODES)}
    asked[_FOLDER] = asked[_FOLDER] or written[_FOLDER]
    return {name: str((here / Path(str(path)).expanduser()).resolve()) for name, path in asked.items() if path}


def _app_config(app: Path) -> dict[str, Any]:
    """The settings in the app's pyproject.toml, by their names in `-c`."""
    from flwr.common.config import flatten_dict

    try:
        config = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
        found: dict[str, Any] = flatten_dict(config)
        return {_FOLDER: found[_FOLDER], **found}
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{str(app / 'pyproject.toml')!r} is not valid TOML: {error}.") from None
    except OSError:
        raise InputError(
            f"{str(app)!r} is no app: it has no readable pyproject.toml. `dpfedexp flower new` writes an app to start from."
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(
            f"{str(app)!r} is not an app of dpfedexp: its pyproject.toml has no key `folder` in [tool.flwr.app.config.federation]."
        ) from None


def _stream(
    command: list[str], environment: Mapping[str, str], folder: Path, log: Path, down: Path | None = None
) -> str | None:
    """Run the command until it ends or the server app was killed; return Flower's id of the run.

    The output goes to the file `log`, and is printed without tracebacks, as long as there is no file `down`.
    """
    run, hidden = None, False
    process = subprocess.Popen(
        command,
        env={**environment, **QUIET, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    over = threading.Event()
    threading.Thread(target=_end_when_killed, args=(process, folder, over), daemon=True).start()
    with process, open(log, "w", encoding="utf-8") as file:
        for line in process.stdout or ():
            file.write(line)
            hidden = hidden or _TRACEBACK in line
            if not (hidden or line.startswith(_CHAINED) or (down is not None and down.exists())):
                print(line, end="", flush=True)
            hidden = hidden and (_TRACEBACK in line or not line.strip() or line.startswith(" "))
            if (found := _STARTED.search(line)) is not None:
                run = found[1]
    over.set()
    return run


def _end_when_killed(process: subprocess.Popen[str], folder: Path, over: threading.Event) -> None:
    """End the log stream when the server app was running and is killed; Flower itself needs a minute or more to notice."""
    alive = False
    while not over.wait(1.0):
        status = _status(folder).get("status")
        alive = alive or status == "running"
        if alive and status == "killed":
            process.terminate()
            return


def _status(folder: Path) -> dict[str, Any]:
    """The content of `status.json`; empty if it is not on this machine or can't be read."""
    try:
        return read_status(folder)
    except InputError:
        return {}


def _final_status(
    folder: Path, connection: str, run: str, environment: Mapping[str, str], before: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The status of a run at its end, and the content of its `status.json`, which is of an earlier attempt if it is `before`."""
    told = _status(folder)
    flowers = _flowers_status(connection, run, environment)
    failed = flowers.endswith("failed")
    if told and not (failed and (told["status"] == "completed" or told == before)):
        return str(told["status"]), told
    if told:  # from an earlier run in this folder, or from before the app itself failed
        told = {**told, "reason": ""}
    return ("completed" if flowers == "finished:completed" else "failed"), told


def _flowers_status(connection: str, run: str, environment: Mapping[str, str]) -> str:
    command = [program("flwr"), "list", connection, "--run-id", run, "--format", "json"]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
    try:
        done = subprocess.run(command, env={**environment, **QUIET}, **options)
        return str(json.loads(done.stdout)["runs"][0]["status"])
    except (subprocess.TimeoutExpired, ValueError, KeyError, IndexError, TypeError):
        return "unknown"
