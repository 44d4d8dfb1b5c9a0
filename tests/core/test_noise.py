import math
import os
import pickle
import sys
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpfedexp.core import noise as module
from dpfedexp.core.clipping import clip
from dpfedexp.core.noise import (
    ChaChaNoise,
    Streams,
    SystemStreams,
    add_noise,
    check_room,
    discrete_gaussian,
    step_for,
    truncate,
    truncated_sum,
)
from dpfedexp.errors import InputError

ONE_IN_A_MILLION = 1e-6
CPU = torch.device("cpu")


def normals(noise, count, client=0):
    return noise.normal(torch.tensor([client]), count, CPU, torch.float64)[0].numpy()


def test_the_words_are_the_key_stream_of_rfc_8439():
    """Appendix A.1, test vector 1: zero key, zero nonce, counter 0."""
    assert module.key_stream(bytes(32)).update(bytes(16)).hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_a_simulations_normals_are_numpys_philox_with_a_stream_for_every_2_20_draws():
    """Another version of this library gets the same numbers from the same seed."""
    piece = 2**20
    drawn = normals(Streams(5).at("noise", 3), piece + 3, client=7)
    for first, part in ((0, drawn[:piece]), (piece, drawn[piece:])):
        bits = np.random.Philox(key=[5, zlib.crc32(b"noise")], counter=[first << 32, 7, 3, 0])
        assert np.array_equal(part, np.random.Generator(bits).standard_normal(len(part)))


def test_normals_are_normal_and_uniforms_uniform():
    noise = ChaChaNoise()
    drawn = normals(noise, 200_000)
    assert stats.kstest(drawn, "norm").pvalue > ONE_IN_A_MILLION
    x, y = drawn[:100_000], drawn[100_000:]
    bound = stats.norm.isf(ONE_IN_A_MILLION / 2) / np.sqrt(len(x))
    assert abs(np.corrcoef(x, y)[0, 1]) < bound, "the two halves of a pair"
    assert abs(np.corrcoef(x**2, y**2)[0, 1]) < bound
    assert normals(noise, 3).shape == (3,)
    uniform = noise.uniform(torch.arange(4), 50_000).numpy().ravel()
    assert stats.kstest(uniform, "uniform").pvalue > ONE_IN_A_MILLION
    assert 0 <= uniform.min() <= uniform.max() < 1


def test_tails_reach_far_and_extreme_words_stay_finite(monkeypatch):
    noise = ChaChaNoise()
    for word in (0, 2**64 - 1):
        monkeypatch.setattr(noise, "words", lambda count, word=word: np.full(count, word, dtype=np.uint64))
        drawn = normals(noise, 4)
        assert np.isfinite(drawn).all()
        assert word or abs(drawn).max() > 9.4


def test_no_two_sources_and_no_two_draws_are_the_same():
    first, streams = ChaChaNoise(), SystemStreams()
    copy = pickle.loads(pickle.dumps(first))  # as it is sent to another process
    sources = (first, first, ChaChaNoise(), copy, streams.at("noise", 1), streams.at("noise", 1))
    assert len({tuple(normals(source, 4)) for source in sources}) == len(sources)


def test_a_forked_process_does_not_repeat_its_parents_noise():
    noise = ChaChaNoise()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, noise.words(2).tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 16)
    assert len(theirs) == 16
    assert theirs != noise.words(2).tobytes()


def test_a_key_is_not_used_beyond_its_length(monkeypatch):
    monkeypatch.setattr(module, "_BYTES_PER_KEY", 64)
    taken = []
    monkeypatch.setattr(module.os, "urandom", lambda n: taken.append(n) or bytes(n))
    source = ChaChaNoise()
    assert np.array_equal(source.words(8), source.words(8))
    assert len(taken) == 2


def test_choices_are_sets_of_the_right_size_and_every_client_is_as_likely():
    noise, counts = ChaChaNoise(), np.zeros(20)
    for _ in range(4000):
        chosen = noise.choice(20, 5, replace=False)
        assert len(set(chosen.tolist())) == 5
        counts[chosen] += 1
    assert stats.chisquare(counts).pvalue > ONE_IN_A_MILLION
    with pytest.raises(InputError, match=r"replace is True; this source chooses without replacement only"):
        noise.choice(10, 3, replace=True)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(InputError, match=r"dpfedexp\[secure\]"):
        ChaChaNoise()


