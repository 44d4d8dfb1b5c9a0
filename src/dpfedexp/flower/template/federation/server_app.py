"""The server: private rounds with the settings of pyproject.toml. Model, ledger and privacy statement go to `federation.folder`."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from dpfedexp.flower import serve
from federation import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    print(serve(grid, context, task.build_model(), task.test_set(), task.LOSS).privacy)
