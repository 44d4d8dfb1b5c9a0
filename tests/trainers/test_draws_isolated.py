"""Nothing that another client holds shows in an update, whatever the model draws, takes in or steps with: bit for bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfedexp import AdamW, Federation, Sgd
from tests.sizes import sized
from tests.trainers.shared import Made, one_round, secured, unless_refused
from tests.trainers.test_draws import Attending

TRAINERS = ("loop", "tiled-loop", "vectorised", "tiled-vectorised")
CLIENTS, MINE, BOUND = 7, 5, 4


pytestmark = pytest.mark.usefixtures("same_streams")


class Pair(nn.Module):
    """Inputs by place or by name, and dropout of each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(40, 3), nn.Linear(2, 3)

    def forward(self, x, more):
        return F.dropout(self.one(x.flatten(1)), 0.3) + F.dropout(self.two(more), 0.5)


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    dropout = nn.Sequential(nn.Flatten(), nn.Linear(40, 12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, 3))
    lstm = nn.LSTM(8, 4, 2, dropout=0.4, bidirectional=True, batch_first=True)
    recurrent = Made(lambda self, x: self.head(self.layer(x[:, :2])[0][:, -1]), layer=lstm, head=nn.Linear(8, 3))
    # Attention and noise of the module's own.
    return {"dropout": dropout, "attention": Attending(), "recurrent": recurrent, "tuple": Pair(), "dict": Pair()}


LOCALS = {
    "momentum": Sgd(lr=0.3, steps=2, momentum=0.9, nesterov=True, max_examples=BOUND),
    "adamw": AdamW(lr=0.05, steps=2, max_examples=BOUND, clip_gradient=1.0),
}


def federation(name: str, garbage: bool) -> Federation:
    """One client that stays, among others whose rows, and how many they are, may be replaced by garbage."""
    parts = []
    for client in range(CLIENTS):
        replaced = garbage and client != MINE
        generator = torch.Generator().manual_seed(client + 1000 * replaced)
        rows = int(torch.randint(1, 2 * BOUND, (), generator=generator)) * (0 if replaced and client % 4 == 0 else 1)
        x, more = (torch.randn(rows, *shape, generator=generator) for shape in ((5, 8), (2,)))
        if replaced:
            x, more = 1e6 * x, more.fill_(torch.nan if client % 2 else torch.inf)
        inputs = {"tuple": (x, more), "dict": {"more": more, "x": x}}.get(name, x)
        parts.append((inputs, torch.randint(0, 3, (rows,), generator=generator)))
    return Federation.from_clients(parts, finite=False)


def row_of_mine(name: str, how: str, trainer: str, garbage: bool) -> torch.Tensor:
    return one_round(secured(modules()[name], federation(name, garbage), LOCALS[how], trainer))[MINE]


PAIRS = [(name, ("momentum", "adamw")[at % 2], TRAINERS[at % 4]) for at, name in enumerate(modules())]
MORE = [("dropout", "adamw", "tiled-vectorised"), ("dropout", "momentum", "fast")]
ALL = [(name, how, trainer) for name in modules() for how in LOCALS for trainer in TRAINERS]


@pytest.mark.parametrize(("name", "how", "trainer"), sized([*PAIRS, *MORE], [*ALL, *MORE]))
def test_an_update_is_the_same_whatever_the_others_hold(name, how, trainer):
    mine = unless_refused(trainer, lambda: row_of_mine(name, how, trainer, garbage=False))
    if mine is None:
        return
    assert bool(mine.isfinite().all())
    assert float(mine.abs().max()) > 0
    assert torch.equal(mine, row_of_mine(name, how, trainer, garbage=True))
