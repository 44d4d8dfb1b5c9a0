"""The model that is measured: never one that trains, and a caller's function may do with it what it likes."""

import pytest
import torch
from torch import nn

from dpfedexp import Federation, Sgd, dp_fedavg, train
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.train import evaluation_of

LOCAL = Sgd(lr=0.1, steps=2)


def problem() -> tuple[nn.Module, Federation, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    x, y = torch.randn(60, 3), torch.randint(0, 2, (60,))
    return model, Federation.iid(x[:40], y[:40], clients=8, seed=0), (x[40:], y[40:])


def metrics(**how):
    model, clients, _ = problem()
    # The functions below hold their rows on the processor.
    how |= {"local": LOCAL, "rounds": 3, "progress": False, "device": "cpu"}
    return train(model, clients, dp_fedavg(clip=1.0, noise_multiplier=0.1), **how)


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


class Remembering(nn.ReLU):
    """Adds what it has seen in eval mode to what it says next."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            return super().forward(x)
        self.seen += x.detach().abs().sum()
        return super().forward(x) + self.seen


def hooked(module: nn.Module) -> nn.Module:
    seen = torch.zeros(())

    def add(module, given, made):
        if not module.training:
            module.total = getattr(module, "total", seen) + given[0].detach().abs().sum()
            return made + module.total
        return made

    module.register_forward_hook(add)
    return module


def replaced(module: nn.Module) -> nn.Module:
    forward = module.forward

    def remembering(x):
        if module.training:
            return forward(x)
        module.total = getattr(module, "total", 0.0) + float(x.detach().abs().sum())
        return forward(x) + module.total

    module.forward = remembering
    return module


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(nn.ReLU, True), (Remembering, False), (lambda: hooked(nn.ReLU()), False), (lambda: replaced(nn.ReLU()), False)],
    ids=["torch's own", "a class", "a hook", "another forward"],
)
def test_only_what_remembers_nothing_is_measured_without_a_copy(kind, kept):
    """A module of one's own is asked in a fresh copy every time, whatever it keeps in eval mode."""
    _, clients, test = problem()
    model = nn.Sequential(nn.Linear(3, 4), kind(), nn.Linear(4, 2))
    simulation, _ = prepare(model, clients, dp_fedavg(clip=1.0, noise_multiplier=0.1), local=LOCAL, rounds=3)
    measuring = evaluation_of(test, None, clients, simulation, model)
    assert measuring.forgets is kept
    state = simulation.begin()
    assert measuring(state) == measuring(state)
