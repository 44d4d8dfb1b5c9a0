"""Two aggregators: the same sums as one, bit for bit; noise of both; and what is refused before a run begins."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp import Full, InputError, Poisson, Sgd, cdp_fedexp, dp_fedavg, dp_scaffold, ldp_fedexp, train
from dpfedexp.accounting import compose
from dpfedexp.accounting.events import Sampling
from dpfedexp.algorithms.algorithm import resolve_algorithm, with_aggregation
from dpfedexp.core.clipping import MAX_NOISE_MOVE, AdaptiveClip
from dpfedexp.core.noise import Streams, expand, fresh_seed, hide, masked_sum
from dpfedexp.core.sums import WITHIN_CLIP, VoteSpec
from dpfedexp.data import synthetic_regression
from dpfedexp.mechanisms.aggregation import server_release
from dpfedexp.mechanisms.central_gaussian import SecureCentralGaussian
from dpfedexp.mechanisms.two_party import OneSidedGaussian, TwoPartyGaussian
from dpfedexp.models import linear_regression

from .one_round import collected, reports

D, CLIENTS = 7, 12

EVERYTHING = {
    "free": cdp_fedexp(clip=0.3, noise_multiplier=2.0),
    "paper": cdp_fedexp(clip=0.3, noise_multiplier=2.0, numerator="paper"),
    "no step size": dp_fedavg(clip=0.3, noise_multiplier=2.0),
    "adaptive clip": cdp_fedexp(clip=AdaptiveClip(initial=0.3), noise_multiplier=2.0, numerator="paper"),
}


def bound(name, kind=TwoPartyGaussian, votes=()):
    algorithm = with_aggregation(EVERYTHING[name], kind.kind)
    return algorithm.bind(D, float(CLIENTS), Sampling(), 3, votes=votes)


def plain_twin(mechanism):
    return SecureCentralGaussian(**vars(mechanism))


ROWS = torch.randn(CLIENTS, D, generator=torch.Generator().manual_seed(0))
BALLOTS = torch.rand(CLIENTS, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "further"), [*((name, 0) for name in EVERYTHING), ("adaptive clip", 2)])
def test_sums_are_those_of_one_trusted_server_bit_for_bit(name, further):
    mechanism = bound(name, votes=tuple(VoteSpec(f"vote {place}") for place in range(further)))
    report = reports(mechanism, ROWS, ballots=BALLOTS[:, :further])
    two, one = mechanism.collect(report), plain_twin(mechanism).collect(report)
    for ours, theirs in ((two.vector, one.vector), (two.squares, one.squares), (two.votes, one.votes)):
        assert torch.equal(ours, theirs)
    assert two.count == one.count == CLIENTS


@pytest.mark.parametrize("kind", [TwoPartyGaussian, OneSidedGaussian])
def test_the_noise_of_a_vote_is_that_of_all_who_add_it_and_slows_an_adaptive_clip(kind):
    mechanism = bound("adaptive clip", kind)
    sums = collected(mechanism, ROWS)
    sources = [[Streams(seed).at(name, 1) for name in ("noise", "scalar noise")] for seed in range(400)]
    found = torch.tensor([mechanism.release(sums, 1.0, *pair).within for pair in sources], dtype=torch.float64)
    noise = mechanism.vote_noise(WITHIN_CLIP)
    assert noise == pytest.approx(mechanism.votes[0].noise * len(mechanism.sides) ** 0.5)
    assert float(found.std()) == pytest.approx(noise, rel=0.18)  # five standard errors
    clip = resolve_algorithm(EVERYTHING["adaptive clip"], None, mechanism, D, float(CLIENTS)).clip
    assert clip.rate * noise / CLIENTS == pytest.approx(MAX_NOISE_MOVE)


def test_a_report_without_its_votes_is_refused():
    mechanism = bound("adaptive clip")
    with pytest.raises(InputError, match="holds no votes"):
        mechanism.units(replace(reports(mechanism, ROWS), votes=None))


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_release_is_the_plain_sum_and_the_two_noises_bit_for_bit(name):
    mechanism, streams = bound(name), Streams(5)
    noise, scalar = streams.at("central noise", 1), streams.at("central scalar noise", 1)
    sums = collected(plain_twin(mechanism), ROWS)
    release = mechanism.release(sums, CLIENTS, noise, scalar)
    columns = mechanism.columns(D)
    mine, theirs = (mechanism.from_units(mechanism.noise_units(columns, s, noise, scalar), 0) for s in mechanism.sides)
    noisy = (sums.vector + mine.vector + theirs.vector) / CLIENTS
    free = mechanism.numerator == "free"
    assert torch.equal(release.c_bar, noisy[:-1] if free else noisy)
    if free:
        assert release.statistic == float(noisy[-1])
    if mechanism.numerator == "paper":
        assert release.statistic == float(sums.squares + mine.squares + theirs.squares) / CLIENTS
    assert not torch.equal(mine.vector, theirs.vector)


@pytest.mark.parametrize("kind", [TwoPartyGaussian, OneSidedGaussian])
def test_the_server_of_a_deployment_adds_noise_of_its_own_where_both_parties_do(kind):
    mechanism, streams = bound("free", kind), partial(Streams(1).at, "noise", 1)
    nothing = np.zeros(mechanism.columns(D), dtype=np.uint64)
    found = server_release(mechanism, [nothing] * CLIENTS, nothing, CLIENTS, streams)
    drawn = mechanism.noise_units(len(nothing), "server", streams(), streams())
    assert torch.equal(found.c_bar, mechanism.decode(drawn * (kind is TwoPartyGaussian), CLIENTS, CLIENTS).c_bar)


def test_each_side_has_noise_of_full_size_and_the_two_are_unrelated():
    """20,000 draws: the relative error of a standard deviation is 0.5%, and of a correlation 0.7%; six of each are allowed."""
    mechanism, streams = replace(bound("no step size"), clip=1.0), Streams(1)
    noise, scalar = streams.at("central noise", 1), streams.at("central scalar noise", 1)
    mine, theirs = (mechanism.noise_units(20_000, s, noise, scalar).double() for s in mechanism.sides)
    for drawn in (mine, theirs):
        assert float(drawn.std()) * mechanism._step == pytest.approx(2.0, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([mine, theirs]))[0, 1])) < 0.042


def test_every_scalar_of_a_side_has_a_draw_of_its_own():
    mechanism = bound("adaptive clip", votes=(VoteSpec("a"), VoteSpec("b")))
    streams = Streams(2)
    _, steps, deviations = mechanism._by_column(mechanism.columns(D))
    given = (streams.at("x", 1), streams.at("y", 1))
    drawn = [mechanism.noise_units(mechanism.columns(D), side, *given).double() for side in mechanism.sides]
    values = [value for row in drawn for value in (row / (deviations / steps))[D:].tolist()]
    assert len(values) == 8
    assert min(abs(a - b) for i, a in enumerate(values) for b in values[:i]) > 1e-4


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=5, max_size=5), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_masks_cancel_whatever_the_rows_are(rows):
    units = torch.tensor(rows, dtype=torch.int64)
    total = [(sum(column) + 2**63) % 2**64 - 2**63 for column in zip(*rows, strict=True)]
    assert masked_sum(units).tolist() == total


def test_a_mask_is_the_key_stream_of_chacha20_in_little_endian_words():
    """RFC 8439 with key 00…1f: the first block by the `cryptography` package under the documented nonce."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    key = bytes(range(32))
    stream = Cipher(ChaCha20(key, bytes(4) + b"dpfedexp-2p1"), None).encryptor().update(bytes(64))
    assert expand(key, 8).tolist() == [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(8)]
    assert expand(key, 3).tolist() == expand(key, 8)[:3].tolist()
    # What the server gets of a constant row: every bit is one half of the time, within six standard deviations.
    hidden = hide(np.full(2**16, 12345, dtype=np.uint64), fresh_seed())
    ones = np.unpackbits(hidden.view(np.uint8)).reshape(-1, 64).mean(0)
    assert np.abs(ones - 0.5).max() < 6 * 0.5 / 2**8
    assert fresh_seed() != fresh_seed()


