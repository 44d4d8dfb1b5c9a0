"""Votes beside an update: what the adaptive clip alone released before there were others, and the noise of each vote."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpfedexp.accounting import Sampling
from dpfedexp.core.clipping import clip
from dpfedexp.core.noise import ChaChaNoise, Streams
from dpfedexp.core.sums import Vote, within_clip_vote
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian
from dpfedexp.mechanisms.serialization import decode, encode
from tests.sizes import sized

from .one_round import collected

ASKING = CentralGaussian(
    0.3,
    2.0,
    numerator="paper",
    scalar_multiplier=3.0,
    votes=(within_clip_vote(4.0), Vote("loss", 0.0, 10.0, noise=5.0), Vote("loss fell", noise=7.0)),
)
ROWS = 0.1 * torch.randn(40, 9, generator=torch.Generator().manual_seed(0))
BALLOTS = torch.stack([torch.linspace(0, 10, 40, dtype=torch.float64), torch.arange(40) % 2], dim=1)
TRUTH = {"within clip": float(clip(ROWS, 0.3).within.double().mean()), "loss": 5.0, "loss fell": 0.5}


def sums_of(mechanism):
    return collected(mechanism, ROWS, ballots=BALLOTS)


def noises(n):
    return Streams(n).at("noise", 1), Streams(n).at("scalar noise", 1)


def test_further_votes_draw_after_the_others_and_change_none_of_their_noise():
    alone = replace(ASKING, votes=ASKING.votes[:1])
    for n in range(5):
        ours = ASKING.release(sums_of(ASKING), 40.0, *noises(n))
        theirs = alone.release(collected(alone, ROWS), 40.0, *noises(n))
        assert (ours.within, ours.statistic) == (theirs.within, theirs.statistic)
        fixed = replace(ASKING, votes=ASKING.votes[1:])
        without = fixed.release(sums_of(fixed), 40.0, *noises(n))
        assert without.votes == {name: ours.votes[name] for name in ("loss", "loss fell")}
        assert without.within is None


COUNT = sized(500, 1500)


def standardized(mechanism, noise, count):
    """The noise of every vote over what is charged, and the statistic's, in so many releases."""
    sums = sums_of(mechanism)
    rows = []
    for n in range(count):
        release = mechanism.release(sums, 40.0, *noise(n))
        votes = [(release.votes[v.name] - TRUTH[v.name]) / v.width * 40.0 / v.noise for v in mechanism.votes]
        rows.append([*votes, (release.statistic * 40.0 - float(sums.squares)) / (3.0 * 0.3**2)])
    return np.array(rows)


@pytest.mark.parametrize("secure", [False, True])
def test_every_vote_has_independent_gaussian_noise_of_the_size_that_is_charged(secure):
    """Plain and secure by the same law: Kolmogorov and Smirnov's test, and correlations within six deviations."""
    mechanism, system = (ASKING.secure() if secure else ASKING), ChaChaNoise()
    found = standardized(mechanism, (lambda n: (system, system)) if secure else noises, COUNT)
    for column in found.T:
        assert stats.kstest(column, "norm").pvalue > 1e-7
    assert float(np.abs(np.corrcoef(found, rowvar=False) - np.eye(4)).max()) < 6 / math.sqrt(COUNT)


def test_votes_on_the_lattice_have_draws_of_their_own_even_from_a_stream_that_repeats_itself():
    mechanism = ASKING.secure()
    assert all(len({round(value, 4) for value in row[:3]}) == 3 for row in standardized(mechanism, noises, 3))
    found = standardized(replace(mechanism, votes=mechanism.votes[1:]), noises, 3)
    assert all(len({round(value, 4) for value in row}) == 3 for row in found), "nor is one the statistic's"


def test_a_mechanism_with_votes_is_the_same_after_a_journey_as_text():
    assert decode(encode(ASKING)) == ASKING
    listed = [["within clip", 0.0, 1.0, 4.0], ["loss", 0.0, 10.0, 5.0], ["loss fell", 0.0, 1.0, 7.0]]
    assert json.loads(encode(ASKING))["votes"] == listed


@pytest.mark.parametrize(
    "votes",
    [
        "loss",
        [["loss", 0.0, 1.0]],
        *([["loss", 0.0, 1.0, noise]] for noise in (0.0, -1.0, None, True, 1e31)),
        *([["loss", low, 0.5, 1.0]] for low in (1.0, "0", -math.inf, math.nan)),
        *([[name, 0.0, 1.0, 1.0]] for name in ("", 7)),
        [["loss", 0.0, 1.0, 1.0]] * 2,
        [["loss", 0.0, 1.0, 1.0], ["within clip", 0.0, 1.0, 1.0]],
        [["within clip", 0.0, 2.0, 1.0]],
        [[f"vote {n}", 0.0, 1.0, 1.0] for n in range(17)],
    ],
)
def test_a_text_whose_votes_make_no_sense_is_refused(votes):
    values = json.loads(encode(ASKING))
    with pytest.raises(InputError, match="vote"):
        decode(json.dumps({**values, "votes": votes}))
    with pytest.raises(InputError, match="call it otherwise"):
        CentralGaussian(0.3, 2.0, votes=(Vote("squared norms", noise=1.0),)).event(Sampling())
