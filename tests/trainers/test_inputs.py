"""Several inputs and outputs: a module of many arguments trains as the same module of one does, in every trainer."""

import pytest
import torch
from torch import nn

from dpfedexp import Federation, InputError, Sgd, fedavg, train
from tests.trainers.shared import PRIVATE, Made, recorded, simulated, updates

SIZES = (4, 2, 7, 1)
LOCAL = Sgd(lr=0.1, steps=3, batch_size=3)


class Two(nn.Module):
    """Tokens and numbers; a dictionary of outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(5, 4), nn.Linear(7, 2)

    def forward(self, tokens, numbers):
        out = self.layer(torch.cat([self.words(tokens).mean(1), numbers], dim=1))
        return {"mean": out[:, 0], "spread": (out[:, 1],)}


def joined(self, x):
    """The same of one tensor, in which tokens are numbers too; one tensor of outputs."""
    found = self.inner(x[:, :3].long(), x[:, 3:])
    return torch.stack([found["mean"], found["spread"][0]], dim=1)


def gaussian(outputs, targets):
    mean, spread = (outputs["mean"], outputs["spread"][0]) if isinstance(outputs, dict) else outputs.unbind(1)
    return 0.5 * ((targets - mean) / spread.exp()).square() + spread


def rows():
    generator = torch.Generator().manual_seed(1)
    for n in SIZES:
        tokens, numbers = torch.randint(0, 5, (n, 3), generator=generator), torch.randn(n, 3, generator=generator)
        yield tokens, numbers, torch.randn(n, generator=generator)


FEDERATIONS = {
    "tuple": Federation.from_clients([((a, b), y) for a, b, y in rows()]),
    "dictionary": Federation.from_clients([({"numbers": b, "tokens": a}, y) for a, b, y in rows()]),
}
ONE = Federation.from_clients([(torch.cat([a.float(), b], dim=1), y) for a, b, y in rows()])


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [("tuple", "loop"), ("tuple", "vectorized"), ("dictionary", "tiled-vectorized"), ("dictionary", "recorded")],
)
def test_several_inputs_and_outputs_train_as_one(kind, trainer):
    """1e-6 is float32 rounding of updates of order 0.1. Six calls of three steps are replayed by torch.fx."""
    expected = updates(simulated(Made(joined, inner=Two()), ONE, LOCAL, "loop", loss=gaussian))
    by_name = "vectorized" if trainer == "recorded" else trainer
    prepared = simulated(Two(), FEDERATIONS[kind], LOCAL, by_name, loss=gaussian)
    steps = recorded(prepared) if trainer == "recorded" else None
    torch.testing.assert_close(updates(prepared, steps, calls=6), expected, rtol=0, atol=1e-6)
    assert float(expected.abs().max()) > 0.01


def test_a_run_with_several_inputs_finishes_on_auto_and_with_a_rate_that_sets_itself():
    local = Sgd(lr="auto", steps=2, batch_size=2)
    given = {"local": local, "rounds": 2, "loss": gaussian, "execution": "cpu"}
    for secure in (False, True):
        assert len(train(Two(), FEDERATIONS["dictionary"], PRIVATE, secure=secure, **given).history) == 2


def test_what_does_not_fit_is_one_sentence():
    clients = FEDERATIONS["tuple"]
    with pytest.raises(InputError, match=r"applied to a batch of inputs of shape \(\(2, 3\), \(2, 3\)\)"):
        simulated(nn.Linear(3, 1), clients, LOCAL)
    with pytest.raises(InputError, match=r"returns \{mean: \(2,\), spread: \(\(2,\)\)\}, .* give loss a function"):
        simulated(Two(), clients, LOCAL)
    with pytest.raises(InputError, match="several inputs"):
        simulated(Two(), clients, LOCAL, "fast", loss=gaussian)


def test_a_test_set_of_several_inputs_is_measured_with_a_loss_of_several_outputs():
    clients = FEDERATIONS["dictionary"]
    a, b, y = (torch.cat(parts) for parts in zip(*rows(), strict=True))
    test = {"numbers": b, "tokens": a}, y
    run = train(Two(), clients, fedavg(), local=LOCAL, rounds=1, loss=gaussian, evaluate=test)
    with torch.no_grad():
        expected = float(gaussian(run.model(**test[0]), y).mean())
    assert run.history[-1]["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert "test_rmse" not in run.history[-1], "nothing is known of such outputs but their loss"
