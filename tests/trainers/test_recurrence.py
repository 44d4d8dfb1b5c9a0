"""Recurrent layers of torch: many clients at once, and what one client alone would have computed."""

import warnings

import pytest
import torch
from torch import nn

from dpfedexp import Sgd
from dpfedexp.trainers.draws import Drawing
from dpfedexp.trainers.steps import Loop, Vectorised
from tests.trainers.shared import labelled, simulated, updates

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


class Reader(nn.Module):
    """A recurrent layer, its last output and its last state."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = KINDS[kind](6, 4, batch_first=True, **options)
        ways = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(4 * ways + 4, 3)

    def forward(self, x):
        states, last = self.layer(x)
        hidden = last[0] if isinstance(last, tuple) else last
        return self.head(torch.cat([states[:, -1], hidden[-1]], -1))


def learnt(model, trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = simulated(model, labelled((5, 6), (4, 2, 7, 1), seed=1), Sgd(lr=0.5, steps=3, batch_size=2))
    return updates(run, trainer(run.task, streams=run.streams))


DEEP, DROPPED = {"num_layers": 2, "bidirectional": True}, {"num_layers": 2, "dropout": 0.5}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lstm", {}), ("lstm", DROPPED), ("gru", DEEP), ("gru", DROPPED), ("tanh", DEEP), ("relu", {})],
)
def test_all_clients_at_once_learn_what_each_would_alone(kind, options):
    torch.manual_seed(0)
    model = Reader(kind, **options)
    alone, together = (learnt(model, trainer) for trainer in (Loop, Vectorised))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)
    assert float(alone.norm(dim=1).min()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_a_layer_gives_torchs_outputs_and_states(kind):
    for layers, both, first, bias in ((1, False, True, False), (2, True, False, True), (2, True, True, False)):
        layer = KINDS[kind](
            6, 4, num_layers=layers, bidirectional=both, batch_first=first, bias=bias, dtype=torch.float64
        )
        x = torch.randn(3, 5, 2, 6, dtype=torch.float64)
        with Drawing(None):
            together = torch.func.vmap(layer)(x)
        for client in range(3):
            one, other = (
                torch.utils._pytree.tree_leaves(found)
                for found in (layer(x[client]), torch.utils._pytree.tree_map(lambda t, c=client: t[c], together))
            )
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b)


def test_a_client_alone_keeps_torchs_own_kernel(monkeypatch):
    monkeypatch.setattr("dpfedexp.trainers.draws.recurrent", None)
    with Drawing(None) as mode:
        nn.LSTM(6, 4)(torch.randn(5, 2, 6))
    assert mode.fused


def test_packed_sequences_and_projections_are_left_to_torch():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 6), torch.randn(2, 6)])
    for layer, x in ((nn.LSTM(6, 4), packed), (nn.LSTM(6, 4, proj_size=2), torch.randn(5, 2, 6))):
        with Drawing(None) as mode:
            layer(x)
        assert not mode.fused


def test_no_layer_asks_where_weights_lie_that_have_no_place(monkeypatch):
    """On a GPU a recurrent layer moves changed weights together; those of all clients at once are nowhere."""
    model = Reader("lstm")

    def ask(self):
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", ask)
    assert learnt(model, Vectorised).isfinite().all()
