"""What `train` is given is checked before the first round, and answered with where it belongs."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import nn

from dpfedexp import Execution, Federation, FixedSize, InputError, Sgd, cdp_fedexp, dp_fedavg, fit, train
from dpfedexp.accounting import Ledger, Sampling, compose
from dpfedexp.accounting.charges import central_gaussian
from dpfedexp.accounting.statement import PrivacyStatement
from dpfedexp.algorithms.participation import Full
from dpfedexp.engine.checkpoint import read_progress
from dpfedexp.engine.fit import MANY, USUAL, rounds_for
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.train import epsilon_so_far, evaluation_of, next_known
from dpfedexp.models import linear_regression

PRIVATE = cdp_fedexp(clip=0.5, noise_multiplier=1.0)


def federation(clients: int = 6) -> Federation:
    generator = torch.Generator().manual_seed(0)
    return Federation.from_clients(
        [(torch.randn(4, 3, generator=generator), torch.randn(4, generator=generator)) for _ in range(clients)]
    )


def run(clients=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    given = {"local": Sgd(lr=0.1, steps=1), "rounds": 2, "device": "cpu", "progress": False} | options
    return train(model, federation() if clients is None else clients, PRIVATE, **given)


@pytest.mark.parametrize(
    ("name", "value"), [("chunk_size", 3), ("trainer", "loop"), ("precision", "bf16"), ("memory", "4GB")]
)
def test_a_field_of_the_execution_is_sent_to_its_place(name, value):
    with pytest.raises(InputError, match=rf"train has no argument {name!r}. Write execution=Execution\({name}="):
        run(**{name: value})


def test_the_signature_is_the_one_that_the_docs_show():
    names = list(inspect.signature(train).parameters)
    assert names[:5] == ["model", "clients", "algorithm", "local", "rounds"]
    assert not {"chunk_size", "trainer", "precision", "memory"} & set(names)
    documented = inspect.getdoc(train)
    assert all(f"    {name}: " in documented for name in names)


def test_a_device_and_an_execution_that_differ_are_an_error():
    with pytest.raises(InputError, match="give one of them"):
        run(device="cpu", execution=Execution(device="cuda"))
    assert len(run(execution=Execution(chunk_size=2)).history) == 2


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        ((5, 4), (5,), r"test has inputs of shape \(5, 4\) and targets of shape \(5,\), which do not fit the model"),
        ((5, 3), (5, 2), "which do not fit the model and its loss"),
        ((5, 3), (4,), "5 inputs and 4 targets"),
        ((0, 3), (0,), "at least 1"),
    ],
)
def test_a_test_set_that_does_not_fit_is_a_sentence_before_anything_is_charged(inputs, targets, words):
    ledger = Ledger.in_memory()
    with pytest.raises(InputError, match=words):
        run(test=(torch.zeros(inputs), torch.zeros(targets)), ledger=ledger)
    assert len(ledger) == 0


def test_clients_that_can_not_cast_a_test_set_ask_for_a_function_instead():
    class Own:
        """What the simulator asks of clients, and no more."""

        def __init__(self) -> None:
            inner = federation()
            self.sizes, self.gather = inner.sizes, inner.gather

        def __len__(self) -> int:
            return len(self.sizes)

    with pytest.raises(InputError, match=r"Own has no method prepare .* give evaluate"):
        run(Own(), test=(torch.zeros(5, 3), torch.zeros(5)))
    assert len(run(Own(), evaluate=lambda model: {"size": 1.0}).history) == 2


def test_counts_may_be_numpys_and_are_recorded_as_pythons_own(tmp_path):
    options = {"local": Sgd(lr=0.1, steps=np.int64(2)), "participation": FixedSize(np.int64(4))}
    whole = run(rounds=np.int64(3), evaluate_every=np.int32(2), checkpoint=tmp_path, **options)
    assert len(whole.history) == 3
    settings = read_progress(tmp_path).settings
    assert (settings["rounds"], settings["evaluate_every"], settings["local.steps"]) == (3, 2, 2)
    again = run(
        local=Sgd(lr=0.1, steps=2),
        participation=FixedSize(4),
        rounds=3,
        evaluate_every=2,
        checkpoint=tmp_path,
        resume=True,
    )
    assert again.history == whole.history


DELTA = 1e-5


def charged(rounds: int, sampling: Sampling) -> Ledger:
    ledger = Ledger.in_memory()
    for number in range(1, rounds + 1):
        ledger.charge(number, central_gaussian(3.0, sampling=sampling), noise="seed 0")
    return ledger


@pytest.mark.parametrize("rounds", [8, 23])
def test_a_record_of_sampled_rounds_bounds_what_was_charged_by_a_quarter_more_rounds_at_most(rounds):
    ledger = charged(rounds, Sampling("poisson", 0.1))
    exact = ledger.guarantee(DELTA).epsilon
    event = central_gaussian(3.0, sampling=Sampling("poisson", 0.1))
    most = compose([(event, max(rounds, int(1.25 * rounds) + 1))], DELTA).epsilon
    assert exact <= epsilon_so_far(ledger, DELTA, last=False) <= most
    assert epsilon_so_far(ledger, DELTA, last=True) == exact


@pytest.mark.parametrize("kind", [Sampling(), Sampling("fixed", 0.1)])
def test_what_is_computed_in_a_moment_is_that_of_the_round(kind):
    ledger = charged(37, kind)
    assert epsilon_so_far(ledger, DELTA, last=False) == ledger.guarantee(DELTA).epsilon


def test_a_thousand_records_need_few_numbers_of_rounds():
    known = {next_known(rounds) for rounds in range(1, 1001)}
    assert len(known) < 35
    assert all(rounds <= next_known(rounds) <= 1.25 * rounds + 1 for rounds in range(1, 1001))


LOCAL = Sgd(lr=0.1, steps=2)


def problem() -> tuple[nn.Module, Federation, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    x, y = torch.randn(60, 3), torch.randint(0, 2, (60,))
    return model, Federation.iid(x[:40], y[:40], clients=8, seed=0), (x[40:], y[40:])


def measured_run(**how):
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

    plain, spoilt = measured_run(evaluate=honest), measured_run(evaluate=spoiling)
    assert [record["loss"] for record in plain.history] == [record["loss"] for record in spoilt.history]
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), spoilt.model.parameters(), strict=True))


def test_a_test_set_measures_each_rounds_own_parameters():
    _, _, test = problem()

    def by_hand(model):
        with torch.no_grad():
            return {"test_loss": float(nn.functional.cross_entropy(model(test[0]), test[1]))}

    measured, expected = measured_run(test=test).history, measured_run(evaluate=by_hand).history
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


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(nn.ReLU, True), (Remembering, False), (lambda: hooked(nn.ReLU()), False)],
    ids=["torch's own", "a class", "a hook"],
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


def test_the_statement_names_what_was_chosen_and_nothing_that_was_given():
    run = fit(linear_regression(3), federation(150), rounds=3, progress=False)
    facts = " ".join(run.privacy.chosen)
    for words in (
        "cdp_fedexp with the safe step",
        "δ = 1e-05",
        "10 full-batch local steps",
        "the local rate",
        "the clip",
    ):
        assert words in facts
    assert " rounds" not in facts
    assert f"{run.history[0]['local_rate']:.3g} by votes at first" in facts
    assert "Nobody tuned this run: it chose the algorithm" in run.privacy.text
    assert PrivacyStatement.from_json(run.privacy.to_json()) == run.privacy
    given = fit(
        linear_regression(3),
        federation(150),
        rounds=2,
        delta=1e-6,
        local=Sgd(lr=0.1, steps=2),
        epsilon=4,
        progress=False,
    )
    facts = " ".join(given.privacy.chosen)
    assert not any(words in facts for words in ("δ", "local", " rounds"))
    assert (given.privacy.delta, len(given.history)) == (1e-6, 2)
    assert 3.9 < given.privacy.epsilon_total <= 4.0


def test_the_rounds_follow_from_the_noise_of_one():
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0)
    counts = [rounds_for(algorithm, d, 1000, Full()) for d in (4, 5_000, 10_000_000)]
    assert counts == [MANY, USUAL, USUAL]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be a positive number"),
        ({"rounds": 0}, "rounds is 0; it must be a positive whole number"),
        ({"lr": 0.1}, "lr"),
    ],
)
def test_wrong_arguments_are_one_sentence(wrong, sentence):
    with pytest.raises((InputError, TypeError), match=sentence):
        fit(linear_regression(3), federation(10), progress=False, **wrong)
