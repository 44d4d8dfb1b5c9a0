"""Edited statements, ledgers and folders that `privacy verify` took for true ones, and folders that are whole."""

import json
import shutil
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dpfedexp import EarlyStopping, Evaluation, Execution, Stop, cdp_fedexp, ldp_fedexp
from dpfedexp.accounting import Ledger, PrivacyStatement
from dpfedexp.accounting import ledger as chain
from dpfedexp.accounting.statement import View
from dpfedexp.algorithms.algorithm import with_aggregation
from dpfedexp.cli import app
from dpfedexp.engine.checkpoint import digest
from dpfedexp.engine.engine import Engine
from dpfedexp.engine.verify import EXEMPT, outcome, read_claim, recompute, verify_run
from dpfedexp.errors import AdviceWarning, InputError, LedgerError, RoundFailed
from tests.engine.small import ROUNDS, crash_after, crash_in, forge, path_content, small_run

pytestmark = pytest.mark.usefixtures("untried")
NOISY = cdp_fedexp(clip=0.3, noise_multiplier=4.0)
RUNS = {
    "seeded": {},
    "secure": {"secure": True},
    "stopped": {"on_round": crash_after(2, Stop("enough", source="private"))},
    "local": {"algorithm": ldp_fedexp(clip=0.3, noise_multiplier=0.7)},
    "one-sided": {"algorithm": with_aggregation(NOISY, "two-party-one-sided"), "secure": True},
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Function: the folder of a run of `RUNS`, which is made once."""
    place, made = tmp_path_factory.mktemp("originals"), set()

    def original(name):
        if name not in made:
            made.add(name)
            small_run(out=place / name, **RUNS[name])
        return place / name

    return original


@pytest.fixture
def folder(originals, tmp_path):
    """Function: a copy of the folder of a run of `RUNS`."""
    return lambda name: shutil.copytree(originals(name), tmp_path / name)


def claim_instead(run, statement):
    (run / "privacy.json").write_text(statement.to_json(), encoding="utf-8")
    (run / "privacy.txt").write_text(statement.text, encoding="utf-8")


def rebuilt(run, **other):
    """The statement of the charges alone, with other facts beside them."""
    claim = read_claim(run)
    known = {name: getattr(claim, name) for name in ("delta", "algorithm", "clients", "simulated")}
    charges = Ledger.open(run / "ledger.jsonl", read_only=True).charges()
    return PrivacyStatement.from_charges(charges, **{**known, **other})


def copy_ledger(source, target):
    for suffix in ("", ".head"):
        shutil.copy(f"{source}{suffix}", f"{target}{suffix}")


def failed(run):
    return {check.name for check in verify_run(run) if not check.passed}


@pytest.mark.parametrize("name", RUNS)
def test_an_honest_run_of_each_kind_holds(folder, name):
    assert outcome(verify_run(folder(name))) == "holds"


@pytest.mark.parametrize(
    ("name", "edit", "field"),
    [
        ("seeded", lambda run: replace(read_claim(run), simulated=False), "simulated"),
        ("secure", lambda run: rebuilt(run, delta=0.6, clients=0), "delta"),
        ("stopped", rebuilt, "stopping"),
        ("local", lambda run: rebuilt(run, clients=50_000), "models_only"),
        ("one-sided", lambda run: replace(read_claim(run), noise_by="both"), "noise_by"),
    ],
)
def test_an_edited_statement_is_false_and_is_explained_from_the_ledger(folder, name, edit, field):
    """All of these had exit status 0: what a statement says beside ε was taken from the statement."""
    run = folder(name)
    honest, false = read_claim(run), edit(run)
    assert getattr(false, field) != getattr(honest, field)
    claim_instead(run, false)
    assert field in failed(run)
    assert outcome(verify_run(run)) == "false"
    assert CliRunner().invoke(app, ["privacy", "verify", str(run)]).exit_code == 1
    assert recompute(run) == honest


def other(field, value):
    """Another value of a field of a statement."""
    if value is None and "View" in str(field.type):
        return vars(View("add-remove", 0.1, 0.1, "magic", True))
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list():
            return [*value, "more"]
        case dict():
            return value | {"epsilon_total": 0.1}
        case None:
            return 1
    return f"{value}x"


@pytest.mark.parametrize("name", ["local", "stopped"])
@pytest.mark.parametrize("field", fields(PrivacyStatement), ids=lambda field: field.name)
def test_every_field_of_a_statement_is_compared_with_the_ledger_or_exempt(folder, name, field):
    """A new field of the statement is compared too: `recompute` must find it in the ledger, or `EXEMPT` must say why not."""
    run = folder(name)
    claim = json.loads((run / "privacy.json").read_text())
    claim[field.name] = other(field, claim[field.name])
    (run / "privacy.json").write_text(json.dumps(claim))
    try:
        found = field.name in failed(run)
    except InputError:
        found = True
    assert found == (field.name not in EXEMPT)


def test_everything_that_a_statement_is_made_of_is_in_the_ledger(folder):
    header = Ledger.open(folder("seeded") / "ledger.jsonl", read_only=True).header
    of_a_larger_deployment = {"noise_cohort", "stand_ins"}
    known = {*header, *of_a_larger_deployment, "charges", "planned"}
    assert set(signature(PrivacyStatement.from_charges).parameters) <= known
    assert "planned_rounds" in header


@pytest.mark.parametrize("name", ["text", "shown", "more"])
def test_what_a_claim_repeats_or_adds_is_compared_with_its_fields(folder, name):
    run = folder("seeded")
    claim = json.loads((run / "privacy.json").read_text())
    (run / "privacy.json").write_text(json.dumps(claim | {name: "perfectly private"}))
    if name == "more":
        with pytest.raises(InputError, match="more"):
            verify_run(run)
    else:
        assert failed(run) == {"privacy.json"}


def test_choices_are_exempt_and_not_explained(folder):
    run = folder("seeded")
    claim_instead(run, replace(read_claim(run), choices=("a clip of 7",)))
    assert set(EXEMPT) == {"choices", "shown", "text"}
    assert outcome(verify_run(run)) == "holds"
    assert "a clip of 7" not in CliRunner().invoke(app, ["privacy", "explain", str(run)]).output


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "model.safetensors", "checkpoint.safetensors"])
def test_without_a_file_that_the_run_wrote_the_claim_can_not_be_checked(folder, name):
    run = folder("secure")
    (run / name).unlink()
    assert failed(run) == {name.removesuffix(".safetensors")}
    assert CliRunner().invoke(app, ["privacy", "verify", str(run)]).exit_code == 4


def test_a_model_that_the_ledger_did_not_pay_for_is_found(folder):
    path = folder("seeded") / "model.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in load_file(path).items()}, path)
    assert failed(path.parent) == {"model"}


@pytest.mark.parametrize("text", ["run", "ledger"])
def test_a_checkpoint_of_another_run_or_of_another_ledger_is_found(folder, text):
    run = folder("seeded")
    other = {"run": "0" * 16, "ledger": path_content(run)["ledger"] | {"hash": "0" * 64}}
    forge(run, **{text: other[text]})
    assert failed(run) == {"checkpoint"}


def rewritten(run, header=None):
    """Ten times the noise in every charge, another header, and a chain, a head and a statement that fit."""
    old, statement = chain.read_chain(run / "ledger.jsonl"), read_claim(run)
    previous, lines = chain._GENESIS, []
    for number, record in enumerate([old.header, *old.records]):
        if "event" in record:
            record["event"]["queries"][0]["noise"] *= 10
            record["event"] |= {name: None for name in ("joint_mu", "other_mu") if name in record["event"]}
        record |= (header or {}) if number == 0 else {"previous": previous}
        if "run" in record:
            record["run"] = (header or {}).get("run", record["run"])
        line, previous = chain._hashed_line(record, previous)
        lines.append(line)
    (run / "ledger.jsonl").write_bytes(b"".join(lines))
    head = {"count": len(lines) - 1, "hash": previous}
    (run / "ledger.jsonl.head").write_bytes(chain._dump(head) + b"\n")
    if header and "run" in header:
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(facts | {"run": header["run"]}))
    false = recompute(run)
    assert false.epsilon_total < 0.2 * statement.epsilon_total
    claim_instead(run, false)


@pytest.mark.parametrize("header", [None, {"x": 1}, {"simulated": True}], ids=["kept", "longer", "simulated"])
@pytest.mark.parametrize("place", ["in place", "a copy"])
def test_a_rewritten_ledger_is_found_on_the_machine_of_the_run(tmp_path, header, place):
    """A changed first line changed the anchor's name, so that no anchor was found."""
    run = tmp_path / "run"
    small_run(out=run, secure=True)
    assert outcome(verify_run(run)) == "holds"
    if place == "a copy":
        run = shutil.copytree(run, tmp_path / "copy")
    rewritten(run, header)
    assert "newest copy" in failed(run)
    assert outcome(verify_run(run)) == "false"


def test_a_ledger_under_another_name_is_found_in_the_place_of_a_run(tmp_path):
    run = tmp_path / "run"
    small_run(out=run, secure=True)
    (run / "checkpoint.safetensors").unlink()
    rewritten(run, {"run": "0" * 16})
    (check,) = (check for check in verify_run(run) if check.name == "newest copy")
    assert (check.passed, check.incomplete) == (False, True)
    assert "names another ledger for this path" in check.detail


def test_a_rewritten_ledger_of_a_project_is_not_charged(tmp_path):
    """Otherwise the next run would make the rewritten ledger the known one."""
    project, run = tmp_path / "ledger.jsonl", tmp_path / "run"
    small_run(ledger=project, out=run)
    copy_ledger(project, run / "ledger.jsonl")
    rewritten(run, {"x": 1})
    copy_ledger(run / "ledger.jsonl", project)
    with pytest.raises(LedgerError, match="names another one: it was replaced or rewritten"):
        small_run(ledger=project, rounds=1)
    shutil.move(project, tmp_path / "moved.jsonl")
    Path(f"{project}.head").unlink()
    small_run(ledger=project, rounds=1)


@pytest.mark.parametrize("made", ["shared", "seeded", "secure"])
@pytest.mark.parametrize(
    ("kind", "terms"),
    [
        ("terms", {"delta": 0.01, "clients": 10**6}),
        ("terms", {"stopping": "", "planned_rounds": 2, "complete": True, "simulated": False}),
        ("seal", {"model": "0"}),
        ("charges", {}),
    ],
)
def test_records_that_somebody_appends_to_a_ledger_are_not_believed(tmp_path, kind, terms, made):
    """The chain has no key: one line of Python made another statement true. Cheap charges stood for the rounds that were left."""
    run, shared = tmp_path / "run", tmp_path / "ledger.jsonl"
    given = {"ledger": shared} if made == "shared" else {"secure": made == "secure"}
    small_run(out=run, on_round=crash_after(2, Stop("enough", source="private")), **given)
    if made == "shared":
        copy_ledger(shared, run / "ledger.jsonl")
    assert outcome(verify_run(run)) == "holds"
    with Ledger.open(run / "ledger.jsonl") as ledger:
        own, seal, event = ledger.header["run"], ledger.sealed(ledger.header["run"]), ledger.entries[-1].event
        if kind == "charges":
            cheap = replace(event, queries=tuple(replace(one, noise=1e6 * one.noise) for one in event.queries))
            for number in range(3, ROUNDS + 1):
                ledger.charge(number, replace(cheap, joint_mu=None, other_mu=None), run=own)
            ledger.add({"run": own, "seal": seal})
        else:
            ledger.add({"run": own, kind: terms})
    claim_instead(run, recompute(run))
    assert "newest copy" in failed(run)
    assert outcome(verify_run(run)) in ("incomplete", "false")


def test_a_run_without_a_folder_binds_its_model_to_a_ledger_on_disk(tmp_path):
    run = small_run(ledger=tmp_path / "ledger.jsonl", secure=True)
    run.save(tmp_path / "saved")
    assert outcome(verify_run(tmp_path / "saved")) == "holds"
    assert Ledger.open(tmp_path / "ledger.jsonl", read_only=True).sealed(run.facts.run).keys() == {"model"}


def test_a_run_that_comes_back_to_its_place_holds(tmp_path):
    small_run(out=tmp_path / "run", secure=True)
    (tmp_path / "run").rename(tmp_path / "away")
    small_run(out=tmp_path / "run", secure=True)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "away").rename(tmp_path / "run")
    assert outcome(verify_run(tmp_path / "run")) == "holds"


