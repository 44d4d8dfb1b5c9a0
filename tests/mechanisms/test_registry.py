"""Every mechanism of the registry, and one that a user adds, through everything that asks a mechanism something."""

import json
from dataclasses import fields, replace

import pytest
import torch
from typer.testing import CliRunner

from dpfedexp import InputError, Sgd, cdp_fedexp, dp_fedavg, fedavg, train
from dpfedexp.accounting import Ledger, PrivacyStatement, compose
from dpfedexp.accounting.events import RoundSettings, Sampling, from_json, to_json
from dpfedexp.audit.mechanisms import Case, audit_mechanism
from dpfedexp.cli import app
from dpfedexp.core.clipping import Clipped, clip
from dpfedexp.core.noise import Streams
from dpfedexp.core.sums import Vote
from dpfedexp.data import synthetic_regression
from dpfedexp.mechanisms import MECHANISMS, CentralGaussian, Mechanism, Report, mechanism_class
from dpfedexp.mechanisms.registry import round_event
from dpfedexp.mechanisms.serialization import decode, encode
from dpfedexp.models import linear_regression
from tests.sizes import sized

from .local_laplace import ENTRY

D, CLIENTS = 6, 12
ASKED = {
    "none": {},
    "central-gaussian": {"noise_multiplier": 1.0},
    "two-party": {"noise_multiplier": 1.0},
    "two-party-one-sided": {"noise_multiplier": 1.0},
    "local-gaussian": {"noise_multiplier": 1.0},
    "privunit": {"epsilons": (1.0, 1.0, 1.0)},
    "local-laplace": {"target_epsilon": 6.0},
}
NAMES = [*MECHANISMS, "local-laplace"]
TWO_PARTY = ("two-party", "two-party-one-sided")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(MECHANISMS, "local-laplace", ENTRY)


def algorithm(name):
    return fedavg() if name == "none" else dp_fedavg(clip=0.5, mechanism=name, **ASKED[name])


def bound(name, **more) -> Mechanism:
    return algorithm(name).bind(D, float(CLIENTS), Sampling(), 3, **more)


@pytest.mark.parametrize("name", NAMES)
def test_a_mechanism_says_what_it_is(name):
    kind = mechanism_class(name)
    assert set(ASKED) == set(MECHANISMS)
    assert kind.kind == name
    if kind.is_private:
        # Masks need whole numbers, so a simulation of two aggregators has the lattice too.
        assert bound(name).noise_kind is (name in TWO_PARTY)
        assert bound(name, secure=True).noise_kind is True
    assert type(kind.is_local) is bool
    assert kind.__doc__
    assert ("guarantee" in kind.__doc__.lower()) or name == "privunit", "privunit's is its module's"


def test_a_mechanism_that_does_not_say_whether_it_is_local_can_not_be_written():
    with pytest.raises(TypeError, match="is_local"):

        class Forgetful(mechanism_class("none")):
            kind = "forgetful"
            is_local = None


@pytest.mark.parametrize("name", NAMES)
def test_a_mechanism_is_the_same_after_a_journey_as_text(name):
    mechanism = bound(name)
    assert decode(encode(mechanism)) == mechanism
    assert {"kind", *(field.name for field in fields(mechanism))} == set(json.loads(encode(mechanism)))


def test_numbers_up_to_the_limit_travel_and_zero_is_refused():
    mechanism = CentralGaussian(0.25, 5.0, votes=(Vote("loss", 0.0, 1e30, noise=2.0),))
    assert decode(encode(mechanism)) == mechanism
    with pytest.raises(InputError, match=r"at most 1e\+30"):
        decode(encode(mechanism).replace("1e+30", "1.1e+30"))
    with pytest.raises(InputError, match=r"clip is 0\.0; it must be a positive number"):
        decode(encode(mechanism).replace("0.25", "0.0"))


@pytest.mark.parametrize("name", NAMES)
def test_the_simulator_charges_the_mechanisms_own_event_and_the_statement_says_so(name, tmp_path):
    path, clients = tmp_path / "ledger.jsonl", synthetic_regression(CLIENTS, D, seed=1).federation
    given = {"local": Sgd(lr=0.1, steps=2), "rounds": 3, "execution": "cpu"}
    run = train(linear_regression(D), clients, algorithm(name), ledger=path, **given)
    event = bound(name).event(Sampling())
    assert Ledger.open(path).charges() == [(event, 3)]
    assert from_json(json.loads(json.dumps(to_json(event)))) == event
    total = compose([(event, 3)], 1e-5)
    assert run.privacy.epsilon_total == total.epsilon
    assert run.privacy.private == mechanism_class(name).is_private
    assert PrivacyStatement.from_json(run.privacy.to_json()) == run.privacy


@pytest.mark.parametrize("name", NAMES)
def test_ranks_add_to_what_one_process_collects(name):
    mechanism, streams, everyone = bound(name), Streams(3).at("local noise", 1), torch.arange(CLIENTS)
    rows = clip(torch.randn(CLIENTS, D, generator=torch.Generator().manual_seed(2)), mechanism.clip)

    def sums(who):
        return mechanism.collect(mechanism.randomize(Clipped(rows.vectors[who], rows.within[who]), who, streams))

    whole, halves = sums(everyone), sums(everyone[:5]) + sums(everyone[5:])
    torch.testing.assert_close(whole.vector, halves.vector, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.squares, halves.squares, rtol=1e-6, atol=1e-9)
    assert whole.count == halves.count == CLIENTS


