"""The tutorials: executes the stored notebooks, which have no outputs, and makes pages of the site from them.

    python docs/hooks/notebooks.py              # execute all of them, two at a time, and say how long each took
    python docs/hooks/notebooks.py 03 08        # only these

As a hook of mkdocs it does the same and then renders them. An error in any cell ends the build with the notebook, the cell and the
exception. Executed copies lie in build/notebooks; `mkdocs serve`, and a build with NOTEBOOKS=reuse, take a copy from there
if its cells are those of the stored notebook.
"""

from __future__ import annotations

import base64
import html
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
EXECUTED = ROOT / "build" / "notebooks"
PROCESSES = 2
CELL_SECONDS = 600
"""A cell takes seconds on a quiet machine, and one that starts a deployment half a minute; this is for busy ones."""
FIRST = ("07",)
"""Begun before the others, because they take longest: those with processes of their own."""
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_niceness": "0",
}
"""Of Ray, on which Flower simulates: by default it gives up soon, and its workers let all other processes go first."""
STYLE = "assets/notebooks.css"
HIDDEN = "hide-input"
"""The tag of a cell whose code the page folds away."""

Notebook = Any
Cell = Any


@dataclass(frozen=True)
class Execution:
    """How one notebook went: seconds by the clock and of processors, and what failed, if anything did."""

    name: str
    seconds: float
    processor: float
    failure: str = ""


def stored() -> list[Path]:
    """All tutorials, in their order."""
    return sorted(TUTORIALS.glob("[0-9][0-9]-*.ipynb"))


def execute(path: Path) -> Execution:
    """Runs one notebook where it lies, as Jupyter would, and writes the copy with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    began, spent, failure = time.monotonic(), _processor_seconds(), ""
    with tempfile.TemporaryDirectory() as sockets:
        # On files of this user's, not on ports of the machine.
        listening = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        where = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            interrupt_on_timeout=True,  # a cell that started processes ends them
            startup_timeout=CELL_SECONDS,
            kernel_name="python3",
            resources=where,
            config=listening,
        )
        try:
            client.execute()
        except (CellControlSignal, CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failure = f"{path.name}, {_failed_cell(notebook)}: {_message(error)}"
    result = Execution(path.stem, time.monotonic() - began, _processor_seconds() - spent, failure)
    if not failure:
        EXECUTED.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, EXECUTED / path.name)
    return result


def execute_all(paths: Sequence[Path]) -> list[Execution]:
    """Two at a time, each in a process of its own with one thread for its numbers; the slow ones first."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1", **PATIENCE}
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    ordered = sorted(paths, key=lambda path: (not path.name.startswith(FIRST), path.name))
    done = []
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for result in pool.map(execute, ordered):
            print(f"{result.seconds:6.1f} s, {result.processor:5.1f} s of processors  {result.name}", flush=True)
            done.append(result)
    by_name = {path.stem: path for path in paths}
    return [_once_more(by_name[result.name], result) if result.name.startswith(FIRST) else result for result in done]


def _once_more(path: Path, result: Execution) -> Execution:
    """What a notebook gave, or gives alone: Flower's engine gives up where its processes are slow to start."""
    if not result.failure:
        return result
    print(f"{result.failure}\n{result.name} failed beside another one; once more, alone.", flush=True)
    return execute(path)


def _processor_seconds() -> float:
    """Of the kernels that have ended, and of what they started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _failed_cell(notebook: Notebook) -> str:
    """The last cell that was begun, by its number among all cells and its first line."""
    begun = [(i, cell) for i, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code" and _was_begun(cell)]
    if not begun:
        return "before the first cell"
    number, cell = begun[-1]
    return f"cell {number} ({cell.source.strip().splitlines()[0]!r})"


def _was_begun(cell: Cell) -> bool:
    return cell.execution_count is not None or bool(cell.outputs) or "execution" in cell.metadata


def _message(error: Exception) -> str:
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: {_plain(error.evalue)}\n{_plain(error.traceback)}"
    return f"{type(error).__name__}: {error}"


# Pages


def on_config(config: Any) -> Any:
    """Called by mkdocs: the pages' own style sheet."""
    config["extra_css"].append(STYLE)
    return config