def test_a_long_row_does_not_depend_on_threads_and_consists_of_pieces(monkeypatch):
    monkeypatch.setattr(module, "_ROW_PIECE", 1000)
    noise, clients = Streams(5).at("local noise", 2), torch.tensor([3, 8])
    drawn, before = {}, torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            drawn[threads] = noise.normal(clients, 4100, CPU, torch.float64)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[1], drawn[3])
    assert torch.equal(drawn[1][:, :1000], noise.normal(clients, 1000, CPU, torch.float64))
    assert len(drawn[1].unique()) == drawn[1].numel(), "pieces must not repeat each other"


def test_a_generator_that_jumps_draws_what_a_client_s_own_would():
    """Whatever the client before drew, and wherever it stopped within a block."""
    noise = Streams(7).at("batches", 3)
    of = noise.generators()
    for client, drawn in ((4, 1), (0, 3), (4, 2), (9, 5)):
        jumped, own = of(client), noise.generator(client)
        for generator in (jumped, own):
            generator.integers(2**16, size=drawn, dtype=np.uint32)
        assert np.array_equal(jumped.permutation(50), own.permutation(50))


scales = st.floats(min_value=1e-12, max_value=1e12)
rows = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8)


@given(scales, st.booleans())
def test_a_step_is_a_power_of_two_and_noise_spans_the_promised_number_of_them(deviation, strict):
    step = step_for(deviation, strict)
    assert math.frexp(step)[0] == 0.5
    bits = module.STRICT_BITS if strict else module.BITS
    assert 2**bits <= deviation / step < 2 ** (bits + 1)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("clients", [1, 3])
def test_the_sum_of_truncated_rows_is_exact_and_leaves_them_as_they_were(clients, kind):
    """So it depends neither on the order of the rows nor on the chunks in which they are added."""
    step = step_for(5.0)
    given = torch.randn(clients, module.PIECE // clients + 7, dtype=kind)
    before = given.clone()
    assert torch.equal(truncated_sum(given, step), truncate(given, step).sum(0).double() * step)
    assert torch.equal(given, before)
    # −0 and 0 are told apart in what is released, where the noise is −0.
    assert not torch.signbit(truncated_sum(torch.full((clients, 4), -0.25 * step), step)).any()


@given(rows, scales)
@settings(max_examples=100)
def test_truncation_never_makes_a_norm_larger_and_never_changes_a_sign(values, radius):
    """In exact rational arithmetic."""
    step = step_for(5.0 * radius)
    inside = clip(torch.tensor([values]), radius).vectors
    exact = [Fraction(u) * Fraction(step) for u in truncate(inside, step)[0].tolist()]
    before = [Fraction(v) for v in inside.double()[0].tolist()]
    assert sum(x * x for x in exact) <= sum(x * x for x in before) <= Fraction(radius) ** 2
    assert all(abs(b - e) < Fraction(step) and e * b >= 0 for e, b in zip(exact, before, strict=True))


def test_sums_that_are_off_the_grid_or_too_large_for_it_are_refused():
    check_room(10**6, 1.0, step_for(1.0))
    with pytest.raises(InputError, match="52 bits"):
        check_room(10**6, 1.0, step_for(1e-6))
    for deviation in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="positive"):
            step_for(deviation)
    with pytest.raises(InputError, match="not on the lattice"):
        add_noise(torch.tensor([[0.1]], dtype=torch.float64), step_for(5.0), 5.0, ChaChaNoise())


@pytest.mark.parametrize("strict", [False, True])
def test_noisy_values_are_on_the_grid_with_the_right_law(strict):
    deviation, count = 3.0, 5_000
    step = step_for(deviation, strict)
    noisy = add_noise(torch.zeros(1, count, dtype=torch.float64), step, deviation, ChaChaNoise(), strict)[0]
    assert torch.equal(noisy / step, (noisy / step).round())
    assert stats.kstest((noisy / deviation).numpy(), "norm").pvalue > ONE_IN_A_MILLION


def test_the_discrete_gaussian_has_the_law_of_its_definition():
    scale, count = 1.7, 20_000
    drawn = discrete_gaussian([count], scale)
    assert torch.equal(drawn, drawn.round())
    weights = torch.exp(-(torch.arange(-60, 61).double() ** 2) / (2 * scale**2))
    expected = count * (weights / weights.sum())[55:66]
    seen = torch.stack([(drawn == value).sum() for value in range(-5, 6)]).double()
    tables = ([*part.tolist(), count - float(part.sum())] for part in (seen, expected))
    assert stats.chisquare(*tables).pvalue > ONE_IN_A_MILLION
