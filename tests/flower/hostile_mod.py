"""A mod that is put into the template's app to make chosen nodes misbehave in chosen rounds.

The plan comes from the run's configuration as "node:round=behavior …". It sits outside `private_training`, where a node's operator
who changed the code would be: what it returns is what leaves the node.
"""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

REPORT, REQUEST = "dpfedexp.report", "dpfedexp"


def hostile(message, context, call_next):
    plan = dict(item.split("=") for item in context.run_config["test.plan"].split())
    request = message.content.config_records[REQUEST]
    what = plan.get(f"{context.node_config['partition-id']}:{request['round']}")
    if what in ("hang", "die"):
        Path(context.run_config["test.marks"], what).touch()
        time.sleep(600)
    if what == "crash":
        context = replace(context, node_config={**context.node_config, "partition-id": 47110815})
    reply = call_next(message, context)
    if what == "nan":
        vector = np.full_like(reply.content.array_records[REPORT]["vector"].numpy(), np.nan)
        said = ConfigRecord(dict(reply.content.config_records[REQUEST]))
        return Message(RecordDict({REPORT: ArrayRecord({"vector": Array(vector)}), REQUEST: said}), reply_to=message)
    return reply
