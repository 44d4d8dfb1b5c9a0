"""Noise as for a larger cohort than the one that is simulated: how much, what it costs, and whose promise it is."""

import json

import pytest
import torch

from dpfedexp import FixedSize, Full, Poisson, Sgd, cdp_fedexp, dp_fedavg, dp_scaffold, ldp_fedexp, train
from dpfedexp.accounting import Ledger, Sampling
from dpfedexp.accounting.events import central_gaussian
from dpfedexp.data.federation import Federation
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.runner import OF_LARGER_DEPLOYMENT, show
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import InputError
from dpfedexp.models import linear_regression
from dpfedexp.report.page import report
from tests.arguments import arguments
from tests.engine.small import random_rows

LOCAL = Sgd(lr=0.1, steps=1)
PROBLEM = linear_regression(400), Federation.from_clients(random_rows([4] * 40, 400))


def released(participation, noise_cohort, z: float = 3.0, population=None, rule=dp_fedavg):
    """The first released mean."""
    algorithm = rule(clip=0.5, noise_multiplier=z, average_last=1)
    who = {"participation": participation, "population": population, "noise_cohort": noise_cohort}
    simulation, _ = prepare(*PROBLEM, algorithm, local=LOCAL, rounds=1, **arguments(who))
    state, _ = simulation.step(simulation.begin(), Ledger.in_memory())
    return simulation, state.w


@pytest.mark.parametrize("participation", [FixedSize(10), Poisson(0.25)])
def test_the_released_mean_is_that_of_the_simulated_clients_with_the_noise_of_the_larger_cohort(participation):
    _, still = released(participation, 400, z=1e-9)
    simulation, noisy = released(participation, 400)
    noise = noisy - still
    # The same draws decide who takes part, so only the noise differs; of 400 numbers a quarter is seven sigma.
    assert float(noise.std()) == pytest.approx(3.0 * 0.5 / 400, rel=0.25)
    _, plain = released(participation, None, z=1e-9)
    assert torch.allclose(still, plain, atol=1e-8)
    assert simulation.mechanism.noise_variance(400, 10) == pytest.approx((3.0 * 0.5 / 400) ** 2)


def test_the_free_statistic_is_the_mean_over_the_simulated_clients():
    still = [released(FixedSize(10), cohort, z=1e-9, rule=cdp_fedexp)[1] for cohort in (None, 500)]
    assert torch.allclose(*still, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("participation", "kind"), [(FixedSize(10), "fixed"), (Poisson(0.25), "poisson")])
def test_what_is_charged_has_the_rate_of_the_deployment(participation, kind):
    simulation, _ = released(participation, 400)
    assert (simulation.sampling, simulation.population) == (Sampling(kind, 0.25), 1600)
    simulation, _ = released(participation, 400, population=100_000)
    assert (simulation.sampling, simulation.population) == (Sampling(kind, 0.004), 100_000)
    assert simulation.event == central_gaussian(3.0, sampling=Sampling(kind, 0.004))
    everybody, _ = released(Full(), 400)
    assert (everybody.sampling, everybody.population) == (Sampling(), 400)


@pytest.mark.parametrize(
    ("algorithm", "options", "sentence"),
    [
        (ldp_fedexp, {}, "no server adds noise"),
        (dp_fedavg, {"secure": True}, "secure run"),
        (dp_scaffold, {}, "SCAFFOLD"),
        (dp_fedavg, {"noise_cohort": 9}, "at least the 10"),
        (dp_fedavg, {"population": 300}, "at most that"),
        (dp_fedavg, {"participation": Full(), "population": 500}, "full participation"),
        (dp_fedavg, {"local": Sgd(lr="auto", steps=1)}, "votes choose"),
    ],
)
def test_what_can_not_stand_for_a_larger_cohort_is_refused(algorithm, options, sentence):
    given = {"local": LOCAL, "noise_cohort": 400, "participation": FixedSize(10), **options}
    with pytest.raises(InputError, match=sentence):
        train(*PROBLEM, algorithm(clip=0.5, noise_multiplier=1.0), rounds=1, **arguments(given))


@pytest.mark.usefixtures("untried")
def test_an_epsilon_of_a_larger_deployment_never_stands_without_its_caveat(tmp_path):
    """`repr`, the notebook's views, a saved run, its page and its progress line: each says that the promise is another's."""
    algorithm = dp_fedavg(clip=0.5, noise_multiplier=1.0)
    given = {"local": LOCAL, "rounds": 2, "participation": FixedSize(10), "noise_cohort": 400}
    run = train(*PROBLEM, algorithm, evaluate=lambda network: {"test_size": 1.0}, **arguments(given))
    assert run.privacy.epsilon_total > 0
    caveat = "the promise of a larger deployment with 400 clients in a round, and none to the clients of this run"
    for view in (repr(run.privacy), repr(run), run.privacy._repr_html_(), run._repr_html_()):
        assert caveat in view.partition("<details>")[0]
    assert "larger deployment, in which 400 of 1600 clients take part" in run.privacy.text
    assert "It promises nothing to the clients whose data it used." in run.privacy.text
    assert f"ε {OF_LARGER_DEPLOYMENT}" in show(run.history[-1], OF_LARGER_DEPLOYMENT)
    assert outcome(verify_run(run.save(tmp_path / "run"))) == "holds"
    assert "the promise of a larger deployment, none to these clients" in report(tmp_path / "run").read_text()
    path = tmp_path / "run" / "privacy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"noise_cohort": None, "stand_ins": None}))
    failed = {check.name for check in verify_run(tmp_path / "run") if not check.passed}
    assert {"noise_cohort", "stand_ins"} <= failed
