"""A node, which trains on its own data. `private_training` clips its update and, in local DP, adds noise before the reply."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from dpfedexp.flower import answer, data_path, private_training
from federation import task

app = ClientApp()


@app.train(mods=[private_training])
def train(message: Message, context: Context) -> Message:
    return answer(message, context, task.build_model(), task.load_data(data_path(context)), loss=task.LOSS)
