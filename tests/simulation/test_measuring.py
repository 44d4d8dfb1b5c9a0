"""The model that is measured: never one that trains, and a caller's function may do with it what it likes."""

import torch
from torch import nn

from dpfedexp import Federation, Sgd, dp_fedavg, train

LOCAL = Sgd(lr=0.1, steps=2)


def problem() -> tuple[nn.Module, Federation, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    x, y = torch.randn(60, 3), torch.randint(0, 2, (60,))
    return model, Federation.iid(x[:40], y[:40], clients=8, seed=0), (x[40:], y[40:])


def metrics(**how):
    model, clients, _ = problem()
    run = train(model, clients, dp_fedavg(clip=1.0, noise_multiplier=0.1), local=LOCAL, rounds=3, progress=False, **how)
    return run


def test_a_function_that_spoils_its_model_spoils_nothing_else():
    _, _, (x, y) = problem()

    def honest(model):
        return {"loss": float(nn.functional.cross_entropy(model(x), y))}

    def spoiling(model):
        found = honest(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.train()
        return found

    plain, spoilt = metrics(evaluate=honest), metrics(evaluate=spoiling)
    assert [record["loss"] for record in plain.history] == [record["loss"] for record in spoilt.history]
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), spoilt.model.parameters(), strict=True))


def test_a_test_set_measures_each_rounds_own_parameters():
    _, _, test = problem()

    def by_hand(model):
        with torch.no_grad():
            return {"test_loss": float(nn.functional.cross_entropy(model(test[0]), test[1]))}

    measured, expected = metrics(test=test).history, metrics(evaluate=by_hand).history
    for one, other in zip(measured, expected, strict=True):
        assert abs(one["test_loss"] - other["test_loss"]) < 1e-6
    assert len({record["test_loss"] for record in measured}) == 3
