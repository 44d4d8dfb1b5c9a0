"""What a run says of itself: on the case that each message is for, and on no healthy one."""

import math

import pytest
import torch

import dpfedexp as dp
from dpfedexp.algorithms.probe import bind
from dpfedexp.core.local_rate import IMPROVED, first_rate
from dpfedexp.data import synthetic_regression
from dpfedexp.engine import plan as planning
from dpfedexp.engine.advice import FEW_CLIENTS, FIRST_LOOK, LARGE_EPSILON, WINDOW, AdviceMonitor, preflight
from dpfedexp.engine.plan import EPSILONS, ROUNDS, Plan, alignment, default_delta, is_longer_than_noise, plans
from dpfedexp.errors import AdviceWarning
from dpfedexp.models import linear_regression
from tests.arguments import arguments
from tests.engine.small import Crash, crash_after
from tests.mechanisms.local_laplace import LocalLaplace

D, M = 400, 1000
FIXED = dp.dp_fedavg(clip=1.0, noise_multiplier=5.0)
ADAM = dp.dp_fedadam(clip=1.0, noise_multiplier=5.0)
ADAPTIVE = dp.cdp_fedexp(clip="adaptive", noise_multiplier=5.0)


def watch(algorithm=FIXED, **options):
    return AdviceMonitor(Plan.of(algorithm, dp.Full(), M, D, 50), **options)


def record(number, **values):
    return {"round": number, "eta_g": 1.0, "clip": 1.0, "epsilon_total": 1.0} | values


def codes(advice):
    return [one.code for one in advice]


def walk(seed, signal=0.0, eta_g=1.0):
    """The advice of 50 rounds whose means are noise plus a push of the given share of the clip, always the same way."""
    ours, generator = watch(), torch.Generator().manual_seed(seed)
    deviation = math.sqrt(ours.plan.mechanism.noise_variance(M, M))
    w, push = torch.zeros(D, dtype=torch.float64), torch.tensor([signal] + [0.0] * (D - 1))

    def norms():
        return float(w.norm()), float(w.norm())

    for number in range(1, 51):
        c_bar = push + deviation * torch.randn(D, generator=generator, dtype=torch.float64)
        w += eta_g * c_bar
        ours.seen(record(number, eta_g=eta_g, update_norm=float(c_bar.norm())), norms)
    ours.end(norms)
    return ours.advice


def test_noise_alone_is_called_so_and_ends_with_a_verdict():
    # Each of two tests takes noise for a signal once in a hundred runs.
    heard = [{one.code: one.sentence for one in walk(seed)} for seed in range(20)]
    dead = [said["dead"] for said in heard if "dead" in said]
    assert len(dead) >= 15
    assert all(sentence.startswith("Nothing shows that this run learned anything: in 50 rounds") for sentence in dead)
    assert sum("drowned" in said for said in heard) >= 10, "two looks before the end, each at two thirds"
    assert all(set(said) <= {"dead", "drowned"} for said in heard)


@pytest.mark.parametrize("eta_g", [1.0, 7.0])
def test_a_signal_that_no_single_round_shows_is_heard_over_all_of_them(eta_g):
    # Noise of norm 0.1C, a push of 0.02C: 4% more squared length in a round, of which the deviation is 7%.
    assert [walk(seed, signal=0.02, eta_g=eta_g) for seed in range(10)] == [[]] * 10


def test_the_length_test_has_its_level_and_its_power():
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(2000, 5, 30, generator=generator, dtype=torch.float64)
    rejected = sum(is_longer_than_noise(one.square().sum(1).tolist(), [1.0] * 5, 30) for one in draws) / 2000
    assert abs(rejected - 0.01) < 5.5 * math.sqrt(0.01 * 0.99 / 2000)
    assert all(is_longer_than_noise((1.5 * one).square().sum(1).tolist(), [1.0] * 5, 30) for one in draws[:50])


def test_alignment_is_standardized_for_random_directions_of_any_lengths():
    generator = torch.Generator().manual_seed(2)
    lengths = torch.linspace(0.5, 3.0, 12, dtype=torch.float64)
    found = []
    for _ in range(3000):
        ways = torch.randn(12, 200, generator=generator, dtype=torch.float64)
        moves = lengths[:, None] * ways / ways.norm(dim=1, keepdim=True)
        found.append(alignment(lengths.tolist(), float(moves.sum(0).norm()), 200))
    found = torch.tensor(found)
    # 5.5 standard errors of a mean and of a standard deviation of 3000 draws with little excess kurtosis.
    assert abs(float(found.mean())) < 5.5 / math.sqrt(3000)
    assert float(found.std()) == pytest.approx(1.0, abs=0.1)
    assert alignment([1.0], 1.0, 10) == 0.0


