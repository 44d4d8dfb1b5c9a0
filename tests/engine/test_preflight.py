"""The preflight speaks where it has a reason to, and is silent at healthy settings; public numbers are all that it sees."""

import math

import pytest

from dpfedexp import AdaptiveClip, FixedSize, Full, InputError, Poisson, cdp_fedexp, dp_fedavg, fedavg, ldp_fedexp
from dpfedexp.engine.advice import FEW_CLIENTS, LARGE_EPSILON, preflight
from dpfedexp.engine.plan import EPSILONS, ROUNDS, Plan, default_delta, plans, sampling_rates
from tests.mechanisms.local_laplace import LocalLaplace

MNIST = 8_186
"""About the parameters of the paper's network."""


def plan(algorithm=None, clients=1000, dimension=MNIST, rounds=50, participation=None, **options):
    algorithm = algorithm or cdp_fedexp(**({"clip": 0.3} | options))
    return Plan.of(algorithm, participation or Full(), clients, dimension, rounds)


def said(*args, **options):
    return {advice.code: advice for advice in preflight(plan(*args, **options))}


def test_the_papers_settings_for_mnist_give_no_reason_to_speak():
    assert said(noise_multiplier=5.0) == {}
    assert said(noise_multiplier=5.0, clip="adaptive") == {}
    assert said(target_epsilon=8.0) == {}
    assert said(target_epsilon=8.0, dimension=500) == {}


def test_the_noise_share_is_the_formula_of_each_setting():
    central = plan(noise_multiplier=5.0, participation=Poisson(0.25), adjacency="replace-one")
    assert central.noise_share == pytest.approx(5.0 * math.sqrt(MNIST) / (0.25 * 1000))
    local = plan(ldp_fedexp(clip=0.3, noise_multiplier=0.7), participation=FixedSize(250))
    assert local.noise_share == pytest.approx(0.7 * math.sqrt(MNIST) / math.sqrt(250))
    assert local.best_signal == pytest.approx(math.sqrt(50) / local.noise_share)