# Two aggregators need a node more than this grid has: tests/flower/test_two_party.py.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TWO_PARTY])
def test_flower_runs_it_and_charges_what_the_simulator_charges_with_secure_noise(name, tmp_path):
    pytest.importorskip("flwr")
    from tests.flower.loopback import LoopbackGrid, deploy, plain_app
    from tests.flower.loopback import problem as posed

    federation, model = posed(6, D)
    announced = {"algorithm.name": "fedavg", "federation.clients": 6, "federation.rounds": 2, "federation.folder": "x"}
    grid = LoopbackGrid(plain_app(federation, model), 6, run_config=announced if name == "none" else {})
    _, result = deploy(tmp_path, algorithm(name), grid, clients=6, rounds=2, model=model)
    assert len(result.arrays) == len(model.state_dict())
    private = mechanism_class(name).is_private
    mechanism = algorithm(name).bind(D, 6.0, Sampling(), 2, secure=private)
    assert Ledger.open(tmp_path / "ledger.jsonl").charges() == [(mechanism.event(Sampling()), 2)]


@pytest.mark.parametrize("name", NAMES)
def test_a_node_pays_for_everyone_whom_it_hosts(name):
    event = bound(name).client_event()
    ten, count = event.for_clients(10)
    one, all_ten = (compose(charges, 1e-5).epsilon for charges in ([(event, 1)], [(ten, count)]))
    assert all_ten > one or one == float("inf")
    assert event.tells_no_more_than(event, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_pays_for_the_replacement_of_its_data_and_counts_are_shown_where_nothing_hides_them(name):
    mechanism = bound(name)
    hides = mechanism.is_private and not mechanism.is_local
    assert mechanism.counts_are_public(Sampling())
    assert mechanism.counts_are_public(Sampling("poisson", 0.5)) is not hides
    if mechanism.is_local or name in TWO_PARTY:
        with pytest.raises(InputError, match="replace-one"):
            replace(algorithm(name), adjacency="add-remove")
        return
    other = replace(algorithm(name), adjacency="add-remove").bind(D, float(CLIENTS), Sampling(), 3)
    assert other.counts_are_public(Sampling()) is not hides
    for one in (mechanism, other):
        assert one.client_event().adjacency == "replace-one"
        assert one.client_event().strength >= mechanism.event(Sampling()).strength * (1 - 1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_the_server_does_not_trust_the_clients_clipping(name):
    """In the center it clips again; in a local setting it may refuse, because clipping would bias."""
    mechanism = bound(name)
    rows = torch.full((3, mechanism.width(D)), 1e6)
    report = Report(rows, level=torch.zeros(3, dtype=torch.int64) if "level" in mechanism.parts else None)
    try:
        mechanism.check_report(report)
    except InputError:
        assert mechanism.is_local
        return
    longest = 3 * mechanism.norm_bound(mechanism.width(D)) * (1 + 1e-6)
    assert float(mechanism.collect(report).vector.norm()) <= longest or name == "local-laplace"


def test_a_mechanism_that_forgets_secure_noise_or_a_statistic_is_refused(monkeypatch):
    kind = mechanism_class("local-laplace")
    monkeypatch.setattr(kind, "bound", classmethod(lambda cls, spec: cls(0.5, D, 1.0)))
    with pytest.raises(InputError, match="draws no secure noise"):
        bound("local-laplace", secure=True)
    with pytest.raises(InputError, match="target_epsilon is missing"):
        round_event("local-laplace", RoundSettings())
    with pytest.raises(InputError, match="numerator is 'free', which mechanism 'local-laplace' does not release"):
        replace(cdp_fedexp(clip=0.5, target_epsilon=6.0), mechanism="local-laplace")
    with pytest.raises(InputError, match="Did you mean 'central-gaussian'"):
        dp_fedavg(clip=1.0, mechanism="central-gausian", noise_multiplier=1.0)


# Against readers of the models "two-party" has the noise of both aggregators, and its claim is about one of them.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("none", "two-party")])
def test_the_audit_finds_no_more_than_is_claimed_and_something(name):
    mechanism = bound(name)
    ends = torch.zeros(2, D)
    ends[0, 0], ends[1, 0] = 0.5, -0.5
    known = torch.zeros(0 if mechanism.is_local else 2, D)
    here, there = (torch.cat([known, end[None]]) for end in ends)
    # A round of two aggregators takes a hundred times as long as another.
    few = 1_000 if name == "two-party-one-sided" else 6_000
    results = audit_mechanism(Case(name, mechanism, here, there), sized(few, 20_000), 5, 0.999999)
    assert all(result.lower <= result.claim for result in results)
    # Laplace noise is worst for updates that differ in every coordinate, so this pair does not come near its claim.
    assert name == "local-laplace" or all(result.holds for result in results)
    assert max(result.lower for result in results) > 0.05, "and it is not blind"


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_round_by_its_settings_and_on_the_command_line_costs_what_the_round_that_runs_does(name):
    event = bound(name).event(Sampling())
    assert round_event(name, RoundSettings(**ASKED[name], dimension=D)) == event
    if name == "none":
        return
    flags = "--epsilon0 1 --epsilon1 1 --epsilon2 1" if name == "privunit" else "--noise-multiplier 1"
    told = CliRunner().invoke(app, f"privacy epsilon --mechanism {name} --rounds 3 --json {flags}".split())
    assert told.exit_code == 0, told.output
    expected = compose([(event, 3)], 1e-5).epsilon
    assert json.loads(told.stdout)["epsilon_total"] == pytest.approx(expected, rel=1e-12)
