"""What a run says of itself: on the case that each message is for, and on no healthy one."""

import math
import time

import pytest
import torch

from dpfedexp import Federation, Full, Sgd, cdp_fedexp, dp_fedadam, dp_fedavg, fedavg, fedexp, ldp_fedexp, train
from dpfedexp.core.local_rate import HELPED
from dpfedexp.data import synthetic_regression
from dpfedexp.engine.advice import FIRST_LOOK, WINDOW, Watch
from dpfedexp.engine.plan import Plan, alignment, is_longer_than_noise
from dpfedexp.errors import AdviceWarning, InputError
from dpfedexp.models import linear_regression

D, M = 400, 1000
FIXED = dp_fedavg(clip=1.0, noise_multiplier=5.0)
ADAPTIVE = cdp_fedexp(clip="adaptive", noise_multiplier=5.0)


def watch(algorithm=FIXED, **options):
    return Watch(Plan.of(algorithm, Full(), M, D, 50), **options)


def nowhere():
    return 0.0, 1.0


def record(number, **values):
    return {"round": number, "eta_g": 1.0, "clip": 1.0, "epsilon_total": 1.0} | values


def codes(advice):
    return [one.code for one in advice]


def walk(algorithm, rounds, signal=0.0, seed=0, eta_g=1.0):
    """The advice of rounds whose means are noise plus a push of the given share of the clip, always the same way."""
    ours = watch(algorithm)
    generator, way = torch.Generator().manual_seed(seed), torch.zeros(D, dtype=torch.float64)
    v = ours.plan.mechanism.noise_variance(M, M)
    w = torch.zeros(D, dtype=torch.float64)

    def norms():
        return float(w.norm()), float(w.norm())

    way[0] = signal * ours.plan.mechanism.clip
    for number in range(1, rounds + 1):
        c_bar = way + math.sqrt(v) * torch.randn(D, generator=generator, dtype=torch.float64)
        w += eta_g * c_bar
        line = record(number, eta_g=eta_g, update_norm=float(c_bar.norm()), clip=ours.plan.mechanism.clip)
        ours.seen(line, norms)
    ours.end(norms)
    return codes(ours.advice)


def test_noise_alone_is_called_so_and_ends_with_a_verdict():
    # Each of two tests takes noise for a signal once in a hundred runs.
    dead = [walk(FIXED, 50, seed=seed) for seed in range(20)]
    assert sum("dead" in said for said in dead) >= 15
    assert sum("drowned" in said for said in dead) >= 10, "two looks before the end, each at two thirds"
    assert all(set(said) <= {"dead", "drowned"} for said in dead)


@pytest.mark.parametrize("eta_g", [1.0, 7.0])
def test_a_signal_that_no_single_round_shows_is_heard_over_all_of_them(eta_g):
    # Noise of norm 0.1C, a push of 0.02C: 4% more squared length in a round, of which the deviation is 7%.
    assert [walk(FIXED, 50, signal=0.02, seed=seed, eta_g=eta_g) for seed in range(10)] == [[]] * 10


def test_the_length_test_has_its_level_and_its_power():
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(2000, 5, 30, generator=generator, dtype=torch.float64)
    rejected = sum(is_longer_than_noise(one.square().sum(1).tolist(), [1.0] * 5, 30) for one in draws) / 2000
    assert abs(rejected - 0.01) < 5.5 * math.sqrt(0.01 * 0.99 / 2000)
    assert all(is_longer_than_noise((1.5 * one).square().sum(1).tolist(), [1.0] * 5, 30) for one in draws[:50])


def test_alignment_is_standardised_for_random_directions_of_any_lengths():
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


def test_an_update_that_is_not_finite_is_said_at_once_and_is_the_verdict():
    ours = watch()
    for number in range(1, 6):
        said = ours.seen(record(number, update_norm=math.nan if number == 3 else 1.0))
        assert codes(said) == (["not-finite"] if number == 3 else [])
    assert codes(ours.end(nowhere)) == ["dead"]
    assert "Round 3" in ours.advice[0].sentence
    assert "This run learnt nothing: round 3" in ours.advice[-1].sentence


def test_votes_that_training_did_not_help_say_that_it_diverges():
    ours, field = watch(), HELPED.field
    said = [ours.seen(record(number, **{field: 0.3})) for number in range(1, 15)]
    assert [codes(new) for new in said].index(["diverging"]) == WINDOW - 1
    assert "30% of the clients" in ours.advice[0].sentence
    assert codes(ours.advice) == ["diverging"], "once"
    healthy = watch()
    assert not any(healthy.seen(record(number, **{field: 0.8})) for number in range(1, 15))