def told(algorithm=FIXED, at=(3.0, 3.0), start_norm=0.0, **fields):
    """The codes of a run whose rounds have these values, those at its end after a bar; without `at` it goes as noise goes."""
    ours = watch(algorithm, start_norm=start_norm)
    noise = math.sqrt(D * ours.plan.mechanism.noise_variance(M, M))
    count = max(len(values) for values in fields.values())
    for number in range(1, count + 1):
        line = {name: values[(number - 1) % len(values)] for name, values in ({"update_norm": [0.5]} | fields).items()}
        line |= {"update_norm": noise * line.get("clip", 1.0)} if line["update_norm"] == "noise" else {}
        there = at or (math.sqrt(number) * noise, 1.0)
        ours.seen(record(number, **line), lambda there=there: there)
    during = codes(ours.advice)
    return [*during, "|", *codes(ours.end(lambda: there))]


RISING, FALLING = [1.2**n for n in range(WINDOW)], [0.8**n for n in range(30)]
NOISE = {"update_norm": ["noise"] * 39, "at": None}


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("not-finite | dead", {"update_norm": [1.0, 1.0, math.nan, 1.0, 1.0]}),
        ("diverging |", {IMPROVED.field: [0.3] * 14}),
        ("|", {IMPROVED.field: [0.8] * 14}),
        ("diverging |", {"algorithm": ADAPTIVE, "clip": RISING, "update_norm": ["noise"], "eta_g": [2.0]}),
        ("|", {"algorithm": ADAPTIVE, "clip": RISING, "eta_g": [2.0]}),
        ("|", {"algorithm": ADAPTIVE, "clip": FALLING, "eta_g": [2.0]}),
        ("|", {"algorithm": ADAPTIVE, "clip": [0.9, 1.1] * 15, "eta_g": [2.0]}),
        ("|", {"clip": FALLING}),
        ("exploded | dead", {"update_norm": [5e3] * FIRST_LOOK, "at": (1e5, 1e5), "start_norm": 3.0}),
        ("|", {"update_norm": [5e3] * FIRST_LOOK, "at": (1e5, 1e5), "start_norm": 30.0}),
        ("| dead", {"test_loss": [2.30] * 8}),
        ("| dead", {"test_loss": [2.30, 2.31, 2.4, 2.5, 2.6, 2.7]}),
        ("|", {"test_loss": [2.30, 2.2, 2.1, 2.0, 1.9, 1.8]}),
        ("|", {"test_loss": [2.30, 2.30]}),
        ("|", {"test_loss": [-1.0, -1.5, -2.0, -2.5, -3.0]}),
        ("|", {"test_loss": [0.3 + 0.01 * n for n in range(8)], "test_accuracy": [0.8 + 0.01 * n for n in range(8)]}),
        ("|", {"nonprivate_training_loss": [2.0] * 8}),
        ("|", {"update_norm": [None] * 29, "at": (0.0, 1.0)}),
        ("|", {"algorithm": ADAM, "update_norm": ["noise"], "clip": [1.0] * 29, "at": (0.0, 1.0)}),
        # The tests can miss a signal that a model lives on: what the server measured itself comes first.
        ("drowned | dead", NOISE),
        ("drowned | dead", NOISE | {"test_accuracy": [0.1] * 39}),
        ("| still-climbing", NOISE | {"test_accuracy": [0.1 + 0.02 * n for n in range(39)]}),
        ("| still-climbing", {"test_loss": [0.9**n for n in range(20)]}),
        ("|", {"test_accuracy": [0.5 + 0.001 * n for n in range(20)]}),
        ("|", {"test_loss": [1.0] * 8 + [0.5] * 12}),
        ("|", {"test_accuracy": [0.1 * n for n in range(6)]}),
        ("|", {"nonprivate_accuracy": [0.05 * n for n in range(20)]}),
    ],
)
def test_each_message_is_said_in_its_case_and_in_no_other(expected, given):
    assert told(**given) == expected.split()


PROBLEM = synthetic_regression(200, 30, seed=0)


def run(algorithm, lr=0.003, rounds=25, clients=PROBLEM.federation, **options):
    given = {"local": dp.Sgd(lr=lr, steps=10), "rounds": rounds, "execution": "cpu"} | options
    return dp.train(linear_regression(30), clients, algorithm, **arguments(given))