def test_an_evaluation_that_failed_is_not_counted_as_planned(tmp_path, monkeypatch):
    crash_in(monkeypatch, Engine, "evaluate", 1, before=True, error=RoundFailed("too few clients answered."))
    given = {"test": None, "evaluate": Evaluation("clients", every=2), "on_round": crash_after(4, Stop("x"))}
    with pytest.warns(AdviceWarning, match="too few clients answered"):
        small_run(out=tmp_path, **given)
    assert outcome(verify_run(tmp_path)) == "holds"


def test_a_new_run_in_the_place_of_a_removed_one_holds(tmp_path):
    for secure in (True, True, False):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        small_run(out=tmp_path / "run", secure=secure)
        assert all(check.passed and not check.incomplete for check in verify_run(tmp_path / "run"))
    small_run(out=tmp_path / "more", ledger=tmp_path / "run" / "ledger.jsonl", execution=Execution(seed=5))


@pytest.mark.parametrize(("name", "limited"), [("secure", True), ("seeded", False)])
def test_a_machine_without_an_anchor_says_what_it_can_not_see(folder, name, limited, tmp_path, monkeypatch):
    run = folder(name)
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "elsewhere"))
    said = CliRunner().invoke(app, ["privacy", "verify", str(run)])
    assert said.exit_code == 0
    assert ("The claim holds for this ledger." in said.output) == limited
    assert ("The claim holds." in said.output) != limited
    found = json.loads(CliRunner().invoke(app, ["privacy", "verify", str(run), "--json"]).output)
    assert (found["verified"], found["limited"]) == (True, limited)
    assert any("can't see whether it was rewritten" in check["detail"] for check in found["checks"]) == limited


