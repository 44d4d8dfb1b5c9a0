"""What `train` is given is checked before the first round, and answered with where it belongs."""

import numpy as np
import pytest
import torch
from torch import nn

from dpfedexp import Evaluation, Federation, FixedSize, InputError, Sgd, cdp_fedexp, fit, train
from dpfedexp.accounting import Ledger, Sampling, compose
from dpfedexp.accounting.events import central_gaussian
from dpfedexp.accounting.statement import PrivacyStatement
from dpfedexp.engine.checkpoint import read_progress
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.runner import epsilon_so_far, next_known
from dpfedexp.engine.simulated import Simulation
from dpfedexp.engine.train import make_evaluator
from dpfedexp.models import linear_regression
from tests.arguments import arguments
from tests.engine.small import ROUNDS, BareClients, random_rows, small_run

PRIVATE = cdp_fedexp(clip=0.5, noise_multiplier=1.0)


def federation(clients: int = 6) -> Federation:
    return Federation.from_clients(random_rows([4] * clients, 3))


def run(clients=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    given = {"local": Sgd(lr=0.1, steps=1), "rounds": 2, "execution": "cpu"} | options
    return train(model, federation() if clients is None else clients, PRIVATE, **arguments(given))


@pytest.mark.parametrize(
    ("name", "value"), [("chunk_size", 3), ("trainer", "loop"), ("precision", "bf16"), ("memory", 9)]
)
def test_a_field_of_the_execution_is_sent_to_its_place(name, value):
    with pytest.raises(InputError, match=rf"train has no argument {name!r}. Write execution=Execution\({name}="):
        run(**{name: value})


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        ((5, 4), (5,), r"inputs of shape \(5, 4\) and targets of shape \(5,\), which do not fit the model"),
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
    bare = BareClients([federation().client(n) for n in range(6)])
    with pytest.raises(InputError, match=r"BareClients has no method prepare .* give a function"):
        run(bare, test=(torch.zeros(5, 3), torch.zeros(5)))
    assert len(run(bare, evaluate=lambda model: {"size": 1.0}).history) == 2


def test_counts_may_be_numpys_and_are_recorded_as_pythons_own(tmp_path):
    options = {"local": Sgd(lr=0.1, steps=np.int64(2)), "participation": FixedSize(np.int64(4))}
    whole = run(rounds=np.int64(3), evaluate=Evaluation(lambda model: {}, every=np.int32(2)), out=tmp_path, **options)
    assert len(whole.history) == 3
    settings = read_progress(tmp_path).settings
    assert (settings["rounds"], settings["evaluate_every"], settings["local.steps"]) == (3, 2, 2)


DELTA = 1e-5


@pytest.mark.parametrize("sampling", [Sampling("poisson", 0.1), Sampling("fixed", 0.1)])
def test_a_record_bounds_what_was_charged_by_a_quarter_more_rounds_at_most(sampling):
    """Of Poisson rounds, whose cost takes long to compute; of all others it is what was charged."""
    ledger, rounds, event = Ledger.in_memory(), 23, central_gaussian(3.0, sampling=sampling)
    for number in range(1, rounds + 1):
        ledger.charge(number, event, noise="seed 0")
    exact = ledger.guarantee(DELTA).epsilon
    most = compose([(event, int(1.25 * rounds) + 1)], DELTA).epsilon if sampling.kind == "poisson" else exact
    assert exact <= epsilon_so_far(ledger, DELTA, last=False) <= most
    assert epsilon_so_far(ledger, DELTA, last=True) == exact


def test_a_thousand_records_need_few_numbers_of_rounds():
    known = {next_known(rounds) for rounds in range(1, 1001)}
    assert len(known) < 35
    assert all(rounds <= next_known(rounds) <= 1.25 * rounds + 1 for rounds in range(1, 1001))


def test_a_function_that_spoils_its_model_spoils_nothing_else():
    """Not even the frozen parameters, which the clients train with."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0))
    model[0].requires_grad_(False)

    def output(model):
        return {"output": float(model(torch.ones(1, 3)))}

    def spoiling(model):
        found = output(model)
        for parameter in model.train().parameters():
            parameter.data.zero_()
        return found

    honest, spoilt = (small_run(model=model, test=None, evaluate=function) for function in (output, spoiling))
    outputs = [record["output"] for record in honest.history]
    assert outputs == [record["output"] for record in spoilt.history]
    assert len(set(outputs)) == ROUNDS, "of each round's own parameters"
    assert all(torch.equal(a, b) for a, b in zip(honest.model.parameters(), spoilt.model.parameters(), strict=True))


class Remembering(nn.ReLU):
    """Adds what it has seen in eval mode to what it says next."""

    total = 0.0

    def forward(self, x):
        self.total += 0.0 if self.training else x.detach().abs().sum()
        return super().forward(x) + self.total


def test_a_module_that_remembers_is_measured_in_a_fresh_copy():
    clients = federation()
    model = nn.Sequential(nn.Linear(3, 4), Remembering(), nn.Linear(4, 1), nn.Flatten(0))
    engine, _ = prepare(model, clients, PRIVATE, local=Sgd(lr=0.1, steps=1), rounds=2)
    measure = make_evaluator(Evaluation(clients.client(0)), clients, engine.cohort.task, model)
    state = engine.begin()
    assert measure(state) == measure(state)


def test_the_statement_names_what_was_chosen_and_nothing_that_was_given():
    run = fit(linear_regression(3), federation(150), rounds=3)
    facts = " ".join(run.privacy.choices)
    chosen = ("cdp_fedexp with the safe step", "δ = 1e-05", "10 local steps on 64 rows", "the local rate", "the clip")
    assert all(words in facts for words in chosen)
    assert " rounds" not in facts
    assert f"{run.history[0]['local_rate']:.3g} by votes at first" in facts
    assert "This run chose its own settings: the algorithm" in run.privacy.text
    assert PrivacyStatement.from_json(run.privacy.to_json()) == run.privacy
    settings = {"rounds": 2, "delta": 1e-6, "epsilon": 4}
    given = fit(linear_regression(3), federation(150), **settings)
    facts = " ".join(given.privacy.choices)
    assert not any(words in facts for words in ("δ", " rounds"))
    assert (given.privacy.delta, len(given.history)) == (1e-6, 2)
    assert 3.9 < given.privacy.epsilon_total <= 4.0


def test_what_another_run_charges_while_clients_train_counts_towards_the_budget(monkeypatch):
    ledger, answer, delta = Ledger.in_memory(), Simulation.answer, 1e-5

    def slow(cohort, request):
        if len(ledger) == 0:
            ledger.charge(1, central_gaussian(1.0), run="another")
        return answer(cohort, request)

    monkeypatch.setattr(Simulation, "answer", slow)
    other = compose([(central_gaussian(1.0), 1)], delta).epsilon
    made = fit(linear_regression(3), federation(150), rounds=3, epsilon=4, ledger=ledger, budget=other, delta=delta)
    assert "budget" in made.stopped
    assert [entry.run for entry in ledger.entries] == ["another"]