def test_a_rising_clip_over_nothing_but_noise_says_that_training_diverges():
    ours, quiet = watch(ADAPTIVE), watch(ADAPTIVE)
    noise = math.sqrt(D * ours.plan.mechanism.noise_variance(M, M))
    for number in range(1, WINDOW + 1):
        clip = 1.2**number
        ours.seen(record(number, clip=clip, update_norm=clip * noise))
        quiet.seen(record(number, clip=clip, update_norm=clip * 0.5))
    assert codes(ours.advice) == ["diverging"]
    assert quiet.advice == [], "a clip that rises to where the updates are is doing its work"


def test_a_clip_that_went_far_or_still_moves_is_noted():
    ours = watch(ADAPTIVE)
    for number in range(1, 31):
        ours.seen(record(number, clip=0.8**number, update_norm=0.5 * 0.8**number, eta_g=2.0))
    assert codes(ours.advice) == ["far-clip"]
    assert codes(ours.end(lambda: (2.0, 2.0))) == ["moving-clip"]
    still = watch(ADAPTIVE)
    for number in range(1, 31):
        still.seen(record(number, clip=1.0 + 0.1 * (-1) ** number, update_norm=0.5, eta_g=2.0))
    assert still.end(lambda: (2.0, 2.0)) == []


def test_a_fixed_clip_is_never_remarked_on():
    ours = watch()
    for number in range(1, 31):
        ours.seen(record(number, clip=0.8**number, update_norm=0.5))
    assert codes(ours.end(lambda: (2.0, 2.0))) == []


def test_a_step_size_that_is_one_from_the_middle_on_is_noted_for_fedexp_only():
    for algorithm, expected in ((ADAPTIVE, ["no-extrapolation"]), (FIXED, []), (fedavg(), [])):
        ours = watch(algorithm)
        for number in range(1, 9):
            ours.seen(record(number, update_norm=0.5))
        assert codes(ours.end(lambda: (4.0, 4.0))) == expected
    for longer, expected in ((4, ["no-extrapolation"]), (5, [])):
        once = watch(ADAPTIVE)
        for number in range(1, 9):
            once.seen(record(number, update_norm=0.5, eta_g=1.5 if number == longer else 1.0))
        said = once.end(lambda: (4.0, 4.0))
        assert codes(said) == expected
        assert all("1 after round 4" in advice.sentence for advice in said)


def test_parameters_that_explode_are_said_and_are_the_verdict():
    ours = watch(start_norm=3.0)
    for number in range(1, FIRST_LOOK + 1):
        ours.seen(record(number, update_norm=5e3), lambda: (1e5, 1e5))
    assert codes(ours.advice) == ["exploded"]
    assert codes(ours.end(lambda: (1e5, 1e5))) == ["dead"]
    fine = watch(start_norm=30.0)
    for number in range(1, FIRST_LOOK + 1):
        fine.seen(record(number, update_norm=5e3), lambda: (1e5, 1e5))
    assert fine.advice == []


@pytest.mark.parametrize(
    ("losses", "dead"),
    [
        ([2.30] * 8, True),
        ([2.30, 2.31, 2.4, 2.5, 2.6, 2.7], True),
        ([2.30, 2.2, 2.1, 2.0, 1.9, 1.8], False),
        ([2.30, 2.30], False),
        ([-1.0, -1.5, -2.0, -2.5, -3.0], False),
    ],
    ids=["still", "rising", "falling", "too short", "falling below zero"],
)
def test_a_loss_that_never_fell_is_the_verdict(losses, dead):
    ours = watch()
    for number, loss in enumerate(losses, 1):
        ours.seen(record(number, update_norm=0.5, test_loss=loss))
    assert ("dead" in codes(ours.end(lambda: (3.0, 3.0)))) == dead


def test_a_rising_loss_with_rising_accuracy_is_overconfidence_and_not_death():
    ours = watch()
    for number in range(1, 9):
        ours.seen(record(number, update_norm=0.5, test_loss=0.3 + 0.01 * number, test_accuracy=0.8 + 0.01 * number))
    assert ours.end(lambda: (3.0, 3.0)) == []


def test_noise_is_no_verdict_where_the_servers_own_metric_improved():
    """The tests can miss a signal that a model lives on: what the server measured itself comes first."""
    noise = math.sqrt(D * watch().plan.mechanism.noise_variance(M, M))
    for metric, dead in (({"test_accuracy": 0.02}, False), ({"test_accuracy": 0.0}, True), ({}, True)):
        ours = watch()
        for number in range(1, 2 * FIRST_LOOK):
            line = record(number, update_norm=noise, **{name: 0.1 + number * by for name, by in metric.items()})
            ours.seen(line, lambda n=number: (math.sqrt(n) * noise, 1.0))
        ours.end(lambda n=number: (math.sqrt(n) * noise, 1.0))
        assert codes(ours.advice) == (["drowned", "dead"] if dead else [])
    assert ours.advice[-1].sentence.startswith("Nothing shows that this run learnt anything: in 39 rounds")