def test_a_healthy_run_has_nothing_to_say():
    done = run(dp.cdp_fedexp(clip=0.3, noise_multiplier=2.0, delta=1e-5), lr=0.02)
    assert [one for one in done.advice if one.level == "warning" and one.code != "large-epsilon"] == []
    assert done.verdict is None
    assert run(dp.fedexp()).advice == ()


def test_training_that_diverges_to_nothing_is_found():
    """Updates that are not finite count as zero, so nothing but noise is released, and an adaptive clip falls for ever."""
    done = run(dp.cdp_fedexp(clip="adaptive", target_epsilon=8.0), lr=1e6, rounds=40)
    assert codes(done.advice)[-1] == "dead"
    assert done.history[0]["update_norm"] > 0


def test_advice_goes_to_its_callback_and_notes_are_no_warnings(recwarn):
    heard = []
    done = run(dp.ldp_fedexp(clip=0.3, noise_multiplier=0.7), on_round=dp.OnAdvice(heard.append), rounds=6)
    assert heard == list(done.advice)
    assert "large-epsilon" in codes(heard)
    assert [one for one in recwarn if one.category is AdviceWarning] == []
    with pytest.raises(dp.InputError, match="OnAdvice is given 3; it must be a function"):
        dp.OnAdvice(3)


def test_a_resumed_run_says_what_the_whole_one_says(tmp_path):
    clients = dp.Federation.from_clients([(torch.ones(2, 30), torch.ones(2)) for _ in range(5)])
    algorithm = dp.dp_fedavg(clip=1.0, noise_multiplier=50.0)
    given = {"clients": clients, "rounds": 12}
    silent = dp.OnAdvice(lambda advice: None)
    whole = run(algorithm, on_round=silent, **given)
    with pytest.raises(Crash):
        run(algorithm, out=tmp_path, on_round=[crash_after(7), silent], **given)
    resumed = run(algorithm, out=tmp_path, on_round=silent, **given)
    assert resumed.advice == whole.advice
    assert codes(whole.advice) == ["few-clients", "dead"]


MNIST = 8_186
"""About the parameters of the paper's network."""


def plan(algorithm=None, clients=1000, dimension=MNIST, rounds=50, participation=None, **options):
    algorithm = algorithm or dp.cdp_fedexp(**({"clip": 0.3} | options))
    return Plan.of(algorithm, participation or dp.Full(), clients, dimension, rounds)


def said(*args, **options):
    return {advice.code: advice for advice in preflight(plan(*args, **options))}


def test_the_noise_share_is_the_formula_of_each_setting():
    central = plan(noise_multiplier=5.0, participation=dp.Poisson(0.25), adjacency="replace-one")
    assert central.noise_share == pytest.approx(5.0 * math.sqrt(MNIST) / (0.25 * 1000))
    local = plan(dp.ldp_fedexp(clip=0.3, noise_multiplier=0.7), participation=dp.FixedSize(250))
    assert local.noise_share == pytest.approx(0.7 * math.sqrt(MNIST) / math.sqrt(250))
    assert local.best_signal == pytest.approx(math.sqrt(50) / local.noise_share)


