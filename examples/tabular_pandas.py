"""A table with a column of users: a private model with a promise to each of them.

pip install pandas && python examples/tabular_pandas.py
"""

import sys

import numpy as np
import pandas as pd
import torch

from dpfedexp import Execution, Federation, fit


def visits(users: int, seed: int = 0) -> pd.DataFrame:
    """What a shop might hold: who, when, how much, and whether they came back."""
    rng = np.random.default_rng(seed)
    user = np.repeat([f"user-{number}" for number in range(users)], rng.integers(1, 12, users))
    table = pd.DataFrame({"user": user, "hour": rng.integers(0, 24, len(user)), "spent": rng.gamma(2, 10, len(user))})
    table["weekend"] = rng.random(len(user)) < 2 / 7
    chance = 1 / (1 + np.exp(-(0.08 * (table.spent - 20) + 1.5 * table.weekend)))
    table["returned"] = (rng.random(len(user)) < chance).astype(int)
    return table


def main(small: bool = False) -> float:
    table = visits(300 if small else 3000)
    # Public numbers, not statistics of the table: means and deviations learned from the users' rows would be a leak.
    table["hour"], table["spent"] = (table.hour - 12) / 7, (table.spent - 20) / 15
    held_out = table.user.str.endswith("7")
    features = ["hour", "spent", "weekend"]
    clients = Federation.from_pandas(table[~held_out], by="user", target="returned", features=features)
    test = table[held_out]
    run = fit(
        torch.nn.Linear(3, 2),
        clients,
        epsilon=8.0,
        rounds=5 if small else None,
        evaluate=(test[features].to_numpy(np.float32), test.returned.to_numpy()),
        execution=Execution(progress=not small),
    )
    print(run)
    return run.history[-1]["test_accuracy"]


if __name__ == "__main__":
    main(small="--small" in sys.argv)