def test_values_that_are_not_private_are_not_read():
    ours = watch()
    for number in range(1, 9):
        ours.seen(record(number, update_norm=0.5, nonprivate_training_loss=2.0))
    assert ours.end(lambda: (3.0, 3.0)) == []


def test_records_of_before_say_nothing_about_noise():
    ours = watch()
    ours.replay(record(number) for number in range(1, 30))
    assert ours.end(nowhere) == []


def test_a_server_with_moments_is_not_judged_by_its_way():
    ours = watch(dp_fedadam(clip=1.0, noise_multiplier=5.0))
    noise = math.sqrt(D * ours.plan.mechanism.noise_variance(M, M))
    for number in range(1, 30):
        ours.seen(record(number, update_norm=noise), nowhere)
    assert ours.end(nowhere) == []


def test_a_round_costs_less_than_a_millisecond():
    ours = watch(ADAPTIVE)
    lines = [record(number, clip=1.0 + number % 3, update_norm=0.5, test_loss=1.0) for number in range(1, 501)]
    began = time.process_time()
    for line in lines:
        ours.seen(line, nowhere)
    assert time.process_time() - began < 0.5


PROBLEM = synthetic_regression(200, 30, seed=0)


def run(algorithm, lr=0.003, rounds=25, clients=PROBLEM.federation, **options):
    return train(
        linear_regression(30),
        clients,
        algorithm,
        local=Sgd(lr=lr, steps=10),
        rounds=rounds,
        progress=False,
        device="cpu",
        **options,
    )


def test_a_healthy_run_has_nothing_to_say():
    done = run(cdp_fedexp(clip=0.3, noise_multiplier=2.0, delta=1e-5), lr=0.02)
    assert [one for one in done.advice if one.level == "warning" and one.code != "large-epsilon"] == []
    assert done.verdict is None
    assert run(fedexp()).advice == ()


@pytest.mark.parametrize(
    ("mechanism", "epsilon"), [("central-gaussian", 0.02), ("local-gaussian", 0.2), ("privunit", 0.2)]
)
def test_a_drowned_run_warns_before_and_ends_with_its_verdict(mechanism, epsilon):
    with pytest.warns(AdviceWarning) as caught:
        done = run(dp_fedavg(clip=0.01, mechanism=mechanism, target_epsilon=epsilon))
    assert str(caught[0].message).startswith(("The noise drowns", "There will be more noise"))
    assert done.advice[0].code in ("no-signal", "mostly-noise")
    assert done.advice[-1].code == "dead"
    assert done.verdict.startswith("Nothing shows that this run learnt anything: in 25 rounds neither")
    assert "Nothing shows that this run learnt anything" in repr(done)


def test_training_that_diverges_to_nothing_is_found():
    """Updates that are not finite count as zero, so nothing but noise is released, and an adaptive clip falls for ever."""
    done = run(cdp_fedexp(clip="adaptive", target_epsilon=8.0), lr=1e6, rounds=40)
    assert {"vanishing", "dead"} <= set(codes(done.advice))
    assert done.history[0]["update_norm"] > 0


def test_advice_goes_to_whoever_asked_for_it_and_notes_are_no_warnings(recwarn):
    heard = []
    done = run(ldp_fedexp(clip=0.3, noise_multiplier=0.7), on_advice=heard.append, rounds=6)
    assert heard == list(done.advice)
    assert "large-epsilon" in codes(heard)
    assert [one for one in recwarn if one.category is AdviceWarning] == []
    with pytest.raises(InputError, match="on_advice is 3; it must be a function"):
        run(fedavg(), on_advice=3)


def test_a_resumed_run_says_what_the_whole_one_says(tmp_path):
    clients = Federation.from_clients([(torch.ones(2, 30), torch.ones(2)) for _ in range(5)])
    algorithm = dp_fedavg(clip=1.0, noise_multiplier=50.0)
    whole = run(algorithm, clients=clients, rounds=12, on_advice=lambda advice: None)

    def interrupt(line):
        if line["round"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            algorithm,
            clients=clients,
            rounds=12,
            checkpoint=tmp_path,
            on_round=interrupt,
            on_advice=lambda advice: None,
        )
    resumed = run(
        algorithm, clients=clients, rounds=12, checkpoint=tmp_path, resume=True, on_advice=lambda advice: None
    )
    assert resumed.advice == whole.advice
    assert codes(whole.advice) == ["few-clients", "dead"]