def test_each_run_on_a_ledger_is_stated_with_its_own_terms_and_checked_by_its_own_model(tmp_path):
    """Each has its δ, its plan and its end, and the second one is stopped, resumed and stopped again."""
    project, one, two = tmp_path / "project.jsonl", tmp_path / "one", tmp_path / "two"
    small_run(ledger=project, out=one, rounds=3)
    given = {"ledger": project, "out": two, "algorithm": cdp_fedexp(clip=0.3, noise_multiplier=3.0, delta=1e-6)}
    for rounds, source in ((2, "test"), (4, "public")):
        run = small_run(**given, on_round=crash_after(rounds, Stop("enough", source=source)))
        copy_ledger(project, two / "ledger.jsonl")
        assert outcome(verify_run(two)) == "holds"
        stated = recompute(two)
        assert (stated, stated.stopping, stated.delta) == (run.privacy, source, 1e-6)
        assert (stated.rounds, stated.planned_rounds) == (3 + rounds, 3 + ROUNDS)
        assert outcome(verify_run(run.save(tmp_path / f"saved {rounds}"))) == "holds"
    copy_ledger(project, one / "ledger.jsonl")
    assert not failed(one) & {"model", "checkpoint"}


def test_a_resumed_run_writes_its_terms_once(tmp_path):
    algorithm = cdp_fedexp(clip="adaptive", noise_multiplier=4.0)
    given = {"out": tmp_path, "algorithm": algorithm, "evaluate": "clients", "test": None, "loss": "mse"}
    small_run(**given, on_round=crash_after(2, Stop("enough", source="test")))
    run = small_run(**given)
    terms = [note["terms"] for _, note in run.ledger.notes if "terms" in note]
    assert terms == [{"stopping": "test"}, {"complete": True}]


def test_a_callback_that_stops_a_complete_run_when_it_is_read_again_changes_nothing(tmp_path):
    whole = small_run(out=tmp_path)
    again = small_run(out=tmp_path, on_round=EarlyStopping("test_loss", patience=1, min_delta=1e9, source="public"))
    assert (again.privacy, again.stopped) == (whole.privacy, None)
    assert outcome(verify_run(tmp_path)) == "holds"


@pytest.mark.parametrize("terms", [{"delta": "x"}, {"clients": None}, {"votes": [3]}, {"planned_rounds": "all"}])
def test_terms_that_are_none_are_one_sentence(folder, terms):
    run = folder("stopped")
    with Ledger.open(run / "ledger.jsonl") as ledger:
        ledger.describe(ledger.header["run"], **terms)
    (check,) = verify_run(run)
    assert (check.name, check.passed) == ("ledger", False)
    with pytest.raises(LedgerError, match="the terms of the run"):
        recompute(run)


def test_no_name_of_a_tensor_stands_for_another_tensor():
    zero, one = torch.zeros(1), torch.ones(1)
    glued = "a:torch.float32:(1,);\0\0\0\0b"
    assert digest({"a": zero, "b": one}) != digest({glued: one})
