"""Clients measure the model: within the same epsilon, on rows that never train, once for each round, and apart from each other."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import dpfedexp as dp
from dpfedexp.accounting import Ledger, Sampling
from dpfedexp.core.client_metrics import EVALUATION
from dpfedexp.engine.engine import Engine, Request, evaluations_left
from dpfedexp.engine.open_run import OpenRun
from dpfedexp.engine.plot import metrics_in
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import AdviceWarning, InputError, RoundFailed
from dpfedexp.mechanisms import CentralGaussian
from dpfedexp.report.page import read_run, run_section
from tests.arguments import arguments
from tests.engine.small import crash_after, crash_in
from tests.sizes import long, sized

M, ROUNDS = 60, 4
LOCAL = dp.Sgd(lr=0.1, steps=3, max_examples=16)
ALGORITHM = dp.dp_fedavg(clip=0.5, target_epsilon=200.0)


def rows_of(kind, clients=M, rows=10, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, rows, 5, generator=draw) + 0.3 * torch.randn(clients, 1, 5, generator=draw)
    score = x @ torch.linspace(-1, 1, 5) + 0.5 * torch.randn(clients, rows, generator=draw)
    if kind == "classes":
        return x, torch.bucketize(score, torch.tensor([-0.7, 0.7]))
    if kind == "heavy tails":
        score = score + torch.from_numpy(np.random.default_rng(seed).standard_t(2, score.shape)).float()
    return x, (score > 0).float() if kind == "binary" else score


def own_loss(outputs, targets):
    return (outputs - targets).abs() ** 1.5


LOSSES = {"binary": "bce", "own loss": own_loss}


def federation(kind="classes", **more):
    return dp.Federation.from_clients(list(zip(*rows_of(kind, **more), strict=True)))


def model_for(kind="classes"):
    torch.manual_seed(0)
    return nn.Linear(5, 3) if kind == "classes" else nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))


def run_of(algorithm=ALGORITHM, kind="classes", **more):
    clients = more.pop("clients", None) or federation(kind)
    given = {"local": LOCAL, "rounds": ROUNDS, "evaluate": "clients", **more}
    return dp.train(model_for(kind), clients, algorithm, loss=LOSSES.get(kind), **arguments(given))


def by_hand(model, kind, clients):
    """The true metrics, without bins: every client counts the same, and so does every row of a client."""
    rows = [clients.client(number) for number in range(len(clients))]
    x, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
    weights = torch.cat([torch.full((len(own),), 1.0 / len(own)) for _, own in rows]).double() / len(rows)
    with torch.no_grad():
        outputs = model(x)
    if kind in ("classes", "binary"):
        logits = outputs if kind == "classes" else torch.stack([torch.zeros_like(outputs), outputs], dim=1)
        losses = nn.functional.cross_entropy(logits, y.long(), reduction="none")
        losses, right = losses.clamp_max(2 * math.log(logits.shape[1])), logits.argmax(1) == y
        found = {"clients_loss": weights @ losses.double(), "clients_accuracy": weights @ right.double()}
        if kind == "binary":
            above = (outputs[:, None] > outputs[None]).double()
            positive, negative = weights * (y > 0.5), weights * (y <= 0.5)
            found["clients_auc"] = positive @ above @ negative / (positive.sum() * negative.sum())
        return {name: float(value) for name, value in found.items()}
    values, order = (own_loss(outputs, y) if kind == "own loss" else (outputs - y).abs()).sort()
    places = torch.searchsorted(weights[order].cumsum(0), torch.tensor([0.5, 0.9]).double())
    name = "loss" if kind == "own loss" else "error"
    return {
        f"clients_{name}_{label}": float(values[place]) for label, place in zip(("median", "p90"), places, strict=True)
    }


# Calibrating the noise of sampled rounds takes ten seconds.
@pytest.mark.parametrize(
    ("make", "participation"), [(dp.dp_fedavg, None), *sized([], [(dp.cdp_fedexp, dp.Poisson(0.5))])]
)
def test_all_measurements_cost_at_most_one_per_cent_of_noise_and_no_epsilon(make, participation):
    algorithm = make(clip=0.5, target_epsilon=8.0)
    given = {"local": LOCAL, "rounds": 50, "participation": participation}
    without, _ = prepare(model_for(), federation(), algorithm, **given)
    measuring, _ = prepare(model_for(), federation(), algorithm, **given, evaluate_every=1)
    ratio = measuring.mechanism.noise_multiplier / without.mechanism.noise_multiplier
    assert 1.0 < ratio <= 1.01
    assert len(measuring.answers_left(measuring.begin(), 50, Ledger.in_memory())) == 50
    if participation is None:
        run = run_of(algorithm, rounds=3)
        assert run.privacy.epsilon_total == pytest.approx(8.0, rel=1e-3)
        assert run.privacy.epsilon_total <= 8.0


@pytest.mark.parametrize("kind", ["classes", "binary", "numbers"])
def test_what_is_measured_is_what_the_model_does_on_the_clients_rows(kind):
    run = run_of(dp.dp_fedavg(clip=0.5, target_epsilon=1e5), kind, evaluate_every=2)
    measured = [[name for name in record if name.startswith("clients_")] for record in run.history]
    assert [bool(names) for names in measured] == [False, True, False, True]
    for name, value in by_hand(run.model, kind, federation(kind)).items():
        assert run.history[-1][name] == pytest.approx(value, abs=0.1), name


def test_rows_that_are_held_out_never_train():
    x, y = rows_of("classes")
    other = x.clone()
    other[:, 4::5] = 100.0  # every fifth row is held out
    runs = [
        run_of(clients=dp.Federation.from_clients(list(zip(inputs, y, strict=True))), held_out=0.2)
        for inputs in (x, other)
    ]
    for one, another in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(one, another)
    assert runs[0].history[-1]["clients_accuracy"] != runs[1].history[-1]["clients_accuracy"]


def test_a_client_holds_out_its_share_and_one_with_few_rows_none():
    clients = dp.Federation.from_clients([(torch.zeros(n, 1), torch.zeros(n)) for n in (0, 1, 4, 5, 11)])
    training, held = clients.hold_out(0.2)
    assert held.sizes.tolist() == [0, 0, 0, 1, 2]
    assert training.sizes.tolist() == [0, 1, 4, 4, 9]
    assert sorted([*training.rows.tolist(), *held.rows.tolist()]) == sorted(clients.rows.tolist())


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("owner", "name", "secure"),
    [(Engine, "ask", False), (OpenRun, "add_to_last_record", False), (OpenRun, "add_to_last_record", True)],
    ids=["before the charge", "after the charge", "after the charge, secure"],
)
def test_a_crash_in_a_measurement_costs_no_round_and_asks_nothing_twice(tmp_path, monkeypatch, owner, name, secure):
    """The attack: the statement left out the measurement that was due, and `verify` called an honest claim false."""
    given, folder = {"secure": secure, "evaluate_every": 2}, tmp_path / "run"
    whole = run_of(**given)
    with monkeypatch.context() as patched:
        crash_in(patched, owner, name, 1, before=True, error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            run_of(out=folder, **given)
    assert outcome(verify_run(folder)) == "holds"
    planned = json.loads((folder / "privacy.json").read_text())["epsilon_total"]
    assert planned == pytest.approx(whole.privacy.epsilon_total)
    run = run_of(out=folder, **given)
    assert outcome(verify_run(folder)) == "holds"
    assert [entry.round for entry in run.ledger.entries if entry.event.question] == [2, 4]
    assert len(run.ledger.entries) == len(whole.ledger.entries)
    assert run.privacy.epsilon_total == pytest.approx(whole.privacy.epsilon_total)
    assert ("clients_accuracy" in run.history[1]) != secure
    if not secure:
        assert [{**line, "seconds": 0} for line in run.history] == [{**line, "seconds": 0} for line in whole.history]


def test_in_a_secure_run_what_a_client_measures_depends_on_no_other_client():
    x, y = rows_of("classes", clients=12)
    other, broken = x.clone(), x.clone()
    other[1:] = 7.0 * torch.rand(x[1:].shape)
    broken[1:] = math.nan
    rows = []
    for inputs in (x, other, broken):
        clients = dp.Federation.from_clients(list(zip(inputs, y, strict=True)), finite=False)
        engine, _ = prepare(model_for(), clients, ALGORITHM, local=LOCAL, rounds=2, secure=True, evaluate_every=1)
        request = Request(EVALUATION, 1, engine.begin(), engine.evaluation.mechanism)
        rows.append(engine.cohort.rows(request, engine.start.float(), torch.arange(12))[0])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert float(rows[0].norm()) > 0.1


def test_dropout_is_off_while_clients_measure():
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(5, 3))
    given = {"local": LOCAL, "rounds": 1, "evaluate_every": 1}
    found = []
    for seed in (0, 1):
        engine, _ = prepare(model, federation(), dp.fedavg(), execution=dp.Execution(seed=seed), **given)
        found.append(engine.evaluate(engine.begin(), Ledger.in_memory()))
    assert found[0] == found[1]


def test_an_uncharged_measurement_is_found(tmp_path):
    run_of(evaluate=None, out=tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [{**json.loads(line), "clients_accuracy": 0.9} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcome(verify_run(tmp_path / "run")) == "false"


def test_a_second_run_on_a_ledger_verifies_with_its_own_measurements(tmp_path):
    book = tmp_path / "book.jsonl"
    run_of(evaluate=None, ledger=book)
    run_of(ledger=book, out=tmp_path / "second", on_round=crash_after(1, dp.Stop), evaluate_every=2)
    for suffix in ("", ".head"):
        (tmp_path / "second" / f"ledger.jsonl{suffix}").write_bytes((tmp_path / f"book.jsonl{suffix}").read_bytes())
    assert outcome(verify_run(tmp_path / "second")) == "holds"


def test_without_privacy_measurements_are_no_rounds(tmp_path):
    run = run_of(dp.fedavg(), out=tmp_path / "run")
    assert run.privacy.rounds == ROUNDS
    assert outcome(verify_run(tmp_path / "run")) == "holds"


def test_a_complete_run_measures_nothing_more(tmp_path, monkeypatch):
    """The attack: a run whose last measurement was interrupted measured other clients when it was resumed."""
    folder, found = tmp_path / "run", []
    with monkeypatch.context() as patched:
        crash_in(patched, Engine, "evaluate", ROUNDS, before=True, error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            run_of(out=folder)
    found.append(json.loads((folder / "status.json").read_text()))
    run = run_of(out=folder, clients=federation(seed=5))
    found.append(json.loads((folder / "status.json").read_text()))
    assert not any(name.startswith("clients_") for name in run.history[-1])
    assert [(one["status"], one["reason"]) for one in found] == [("failed", "it was interrupted."), ("completed", "")]


def test_too_few_answers_to_a_measurement_do_not_end_training(monkeypatch):
    crash_in(monkeypatch, Engine, "ask", 1, before=True, error=RoundFailed("the evaluation failed."))
    with pytest.warns(AdviceWarning, match="the evaluation failed"):
        run = run_of()
    assert ["clients_loss" in record for record in run.history] == [False] + [True] * (ROUNDS - 1)


def test_another_algorithm_a_sampled_cohort_and_add_remove_measure_too():
    algorithm = dp.dp_scaffold(clip=0.5, noise_multiplier=0.1, adjacency="add-remove")
    run = run_of(algorithm, evaluate_every=2, participation=dp.FixedSize(40), population=M)
    assert 0.2 < run.history[-1]["clients_accuracy"] <= 1.0


@pytest.mark.parametrize("asked", [15, M])
def test_an_interval_is_as_wide_as_clients_that_were_not_asked_make_it(asked):
    given = {"local": LOCAL, "rounds": 1, "evaluate_every": 1, "participation": dp.FixedSize(asked)}
    engine, _ = prepare(model_for(), federation(), dp.fedavg(), **given)
    found = engine.evaluate(engine.begin(), Ledger.in_memory())
    share = found["clients_accuracy"]
    width = 1.96 * math.sqrt((1 - asked / M) / asked * share * (1 - share))
    assert found["clients_accuracy_high"] - share == pytest.approx(width, rel=1e-3, abs=1e-9)


def test_fit_measures_and_says_so(tmp_path):
    given = {"evaluate": dp.Evaluation("clients", held_out=0.2), "rounds": 4, "out": tmp_path / "r"}
    run = dp.fit(model_for(), federation(), epsilon=100, **given)
    assert "measured the model on rows of their own" in run.privacy.text
    assert "clients_accuracy" in dp.Run.load(tmp_path / "r").history[-1]
    assert outcome(verify_run(tmp_path / "r")) == "holds"


def test_the_evaluations_that_are_left_do_not_depend_on_other_runs_of_the_ledger():
    ledger, event = Ledger.in_memory(), CentralGaussian(1.0, 5.0).event(Sampling())
    ledger.charge(9, event, run="another")
    assert evaluations_left(2, 10, ledger, "own") == 5
    ledger.charge(4, event, run="own")
    assert evaluations_left(2, 10, ledger, "own") == 4


def test_evaluations_that_are_only_noise_are_counted_at_the_end():
    """Clients with few rows hold none out: the history had no metrics of the clients, and nothing said so."""
    sizes = [5, 5, 5] + [1] * 197
    small = dp.Federation.from_clients([(torch.randn(n, 5), torch.zeros(n).long()) for n in sizes])
    words = "5 of 5 evaluations by the clients were only noise and are not in the history"
    with pytest.warns(AdviceWarning, match=words):
        run = dp.fit(torch.nn.Linear(5, 2), small, epsilon=8, rounds=5, evaluate=dp.Evaluation("clients", held_out=0.2))
    assert "evaluation-lost" in [one.code for one in run.advice]
    assert not any(name.startswith("clients_") for record in run.history for name in record)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": dp.ldp_fedexp(clip=0.5, noise_multiplier=1.0)}, "evaluate is 'clients' in a local setting"),
        (
            {"evaluate": lambda model: {}, "held_out": 0.2},
            r"held_out is 0\.2; it must be from 0 to below 1, with Evaluation",
        ),
        ({"held_out": 1.0}, "it must be from 0 to below 1"),
        ({"held_out": 0.05}, "no client has enough rows to hold some out"),
        ({"noise_cohort": 500, "participation": dp.FixedSize(20)}, "noise_cohort is 500 with evaluate='clients'"),
        ({"evaluate": lambda model: {"clients_loss": 1.0}}, "begin with clients_ are for what clients measure"),
        ({"rounds": "10"}, "rounds is '10'"),
        ({"evaluate": "client"}, "or 'clients'"),
    ],
)
def test_what_can_not_be_measured_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        run_of(**options)


@long
@pytest.mark.parametrize("kind", ["classes", "binary", "numbers", "heavy tails", "own loss"])
def test_intervals_of_whole_runs_cover_in_95_per_cent(kind):
    """200 fixed seeds and clients of uneven sizes: two standard errors on either side of 95%."""
    x, y = rows_of(kind, clients=300, rows=12)
    sizes = [1 + (7 * n) % 12 for n in range(300)]
    clients = dp.Federation.from_clients([(a[:n], b[:n]) for a, b, n in zip(x, y, sizes, strict=True)])
    covered: dict[str, list[bool]] = {}
    for seed in range(200):
        given = {"clients": clients, "rounds": 2, "execution": dp.Execution(seed=seed), "evaluate_every": 2}
        run = run_of(dp.dp_fedavg(clip=0.5, target_epsilon=16.0), kind, **given)
        for key, value in by_hand(run.model, kind, clients).items():
            if key in run.history[-1]:
                low, high = (run.history[-1][f"{key}_{end}"] for end in ("low", "high"))
                covered.setdefault(key, []).append(low <= value <= high)
    for key, found in covered.items():
        assert len(found) > 150
        print(f"{kind}, {key}: {sum(found) / len(found):.1%} of {len(found)}")
        assert 0.92 <= sum(found) / len(found) <= 0.98, key


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("odd")])
def test_callbacks_get_a_round_whose_measurement_was_interrupted_or_failed(tmp_path, monkeypatch, error):
    heard = []
    crash_in(monkeypatch, Engine, "evaluate", 2, before=True, error=error)
    with pytest.raises(type(error)):
        run_of(out=tmp_path / "run", evaluate_every=1, on_round=heard.append)
    assert [record["round"] for record in heard] == [1, 2]
    assert ["clients_loss" in record for record in heard] == [True, False]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]


def test_a_loss_at_its_bound_is_marked_in_history_and_page(tmp_path):
    """A model that is sure of the wrong class has a loss far above the bound, and looked like one that is at it."""
    sure = nn.Linear(5, 3)
    nn.init.constant_(sure.weight, 0.0)
    sure.bias.data = torch.tensor([1e4, 0.0, 0.0])
    x = torch.randn(M, 10, 5)
    clients = dp.Federation.from_clients(list(zip(x, torch.ones(M, 10).long(), strict=True)))
    algorithm = dp.dp_fedavg(clip=1e-6, target_epsilon=200.0)
    run = dp.train(sure, clients, algorithm, local=LOCAL, rounds=2, evaluate="clients", out=tmp_path / "run")
    assert run.history[-1]["clients_loss_at_bound"] == 1.0
    assert "clients_loss_at_bound" not in metrics_in(run.history)
    assert "may be above its bound in 2 rounds" in str(run_section(read_run(tmp_path / "run")).charts)
    assert "clients_loss_at_bound" not in run_of(rounds=2).history[-1]


def test_too_few_clients_for_their_own_evaluation_are_told_how_many_it_takes():
    clients = dp.Federation.from_clients([(torch.eye(3), torch.arange(3))] * 50)
    with pytest.warns(AdviceWarning, match="with 50 clients a round a share of examples") as caught:
        run = dp.fit(nn.Linear(3, 3), clients, rounds=20, evaluate="clients")
    (said,) = [str(one.message) for one in caught if "Evaluation by the clients" in str(one.message)]
    assert "it takes about 440 clients a round at this ε" in said
    assert "evaluate on public data, or less often, such as every 4 rounds" in said
    assert not any("clients_accuracy" in record for record in run.history)


def test_a_run_that_ends_on_a_round_without_a_measurement_is_shown():
    test = (torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2]))
    run = run_of(evaluate=dp.Evaluation(test, every=5), on_round=crash_after(3, dp.Stop))
    assert run.baselines
    assert "test_accuracy" not in run.history[-1]
    assert "3 rounds" in repr(run)
