"""What fast programs must not take for something else, and words that no vocabulary has."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpfedexp import Execution, Federation, InputError, Sgd, fedavg, train
from dpfedexp.core.batches import schedule
from dpfedexp.engine.prepare import prepare
from dpfedexp.trainers import select as tune
from dpfedexp.trainers.fast import ops
from dpfedexp.trainers.fast.convolution import Contract, Convolve, Patches
from dpfedexp.trainers.fast.held import each_held
from dpfedexp.trainers.fast.ops import multiplied
from dpfedexp.trainers.fast.program import Program, Step
from dpfedexp.trainers.fast.window import Window


def federation(words=False):
    generator = torch.Generator().manual_seed(1)
    return Federation.from_clients(
        [
            (
                torch.randint(9, (5, 4), generator=generator) if words else torch.randn(5, 4, generator=generator),
                torch.randint(2, (5,), generator=generator),
            )
            for _ in range(6)
        ]
    )


def bound(model, clients, trainer):
    execution = Execution("cpu", trainer=trainer)
    return prepare(model, clients, fedavg(), local=Sgd(lr=1.0, steps=5), rounds=1, execution=execution)[0]


def first_round(run):
    """The updates of all clients."""
    shuffles = run.streams.at("batches", 1)
    plan = schedule(run.task.local, run.task.clients.sizes, lambda row: shuffles.generator(row))
    return run.trainer(run.task.layout.read(run.task.model).float(), torch.arange(6), plan, 1)


def updates(model, clients, trainer):
    return first_round(bound(model, clients, trainer))


@pytest.mark.parametrize("trainer", ["fast", "vectorised", "tiled-vectorised"])
@pytest.mark.parametrize("word", [-1, 9])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_word_that_does_not_exist_is_its_clients_own_affair(trainer, word, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 2))
    model[0].requires_grad_(not frozen)
    clients = federation(words=True)
    run = bound(model, clients, trainer)
    proper = first_round(run)
    # A secure run never looks whether a client's words are in the vocabulary; here they change behind its back.
    run.task.clients.inputs[15:20] = word
    found = first_round(run)
    others = torch.arange(6) != 3
    torch.testing.assert_close(found[others], proper[others], rtol=1e-5, atol=1e-6)
    assert not found[3].isfinite().all()


class Ignored(nn.Module):
    """Its activation changes the value itself, and nobody reads what it returns."""

    def __init__(self, activate):
        super().__init__()
        self.first, self.last, self.activate = nn.Linear(4, 6), nn.Linear(6, 2), activate
        nn.init.constant_(self.first.bias, 4.0)

    def forward(self, x):
        hidden = self.first(x)
        self.activate(hidden)
        return self.last(hidden)


@pytest.mark.parametrize(
    "activate",
    [nn.ReLU(inplace=True), F.relu_, lambda h: h.clamp_(-2, 2), lambda h: F.relu(h, inplace=True)],
    ids=["layer", "function", "method", "option"],
)
def test_what_changes_a_value_in_place_is_not_left_out(activate):
    with pytest.raises(InputError, match="nothing reads"):
        updates(Ignored(activate), federation(), "fast")


class Probe(nn.Module):
    """A head that begins at zero on features that are not trained, which no tracer sees."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        with torch.no_grad():
            features = torch.tanh(self.features(x))
        return self.head(features)


def test_a_layer_that_begins_at_zero_hides_no_wrong_gradient():
    with pytest.raises(InputError, match="another gradient"):
        updates(Probe(), federation(), "fast")


class Masked(nn.Module):
    """A tensor that is made on the way, and a number that is kept."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("shift", torch.randn(9, 4))

    def forward(self, x):
        return self.layer(x + self.shift[0] + torch.arange(4.0))


def test_tracing_leaves_the_runs_module_as_it_is():
    run = train(
        Masked(), federation(), fedavg(), local=Sgd(lr=0.1, steps=2), rounds=2, progress=False,
        execution=Execution("cpu", trainer="vectorised"),
    )  # fmt: skip
    assert len(run.history) == 2
    with pytest.raises(InputError, match="no fast program"):
        updates(Masked(), federation(), "fast")
    model = Masked()
    run, _ = prepare(model, federation(), fedavg(), local=Sgd(lr=0.1, steps=1), rounds=1)
    names = set(vars(run.task.model))
    with pytest.raises(InputError, match="no fast program"):
        tune.Programs(run.task).plain  # noqa: B018
    assert set(vars(run.task.model)) == names


class Activated(nn.Module):
    def __init__(self, activate):
        super().__init__()
        self.first, self.last, self.activate = nn.Linear(4, 6), nn.Linear(6, 2), activate

    def forward(self, x):
        return self.last(self.activate(self.first(x)))


def test_a_choice_of_before_that_no_longer_fits_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("DPFEDEXP_TRAINERS", str(tmp_path / "trainers.json"))
    monkeypatch.setattr(tune, "WORTH_MEASURING", 0)
    monkeypatch.setattr(tune, "_remembered", {})
    monkeypatch.setattr(
        tune, "_compared", lambda task, makers, *_: {name: 0.1 for name in makers if tune._made(makers[name])}
    )
    first, second = (
        prepare(Activated(f), federation(), fedavg(), local=Sgd(lr=0.1, steps=2), rounds=1)[0].trainer.name
        for f in (F.relu, F.softplus)
    )
    assert first == "fast"
    assert second != "fast"


@pytest.mark.parametrize("activate", [lambda h: torch.tanh(input=h), lambda h: h * h.mean(None)])
def test_a_call_that_no_rule_foresees_is_refused_with_a_sentence(activate):
    with pytest.raises(InputError, match="no fast program"):
        updates(Activated(activate), federation(), "fast")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("trainer", ["vectorised", "tiled-vectorised"])
def test_a_parameter_may_be_a_single_number(trainer):
    torch.manual_seed(0)
    model = Scaled()
    found, alone = (updates(model, federation(), name) for name in (trainer, "loop"))
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    assert float(alone[:, -1].abs().min()) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_kernel_is_held_to_what_it_stands_for_layer_by_layer(precision):
    window, draws = Window((3, 3), padding=(1, 1)), torch.Generator().manual_seed(0)
    x, kernel, dy = (
        torch.randn(shape, generator=draws) for shape in ((2, 3, 6, 5, 4), (2, 7, 3, 3, 3), (2, 7, 6, 5, 4))
    )
    plain = Program(
        (Step(Patches(window), (0,), 1), Step(Contract(False), (1,), 2, ("w",)), Step(ops.RELU, (2,), 3)), output=3
    )

    def back_and_forth(op):
        step = Step(op, (0,), 2, ("w",))
        first, second = each_held(Program((step, plain.steps[2]), output=3), plain, precision).steps
        assert second is plain.steps[2]
        _, saved = first.op.forward([kernel], x)
        return first.op.backward([kernel], saved, dy, True)

    of_kernel, of_inputs = back_and_forth(Convolve(window, False))
    patches, shape = Patches(window).forward((), x)
    of_params, (of_patches,) = Contract(False).backward([kernel], patches, dy, True)
    assert torch.equal(multiplied(of_kernel[0]), multiplied(of_params[0]))
    assert torch.equal(of_inputs[0], Patches(window).backward((), shape, of_patches, True)[1][0])

    class Wrong(Convolve):
        def backward(self, params, saved, dy, wanted):
            of_params, of_inputs = super().backward(params, saved, dy, wanted)
            return [2 * multiplied(of_params[0])], of_inputs

    with pytest.raises(ops.Unsupported, match="Wrong gives something else than Contract"):
        back_and_forth(Wrong(window, False))