@pytest.mark.parametrize("mechanism", ["central-gaussian", "local-gaussian", "privunit"])
@pytest.mark.parametrize("clients", [50, 5000])
def test_the_clients_needed_are_just_enough_for_a_signal(mechanism, clients):
    given = {"clip": 1.0, "mechanism": mechanism, "target_epsilon": 2.0}
    needed = plan(dp_fedavg(**given), clients=clients, dimension=300).clients_needed
    enough, short = (
        plan(dp_fedavg(**given), clients=int(c), dimension=300) for c in (needed, needed - needed // 50 - 1)
    )
    assert short.best_signal < 1 <= enough.best_signal


def test_the_epsilon_for_a_signal_gives_one():
    drowned = plan(dp_fedavg(clip=1.0, target_epsilon=1.0), clients=50, dimension=2000)
    at = drowned.epsilon_for_signal()
    assert at > drowned.epsilon
    heard = plan(dp_fedavg(clip=1.0, target_epsilon=at), clients=50, dimension=2000)
    assert heard.best_signal == pytest.approx(1.0, rel=1e-6)  # calibration is exact to 1e-9 in z


def test_three_clients_are_told_to_consider_record_level_privacy():
    (found,) = preflight(plan(target_epsilon=8.0, clients=3, dimension=1000))
    assert (found.level, found.code) == ("warning", "few-clients")
    assert found.sentence.startswith("3 clients: client-level privacy can't work here")
    for words in ("record-level privacy", "z = 8.5", "d = 1,000", "about 38 clients", "ε ≈ 310", "13 times"):
        assert words in found.sentence
    assert "few-clients" in said(noise_multiplier=1.0, clients=FEW_CLIENTS - 1, dimension=2)
    assert "few-clients" not in said(noise_multiplier=1.0, clients=FEW_CLIENTS, dimension=2)


def test_a_model_too_large_for_its_clients_is_told_how_many_it_takes():
    found = said(target_epsilon=8.0, clients=1000, dimension=11_000_000)["mostly-noise"]
    assert found.level == "warning"
    assert "about 4,000 clients" in found.sentence
    assert "central-gaussian" not in found.sentence
    # The same model with as many clients has a signal, if only over many rounds.
    assert {"mostly-noise", "no-signal"} & said(target_epsilon=8.0, clients=4100, dimension=11_000_000).keys() == set()
    hopeless = said(target_epsilon=0.1, clients=1000, dimension=11_000_000)["no-signal"]
    assert hopeless.level == "warning"
    assert "could be told from noise" in hopeless.sentence


def test_local_noise_that_drowns_the_mean_is_told_of_a_trusted_server():
    found = said(ldp_fedexp(clip=1.0, target_epsilon=1.0), dimension=100_000)["no-signal"]
    assert "mechanism 'central-gaussian'" in found.sentence
    assert "clients at this ε and δ" in found.sentence
    privunit = said(dp_fedavg(clip=1.0, mechanism="privunit", target_epsilon=8.0), dimension=100_000)["no-signal"]
    assert "z =" not in privunit.sentence, "PrivUnit has no noise multiplier"


def test_rounds_with_more_noise_than_signal_are_noted_and_fewer_recommended_where_that_is_enough():
    many = said(target_epsilon=8.0, rounds=400, dimension=20_000)["noisy-rounds"]
    assert many.level == "note"
    fewer = int(many.sentence.split("With ")[1].split(" rounds")[0])
    assert 10 <= fewer < 400
    assert plan(target_epsilon=8.0, rounds=fewer, dimension=20_000).noise_share <= 1
    assert plan(target_epsilon=8.0, rounds=fewer + 2, dimension=20_000).noise_share > 1
    strong = said(target_epsilon=1.0)["noisy-rounds"]
    assert "instead of" not in strong.sentence, "two rounds train nothing"


@pytest.mark.parametrize(("delta", "level"), [(2e-3, "warning"), (5e-4, "note"), (1e-4, None), (1e-5, None)])
def test_delta_is_held_against_one_over_the_clients(delta, level):
    found = said(target_epsilon=8.0, delta=delta).get("delta")
    assert (found and found.level) == level
    assert found is None or "delta = 1e-05" in found.sentence


def test_the_default_delta_is_never_remarked_on():
    for clients in (20, 999, 10_000, 12_163, 10**8):
        delta = default_delta(clients)
        assert delta <= 1e-5
        assert "delta" not in said(target_epsilon=8.0, clients=clients, delta=delta)
    with pytest.raises(InputError, match="population is 0; it must be a positive whole number"):
        default_delta(0)


def test_an_epsilon_that_promises_next_to_nothing_is_said():
    assert said(target_epsilon=LARGE_EPSILON).get("large-epsilon") is None
    assert said(target_epsilon=LARGE_EPSILON + 1)["large-epsilon"].level == "warning"
    assert "ε = 289" in said(ldp_fedexp(clip=0.3, noise_multiplier=0.7), dimension=100)["large-epsilon"].sentence


def test_the_epsilon_of_a_target_per_round_is_that_of_all_rounds():
    assert plan(target_epsilon=2.0, target_per="round").epsilon > 10


def test_sampling_is_recommended_to_a_large_population_and_costs_little_noise():
    options = {"clients": 100_000, "target_epsilon": 4.0, "delta": 1e-6}
    found = said(**options)["sampling"]
    assert found.level == "note"
    rate = float(found.sentence.split("Poisson(")[1].split(")")[0])
    full = plan(**options)
    # A tenth more noise in the mean than with everybody is enough for the same ε.
    sampled = plan(
        noise_multiplier=1.1 * rate * full.noise_multiplier, clients=100_000, delta=1e-6, participation=Poisson(rate)
    )
    assert sampled.noise_share == pytest.approx(1.1 * full.noise_share)
    assert sampled.epsilon < full.epsilon
    assert "sampling" not in said(noise_multiplier=5.0, clients=100_000, participation=Poisson(0.5), rounds=2)
    assert "sampling" not in said(ldp_fedexp(clip=1.0, target_epsilon=4.0, delta=1e-6), clients=100_000, dimension=10)
    assert "sampling" not in said(target_epsilon=4.0, clients=1500)


def test_what_promises_nothing_and_what_says_nothing_about_its_noise_get_no_advice(monkeypatch):
    assert preflight(plan(fedavg(), clients=3)) == []
    unknown = plan(dp_fedavg(clip=1.0, mechanism="local-gaussian", target_epsilon=8.0))
    object.__setattr__(unknown, "mechanism", LocalLaplace(1.0, MNIST, 1.0))
    assert (unknown.noise_share, unknown.best_signal, unknown.clients_needed, unknown.verdict) == (None,) * 4
    assert unknown.epsilon_for_signal() is None
    assert preflight(unknown) == []


def test_only_the_declared_population_enters():
    """Under add-remove adjacency the plan knows what was declared, and has no field that anything else could come in by."""
    given = {"noise_multiplier": 5.0, "adjacency": "add-remove", "clip": AdaptiveClip()}
    assert set(Plan.__dataclass_fields__) == {
        "algorithm",
        "mechanism",
        "sampling",
        "population",
        "cohort",
        "dimension",
        "rounds",
    }
    assert plan(**given, participation=Poisson(0.5)).cohort == 500.0


def test_warnings_come_before_notes():
    levels = [advice.level for advice in preflight(plan(target_epsilon=25.0, clients=100_000, delta=5e-6, rounds=500))]
    assert levels == ["warning", "note", "note"]


def test_the_grid_has_a_row_for_each_rate_epsilon_and_number_of_rounds():
    rows = list(plans(1000, 100, delta=1e-5, epsilons=(1.0, 8.0), rounds=(20, 50)))
    assert [(row.epsilon, row.rounds) for row in rows] == [(1.0, 20), (1.0, 50), (8.0, 20), (8.0, 50)]
    assert len(list(plans(1000, 100, delta=1e-5))) == len(EPSILONS) * len(ROUNDS)
    assert [row.verdict for row in plans(1000, 20_000, delta=1e-5, epsilons=(0.01, 0.5, 4.0, 16.0), rounds=(50,))] == [
        "no signal",
        "mostly noise",
        "noisy rounds",
        "clear",
    ]
    with pytest.raises(InputError, match="epsilon is empty"):
        list(plans(10, 10, delta=1e-5, epsilons=()))
    with pytest.raises(InputError, match="dimension is 0; it must be a positive whole number"):
        plan(target_epsilon=8.0, dimension=0)


def test_sampling_rates_leave_a_cohort_that_says_something():
    assert sampling_rates(1000) == [1.0]
    assert sampling_rates(10_000) == [1.0, 0.1]
    assert sampling_rates(100_000) == [1.0, 0.1, 0.01]