@given(
    st.floats(1e-6, 1e6), st.floats(1e-2, 1e3), st.integers(1, 10**7), st.sampled_from(["free", "paper"]), st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_nothing_wraps_around_for_the_largest_rows_and_noise_that_pass_the_check(radius, z, cohort, numerator, strict):
    mechanism = TwoPartyGaussian(radius, z, numerator=numerator, scalar_multiplier=z * z, strict=strict)
    largest = int(radius / mechanism._step) * cohort + 2 * int(64 * z * radius / mechanism._step)
    try:
        mechanism.check_headroom(cohort)
    except InputError:
        assert largest > 2**50 or cohort * radius**2 / mechanism._square_step > 2**50
        return
    assert largest < 2**53
    rows = torch.full((3, 2), int(radius / mechanism._step), dtype=torch.int64)
    assert masked_sum(rows).tolist() == [3 * int(radius / mechanism._step)] * 2


def test_the_charge_is_one_aggregators_noise_and_sampling_hides_no_client_from_it():
    mechanism = bound("free")
    full, sampled = mechanism.event(Sampling()), mechanism.event(Sampling("poisson", 0.1))
    trusted = plain_twin(mechanism).event(Sampling())
    assert compose([(sampled, 3)], 1e-5).epsilon == compose([(full, 3)], 1e-5).epsilon
    assert compose([(full, 3)], 1e-5).epsilon == compose([(trusted, 3)], 1e-5).epsilon
    readers = compose([(full.to_readers(), 3)], 1e-5)
    assert readers.mu == pytest.approx(full.mu * 3**0.5 / 2**0.5)
    assert compose([(sampled.to_readers(), 3)], 1e-5).epsilon < 0.5 * readers.epsilon
    alone = bound("free", OneSidedGaussian).event(Sampling())
    assert alone.to_readers().mu == alone.mu == full.mu


PROBLEM = (linear_regression(D), synthetic_regression(CLIENTS, D, seed=1).federation)
MORE = {"local": Sgd(lr=0.1, steps=2), "rounds": 2, "execution": "cpu"}


@pytest.mark.parametrize("aggregation", ["two-party", "two-party-one-sided"])
def test_train_takes_the_aggregation_and_states_it(aggregation, tmp_path):
    algorithm = with_aggregation(cdp_fedexp(clip=AdaptiveClip(initial=0.3), target_epsilon=8.0), aggregation)
    run = train(*PROBLEM, algorithm, out=tmp_path / "run", **MORE)
    text = str(run.privacy)
    assert run.privacy.setting == "two-party"
    assert run.privacy.epsilon_total == pytest.approx(8.0, rel=1e-3)
    assert "against readers of the models" in text
    assert "If server and helper work together, they can read every client's update" in text
    assert ("Against the helper nothing is promised" in text) == (aggregation != "two-party")
    readers = run.privacy.models_only.epsilon_total
    assert readers < 0.75 * 8 if aggregation == "two-party" else readers == run.privacy.epsilon_total
    again = train(*PROBLEM, algorithm, **MORE)
    assert [line["eta_g"] for line in again.history] == [line["eta_g"] for line in run.history]


def test_scaffold_secure_noise_and_sampling_run_with_two_aggregators():
    made = (one(clip=0.3, noise_multiplier=1.0) for one in (dp_scaffold, dp_fedavg))
    scaffold, average = (with_aggregation(one, "two-party") for one in made)
    assert len(train(*PROBLEM, scaffold, **MORE).history) == 2
    sampled = train(*PROBLEM, average, secure=True, participation=Poisson(0.5), **MORE)
    assert sampled.privacy.models_only.epsilon_total < sampled.privacy.epsilon_total / 1.5
    assert "sampling counts for them" in str(sampled.privacy)


@pytest.mark.parametrize(
    ("algorithm", "aggregation", "words"),
    [
        (ldp_fedexp(clip=0.3, noise_multiplier=1.0), "two-party", "needs 'central-gaussian'"),
        (dp_fedavg(clip=0.3, noise_multiplier=1.0, adjacency="add-remove"), "two-party", "both aggregators"),
        (dp_fedavg(clip=0.3, noise_multiplier=1.0), "three-party", "'three-party'"),
    ],
)
def test_what_two_aggregators_can_not_do_is_refused(algorithm, aggregation, words):
    with pytest.raises(InputError, match="52 bits"):
        with_aggregation(dp_fedavg(clip=1.0, noise_multiplier=1e-3), "two-party").bind(D, 1e9, Sampling(), 1)
    who = Full(population=CLIENTS) if algorithm.adjacency == "add-remove" else None
    with pytest.raises(InputError, match=words):
        train(*PROBLEM, with_aggregation(algorithm, aggregation), participation=who, **MORE)
