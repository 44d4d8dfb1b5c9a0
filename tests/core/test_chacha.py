import os
import pickle
import sys
import zlib

import numpy as np
import pytest
import torch
from scipy import stats

from dpfedexp.core import noise as noise_module
from dpfedexp.core.noise import ChaChaNoise, Streams, SystemStreams
from dpfedexp.errors import InputError

ONE_IN_A_MILLION = 1e-6
CPU = torch.device("cpu")


def normals(noise, count):
    return noise.normal(torch.arange(1), count, CPU, torch.float64)[0].numpy()


def test_the_words_are_the_key_stream_of_rfc_8439():
    """Appendix A.1, test vector 1: zero key, zero nonce, counter 0."""
    stream = noise_module.key_stream(bytes(32)).update(bytes(16))
    assert stream.hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_a_simulations_normals_are_numpys_philox_with_a_stream_for_every_2_20_draws():
    """Another version of this library gets the same numbers from the same seed."""
    piece = 2**20
    drawn = Streams(5).at("noise", 3).normal(torch.tensor([7]), piece + 3, CPU, torch.float64)[0].numpy()
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
    monkeypatch.setattr(noise_module, "_BYTES_PER_KEY", 64)
    taken = []
    monkeypatch.setattr(noise_module.os, "urandom", lambda n: taken.append(n) or bytes(n))
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


CLIENTS = torch.tensor([3, 8])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_row_does_not_depend_on_threads_and_consists_of_pieces(monkeypatch, threads):
    monkeypatch.setattr(noise_module, "_ROW_PIECE", 1000)
    noise = Streams(5).at("local noise", 2)
    again = noise.normal(CLIENTS, 4100, CPU, torch.float64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        drawn = noise.normal(CLIENTS, 4100, CPU, torch.float64)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn, again)
    assert torch.equal(drawn[:, :1000], noise.normal(CLIENTS, 1000, CPU, torch.float64))
    assert len(drawn.unique()) == drawn.numel(), "pieces must not repeat each other"


def test_a_generator_that_jumps_draws_what_a_client_s_own_would():
    """Whatever the client before drew, and wherever it stopped within a block."""
    noise = Streams(7).at("batches", 3)
    of = noise.generators()
    for client, drawn in ((4, 1), (0, 3), (4, 2), (9, 5)):
        jumped = of(client)
        jumped.integers(2**16, size=drawn, dtype=np.uint32)
        own = noise.generator(client)
        own.integers(2**16, size=drawn, dtype=np.uint32)
        assert np.array_equal(jumped.permutation(50), own.permutation(50))
