"""A node: trains on its own data. What leaves it is made by `private_training`: clipped, and in local privacy with noise."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from dpfedexp.flower import answer, data_path, private_training
from federation import task

app = ClientApp()


@app.train(mods=[private_training])
def train(message: Message, context: Context) -> Message:
    return answer(message, context, task.build_model(), task.load_data(data_path(context)), loss=task.LOSS)