_serving = False


def on_startup(command: str, dirty: bool) -> None:
    """Called by mkdocs first."""
    global _serving
    _serving = command == "serve"


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with the files of the site: adds a page, and its pictures, for every notebook."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    paths = stored()
    reuse = _serving or os.environ.get("NOTEBOOKS") == "reuse"
    due = [path for path in paths if not (reuse and _is_executed(path))]
    if due:
        # A program of its own: mkdocs loads this file under a name that other processes could not import.
        command = [sys.executable, __file__, *(path.name for path in due)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise PluginError(f"a tutorial failed:\n{done.stderr}")
    for path in paths:
        page, pictures = rendered(nbformat.read(EXECUTED / path.name, as_version=4), path.stem)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for every page: a link to a notebook, as Jupyter follows it, leads to its page here."""
    return re.sub(r"(\]\([\w./-]*\d\d-[\w-]+)\.ipynb\)(?!\{ \.notebook-download)", r"\1.md)", markdown)


def _is_executed(path: Path) -> bool:
    copy = EXECUTED / path.name
    return copy.exists() and _sources(copy) == _sources(path)


def _sources(path: Path) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in nbformat.read(path, as_version=4).cells]


def rendered(notebook: Notebook, stem: str) -> tuple[str, dict[str, bytes]]:
    """An executed notebook as Markdown, and its pictures by their file names."""
    pictures: dict[str, bytes] = {}
    parts, heading = [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            titles = re.findall(r"^#+ (.+)$", cell.source, flags=re.MULTILINE)
            heading = titles[-1] if titles else heading
            if len(parts) == 1:
                parts.append(f"[Download this notebook]({stem}.ipynb){{ .notebook-download }}")
        elif cell.cell_type == "code":
            parts.append(_code(cell))
            parts.extend(_outputs(cell, stem, heading, pictures))
    return "\n\n".join(parts) + "\n", pictures


def _code(cell: Cell) -> str:
    fence = f"```python\n{cell.source}\n```"
    if HIDDEN not in cell.metadata.get("tags", ()):
        return fence
    return (
        f'<details class="notebook-code" markdown="1"><summary>Code of what follows</summary>\n\n{fence}\n\n</details>'
    )


def _outputs(cell: Cell, stem: str, heading: str, pictures: dict[str, bytes]) -> Iterator[str]:
    for output in cell.outputs:
        if output.output_type == "stream":
            yield _text(output.text, "notebook-output" + (" notebook-stderr" if output.name == "stderr" else ""))
            continue
        data = output.data
        if "text/markdown" in data:
            yield data["text/markdown"]
        elif "image/png" in data:
            name = f"{stem}-{len(pictures) + 1}.png"
            pictures[name] = base64.b64decode(data["image/png"])
            yield f"![Figure: {heading}]({name}){{ .notebook-figure }}"
        elif "text/html" in data:
            yield f'<div class="notebook-output notebook-html">\n{_without_blank_lines(data["text/html"])}\n</div>'
        elif "text/plain" in data:
            yield _text(data["text/plain"], "notebook-output")


def _text(text: str, classes: str) -> str:
    # A <pre> is one block of HTML to Markdown; a blank line within it must not look like its end.
    shown = html.escape(_plain(text).strip("\n"), quote=False).replace("\n", "&#10;")
    return f'<pre class="{classes}">{shown}</pre>'


def _without_blank_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())


def _plain(text: str) -> str:
    """Without the colors of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def main(numbers: Sequence[str]) -> None:
    paths = [path for path in stored() if not numbers or path.name.startswith(tuple(numbers))]
    began = time.monotonic()
    results = execute_all(paths)
    print(f"{len(results)} notebooks in {time.monotonic() - began:.0f} seconds.")
    if failures := [result.failure for result in results if result.failure]:
        sys.exit("\n\n".join(failures))


if __name__ == "__main__":
    main(sys.argv[1:])
