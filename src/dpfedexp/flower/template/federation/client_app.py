"""A client: trains on its own data. What leaves it is made by `private_training`: clipped, and in local privacy with noise."""

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from dpfedexp.flower import hosted_clients, local_from, private_training, train_hosted
from federation import task

app = ClientApp()


@app.train(mods=[private_training])
def train(message: Message, context: Context) -> Message:
    model, local = task.build_model(), local_from(context.run_config, message)
    if hosted_clients(message):
        hosted = task.data_of_hosted(context.node_config, context.run_config["federation.clients_per_node"])
        return Message(train_hosted(message, model, hosted, local=local), reply_to=message)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    correction = message.content.array_records.get("correction")
    inputs, targets = task.data_of(context.node_config)
    task.train(model, inputs, targets, local, correction and correction.to_torch_state_dict())
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)
