"""Frozen parts: statistics that stand still are allowed, frozen parameters are held once, and only what is trained counts."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpfedexp import Federation, Sgd, dp_fedavg, fedavg, train
from dpfedexp.trainers.chunk_size import footprint
from tests.trainers.shared import Made, labeled, one_round, simulated, updates

LOCAL = Sgd(lr=0.1, steps=2, max_examples=4)


class Residual(nn.Module):
    """A small pretrained ResNet: convolutions, batch norms with statistics of their own, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.1))
        self.head = nn.Linear(4, 3)
        for _ in range(3):
            self(torch.randn(8, 1, 6, 6))

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(torch.relu(x + self.block(x)).mean((2, 3)))


def federation(shape=(1, 6, 6), sizes=(4, 2, 7, 1)):
    return labeled(shape, sizes, seed=1)


@pytest.mark.parametrize(("head_only", "secure"), [(False, False), (True, True)])
def test_a_pretrained_network_in_eval_mode_trains_and_its_statistics_stand_still(head_only, secure):
    model = Residual().eval()
    if head_only:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    algorithm = dp_fedavg(clip=1.0, noise_multiplier=1.0)
    run = train(model, federation(), algorithm, local=LOCAL, rounds=2, secure=secure, execution="cpu")
    after = run.model.state_dict()
    for name in dict(model.named_buffers()):
        assert torch.equal(after[name], before[name])
    assert not torch.equal(after["head.weight"], before["head.weight"])
    assert torch.equal(after["stem.weight"], before["stem.weight"]) == head_only


def test_a_network_in_eval_mode_is_vectorized_as_the_loop_trains_it():
    """Dropout is on, batch norm's statistics are not touched; 1e-6 of a largest entry of order one is float32 rounding."""
    one, other = (simulated(Residual().eval(), federation(), LOCAL, trainer) for trainer in ("vectorized", "loop"))
    assert not one.task.model.norm.training
    assert one.task.model.block[2].training
    torch.testing.assert_close(one_round(one), one_round(other), rtol=0, atol=1e-6)


class Largest(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() // 4 > self.numbers:
                self.numbers = leaf.untyped_storage().nbytes() // 4
        return out


class Adapter(nn.Module):
    """W frozen, and a product of two thin matrices beside it: LoRA, written by hand."""

    def __init__(self, width, rank, base=None):
        super().__init__()
        self.base = (base or nn.Linear(width, width)).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(width=64, rank=2):
    torch.manual_seed(3)
    head = nn.Linear(width, 3).requires_grad_(False)
    return nn.Sequential(Adapter(width, rank), nn.Tanh(), Adapter(width, rank), head)


def test_adapters_alone_are_trained_sent_and_counted():
    model, clients = adapted(), federation((64,))
    simulation = simulated(model, clients, LOCAL)
    assert simulation.task.layout.dimension == 2 * 2 * 64 * 2
    assert footprint(simulation.task).dimension == 2 * 2 * 64 * 2
    run = train(model, clients, fedavg(), local=LOCAL, rounds=3, execution="cpu")
    for (name, before), after in zip(model.named_parameters(), run.model.parameters(), strict=True):
        assert torch.equal(before, after) != before.requires_grad, name


@pytest.mark.parametrize("trainer", ["tiled-vectorized", "loop", "fast"])
def test_frozen_parameters_are_held_once(trainer):
    """No tensor of a chunk of 32 clients comes near 32 copies of a frozen matrix; 4 rows of width 256 each do not either."""
    width, count = 256, 32
    simulation = simulated(adapted(width, 1), federation((width,), [4] * count), LOCAL, trainer)
    with Largest() as seen:
        updates(simulation, simulation.trainer._trainer() if trainer == "fast" else None)
    assert 0 < seen.numbers < 4 * width * width
    frozen = {p.data_ptr() for p in simulation.task.model.parameters() if not p.requires_grad}
    for twin in (simulation.task.copy_for_thread().model, *simulation.task.copies):
        assert {p.data_ptr() for p in twin.parameters() if not p.requires_grad} == frozen


@pytest.mark.parametrize("trainer", ["vectorized", "loop", "fast"])
def test_frozen_parts_compute_in_bf16_with_the_rest(trainer):
    """A frozen backbone has the precision of what flows through it, and stays as it is. No rule covers batch norm."""
    model = Residual().eval().requires_grad_(False)
    model.head.requires_grad_(True)
    tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    tokens[:3].requires_grad_(False)
    words = Federation.from_clients([(torch.randint(9, (4, 3)), torch.randint(0, 3, (4,))) for _ in range(3)])
    for network, clients in ((model, federation()), (tokens, words))[trainer == "fast" :]:
        before = {name: value.clone() for name, value in network.state_dict().items()}
        given = network, clients, LOCAL, trainer
        rough, exact = (one_round(simulated(*given, precision=precision)) for precision in ("bf16", "fp32"))
        assert 0 < float((rough - exact).norm() / exact.norm()) < 0.05
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_what_a_module_writes_into_a_rounded_constant_reaches_no_other_client():
    def remembers(self, x):
        """Keeps what it sees of large inputs alone, which no synthetic batch shows."""
        if float(x.detach().abs().max()) > 50:
            self.seen += x.detach().mean(0)
        return self.head(x + self.seen)

    model = Made(remembers, head=nn.Linear(4, 3), seen=nn.Buffer(torch.zeros(4)))
    clients = [(torch.full((4, 4), size), torch.zeros(4, dtype=torch.long)) for size in (100.0, 1.0)]
    both, alone = (
        simulated(model, Federation.from_clients(c), LOCAL, "loop", precision="bf16") for c in (clients, clients[1:])
    )
    assert torch.equal(updates(both)[1], updates(alone)[0])