@pytest.mark.parametrize(("mechanism", "clients"), [("central-gaussian", 5000), ("privunit", 50)])
def test_the_clients_needed_are_just_enough_for_a_signal(mechanism, clients):
    given = {"clip": 1.0, "mechanism": mechanism, "target_epsilon": 2.0}
    needed = plan(dp.dp_fedavg(**given), clients=clients, dimension=300).clients_needed
    counts = (needed, needed - needed // 50 - 1)
    enough, short = (plan(dp.dp_fedavg(**given), clients=int(c), dimension=300) for c in counts)
    assert short.best_signal < 1 <= enough.best_signal


def test_the_epsilon_for_a_signal_gives_one():
    at = plan(target_epsilon=1.0, clients=50, dimension=2000).epsilon_for_signal()
    assert at > 1.0
    heard = plan(target_epsilon=at, clients=50, dimension=2000)
    assert heard.best_signal == pytest.approx(1.0, rel=1e-6)  # calibration is exact to 1e-9 in z


LOCAL = dp.ldp_fedexp(clip=1.0, target_epsilon=1.0)
PRIVUNIT = dp.dp_fedavg(clip=1.0, mechanism="privunit", target_epsilon=8.0)
LARGE = {"clients": 1000, "dimension": 11_000_000}
MANY = {"clients": 100_000, "delta": 1e-6}


@pytest.mark.parametrize(
    ("given", "expected", "words"),
    [
        ({"noise_multiplier": 5.0}, "", ()),
        ({"noise_multiplier": 5.0, "clip": "adaptive"}, "", ()),
        ({"target_epsilon": 8.0}, "", ()),
        ({"algorithm": dp.fedavg(), "clients": 3}, "", ()),
        (
            {"target_epsilon": 8.0, "clients": 3, "dimension": 1000},
            "warning: few-clients",
            (
                "3 clients: client-level privacy does not work here",
                *("record-level privacy", "z = 8.5", "d = 1,000", "about 38 clients", "ε ≈ 310", "13 times"),
            ),
        ),
        ({"noise_multiplier": 5.0, "clients": FEW_CLIENTS - 1, "dimension": 2}, "warning: few-clients", ()),
        ({"noise_multiplier": 5.0, "clients": FEW_CLIENTS, "dimension": 2}, "", ()),
        ({"target_epsilon": 8.0, **LARGE}, "warning: mostly-noise", ("about 4,000 clients",)),
        # As many clients have a signal, if only over many rounds.
        ({"target_epsilon": 8.0, **LARGE, "clients": 4100}, "note: noisy-rounds, note: sampling", ()),
        ({"target_epsilon": 0.1, **LARGE}, "warning: no-signal", ("could not be told from noise",)),
        ({"algorithm": LOCAL, "dimension": 100_000}, "warning: no-signal", ("mechanism 'central-gaussian'",)),
        ({"algorithm": PRIVUNIT, "dimension": 100_000}, "warning: no-signal", ()),
        ({"target_epsilon": 8.0, "delta": 2e-3}, "warning: delta", ("delta = 1e-05",)),
        ({"target_epsilon": 8.0, "delta": 5e-4}, "note: delta", ("delta = 1e-05",)),
        ({"target_epsilon": 8.0, "delta": 1e-4}, "", ()),
        ({"target_epsilon": LARGE_EPSILON}, "", ()),
        ({"target_epsilon": LARGE_EPSILON + 1}, "warning: large-epsilon", (f"ε = {LARGE_EPSILON + 1:g}",)),
        ({"target_epsilon": 4.0, **MANY}, "note: sampling", ()),
        ({"noise_multiplier": 5.0, **MANY, "participation": dp.Poisson(0.5), "rounds": 2}, "", ()),
        ({"target_epsilon": 4.0, "clients": 1500}, "", ()),
        # Warnings come before notes.
        (
            {"target_epsilon": 25.0, "clients": 100_000, "delta": 5e-6, "rounds": 500},
            "warning: large-epsilon, note: delta, note: sampling",
            (),
        ),
    ],
)
def test_each_public_number_gets_its_advice_and_no_other(given, expected, words):
    found = preflight(plan(**given))
    assert ", ".join(f"{advice.level}: {advice.code}" for advice in found) == expected
    assert [part for part in words if part not in found[0].sentence] == []
    # PrivUnit has no noise multiplier.
    assert given.get("algorithm") is not PRIVUNIT or "z =" not in found[0].sentence


def test_rounds_with_more_noise_than_signal_are_noted_and_fewer_recommended_where_that_is_enough():
    many = said(target_epsilon=8.0, rounds=400, dimension=20_000)["noisy-rounds"]
    assert many.level == "note"
    fewer = int(many.sentence.split("With ")[1].split(" rounds")[0])
    assert 10 <= fewer < 400
    assert plan(target_epsilon=8.0, rounds=fewer, dimension=20_000).noise_share <= 1
    assert plan(target_epsilon=8.0, rounds=fewer + 2, dimension=20_000).noise_share > 1
    strong = said(target_epsilon=1.0)["noisy-rounds"]
    assert "instead of" not in strong.sentence, "two rounds train nothing"


def test_the_default_delta_is_never_remarked_on():
    for clients in (20, 999, 10_000, 12_163, 10**8):
        delta = default_delta(clients)
        assert delta <= 1e-5
        assert "delta" not in said(target_epsilon=8.0, clients=clients, delta=delta)
    with pytest.raises(dp.InputError, match="population is 0; it must be a positive whole number"):
        default_delta(0)


def test_sampling_is_recommended_to_a_large_population_and_costs_little_noise():
    options = {"target_epsilon": 4.0, **MANY}
    rate = float(said(**options)["sampling"].sentence.split("(rate ")[1].split(")")[0])
    full = plan(**options)
    # A tenth more noise in the mean than with everybody is enough for the same ε.
    sampled = plan(noise_multiplier=1.1 * rate * full.noise_multiplier, participation=dp.Poisson(rate), **MANY)
    assert sampled.noise_share == pytest.approx(1.1 * full.noise_share)
    assert sampled.epsilon < full.epsilon
    assert "sampling" not in said(dp.ldp_fedexp(clip=1.0, target_epsilon=4.0, delta=1e-6), clients=10**5, dimension=10)


def test_what_says_nothing_about_its_noise_gets_no_advice():
    unknown = plan(dp.dp_fedavg(clip=1.0, mechanism="local-gaussian", target_epsilon=8.0))
    object.__setattr__(unknown, "mechanism", LocalLaplace(1.0, MNIST, 1.0))
    assert (unknown.noise_share, unknown.best_signal, unknown.clients_needed, unknown.verdict) == (None,) * 4
    assert unknown.epsilon_for_signal() is None
    assert preflight(unknown) == []


def test_the_grid_has_a_row_for_each_rate_epsilon_and_number_of_rounds():
    rows = list(plans(1000, 100, delta=1e-5, epsilons=(1.0, 8.0), rounds=(20, 50)))
    assert [(row.epsilon, row.rounds) for row in rows] == [(1.0, 20), (1.0, 50), (8.0, 20), (8.0, 50)]
    assert len(list(plans(1000, 100, delta=1e-5))) == len(EPSILONS) * len(ROUNDS)
    rows = plans(1000, 20_000, delta=1e-5, epsilons=(0.01, 0.5, 4.0, 16.0), rounds=(50,))
    assert [row.verdict for row in rows] == ["no signal", "mostly noise", "noisy rounds", "clear"]
    rates = [planning.sampling_rates(count) for count in (1000, 10_000, 100_000)]
    assert rates == [[1.0], [1.0, 0.1], [1.0, 0.1, 0.01]]
    with pytest.raises(dp.InputError, match="epsilon is empty"):
        list(plans(10, 10, delta=1e-5, epsilons=()))
    with pytest.raises(dp.InputError, match="dimension is 0; it must be a positive whole number"):
        plan(target_epsilon=8.0, dimension=0)


def voting(clients, epsilon=2.0):
    """The plan of a run whose local rate sets itself."""
    algorithm = dp.cdp_fedexp(clip="adaptive", target_epsilon=epsilon, delta=1e-5)
    mechanism, _, _ = bind(algorithm, dp.Sgd(lr="auto", steps=10), MNIST, clients, dp.Full(), 50, False)
    return Plan.of(algorithm, dp.Full(), clients, MNIST, 50, mechanism=mechanism)


def test_a_rate_that_the_votes_can_not_choose_is_said_to_be_the_usual_one():
    assert "rate-by-default" in codes(preflight(voting(30)))
    assert "rate-by-default" not in codes(preflight(voting(1000)))
    assert "rate-by-default" not in said(clients=30, target_epsilon=2.0, delta=1e-5)


def test_a_budget_that_ends_the_run_early_is_said_before_the_first_round():
    """`fit` with a budget below its epsilon gave an untrained model after votes that were charged, without a word."""
    clients, model = synthetic_regression(30, 3).federation, linear_regression(3)
    algorithm, given = dp.dp_fedavg(clip=1.0, target_epsilon=8.0), {"local": dp.Sgd(lr=0.1, steps=2), "rounds": 4}
    with pytest.warns(AdviceWarning, match="The budget of ε = 4 ends this run early: .* would cost ε = 8"):
        run = dp.train(model, clients, algorithm, budget=4.0, **given)
    assert run.stopped
    assert "beyond-budget" not in codes(dp.train(model, clients, algorithm, budget=8.0, **given).advice)


@pytest.mark.parametrize(("voted", "at_edge"), [(2e-4, True), (0.01, False), (2.0, False), (60.0, True)])
def test_a_rate_at_the_end_of_its_grid_says_to_scale_numbers(voted, at_edge):
    ours = AdviceMonitor(voting(1000))
    heard = ours.seen(record(1, local_rate=first_rate(voted, ours.plan.noise_share)))
    assert codes(heard) == ["rate-at-edge"] * at_edge
    assert not at_edge or "If inputs or targets are numbers far from 1, scale them" in heard[0].sentence
    # A rate that fell later was not voted for.
    assert not ours.seen(record(2, local_rate=1e-5))
