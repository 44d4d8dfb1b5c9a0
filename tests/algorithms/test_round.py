"""What follows a release: the move, the reported model and the next clip. The engine's tests follow whole runs by hand."""

from dataclasses import replace

import pytest
import torch

from dpfedexp.algorithms import cdp_fedexp, dp_fedavg, dp_scaffold
from dpfedexp.algorithms.round import State, advance
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.sums import WITHIN_CLIP
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Release

W = torch.tensor([1.0, -2.0], dtype=torch.float64)
NOISE = {"clip": 1.0, "noise_multiplier": 2.0}
MEANS = [torch.tensor(row, dtype=torch.float64) for row in ([0.3, -0.1], [0.2, 0.4], [-0.5, 0.1])]


def release(mean):
    return Release(mean, None, {}, 1.0)


def start(**fields):
    return State(round=0, w=W, recent=(W,), radius=1.0, server={}, **fields)


def test_a_round_moves_the_model_by_the_step_size_times_the_mean():
    state, eta_g = advance(dp_fedavg(**NOISE, server_rate=1.5), release(MEANS[0]), start())
    assert eta_g == 1.5
    assert state.round == 1
    torch.testing.assert_close(state.w, W + 1.5 * MEANS[0], rtol=1e-15, atol=0.0)
    assert (state.radius, state.server, state.control) == (1.0, {}, None)


def test_the_reported_model_is_the_mean_of_the_newest_iterates_and_of_no_older_one():
    algorithm = replace(dp_fedavg(**NOISE), average_last=2)
    state = start()
    iterates = [W]
    for mean in MEANS:
        state, _ = advance(algorithm, release(mean), state)
        iterates.append(iterates[-1] + mean)
        torch.testing.assert_close(state.reported, (iterates[-1] + iterates[-2]) / 2, rtol=1e-14, atol=1e-15)
        assert len(state.recent) == 2
    last, _ = advance(replace(algorithm, average_last=1), release(MEANS[0]), start())
    assert last.reported is last.w


def test_an_adaptive_clip_moves_by_its_own_rule():
    algorithm = cdp_fedexp(clip=AdaptiveClip(initial=1.0), noise_multiplier=2.0)
    state, _ = advance(algorithm, Release(MEANS[0], 0.5, {WITHIN_CLIP: 0.9}, 1.0), start())
    assert state.radius == algorithm.clip.update(1.0, 0.9)
    assert state.radius < 1.0  # nine in ten were within, more than the rule's median


def test_scaffolds_server_control_forgets_by_the_share_that_took_part_which_is_everybody_unless_said():
    old = torch.full((2,), 7.0, dtype=torch.float64)
    for known, share in (({}, 1.0), ({"share": 0.25}, 0.25)):
        begun = start(control=old, client_controls=torch.ones(4, 2))
        state, _ = advance(dp_scaffold(**NOISE), release(MEANS[0]), begun, **known, tau_eta_l=0.5)
        torch.testing.assert_close(state.control, (1 - share) * old - share * MEANS[0] / 0.5)


def test_what_a_release_or_a_caller_leaves_out_is_a_sentence():
    """Errors and no asserts, so that `python -O` says the same."""
    adaptive = cdp_fedexp(clip=AdaptiveClip(initial=1.0), noise_multiplier=2.0)
    with pytest.raises(InputError, match="the release has no vote on the updates within it"):
        advance(adaptive, Release(MEANS[0], 0.5, {}, 1.0), start())
    with pytest.raises(InputError, match="tau_eta_l is missing"):
        advance(dp_scaffold(**NOISE), release(MEANS[0]), start(control=W))
