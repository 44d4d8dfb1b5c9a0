"""The server: DP-FedEXP, with the settings of pyproject.toml. It writes its ledger, model and privacy statement to a folder."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from dpfedexp.flower import round_timeout, strategy_from
from federation import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = strategy_from(context.run_config)
    model = task.build_model()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord(task.evaluate(model, strategy.clients))

    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        timeout=round_timeout(context.run_config),
        evaluate_fn=evaluate if context.run_config["task.example"] else None,
    )
    print(strategy.statement)
